"""Promise 22: the folder that a program names is the program's.

Nothing in it that DeepSpeed or we did not write is moved, replaced or removed; links, mount points and modes stay; code
that runs within a save sees the paths that it would see without us; nothing changes after a save has returned.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import zero_to_fp32
from kit import owners, runs
from kit.cell import Callback
from kit.checkpoints import contents
from kit.owners import BY_HAND, PEFT, Run

import ds_frozen_patch
from ds_frozen_patch import CheckpointError
from ds_frozen_patch.common.files import RECORD, is_state
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.publish import in_flight

pytestmark = pytest.mark.promise(22)
EVERYDAY = pytest.mark.everyday
ROOT = os.geteuid() == 0

OTHERS = {
    "hparams.yaml": b"lr: 1",
    "checkpoints/epoch=0.ckpt": b"an earlier checkpoint",
    "tokenizer/vocab.json": b"{}",
    "checkpoint/notes.txt": b"in the folder of the tag",
}
"""What a program has in its folder, with what it contains."""


def lay_out(folder: Path) -> None:
    for name, content in OTHERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def assert_as_laid_out(folder: Path) -> None:
    assert {name: (folder / name).read_bytes() for name in OTHERS} == OTHERS
    assert not list(folder.rglob(".*"))


def trained(out: str, stage: int, **options: Any) -> Any:
    options.setdefault("enable_checkpointing", False)
    trainer = runs.trainer(out, 2, stage, epochs=1, **options)
    module = runs.LoraRun()
    trainer.fit(module, runs.batches(2))
    return trainer, module


# Files of others


def saved_into(folder: str, by: str, stage: int, times: int, async_save: bool) -> Any:
    ds_frozen_patch.patch(async_save=async_save)
    if by == "trainer":
        trainer, module = trained(folder, stage)
        for _ in range(times):
            trainer.save_checkpoint(folder)
    else:
        fabric = runs.fabric(2, stage)
        module, optimizer = runs.fabric_setup(fabric)
        runs.fabric_epoch(fabric, module, optimizer)
        for _ in range(times):
            fabric.save(folder, {"model": module, "optimizer": optimizer})
    in_flight.wait()
    return runs.trained_state(module)


def loaded_from(folder: str, stage: int) -> Any:
    ds_frozen_patch.patch()
    trainer = runs.trainer(f"{folder}/logs", 2, stage, epochs=1, enable_checkpointing=False)
    module = runs.LoraRun()
    trainer.fit(module, runs.batches(2), ckpt_path=folder)
    return runs.trained_state(module)


SAVES = [("trainer", 2, False), ("fabric", 3, False), ("trainer", 3, True), ("fabric", 0, False)]


@pytest.mark.parametrize(
    ("by", "stage", "async_save", "times"),
    [(*SAVES[0], 1), (*SAVES[0], 2), *(pytest.param(*case, 2, marks=EVERYDAY) for case in SAVES[1:])],
)
def test_files_of_others_stay(ranks: Any, tmp_path: Path, by: str, stage: int, async_save: bool, times: int) -> None:
    lay_out(tmp_path)
    (tmp_path / "zero_to_fp32.py").write_text("of an earlier release")
    inodes = {name: (tmp_path / name).stat().st_ino for name in OTHERS}
    (state, _) = ranks(2, saved_into, folder=str(tmp_path), by=by, stage=stage, times=times, async_save=async_save)
    assert_as_laid_out(tmp_path)
    assert {name: (tmp_path / name).stat().st_ino for name in OTHERS} == inodes
    assert (tmp_path / "latest").read_text() == "checkpoint"
    if stage:  # which DeepSpeed's converter is for
        assert (tmp_path / "zero_to_fp32.py").read_bytes() == Path(zero_to_fp32.__file__).read_bytes()
    if by == "trainer":
        assert ranks(2, loaded_from, folder=str(tmp_path), stage=stage)[0] == state


class WritesIntoIt(Callback):
    """Writes into the checkpoint's folder while it is saved, as lightning-transformers does."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        folder = Path(trainer.default_root_dir, "last.ckpt")
        if trainer.is_global_zero:
            folder.mkdir(exist_ok=True)
            with (folder / "mine.txt").open("a") as file:
                file.write("saved ")


