"""A full, read-only or missing disk, and a rank that fails alone: every rank raises, and nothing is lost.

The disk is a small one in memory, which needs root; other users run what is possible without.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.cell import Callback
from kit.checkpoints import TOOLS, Checkpoints, contents, snapshot

import ds_frozen_patch
from ds_frozen_patch import CheckpointError
from ds_frozen_patch.checkpoint.format import records
from ds_frozen_patch.cli import main
from ds_frozen_patch.publish import in_flight, journal, publication

WAYS = ("trainer", "fabric", "weights", "export", "direct", "async")
ROOT = os.geteuid() == 0
SIZE = 64 * 2**20
ROOMS = 12  # how full a disk can be, in the long part

CASES = [(way, stage) for way in WAYS for stage in (0, 1, 2, 3)]
SHORT = [("trainer", 2), ("fabric", 3), ("weights", 3), ("export", 2), ("async", 3)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" in metafunc.fixturenames:
        metafunc.parametrize(("way", "stage"), CASES if metafunc.config.getoption("--faults") else SHORT)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    if not ROOT:
        yield where
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


# Faults: each lasts as long as its context, is made by rank 0 alone where it is of the disk, and is given the disk and
# the directory of the checkpoints on it. `AT_ALL` is a rank that is to say what has failed, whichever that is.


@contextmanager
def on_the_disk(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """A fault of the disk that all ranks share."""
    first = os.environ.get("RANK", "0") == "0"
    if first:
        begin()
    meet()
    try:
        yield
    finally:
        meet()
        if first:
            end()
        meet()


def full(disk: Path, _: object = None, room: int = 4096) -> Any:
    """Leave room for this many bytes on the disk."""
    filler = disk / "filler"

    def fill() -> None:
        left = os.statvfs(disk)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize - room)

    return on_the_disk(fill, filler.unlink)


def read_only(disk: Path) -> Any:
    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)

    return on_the_disk(partial(remount, "ro"), partial(remount, "rw"))


@contextmanager
def small_files(rank: int, *_: Any) -> Iterator[None]:
    """On one rank, limit the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.environ["RANK"] == str(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def before_each(owner: Any, name: str, do: Callable[[int], None], rank: int) -> Iterator[None]:
    """On one rank, call a function before each call; it receives the number of the call."""
    original = getattr(owner, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        do(calls)
        return original(*args, **kwargs)

    if os.environ["RANK"] == str(rank):
        setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def broken(owner: Any, name: str, rank: int, at: int = 1) -> Any:
    """Let the `at`-th call fail on one rank, or with 0 each call."""

    def fail(call: int) -> None:
        if at in (0, call):
            raise OSError(5, "Input/output error")

    return before_each(owner, name, fail, rank)


def broken_save(rank: int, *_: Any) -> Any:
    return broken(torch, "save", rank)


def vanishing(folder: Path, rank: int) -> Any:
    """Remove the directory when a rank is about to write."""
    return before_each(torch, "save", lambda _: shutil.rmtree(folder), rank)


class Note:
    """User state that cannot be pickled on one rank."""

    rank = -1

    def state_dict(self) -> dict[str, Any]:
        return {"note": (lambda: 1) if os.environ["RANK"] == str(self.rank) else 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@contextmanager
def unpicklable(rank: int, _: Path, note: Note) -> Iterator[None]:
    note.rank = rank
    try:
        yield
    finally:
        note.rank = -1


def meet() -> None:
    """Wait for all ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


Fault = tuple[str, Callable[[Path, Note], Any], str]
"""What it is, what makes it, and what its message must say."""


def faults(way: str, stage: int, rooms: list[int]) -> list[Fault]:
    """Yield all faults for a way of saving in a ZeRO stage."""
    writers = [0] if way == "weights" else [0, 1] if stage else [0]
    found: list[Fault] = []
    if ROOT:
        found += [(f"room for {room} bytes", partial(full, room=room), "") for room in rooms]
        found += [("a read-only disk", lambda disk, _: read_only(disk), "Rank 0: ")]
    for rank in writers:
        found += [(f"a limit on rank {rank}", partial(small_files, rank), f"Rank {rank}: ")]
        found += [(f"torch.save fails on rank {rank}", partial(broken_save, rank), f"Rank {rank}: ")]
    found += [("the first rename fails", lambda *_: broken(Path, "replace", 0), "Rank 0: ")]
    if way == "weights":
        found += [("the second rename fails", lambda *_: broken(Path, "replace", 0, 2), "Rank 0: ")]
    else:
        found += [("the journal gets no name", lambda *_: broken(publication, "commit", 0), "Rank 0: ")]
    if way in ("trainer", "fabric", "async"):
        states = [0, 1] if stage == 3 else [0]  # who writes the module's state
        found += [(f"a state of rank {rank}", partial(unpicklable, rank), f"Rank {rank}: ") for rank in states]
        found += [
            ("`latest`, or the record, cannot be written", lambda *_: broken(Path, "write_text", 0, 2), "Rank 0: "),
            ("the journal cannot be written", lambda *_: broken(journal.Journal, "prepare", 0), "Rank 0: "),
        ]
        if stage:
            found += [("DeepSpeed's script cannot be copied", lambda *_: broken(os, "chmod", 0, at=0), "Rank 0: ")]
    return found


def tried(
    disk: Path, way: str, stage: int, rooms: list[float], note: Note, engine: Any, save: Callable[[Path], None]
) -> list[str]:
    """Try each fault in a save over a checkpoint and in one to a new name, with a good save after each."""
    folder, rank = disk / "checkpoints", os.environ["RANK"]
    save(folder / "last.ckpt")
    meet()
    before = contents(folder)
    # DeepSpeed's script is left where it is the same.
    whole = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.suffix != ".py")
    titles = []
    for title, make, said in faults(way, stage, [int(room * whole) for room in rooms]):
        for name in ("last.ckpt", "new.ckpt"):
            text = ""
            with make(disk, note):
                try:
                    save(folder / name)
                except CheckpointError as error:
                    text = str(error)
            assert text.startswith(f"{folder / name} was not saved. Rank "), (title, text)
            assert said in text, (title, text)
            assert text.count("Rank ") <= 2, text
            if title.startswith("room"):
                assert "free on its disk. A save over a checkpoint needs room for both until it is done" in text, text
            assert "\n" not in text.split(")")[0], text
            assert "save" not in vars(engine.checkpoint_engine), "what was replaced for a save is not put back"
            meet()
            was_there = name == "last.ckpt"
            now = "The previous checkpoint there is unchanged." if was_there else "There is no checkpoint there now."
            assert now in text, (title, text)
            assert contents(folder) == before, (title, name, rank, contents(folder).keys() - before.keys())
            meet()
            if way == "direct" and rank == "0":
                shutil.rmtree(folder / "new.ckpt", ignore_errors=True)
            meet()
            titles.append(title)
    save(folder / "last.ckpt")
    (disk / "file").touch()
    with pytest.raises(CheckpointError, match="was not saved"):
        save(disk / "file" / "last.ckpt")
    for one in [0] if way == "weights" else [0, 1] if stage else [0]:
        gone = disk / "gone"
        with vanishing(gone, one), pytest.raises(CheckpointError, match=f"{gone}/last.ckpt.* was not saved"):
            save(gone / "last.ckpt")
        meet()
        save(gone / "last.ckpt")
        assert (gone / "last.ckpt").exists()
        meet()
    return [*titles, "a file in the place of the folder", "the folder vanishes"]


class Faults(Callback):
    """Inject all faults after the first epoch; then the run continues."""

    def __init__(self, disk: Path, way: str, stage: int, rooms: list[float]) -> None:
        self.arguments = (disk, way, stage, rooms)
        self.note = Note()
        self.tried: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return self.note.state_dict()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        way = self.arguments[1]

        def save(path: Path) -> None:
            if way == "direct":
                trainer.strategy.model.save_checkpoint(str(path), tag="checkpoint")
            else:
                trainer.save_checkpoint(path, weights_only=way == "weights")
            in_flight.wait()

        if trainer.current_epoch == 0:
            self.tried = tried(*self.arguments, self.note, trainer.strategy.model, save)


def train_through(out: str, disk: str, way: str, stage: int, rooms: list[float]) -> Any:
    """Return the faults that were injected, and whether the run ended as it does without them."""
    ds_frozen_patch.patch(export="safetensors" if way == "export" else None, async_save=way == "async")
    callback = Faults(Path(disk), way, stage, rooms)

    def end(*callbacks: Any, resume: str | None = None) -> Any:
        module = runs.LoraRun()
        trainer = runs.trainer(out, 2, stage, callbacks=list(callbacks), enable_checkpointing=False)
        trainer.fit(module, runs.batches(2), ckpt_path=resume)
        return module.losses, runs.trained_state(module)

    through, alone = end(callback), end()
    if way in ("trainer", "async"):
        assert end(resume=f"{disk}/checkpoints/last.ckpt") == (alone[0][runs.BATCHES :], alone[1])
    return callback.tried, through == alone


def fabric_through(out: str, disk: str, way: str, stage: int, rooms: list[float]) -> Any:
    ds_frozen_patch.patch()
    done: list[str] = []
    ends = []
    for faulty in (True, False):
        fabric: Any = runs.fabric(2, stage, **({} if stage else {"precision": "32-true"}))
        model, optimizer = runs.fabric_setup(fabric)
        losses = runs.fabric_epoch(fabric, model, optimizer)
        if faulty:
            note = Note()
            state = {"model": model, "optimizer": optimizer, "note": note}
            engine, save = fabric.strategy.model, partial(fabric.save, state=state)
            done = tried(Path(disk), way, stage, rooms, note, engine, save)
        losses += runs.fabric_epoch(fabric, model, optimizer)
        ends.append((losses, runs.trained_state(model)))
    return done, ends[0] == ends[1]


def rooms_of(long: bool, seed: str) -> list[float]:
    """Return amounts of free space: none, and random ones up to nearly the size of a checkpoint."""
    drawn = random.Random(seed)
    return [0, *(drawn.uniform(0, 0.9) for _ in range(ROOMS if long else 2))]


@pytest.mark.short
def test_write_errors_in_saves(
    ranks: Any, disk: Path, tmp_path: Path, long: bool, counted: Any, way: str, stage: int
) -> None:
    rooms = rooms_of(long, f"{way} {stage}")
    run = fabric_through if way == "fabric" else train_through
    one, other = ranks(2, run, out=str(tmp_path / "out"), disk=str(disk), way=way, stage=stage, rooms=rooms)
    assert one == other
    titles, same = one
    assert same, "the run came to another end than without the saves that failed"
    what = "a save that training does not wait for" if way == "async" else "a save"
    by = "Trainer" if way == "async" else "Trainer, Fabric"
    counted(f"write error in {what} (on one rank, or a full, read-only or missing disk): {by}, ZeRO 0-3", len(titles))


def test_write_errors_in_tools(
    checkpoints: Checkpoints,
    disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    long: bool,
    counted: Any,
) -> None:
    read = records.Records._read_into
    folder = disk / "folder"

    def vanish(*args: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        read(*args)

    breaks: dict[str, Callable[[Path], Any]] = {
        "read-only": read_only,
        "vanishes": nullcontext,
        "full": full,
    }
    count = 0
    for stage in (1, 2, 3) if long else (2,):
        for name, words, made in TOOLS.values():
            source, target = checkpoints(stage) / name, folder / made
            before = snapshot(source)
            line = [*words, str(source), str(target), "-q"]
            for fault in breaks:
                if fault == "full" and not ROOT:
                    continue
                folder.mkdir()
                if fault == "vanishes":
                    monkeypatch.setattr(records.Records, "_read_into", vanish)
                with breaks[fault](disk) if ROOT else nullcontext():
                    if not ROOT and fault == "read-only":
                        folder.chmod(0o500)
                    status = main(line)
                monkeypatch.undo()
                said = capsys.readouterr()
                assert (status, said.out) == (1, ""), (line, fault, said)
                assert said.err.startswith(f"ds-frozen-patch: {target} cannot be written ("), (line, fault, said.err)
                assert said.err.count("\n") == 1
                assert snapshot(source) == before
                if folder.exists():
                    folder.chmod(0o700)
                    assert list(folder.iterdir()) == []
                    folder.rmdir()
                count += 1
            assert main(line) == 0
            assert target.exists()
            shutil.rmtree(folder)
            capsys.readouterr()
    counted("write error in a tool (a full, read-only or missing disk)", count)
