"""Progress of a long piece of work: lines in a log, a bar on a terminal, nothing if it is short or to be quiet."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]


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
