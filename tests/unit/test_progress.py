"""Progress of a long piece of work: lines in a log, a bar on a terminal, nothing if it is short or to be quiet."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from itertools import count

import pytest

from ds_frozen_patch.common import progress as progresses

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]


@pytest.mark.parametrize(
    ("quiet", "seconds", "lines"),
    [
        (False, 6, ["reading: 2 GB of 5 GB (40%)", "reading: 4 GB of 5 GB (80%)"]),
        (False, 1, []),
        (True, 6, []),
    ],
)
def test_lines_in_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quiet: bool, seconds: int, lines: list[str]
) -> None:
    """Five steps that take some seconds each: a line is printed after at least ten."""
    clock = count(0, seconds)
    now = [next(clock)]
    monkeypatch.setattr(progresses, "monotonic", lambda: now[0])
    with progresses.progress("reading", 5 * 10**9, quiet) as done:
        for _ in range(5):
            now[0] = next(clock)
            done(10**9)
    assert capsys.readouterr().err.splitlines() == lines


def test_a_bar_on_a_terminal() -> None:
    program = (
        "from ds_frozen_patch.common.progress import progress\nwith progress('reading', 9, False) as done: done(3)"
    )
    terminal, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # tqdm draws nothing into no columns
    subprocess.run([sys.executable, "-c", program], stderr=there, check=True)
    os.set_blocking(terminal, False)
    assert b"reading:" in os.read(terminal, 10_000)
    os.close(there)
    os.close(terminal)
