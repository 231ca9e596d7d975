"""The command line as a person meets it: versions, misspelt words, Ctrl-C, completion in a shell, progress."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from importlib import metadata
from pathlib import Path

import pytest

import ds_frozen_patch
from ds_frozen_patch.cli import main

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["prun", "a", "b"], "prune"),
        (["export", "a", "b", "--format", "pft"], "peft"),
        (["prune", "a", "b", "--kep", "x"], "--keep"),
        (["run", "--elastc", "--", "python"], "--elastic"),
    ],
)
def test_a_misspelt_word_is_suggested_below_the_usage(
    capsys: pytest.CaptureFixture[str], words: list[str], meant: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said, is_option = capsys.readouterr().err, meant.startswith("--")
    assert ended.value.code == 2
    assert said.startswith(f"usage: ds-frozen-patch {words[0] if is_option else ''}")
    assert ("unrecognized arguments: --" in said) == is_option
    assert said.endswith(f". Did you mean '{meant}'?\n")


@pytest.mark.parametrize("command", [["-m", "ds_frozen_patch"], ["-c", "import ds_frozen_patch.cli as c; c.main()"]])
def test_the_version(command: list[str]) -> None:
    printed = subprocess.check_output([sys.executable, *command, "--version"], text=True)
    assert printed == f"ds-frozen-patch {ds_frozen_patch.__version__}\n"
    assert ds_frozen_patch.__version__ == metadata.version("ds_frozen_patch")


def test_an_interrupt_during_imports() -> None:
    """A finder in the place of a user who presses Ctrl-C while a module of ours is imported."""
    program = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "ds_frozen_patch.cli.arguments":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from ds_frozen_patch.cli import main
sys.exit(main(["status"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "ds-frozen-patch: interrupted; nothing was left at the target\n"


@pytest.mark.parametrize(
    ("line", "completed"), [("ds-frozen-patch pru", ["prune "]), ("ds-frozen-patch prune --no", ["--no-fingerprints "])]
)
def test_a_shell_completes(tmp_path: Path, line: str, completed: list[str]) -> None:
    """As the function of bash that `register-python-argcomplete` prints would ask."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    answer = {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    command = [sys.executable, "-m", "ds_frozen_patch"]
    subprocess.run(command, env={**os.environ, **asked, **answer}, check=True)
    assert (tmp_path / "answer").read_text().split("\n") == completed


def test_a_bar_on_a_terminal() -> None:
    program = "from ds_frozen_patch.common.text import progress\nwith progress('reading', 9, False) as done: done(3)"
    terminal, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # tqdm draws nothing into no columns
    subprocess.run([sys.executable, "-c", program], stderr=there, check=True)
    os.set_blocking(terminal, False)
    assert b"reading:" in os.read(terminal, 10_000)
    os.close(there)
    os.close(terminal)
