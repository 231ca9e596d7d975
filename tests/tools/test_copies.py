"""What tools and saves do with links, devices, modes and swapped files in a checkpoint directory."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tools_checkpoints import Checkpoints, loaded, manifest_of

from ds_frozen_patch import CheckpointError, prune
from ds_frozen_patch.checkpoint.zero.layout import Layout
from ds_frozen_patch.checkpoint.zero.masters import check_masters_match
from ds_frozen_patch.checkpoint.zero.states import read_states
from ds_frozen_patch.cli import main
from ds_frozen_patch.engine.served import ServedEngine
from ds_frozen_patch.engine.topology import Topology
from ds_frozen_patch.publish.ways import Way
from ds_frozen_patch.publish.work_folder import swap
from ds_frozen_patch.save import export_trained
from ds_frozen_patch.save.running import Save, place_of
from ds_frozen_patch.tools.output import MAX_OTHER_BYTES, copy_other_files

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]

STATES = "mp_rank_00_model_states.pt"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Create a checkpoint whose state files hold a few bytes."""
    folder = tmp_path / "in.ckpt" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / STATES).write_bytes(b"states")
    (folder.parent / "latest").write_text("checkpoint")
    return Layout(folder.parent, "checkpoint", (folder / STATES,), ())


def copied(layout: Layout, tmp_path: Path) -> Path:
    made = tmp_path / "out.ckpt"
    (made / "checkpoint").mkdir(parents=True)
    copy_other_files(layout, made)
    return made


def names(folder: Path) -> set[str]:
    return {str(item.relative_to(folder)) for item in folder.rglob("*") if not item.is_dir() or item.is_symlink()}


