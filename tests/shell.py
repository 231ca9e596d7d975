"""A shell that runs a line as a reader of the documentation would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def shell(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line with the programs of this Python's environment, in a terminal of 100 columns."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    torchrun = programs / "torchrun"  # the cells' torch is of a base environment, whose programs are not in theirs
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "HOME": str(folder), "COLUMNS": "100", **environment}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=variables, capture_output=True, text=True, timeout=400, check=False
    )
