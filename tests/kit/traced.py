"""Faults at system calls, injected by strace: a process is killed as it begins one, or one fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CHANGING = (
    "openat", "open", "creat", "rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat", "unlink",
    "unlinkat", "mkdir", "mkdirat", "rmdir", "write", "pwrite64", "writev", "ftruncate", "truncate", "fallocate",
    "copy_file_range", "sendfile", "fsync", "fdatasync", "sync", "chmod", "fchmod", "fchmodat", "chown", "fchown",
    "fchownat", "lchown", "utimensat",
)  # fmt: skip
"""System calls that change something, if they open for writing; those that a machine lacks are left out."""
_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")


def why_unsupported() -> str:
    """Return why this machine cannot trace a process; empty if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    try:
        traced = subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True, check=False)
    except OSError as error:
        return str(error)
    return "" if traced.returncode == 0 else f"strace cannot trace here: {traced.stderr.decode().strip()}"


@dataclass(frozen=True)
class Call:
    """The n-th call of this name in a thread."""

    name: str
    number: int
    about: str = ""
    """What it is called with, for messages."""


@contextmanager
def tracing(process: int, log: Path, inject: Call | None = None, how: str = "signal=SIGKILL") -> Iterator[None]:
    """Trace the changing calls of a process while this lasts, or until it ends.

    Args:
        process: its number.
        log: for what is traced.
        inject: the call at which a fault is injected.
        how: that fault, as strace says it.
    """
    command = ["strace", "-f", "-y", "-s", "0", "-o", str(log), "-e", "signal=none", "-p", str(process)]
    command += ["-e", "trace=" + ",".join(f"?{name}" for name in CHANGING)]
    if inject is not None:
        command += ["-e", f"inject={inject.name}:{how}:when={inject.number}"]
    strace = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert strace.stderr is not None
    told = strace.stderr.readline()
    assert "attached" in told, told
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(strace.pid, 2)
        try:
            strace.communicate(timeout=5)
        except subprocess.TimeoutExpired:  # it waits for the first thread of a process that ends now, before the others
            strace.kill()
            strace.communicate()


def hit(log: Path, folder: Path) -> bool:
    """Whether calls were made to fail, and all of them are about a folder: each thread has counts of its own."""
    failed = [line for line in log.read_text().splitlines() if line.endswith("(INJECTED)")]
    return bool(failed) and all(str(folder) in line for line in failed)


def calls_of(log: Path, folder: Path, reads: bool = False) -> list[Call]:
    """Return the calls in a log that change something in a folder, each once; with `reads`, those that list one too."""
    flags = "O_WRONLY|O_RDWR|O_CREAT" + "|O_DIRECTORY" * reads
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[Call, None] = {}
    for line in log.read_text().splitlines():
        if not (match := _LINE.match(line)):
            continue
        thread, name, rest = match.groups()
        counts[thread, name] += 1
        if str(folder) in rest and (not name.startswith("open") or re.search(flags, rest)):
            found[Call(name, counts[thread, name], rest.replace(str(folder), ""))] = None
    return list(found)