def test_only_the_bytes_of_regular_files_are_copied(
    layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, folder = layout.root, layout.root / "checkpoint"
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
    made = copied(layout, tmp_path)
    assert names(made) == {"latest", "hparams.yaml", "checkpoint/inner/notes.txt"}
    assert (made / "checkpoint" / "inner" / "notes.txt").read_text() == "notes"
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "\x1b" not in said.err
    assert "skipped" in said.err
    assert "links or not regular files" in said.err
    for name in ("inside", "out", "all", "zero", "loop", "pipe"):
        assert name in said.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_a_device_is_not_opened(layout: Layout, tmp_path: Path) -> None:
    try:
        os.mknod(layout.root / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("nor may this one")
    assert names(copied(layout, tmp_path)) == {"latest"}


def test_modes_and_times_are_not_copied(layout: Layout, tmp_path: Path) -> None:
    """Else a set-uid program of another user, copied by root, would run as root."""
    file = layout.root / "checkpoint" / "tool"
    file.write_text("echo\n")
    file.chmod(0o6777)
    os.utime(file, (1, 1))
    with suppress(OSError):  # not every file system has them
        os.setxattr(file, "user.mine", b"x")
    before = os.umask(0o027)
    try:
        made = copied(layout, tmp_path) / "checkpoint" / "tool"
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o640
    assert made.stat().st_mtime > 1
    assert os.listxattr(made) == []


def test_no_script_is_copied(layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's converters are programs that people run, and come with the checkpoint."""
    scripts = ("zero_to_fp32.py", "checkpoint/ZERO_to_fp32.py", "zero_to_torch.py", "run", "modeling.py")
    for name in scripts:
        (layout.root / name).write_text("#!/bin/sh\n" if name == "run" else "import os")
    (layout.root / "rng_state_0.pth").write_text("PK")
    assert names(copied(layout, tmp_path)) == {"latest", "rng_state_0.pth"}
    said = capsys.readouterr().err
    shown = [name for name in scripts if repr(str(layout.root / name)) in said]
    assert shown == ["checkpoint/ZERO_to_fp32.py", "run", "modeling.py"]  # the others are in each checkpoint


def test_there_is_a_limit(layout: Layout, tmp_path: Path) -> None:
    file = layout.root / "checkpoint" / "sparse"
    file.touch()
    os.truncate(file, 1 << 40)
    with pytest.raises(CheckpointError, match=r"sparse is too large to copy: .* Move it out") as refused:
        copied(layout, tmp_path)
    assert str(file) in str(refused.value)
    shutil.rmtree(tmp_path / "out.ckpt")
    os.truncate(file, MAX_OTHER_BYTES // 2)
    assert (copied(layout, tmp_path) / "checkpoint" / "sparse").stat().st_size == MAX_OTHER_BYTES // 2
    shutil.rmtree(tmp_path / "out.ckpt")
    for name in "abc":
        shutil.copy(file, file.with_name(name))
    with pytest.raises(CheckpointError, match="is too large to copy"):
        copied(layout, tmp_path)


def test_a_growing_file_is_copied_up_to_the_limit(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layout.root / "grows").write_bytes(b"x" * 100)
    real = os.fstat
    monkeypatch.setattr("ds_frozen_patch.tools.output.MAX_OTHER_BYTES", 50)
    monkeypatch.setattr(os, "stat", lambda *a, real=os.stat, **k: small(real(*a, **k)))
    monkeypatch.setattr(os, "fstat", lambda opened: small(real(opened)))

    def small(found: os.stat_result) -> Any:
        return os.stat_result([*found[:6], min(found.st_size, 10), *found[7:]])

    with pytest.raises(CheckpointError, match="grows is too large to copy"):
        copied(layout, tmp_path)


def test_nested_folders(layout: Layout, tmp_path: Path) -> None:
    folder = layout.root / "checkpoint"
    for _ in range(400):
        folder = folder / "d"
        folder.mkdir()
    with pytest.raises(CheckpointError, match="is nested too deeply"):
        copied(layout, tmp_path)


@pytest.mark.parametrize("name", ["checkpoint/inner", "note"])
def test_a_file_replaced_by_a_link(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file is swapped between the check and the copy."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (layout.root / "checkpoint" / "inner").mkdir()
    (layout.root / "note").write_text("harmless")
    swapped, real = layout.root / name, os.open

    def swap(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) in (swapped.name, str(swapped)) and not swapped.is_symlink():
            is_folder = swapped.is_dir()
            swapped.rename(tmp_path / "aside")
            swapped.symlink_to(tmp_path / "private" / ("" if is_folder else "key"))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(CheckpointError, match="cannot be read"):
        copied(layout, tmp_path)
    assert swapped.is_symlink()
    assert "secret" not in {item.read_text() for item in (tmp_path / "out.ckpt").rglob("*") if item.is_file()}


# What is copied into an output is what was checked.


class RunsCode:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.file}'",)


def test_an_optimizer_that_is_swapped_after_the_check(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "full.ckpt"
    shutil.copytree(checkpoints(2) / "full.ckpt", source)
    file = max(source.rglob("*optim_states.pt"))
    foul = loaded(file)
    good = loaded(file)
    foul["mine"] = RunsCode(tmp_path / "it ran")

    def check_and_swap(*weights: Any) -> None:
        check_masters_match(*weights)
        torch.save(foul, tmp_path / "other.pt")
        (tmp_path / "other.pt").replace(file)

    monkeypatch.setattr("ds_frozen_patch.checkpoint.zero.opening.check_masters_match", check_and_swap)
    prune(source, tmp_path / "pruned.ckpt")
    made = loaded(tmp_path / "pruned.ckpt" / "checkpoint" / file.name)
    assert made.keys() == good.keys()
    assert not (tmp_path / "it ran").exists()


# Links in a checkpoint.


def linked(source: Path, what: str, elsewhere: Path) -> None:
    """Replace parts of the checkpoint with links."""
    if what == "the directory":
        source.rename(elsewhere)
        source.symlink_to(elsewhere)
    elif what == "the folder":
        (source / "checkpoint").rename(elsewhere)
        (source / "checkpoint").symlink_to(elsewhere)
    elif what == "a file":
        file = max(source.rglob("*optim_states.pt"))
        file.rename(elsewhere)
        file.symlink_to(elsewhere)
    elif what == "a file, by another link":
        file = max(source.rglob("*optim_states.pt"))
        file.rename(elsewhere)
        (source / "step").symlink_to(elsewhere)
        file.symlink_to("../step")
    elif what == "a folder inside":
        (source / "checkpoint").rename(source / "global_step4")
        (source / "checkpoint").symlink_to("global_step4")
    elif what == "a file inside":
        file = max(source.rglob("*optim_states.pt"))
        file.rename(source / "kept")
        file.symlink_to("../kept")


@pytest.mark.parametrize("what", ["the directory", "a folder inside", "a file inside"])
def test_links_within_a_checkpoint_are_followed(checkpoints: Checkpoints, tmp_path: Path, what: str) -> None:
    """The whole checkpoint on another disk, and links that stay inside the checkpoint."""
    source = tmp_path / "full.ckpt"
    shutil.copytree(checkpoints(2) / "full.ckpt", source)
    linked(source, what, tmp_path / "elsewhere")
    assert main(["prune", str(source), str(tmp_path / "pruned.ckpt"), "-q"]) == 0
    (file,) = (tmp_path / "pruned.ckpt" / "checkpoint").glob("*model_states.pt")
    assert manifest_of(loaded(file)).left_out
    assert not [item for item in (tmp_path / "pruned.ckpt").rglob("*") if item.is_symlink()]


@pytest.mark.parametrize("what", ["the folder", "a file", "a file, by another link"])
def test_links_out_of_a_checkpoint_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """A checkpoint from elsewhere could link to a file of the user's, and the output is passed on."""
    source = tmp_path / "full.ckpt"
    shutil.copytree(checkpoints(2) / "full.ckpt", source)
    linked(source, what, tmp_path / "elsewhere")
    for line in (["inspect"], ["verify"], ["prune", str(tmp_path / "pruned.ckpt")]):
        assert main([line[0], str(source), *line[1:]]) == 1
        said = "".join(capsys.readouterr())
        assert "is a link out of the checkpoint" in said
        assert "cp -rL" in said
        assert main([line[0], str(source), *line[1:], "--trust"]) == 0  # as of Hugging Face's cache, or of DVC
        capsys.readouterr()
    assert read_states(source, None, trust=True).layout.root == source


# Where a patched save writes.


def a_save(target: Path) -> Save:
    owner: Any = SimpleNamespace(rank=0, local_rank=0, device=torch.device("cpu"), names_each_save=True)
    engine = SimpleNamespace(use_node_local_storage=lambda: False)
    served = ServedEngine(owner, Topology(2, 1))
    place = place_of(engine, served, target, target.parent, target, is_managed=True)
    place.way = Way.NEW
    return Save(engine, served, place, None)


def exported(folder: Path, adapter: Any = None) -> list[CheckpointError]:
    """The errors of a save into a folder that exports a file, or an adapter, beside the checkpoint."""
    save = a_save(folder / "checkpoint")
    save.open()
    plan: Any = SimpleNamespace(adapter=adapter, write=lambda file: save_file({"a": torch.ones(3)}, file))
    export_trained._write(save, plan)
    save.give_name()
    save.place.close()
    return save.failures.errors


def links(folder: Path, elsewhere: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(elsewhere)


@pytest.mark.short
@pytest.mark.parametrize("to", ["a file", "a folder", "nothing"])
def test_a_save_does_not_write_through_a_link(tmp_path: Path, to: str) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    file = "trainable.safetensors"
    links(folder, {"a file": elsewhere / "precious", "a folder": elsewhere, "nothing": elsewhere / "new"}[to], file)
    assert exported(folder) == []
    assert (names(elsewhere), (elsewhere / "precious").read_text()) == ({"precious"}, "precious")
    assert names(folder) == {file}
    assert not (folder / file).is_symlink()
    assert (folder / file).stat().st_size > 12


@pytest.mark.parametrize("name", ["adapter", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"])
def test_an_adapter_is_not_written_through_a_link(tmp_path: Path, name: str) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    links(folder, elsewhere if name == "adapter" else elsewhere / "precious", name)
    errors = exported(folder, SimpleNamespace(config_json="{}"))
    assert (names(elsewhere), (elsewhere / "precious").read_text()) == ({"precious"}, "precious")
    if name == "adapter":
        assert "is a link" in str(errors[0])
    else:
        assert errors == []
        assert names(folder) == {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
        assert not any(item.is_symlink() for item in folder.rglob("*"))


def test_the_directory_of_a_save_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    assert exported(tmp_path / "out") == []
    assert names(tmp_path / "disk") == {"trainable.safetensors"}


@pytest.mark.parametrize("make", [lambda work, to: work.symlink_to(to), lambda work, to: work.write_text("mine")])
def test_a_foreign_work_folder(tmp_path: Path, make: Callable[[Path, Path], Any]) -> None:
    (tmp_path / "elsewhere").mkdir()
    save = a_save(tmp_path / "last.ckpt")
    save.place.target.mkdir()
    make(save.place.work, tmp_path / "elsewhere")
    save.open()
    assert str(save.place.work) in str(save.failures.errors[0])
    assert names(tmp_path / "elsewhere") == set()


def test_what_cannot_be_moved_aside_is_there_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two are exchanged, and then the old one cannot be renamed."""
    new, target, folder = tmp_path / "new" / "checkpoint", tmp_path / "checkpoint", tmp_path / "old"
    for place in (new, target):
        place.mkdir(parents=True)
        (place / "whose").write_text(place.parent.name)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output error"):
        swap(new, target, folder)
    assert [(place / "whose").read_text() for place in (new, target)] == ["new", tmp_path.name]
