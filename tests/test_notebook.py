"""A researcher's way: from a clone of the repository to an installed wheel, a run, a merged model and `generate`.

The notebook is run cell by cell, with the wheel in place of the sources. Jupyter is not needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kit.programs import shell

pytestmark = [pytest.mark.everyday, pytest.mark.once]

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial"
WRITES = "%%writefile "


def cells() -> list[str]:
    book = json.loads((TUTORIAL / "lora.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def test_its_programs_are_those_of_the_tutorial() -> None:
    written = [cell.removeprefix(WRITES).split("\n", 1) for cell in cells() if cell.startswith(WRITES)]
    page = (TUTORIAL / "lora.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert [name for name, _ in written] == ["make_base.py", "train.py"]
    assert [text.strip() for _, text in written] == [blocks[name].strip() for name, _ in written]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel installs that was built in a clone."""
    folder = tmp_path_factory.mktemp("cloned")
    subprocess.run(["git", "clone", "--quiet", f"file://{ROOT}", folder / "clone"], check=True)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=folder / "clone", check=True, capture_output=True, text=True
    )
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def test_from_a_clone_to_generate(installed: Path, tmp_path: Path) -> None:
    printed = []
    python = []
    for cell in [*cells(), "print(ds_frozen_patch.__file__)"]:
        if cell.startswith(WRITES):
            name, text = cell.removeprefix(WRITES).split("\n", 1)
            (tmp_path / name).write_text(text)
            continue
        if not cell.startswith("!"):  # all cells so far, as in one kernel
            python.append(cell)
            (tmp_path / "kernel.py").write_text("\n".join(python))
        line = cell[1:] if cell.startswith("!") else "python kernel.py"
        done = shell(line, tmp_path, PYTHONPATH=str(installed))
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
        if line == "python kernel.py":
            python = [earlier for earlier in python if "merge(" not in earlier]  # which writes a folder once
    assert "Trainable-only: 38 frozen parameters, 18.7 MB were left out." in printed[2]
    assert re.search(r"^step 4: loss", printed[3], re.MULTILINE)
    assert "The adapter 'default' is folded into 8 of them." in printed[4]
    assert "generated 5 tokens" in printed[5]
    assert printed[6].split()[-1] == str(installed / "ds_frozen_patch" / "__init__.py")
