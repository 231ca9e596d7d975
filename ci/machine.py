"""What figures depend on: the machine, and the releases."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tables import code

PACKAGES = ("lightning", "deepspeed", "torch", "transformers", "peft", "accelerate")


def machine(folder: Path) -> dict[str, Any]:
    """Return what the figures depend on."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory": f"{memory / 2**30:.0f} GiB",
        "disk": disk(folder),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "releases": releases((*PACKAGES, *(["zlib-ng"] if find_spec("zlib_ng") else []))),  # of the extra `fast`
    }


def releases(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the installed release of each package, and the commit of ours."""
    return {"ds_frozen_patch": code(), **{package: version(package) for package in packages}}


def disk(folder: Path) -> str:
    """Return the file system of a folder, and the device that it is on."""
    command = ["findmnt", "--noheadings", "--output", "FSTYPE,SOURCE", "--target", str(folder)]
    return " on ".join(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split())


def described(place: dict[str, Any]) -> str:
    """Return the result of `machine` in words."""
    releases = ", ".join(f"{package} {number}" for package, number in place["releases"].items())
    return (
        f"{place['cores']} cores of {place['cpu']}, {place['memory']} of memory, {place['disk']}, {place['kernel']},"
        f" Python {place['python']}, {releases}"
    )
