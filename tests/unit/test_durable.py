"""Files and folders that are on disk when they have their names, and names that are exchanged."""

from __future__ import annotations

import errno
import os
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from memory import open_files

from ds_frozen_patch.publish import durable


@pytest.fixture
def synced(monkeypatch: Any) -> set[Path]:
    """What has been synced so far, by the names that it had then."""
    found: set[Path] = set()
    monkeypatch.setattr(os, "fsync", lambda opened: found.add(Path(f"/proc/self/fd/{opened}").readlink()))
    return found


@pytest.mark.parametrize("options", [{}, {"sync": False}])
def test_what_is_written_beside_is_synced_before_it_has_its_name(
    tmp_path: Path, synced: set[Path], options: dict[str, bool]
) -> None:
    target = tmp_path / "new" / "file"
    with durable.write_beside(target, **options) as hidden:
        hidden.write_text("content")
        hidden.with_name("scratch").touch()
        assert not target.exists()
    assert target.read_text() == "content"
    assert [*target.parent.iterdir()] == [target]
    assert synced == (set() if options else {tmp_path, hidden, target.parent})


@pytest.mark.parametrize("there", ["file", "link", "folder"])
@pytest.mark.parametrize("options", [{}, {"replace": True}])
def test_what_is_there_is_replaced_only_if_that_is_asked_for(
    tmp_path: Path, there: str, options: dict[str, bool]
) -> None:
    target = tmp_path / "target"
    if there == "file":
        target.write_text("before")
    elif there == "link":
        target.symlink_to(tmp_path / "missing")
    else:
        target.mkdir()
    is_replaced = bool(options) and there != "folder"
    refusal = pytest.raises(IsADirectoryError if options else FileExistsError)
    with nullcontext() if is_replaced else refusal, durable.write_beside(target, **options) as hidden:
        hidden.write_text("new")
    assert (target.is_file() and target.read_text() == "new") == is_replaced
    assert target.is_symlink() == (there == "link" and not options)
    assert [*tmp_path.iterdir()] == [target]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with suppress(KeyError), durable.write_beside(tmp_path / "target") as hidden:
        hidden.mkdir()
        (hidden / "part").touch()
        raise KeyError
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("is_listed", "seen_after", "waits"), [(True, 2, 2), (False, 2, 0), (True, 0, 0)])
def test_a_name_that_a_network_disk_has_cached_as_missing(
    tmp_path: Path, monkeypatch: Any, is_listed: bool, seen_after: int, waits: int
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(Path, "exists", lambda _: len(slept) >= seen_after)
    monkeypatch.setattr(durable, "listed", lambda _: ["name"] if is_listed else [])
    durable.wait_for_name(tmp_path / "name")
    assert slept == [1] * waits


@pytest.mark.parametrize("options", [{}, {"sync": False}])
def test_folders_are_made_and_synced(tmp_path: Path, synced: set[Path], options: dict[str, bool]) -> None:
    before = open_files()
    durable.make_folder(tmp_path / "outer" / "inner", **options)
    assert (tmp_path / "outer" / "inner").is_dir()
    assert synced == (set() if options else {tmp_path, tmp_path / "outer"})
    assert open_files() == before


def test_names_of_which_one_is_missing_are_not_exchanged(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(FileNotFoundError):
        durable.exchange(there, tmp_path / "missing")
    assert there.is_dir()


def test_a_folder_that_another_process_makes_meanwhile(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(Path, "exists", lambda path: path == tmp_path)
    durable.make_folder(tmp_path / "made" / "inner")
    assert (tmp_path / "made" / "inner").is_dir()


@pytest.mark.parametrize(("number", "is_lost"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced(tmp_path: Path, monkeypatch: Any, number: int, is_lost: bool) -> None:
    """Some file systems cannot; an error of the disk is one of the save."""

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output") if is_lost else nullcontext():
        durable.sync_folder(tmp_path)


def test_all_of_a_folder_is_synced(tmp_path: Path, synced: set[Path]) -> None:
    folder = tmp_path / "folder"
    (folder / "inner" / "empty").mkdir(parents=True)
    for name in ("one", "inner/two", "outside"):
        (folder / name).write_text(name)
    (folder / "outside").rename(tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "pipe")
    durable.sync_tree(folder)
    names = {str(path.relative_to(tmp_path)) for path in synced}
    assert names == {"folder", "folder/one", "folder/inner", "folder/inner/two", "folder/inner/empty"}
