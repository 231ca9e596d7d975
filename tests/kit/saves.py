"""An engine that nobody owns, whose checkpoints say of which save each of their values is; the program's own files
beside them; and what other processes do there meanwhile. For the fault tests.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ds_frozen_patch
from ds_frozen_patch import ranks as agreeing
from kit import owners, processes, runs
from kit.processes import Process, ThisProcess

TAG = "checkpoint"
MODES: dict[str, dict[str, Any] | None] = {"plain": None, "sync": {}, "async": {"async_save": True}}
"""How a program saves: without this package, or under `patch()` with these settings."""


def served(mode: str) -> Any:
    """While this lasts, engines are made and save in this mode."""
    settings = MODES[mode]
    return nullcontext() if settings is None else owners.served(**settings)


class Numbered:
    """An engine that trains one step before each save.

    A checkpoint has the number of its save, and a digest of what each rank had at that moment: its weights and the
    state of its optimizer, which lie in files of their own. So a load detects values of two saves.
    """

    def __init__(self, out: str, world_size: int, stage: int, number: int = 0, **config: Any) -> None:
        owner = owners.Run("deepspeed", out, world_size, stage, config=config)
        self.engine = owner.engine
        self.number = 0
        self._batches = list(owner._batches())
        while self.number < number:
            self.step()

    def step(self) -> None:
        self.number += 1
        batch = self._batches[self.number % len(self._batches)]
        self.engine.train()
        self.engine.backward(self.engine(input_ids=batch, labels=batch).loss)
        self.engine.step()

    def save(self, folder: Path | str, tag: str = TAG, wait: bool = True) -> None:
        self.prepare()
        self.write(folder, tag, wait)

    def prepare(self) -> None:
        """Do what belongs to no save."""
        self.step()
        digests: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(digests, self.digest())
        self._state = {"number": self.number, "digests": digests}

    def write(self, folder: Path | str, tag: str = TAG, wait: bool = True) -> None:
        """Save what is prepared."""
        self.engine.save_checkpoint(str(folder), tag=tag, client_state=dict(self._state))
        if wait:
            ds_frozen_patch.wait()

    def load(self, folder: Path | str, tag: str | None = None, strict: bool = True) -> int:
        """Return the number of the save that is loaded.

        Args:
            folder, tag: what is loaded.
            strict: False to load it as a program without this package does.
        """
        path, state = self.engine.load_checkpoint(str(folder), tag, load_module_strict=strict)
        assert path is not None, f"DeepSpeed has loaded nothing from {folder}"
        found, expected = self.digest(), state["digests"][torch.distributed.get_rank()]
        assert found == expected, f"{folder} is a mixture: {found} and {expected} differ"
        return int(state["number"])

    def digest(self) -> dict[str, str]:
        """Digests of what this rank has of the weights that are trained, and of the optimizer's state."""
        optimizer = self.engine.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        trained = [p for p in self.engine.module.parameters() if p.requires_grad]
        parts = {
            "weights": [getattr(parameter, "ds_tensor", parameter) for parameter in trained],
            "master weights": [parameter for group in inner.param_groups for parameter in group["params"]],
            "optimizer": [
                value
                for state in inner.state.values()
                for _, value in sorted(state.items())
                if isinstance(value, torch.Tensor)
            ],
        }
        return {
            name: hashlib.sha256("".join(map(runs.digest, tensors)).encode()).hexdigest()[:12]
            for name, tensors in parts.items()
        }


