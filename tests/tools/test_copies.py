"""What tools and saves do with links, devices, modes and other files in a checkpoint directory."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.checkpoints import Checkpoints, of_one_rank, record_in

import ds_frozen_patch
from ds_frozen_patch import inspect, prune, verify

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]

STATES = "mp_rank_00_model_states.pt"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Create a small checkpoint of one rank without ZeRO."""
    return of_one_rank(tmp_path / "in.ckpt", {"trained.weight": torch.ones(2), "frozen.weight": torch.ones(3)})


def copied(source: Path, tmp_path: Path) -> Path:
    prune(source, tmp_path / "out.ckpt")
    return tmp_path / "out.ckpt"


def names(folder: Path) -> set[str]:
    """Return the names of the files, but for those of the checkpoint itself."""
    found = {str(item.relative_to(folder)) for item in folder.rglob("*") if not item.is_dir() or item.is_symlink()}
    return {name for name in found if not name.startswith("checkpoint/ds_frozen_patch") and not name.endswith(STATES)}


def test_only_the_bytes_of_regular_files_are_copied(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, folder = source, source / "checkpoint"
    (folder / "inner").mkdir()
    (folder / "inner" / "notes.txt").write_text("notes")
    (root / "hparams.yaml").write_text("a: 1")
    (tmp_path / "secret").write_text("secret")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "inside").symlink_to("checkpoint/inner/notes.txt")
    (folder / "all").symlink_to("/")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe\x1b[2J")
    made = copied(source, tmp_path)
    assert names(made) == {"latest", "hparams.yaml", "checkpoint/inner/notes.txt"}
    assert (made / "checkpoint" / "inner" / "notes.txt").read_text() == "notes"
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "\x1b" not in said.err
    assert "skipped, because they are links, special files or scripts" in said.err
    for name in ("inside", "out", "all", "zero", "loop", "pipe"):
        assert name in said.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_a_device_is_not_opened(source: Path, tmp_path: Path) -> None:
    try:
        os.mknod(source / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("nor may this one")
    assert names(copied(source, tmp_path)) == {"latest"}


def test_modes_and_times_are_not_copied(source: Path, tmp_path: Path) -> None:
    """Else a set-uid program of another user, copied by root, would run as root."""
    file = source / "checkpoint" / "tool"
    file.write_text("echo\n")
    file.chmod(0o6777)
    os.utime(file, (1, 1))
    with suppress(OSError):  # not every file system has them
        os.setxattr(file, "user.mine", b"x")
    before = os.umask(0o027)
    try:
        made = copied(source, tmp_path) / "checkpoint" / "tool"
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o640
    assert made.stat().st_mtime > 1
    assert os.listxattr(made) == []


def test_no_script_is_copied(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's converters are programs that people run, and come with the checkpoint."""
    scripts = ("zero_to_fp32.py", "checkpoint/ZERO_to_fp32.py", "zero_to_torch.py", "run", "modeling.py")
    for name in scripts:
        (source / name).write_text("#!/bin/sh\n" if name == "run" else "import os")
    (source / "rng_state_0.pth").write_text("PK")
    assert names(copied(source, tmp_path)) == {"latest", "rng_state_0.pth"}
    said = capsys.readouterr().err
    shown = [name for name in scripts if repr(str(source / name)) in said]
    assert shown == ["checkpoint/ZERO_to_fp32.py", "run", "modeling.py"]  # the others are in each checkpoint


# Links in a checkpoint.


def linked(source: Path, what: str, elsewhere: Path) -> None:
    """Replace parts of the checkpoint with links."""
    if what == "the directory":
        source.rename(elsewhere)
        source.symlink_to(elsewhere)
    elif what == "the folder":
        (source / "checkpoint").rename(elsewhere)
        (source / "checkpoint").symlink_to(elsewhere)
    elif what == "a folder inside":
        (source / "checkpoint").rename(source / "global_step4")
        (source / "checkpoint").symlink_to("global_step4")
    else:
        file = max(source.rglob("*optim_states.pt"))
        kept = source / "kept" if what == "a file inside" else elsewhere
        file.rename(kept)
        if what == "a file, by another link":
            (source / "step").symlink_to(elsewhere)
        file.symlink_to({"a file": str(elsewhere), "a file inside": "../kept"}.get(what, "../step"))


@pytest.mark.parametrize(
    "what", ["the directory", "the folder", "a folder inside", "a file", "a file inside", "a file, by another link"]
)
def test_links_to_states_are_followed(checkpoints: Checkpoints, tmp_path: Path, what: str) -> None:
    """As torch does, for Hugging Face's cache, DVC, or another disk; the output has the files themselves."""
    source = tmp_path / "full.ckpt"
    shutil.copytree(checkpoints(2) / "full.ckpt", source)
    linked(source, what, tmp_path / "elsewhere")
    inspect(source)
    assert verify(source).problems == ()
    prune(source, tmp_path / "pruned.ckpt")
    assert record_in(tmp_path / "pruned.ckpt").left_out
    assert not [item for item in (tmp_path / "pruned.ckpt").rglob("*") if item.is_symlink()]


def save_twice(out: str) -> None:
    """Save with an export, and again where the exported file has become a link."""
    ds_frozen_patch.patch(export="safetensors")
    trainer = runs.trainer(out, 1, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(1))
    folder = Path(out, "last.ckpt")
    trainer.save_checkpoint(folder)
    (exported,) = folder.rglob("trainable.safetensors")
    exported.unlink()
    exported.symlink_to(Path(out, "precious"))
    trainer.save_checkpoint(folder)


def test_a_save_does_not_write_through_a_link(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    ranks(1, save_twice, out=str(tmp_path))
    assert (tmp_path / "precious").read_text() == "precious"
    (exported,) = (tmp_path / "last.ckpt").rglob("trainable.safetensors")
    assert not exported.is_symlink()
    assert exported.stat().st_size > 12