def saved_with_a_callback(out: str) -> None:
    ds_frozen_patch.patch()
    trainer, _ = trained(out, 2, callbacks=[WritesIntoIt()])
    for _ in range(2):
        trainer.save_checkpoint(f"{out}/last.ckpt")


@EVERYDAY
def test_what_a_callback_writes_into_the_checkpoint_stays(ranks: Any, tmp_path: Path) -> None:
    ranks(2, saved_with_a_callback, out=str(tmp_path))
    assert (tmp_path / "last.ckpt" / "mine.txt").read_text() == "saved saved "
    assert not ds_frozen_patch.verify(tmp_path / "last.ckpt").problems


# Weights alone


def weights_into(folder: str, stage: int) -> Any:
    """Weights after a checkpoint, a test from them, a checkpoint after weights, and a test from that."""
    ds_frozen_patch.patch()
    trainer, module = trained(folder, stage)
    found = []
    path = f"{folder}/run"
    trainer.save_checkpoint(path)
    first = {name: value.clone() for name, value in module.named_buffers()}
    for weights_only in (True, False):
        module.seen += 1
        trainer.save_checkpoint(path, weights_only=weights_only)
        torch.distributed.barrier()
        fresh = runs.LoraRun()
        runs.trainer(folder, 2, stage, enable_checkpointing=False).test(
            fresh, runs.batches(2), ckpt_path=path, verbose=False
        )
        found.append(int(fresh.seen - first["seen"]))
        torch.distributed.barrier()
    return found


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=EVERYDAY)])
def test_weights_and_checkpoints_at_one_path(ranks: Any, tmp_path: Path, stage: int) -> None:
    """A load of the path gets what was saved last, and the files of others stay."""
    lay_out(tmp_path / "run")
    assert ranks(2, weights_into, folder=str(tmp_path), stage=stage) == [[1, 2]] * 2
    assert_as_laid_out(tmp_path / "run")
    assert not list((tmp_path / "run").glob("*weights.ckpt"))


def checkpoint_over_weights(out: str) -> Any:
    ds_frozen_patch.patch()
    trainer, module = trained(out, 2)
    trainer.save_checkpoint(f"{out}/last.ckpt", weights_only=True)
    trainer.save_checkpoint(f"{out}/last.ckpt")
    refused = runs.refusal(trainer.save_checkpoint, f"{out}/mine.txt")
    return runs.trained_state(module), refused