def said(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return a call's result, or the type and the text of what it raises."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)


# What the program has beside a checkpoint


def put_files(folder: Path, tag: str = TAG) -> None:
    """Put files of the program into the folder that it names, and into the tag's."""
    inside = folder / tag
    for text in ("train.log", f"{tag}/train.log", f"{tag}/notes/deep/a.txt", f"{tag}/.train.log.0123456789ab"):
        (folder / text).parent.mkdir(parents=True, exist_ok=True)
        (folder / text).write_text(text)
    (inside / "empty").mkdir()
    (inside / "link").symlink_to("notes")
    (inside / "notes").chmod(0o555)
    (inside / "train.log").chmod(0o640)


def files_of_program(folder: Path, tag: str = TAG) -> dict[str, tuple[Any, ...]]:
    """Return what became of them: each with its inode, mode and content."""
    found = {}
    for name in ("train.log", *(f"{tag}/{name}" for name in ("train.log", "notes", "notes/deep", "notes/deep/a.txt",
                 ".train.log.0123456789ab", "empty", "link", "."))):  # fmt: skip
        with suppress(FileNotFoundError):
            path = folder / name
            status = path.lstat()
            content = path.read_text() if path.is_file() else str(path.readlink()) if path.is_symlink() else ""
            found[name] = status.st_ino, status.st_mode, content
    return found


def leftovers(folder: Path) -> list[str]:
    """Return the hidden names in a folder, but for the program's, and for empty notes: who writes them may live."""
    hidden = (item for item in folder.rglob(".*") if item.name != ".train.log.0123456789ab")
    return sorted(str(item) for item in hidden if item.stat().st_size or not item.name.startswith(".ds_frozen_patch-"))


# Another process of the program


_APPEND = """
import os, sys
path, end = sys.argv[1:]
kept, number, missing = open(path + ".kept", "a", buffering=1), 0, 0
while not os.path.exists(end):
    with open(path, "a") as file:
        file.write(f"{number}\\n")
    kept.write(f"{number}\\n")
    number += 1
    missing += not {os.path.basename(kept.name), os.path.basename(path)} <= {*os.listdir(os.path.dirname(path))}
print(number, missing)
"""


@dataclass
class Appended:
    """What a process has appended to FILE, which it opens for each line, and to FILE.kept, which it keeps open."""

    written: int = 0
    kept: tuple[int, ...] = ()
    """How many lines there are in each afterwards."""
    missing: int = 0
    """How often one of them was not in the folder's listing."""
    error: str = ""


@contextmanager
def appending(file: Path, when: bool = True) -> Iterator[Appended]:
    """While this lasts, a process appends lines in the folder of a file."""
    found = Appended()
    if not when:
        yield found
        return
    end = file.parents[1] / "end"
    command = [sys.executable, "-S", "-c", _APPEND, str(file), str(end)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not file.exists() and process.poll() is None:
            time.sleep(0.01)
        yield found
    finally:
        end.touch()
        out, found.error = process.communicate(timeout=60)
    if not found.error:
        found.written, found.missing = map(int, out.split())
    end.unlink()
    files = (file, file.with_name(f"{file.name}.kept"))
    found.kept = tuple(len({*path.read_text().split()}) if path.exists() else 0 for path in files)


def has_journal(folder: Path, tag: str = TAG) -> bool:
    """Whether the files of a checkpoint are yet to get their names, so that only we load it."""
    return any((folder / tag).glob(".ds_frozen_patch-journal-*"))


# Ranks that do what they are told, one after another

SECONDS = 60
"""How long ranks may take for what they are told: an error at a connection of theirs makes them wait for each other."""


def obey(this: ThisProcess, out: str, mode: str, stage: int, number: int) -> None:
    """Make an engine; then call each method of it that is asked for, and report its result or its error."""
    agreeing.GRACE_SECONDS = 1
    agreeing.LOST_SECONDS, agreeing.BEAT_SECONDS = 2, 0.1
    with served(mode):
        run = Numbered(out, int(os.environ["WORLD_SIZE"]), stage, number)
        this.pipe.send(os.getpid())
        while (asked := this.pipe.recv()) is not None:
            name, arguments = asked
            result = said(getattr(run, name), *arguments)
            this.pipe.send(run.number if result is None else result)


class Crew:
    """Ranks with one engine. `crew("save", folder)` calls a method of `Numbered` on all of them and returns what each
    says: a number, the error, or None if it was killed; then the others are too.
    """

    def __init__(self, folder: Path, mode: str, stage: int, number: int = 0, world_size: int = 2) -> None:
        self.log = folder / "log"
        self._asked: dict[str, Any] = {"out": str(folder), "mode": mode, "stage": stage, "number": number}
        self._world_size = world_size
        self._ranks: list[Process] = []
        self.pids: list[int] = []
        self.saved = 0
        """The number of the last save."""

    def start(self) -> None:
        if not self._ranks:
            self._ranks = processes.start_ranks(obey, self.log, (None,) * self._world_size, **self._asked)
            self.saved = self._asked["number"]
            limit = time.monotonic() + processes.SECONDS
            self.pids = [self._heard(rank, limit) for rank in self._ranks]
            assert all(isinstance(pid, int) for pid in self.pids), (self.pids, self.log.read_text()[-4000:])

    def __call__(self, name: str, *arguments: Any) -> list[Any]:
        self.start()
        self.saved += name in ("save", "prepare")
        for rank in self._ranks:
            rank.pipe.send((name, arguments))
        limit = time.monotonic() + SECONDS
        found = [self._heard(rank, limit) for rank in self._ranks]
        if None in found or "hangs" in found:
            self.stop()
        return found

    def stop(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
        self._ranks = []

    def _heard(self, rank: Process, limit: float) -> Any:
        try:
            return rank.pipe.recv() if rank.pipe.poll(max(0.0, limit - time.monotonic())) else "hangs"
        except (EOFError, ConnectionResetError):
            return None
