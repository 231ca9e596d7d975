"""The folder that a program names is the program's: what it writes there while checkpoints are saved over each other
stays where it is, as without this package.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import processes, runs, saves
from kit.processes import ThisProcess
from kit.saves import MODES, TAG, Appended, Numbered

import ds_frozen_patch

pytestmark = pytest.mark.promise(22)


def save_beside_appender(out: str, mode: str, stage: int, times: int) -> tuple[Appended, int]:
    """Save repeatedly while another process appends in the tag's folder; return that, and what is loaded then."""
    folder = Path(out, "run")
    with saves.served(mode):
        run = Numbered(out, 2, stage)
        run.save(folder)
        with saves.appending(folder / TAG / "train.log", torch.distributed.get_rank() == 0) as appended:
            torch.distributed.barrier()
            for _ in range(times):
                run.save(folder, wait=False)
            ds_frozen_patch.wait()
            torch.distributed.barrier()
        return appended, run.load(folder, strict=mode != "plain")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [2, 3])
def test_lines_that_another_process_appends(
    ranks: Any, tmp_path: Path, long: bool, counted: Callable[[str, int], None], stage: int, mode: str
) -> None:
    times = 40 if long else 6
    asked: dict[str, Any] = {"out": str(tmp_path), "mode": mode, "stage": stage, "times": times}
    (appended, number), _ = ranks(2, save_beside_appender, **asked)
    assert appended.error == ""
    assert appended.written > times
    assert appended == Appended(appended.written, (appended.written,) * 2)
    assert number == times + 1
    assert saves.leftovers(tmp_path) == []
    if mode != "plain":
        counted("save over a checkpoint, while another process appends to files beside it", times)


# Another user than root, who may do what modes allow


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def drop_capabilities() -> None:
    """Give up root's right to ignore modes, in this process."""
    header, none = _Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.capset(ctypes.byref(header), none), os.strerror(ctypes.get_errno())


def save_without_rights(this: ThisProcess, folder: str, out: str, mode: str, tags: list[str]) -> list[int]:
    """Save to tags, without root's rights; return what is loaded from each."""
    with saves.served(mode):
        run = Numbered(out, 2, 2, number=10)
        if os.geteuid() == 0:
            drop_capabilities()
        for tag in tags:
            run.save(folder, tag)
        return [run.load(folder, tag, strict=mode != "plain") for tag in (*tags[-1:], None)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("of", ["the tag's folder", "the folder of tags"])
def test_a_folder_that_may_not_be_changed(tmp_path: Path, mode: str, of: str) -> None:
    """A read-only folder of the program in the tag's stays; in a read-only folder of tags, existing ones are saved."""
    folder = tmp_path / "run"
    asked: dict[str, Any] = {"folder": str(folder), "out": str(tmp_path), "mode": mode}
    first = processes.run_ranks(save_without_rights, tmp_path / "log", (None, None), tags=["other", TAG], **asked)
    assert [what for what, _ in first] == ["returned", "returned"], first
    saves.put_files(folder)
    before = saves.files_of_program(folder)
    if of == "the folder of tags":
        folder.chmod(0o555)
    try:
        said = processes.run_ranks(
            save_without_rights, tmp_path / "log", (None, None), tags=[TAG, "other", TAG], **asked
        )
        assert said == [("returned", [13, 13])] * 2, said
        assert {item.name for item in folder.iterdir()} >= {"latest", "other", TAG}
        assert saves.files_of_program(folder) == before
        assert saves.leftovers(folder) == []
    finally:
        folder.chmod(0o755)


# A path with ".."


def save_beside(this: ThisProcess, out: str, async_save: bool) -> list[str]:
    """Save twice by a Trainer to `../runs`; return what is warned of."""
    ds_frozen_patch.patch(async_save=async_save)
    (here := Path(out, "work")).mkdir(exist_ok=True)
    os.chdir(here)
    trainer = runs.trainer("../runs", 2, 2, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(2))
    with runs.heard() as said:
        with ds_frozen_patch.no_wait():
            for _ in range(2):
                trainer.save_checkpoint("../runs/last.ckpt")
                trainer.save_checkpoint("../runs/weights.ckpt", weights_only=True)
        ds_frozen_patch.wait()
    again = runs.trainer("../runs", 2, 2, epochs=2, enable_checkpointing=False)
    again.fit(module := runs.LoraRun(), runs.batches(2), ckpt_path="../runs/last.ckpt")
    assert len(module.losses) == runs.BATCHES
    return [text for text in said if text.startswith("WARNING")]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_relative_path_with_dots(tmp_path: Path, async_save: bool) -> None:
    """It is as any other path: nothing is warned of, and nothing is left."""
    asked: dict[str, Any] = {"out": str(tmp_path), "async_save": async_save}
    said = processes.run_ranks(save_beside, tmp_path / "log", (None, None), **asked)
    assert said == [("returned", [])] * 2, said
    assert {item.name for item in (tmp_path / "runs").iterdir()} == {"last.ckpt", "weights.ckpt"}
    assert not ds_frozen_patch.verify(tmp_path / "runs" / "last.ckpt").problems
    assert saves.leftovers(tmp_path / "runs") == []