@EVERYDAY
def test_a_checkpoint_replaces_weights_and_nothing_else(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    seen = ranks(2, checkpoint_over_weights, out=str(tmp_path))
    for _, (kind, said) in seen:
        assert kind == "CheckpointError"
        assert "mine.txt was not saved. Rank 0: " in said
        assert "There is no checkpoint there now." in said
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert ranks(2, loaded_from, folder=str(tmp_path / "last.ckpt"), stage=2)[0] == seen[0][0]


# Places


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def saved_at(out: str, by: str, place: str, times: int) -> Any:
    os.chdir(out)
    if os.environ["RANK"] == "0":
        (Path(place) / "inner").mkdir(parents=True, exist_ok=True)
        for pipe in (Path(place, "pipe"), Path(place, "inner", "pipe")):  # opened to be synced, it would block for ever
            if not pipe.exists():
                os.mkfifo(pipe)
    with owners.served():
        run = Run(by, out, 2, 2)
        run.train_epoch()
        for _ in range(times):
            run.engine.save_checkpoint(place, tag="epoch0", client_state={"epoch": 1}) if by == "deepspeed" else (
                run.save(Path(place))
            )
        first = run.seen()[1]
        again = Run(by, out, 2, 2, seed=1)
        if by == "deepspeed":
            again.engine.load_checkpoint(place)
        else:
            again.accelerator.load_state(place)
        return first == again.seen()[1]


@pytest.mark.skipif(not ROOT, reason="mounts need root")
@pytest.mark.parametrize("by", ["accelerate", pytest.param("deepspeed", marks=EVERYDAY)])
@pytest.mark.parametrize("place", ["volume", pytest.param(".", marks=EVERYDAY)])
def test_a_mount_point_and_the_current_folder(ranks: Any, tmp_path: Path, by: str, place: str) -> None:
    with mounted(tmp_path / "volume"):
        inode = (tmp_path / place).stat().st_ino
        assert ranks(2, saved_at, out=str(tmp_path), by=by, place=place, times=2) == [True, True]
        assert (tmp_path / place).stat().st_ino == inode
        assert list((tmp_path / place).glob("*/*model_states.pt"))
        assert not list((tmp_path / place).rglob(".*"))


@EVERYDAY
@pytest.mark.skipif(not ROOT, reason="mounts need root")
def test_a_parent_that_cannot_be_written(ranks: Any, tmp_path: Path) -> None:
    above = tmp_path / "above"
    with mounted(above), mounted(above / "volume"):
        subprocess.run(["mount", "-o", "remount,ro", str(above)], check=True)
        place = str(above / "volume")
        assert ranks(2, saved_at, out=str(tmp_path), by="deepspeed", place=place, times=2) == [True, True]
        subprocess.run(["mount", "-o", "remount,rw", str(above)], check=True)


@EVERYDAY
@pytest.mark.skipif(not ROOT, reason="mounts need root")
@pytest.mark.parametrize("kind", ["link", "mount point"])
def test_a_tag_that_is_elsewhere(ranks: Any, tmp_path: Path, kind: str) -> None:
    folder, elsewhere = tmp_path / "run" / "epoch0", tmp_path / "elsewhere"
    folder.parent.mkdir()
    elsewhere.mkdir()
    folder.symlink_to(elsewhere) if kind == "link" else folder.mkdir()
    with mounted(tmp_path / "unused") if kind == "link" else _mounted_at(folder):
        assert ranks(2, saved_at, out=str(tmp_path), by="deepspeed", place="run", times=2) == [True, True]
        assert folder.is_symlink() == (kind == "link")
        assert len(list(folder.glob("*_states.pt"))) == 3
        assert not list(folder.glob(".*"))


@contextmanager
def _mounted_at(folder: Path) -> Iterator[None]:
    folder.rmdir()
    with mounted(folder):
        yield


def saved_without_renames(out: str) -> Any:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "nothing is renamed here")

    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        with overridden([(owner, name, refuse) for owner in (os, Path) for name in ("rename", "replace")]):
            for _ in range(2):
                run.train_epoch()
                run.save(run.at(0))
        again = Run("deepspeed", out, 2, 2)
        again.load(run.at(0))
        return run.seen()[1] == again.seen()[1]


def test_a_folder_where_nothing_can_be_renamed(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, saved_without_renames, out=str(tmp_path)) == [True, True]
    assert (tmp_path / "epoch0" / RECORD).is_file()
    assert not ds_frozen_patch.verify(tmp_path).problems
    assert not list(tmp_path.rglob(".*"))


@EVERYDAY
def test_modes_and_links(ranks: Any, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    (real / "epoch0").mkdir(parents=True)
    (real / "epoch0").chmod(0o2777)
    real.chmod(0o2775)
    (tmp_path / "run").symlink_to("elsewhere")
    for _ in range(2):
        assert ranks(2, saved_at, out=str(tmp_path), by="deepspeed", place="run", times=1) == [True, True]
        assert (tmp_path / "run").is_symlink()
        assert (real.stat().st_mode & 0o7777, (real / "epoch0").stat().st_mode & 0o7777) == (0o2775, 0o2777)
        assert len(list((real / "epoch0").glob("*_states.pt"))) == 3


def saved_beside_a_link(out: str) -> None:
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        for _ in range(2):
            run.save(run.at(0))


@EVERYDAY
def test_a_link_named_latest_stays(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("newest.txt")
    ranks(2, saved_beside_a_link, out=str(tmp_path))
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "newest.txt").read_text() == "epoch0"


@EVERYDAY
@pytest.mark.parametrize("tag", ["a/b", "0.25", "global step 3"])
def test_tags(ranks: Any, tmp_path: Path, tag: str) -> None:
    ranks(2, tagged, out=str(tmp_path), tag=tag)
    assert (tmp_path / "latest").read_text() == tag
    assert len(list((tmp_path / tag).glob("*_states.pt"))) == 3
    assert not list(tmp_path.rglob(".*"))


def tagged(out: str, tag: str) -> None:
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        for _ in range(2):
            run.engine.save_checkpoint(out, tag=tag)


# What code sees that runs within a save


def seen_within(by: str, out: str, patched: bool) -> Any:
    """Return the paths that a program's own code gets, or derives, and what it finds there."""
    import transformers

    seen: list[Any] = []

    def look(path: Any) -> None:
        parent = Path(path).parent
        seen.append((os.path.relpath(path, out), (parent / "args.json").exists()))
        if torch.distributed.get_rank() == 0:  # LLaVA's idiom
            (parent / "mm_projector").mkdir(exist_ok=True)
            (parent / "mm_projector" / f"{Path(path).name}.bin").write_text("projector")

    class OfTheProgram(transformers.Trainer):
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            look(output_dir)
            super().save_model(output_dir, _internal_call)

        def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
            super()._save_optimizer_and_scheduler(output_dir)
            look(output_dir)
            seen.append(sorted(item.name for item in Path(output_dir).iterdir() if item.is_dir()))

    with owners.served() if patched else overridden([]):
        run = Run(by, out, 2, 2)
        if by == "trainer":
            run.trainer.__class__ = OfTheProgram
            seen.append(run.trainer._get_output_dir(trial=None) == out)
        else:
            run.accelerator.register_save_state_pre_hook(lambda models, weights, folder: look(folder))
        if torch.distributed.get_rank() == 0:
            Path(out, "args.json").write_text("{}")
        torch.distributed.barrier()
        run.train()
        return seen


@pytest.mark.parametrize("by", ["trainer", "accelerate"])
def test_code_within_a_save_sees_what_it_would_see_plain(ranks: Any, tmp_path: Path, by: str) -> None:
    found, names = [], []
    for who in ("ours", "plain"):
        out = tmp_path / who / "run"
        out.mkdir(parents=True)
        found.append(ranks(2, seen_within, by=by, out=str(out), patched=who == "ours"))
        names.append(sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()))
    assert found[0] == found[1]
    assert all(is_there for item in found[0][0] if isinstance(item, tuple) for is_there in item[1:])
    assert [name for name in names[0] if not name.endswith(RECORD)] == names[1]
    assert [name for name in names[0] if name.startswith("mm_projector/")]


# After a save, and beside it


def copied_at_once(out: str, copies: int) -> list[str]:
    failed = []
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        for number in range(copies):
            run.engine.save_checkpoint(f"{out}/c", tag="epoch0")
            if torch.distributed.get_rank() == 0:
                before = contents(Path(out, "c"))
                try:
                    shutil.copytree(f"{out}/c", f"{out}/copy{number}")
                except shutil.Error as error:
                    failed.append(str(error))
                threads = [thread.name for thread in threading.enumerate() if "ds_frozen_patch" in thread.name]
                if contents(Path(out, "c")) != before or threads:
                    failed.append(f"changed afterwards {threads}")
    return failed


def test_nothing_changes_after_a_save(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, copied_at_once, out=str(tmp_path), copies=8) == [[], []]
    for copy in tmp_path.glob("copy*"):
        assert {"epoch0", "latest"} <= {item.name for item in copy.iterdir()}
        assert not list(copy.rglob(".*"))


def removed_within(out: str, exists: bool) -> Any:
    """A program that removes what it does not know, as OpenRLHF's rotation does, while a save runs."""
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        if exists:
            run.save(run.at(0))
        write = torch.save

        def remove_and_write(*args: Any, **kwargs: Any) -> None:
            for item in Path(out).rglob(".*") if exists else []:
                item.unlink()
            if not exists:
                shutil.rmtree(f"{out}/epoch0", ignore_errors=True)
            write(*args, **kwargs)

        with overridden([(torch, "save", remove_and_write)]):
            said = runs.refusal(run.save, run.at(0))
        there = sorted(item.name for item in Path(out, "epoch0").glob("*"))
        torch.distributed.barrier()
        run.save(run.at(0))
        return said, there


@EVERYDAY
@pytest.mark.parametrize("exists", [True, False])
def test_a_program_that_removes_what_it_does_not_know(ranks: Any, tmp_path: Path, exists: bool) -> None:
    for (kind, said), there in ranks(2, removed_within, out=str(tmp_path), exists=exists):
        assert kind == "CheckpointError"
        assert f"{tmp_path}/epoch0 was not saved. Rank " in said
        assert "free on its disk" not in said
        assert (
            "The previous checkpoint there is unchanged." if exists else "There is no checkpoint there now."
        ) in said
        assert len(there) == (4 if exists else 0)
    (problems,) = [ds_frozen_patch.verify(tmp_path).problems]
    assert not problems


def fails_beside(out: str) -> tuple[str, str]:
    """A save fails in a folder where a program has put a file of its own, and no checkpoint is."""
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        with owners.failing("_states.pt"):
            return runs.refusal(run.save, run.at(0))


def test_a_failed_save_beside_files_of_others(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "epoch0").mkdir()
    (tmp_path / "epoch0" / "mine.txt").write_text("mine")
    for kind, said in ranks(2, fails_beside, out=str(tmp_path)):
        assert kind == "CheckpointError"
        assert "There is no checkpoint there now." in said
    assert [item.name for item in (tmp_path / "epoch0").iterdir()] == ["mine.txt"]


# Every rename and removal


@contextmanager
def traced() -> Iterator[list[tuple[str, ...]]]:
    """Every rename and removal in this process, while this lasts."""
    found: list[tuple[str, ...]] = []
    is_on = [True]

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on and event in ("os.rename", "os.remove", "os.rmdir", "os.truncate"):
            paths = arguments[:2] if event == "os.rename" else arguments[:1]
            found.append(
                (event, *(str(Path(os.fspath(path)).absolute()) for path in paths if not isinstance(path, int)))
            )

    sys.addaudithook(hear)
    try:
        yield found
    finally:
        is_on.clear()


def traced_saves(by: str, out: str) -> list[tuple[str, ...]]:
    if by in owners.OWNERS:
        with owners.served(), traced() as found:
            run = Run(by, out, 2, 3, BY_HAND if by == "trainer" else PEFT)
            if by == "trainer":
                run.train()
            run.save(run.at(1), 1)
            run.save(run.at(1), 1)
        return found
    with traced() as found:
        saved_into(f"{out}/run", "fabric" if by == "fabric" else "trainer", 3, 2, async_save=False)
    return found


def is_ours(path: str, out: Path) -> bool:
    """Whether DeepSpeed or we have written what has this path."""
    parts = Path(re.sub(r"/\.(.+)\.[0-9a-f]{12}$", r"/\1", path)).relative_to(out).parts
    tags = ("checkpoint", "epoch1", "pytorch_model", *(part for part in parts if part.startswith("global_step")))
    return (
        any(part.startswith((".ds_frozen_patch", "ds_frozen_patch-")) for part in parts)
        or parts[-1] in ("latest", *tags)
        or parts[-1].startswith("zero_to_")
        or is_state(parts[-1])
    )


@pytest.mark.parametrize("by", ["lightning", "fabric", *owners.OWNERS])
def test_every_rename_and_removal_is_of_our_own(ranks: Any, tmp_path: Path, by: str) -> None:
    lay_out(tmp_path / "run")
    for found in ranks(2, traced_saves, by=by, out=str(tmp_path)):
        inside = [call for call in found if any(path.startswith(str(tmp_path)) for path in call[1:])]
        foreign = [call for call in inside if not all(is_ours(path, tmp_path) for path in call[1:])]
        assert not foreign
        assert not [call for call in inside if call[0] == "os.rename" and Path(call[1]).is_dir()]
    assert_as_laid_out(tmp_path / "run")


def test_messages_say_the_way_out(ranks: Any, tmp_path: Path) -> None:
    """The error in words, what is there, and free space only where a lack of it is the cause."""
    for said in ranks(2, refused_by_a_file, out=str(tmp_path)):
        assert "Not a directory" in said
        assert "Errno" not in said
        assert "free on its disk" not in said
        assert "There is no checkpoint there now." in said
        assert "save again once the cause is removed" in said


def refused_by_a_file(out: str) -> str:
    ds_frozen_patch.patch()
    trainer, _ = trained(out, 2)
    if trainer.is_global_zero:
        Path(out, "file").touch()
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as raised:
        trainer.save_checkpoint(f"{out}/file/last.ckpt")
    return str(raised.value)
