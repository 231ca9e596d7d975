"""The writer in place of torch's: the files of both are the same bytes, and what is known of them is true."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_frozen_patch.common.files import SYNCED_BYTES, begin_sync
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.record import File, describe_file
from ds_frozen_patch.save.writer import Archive, Recorder, in_place_of_torch, opened

DTYPES = sorted(
    {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype) and "q" not in str(value)}
)
WAYS = ("at once", "later")


class Weight(torch.Tensor):
    """A subclass, with an attribute."""


class Nested:
    """Pickles itself by `torch.save` into memory, as some samplers and tokenizers do."""

    def __getstate__(self) -> bytes:
        buffer = io.BytesIO()
        torch.save({"inner": torch.arange(7)}, buffer)
        return buffer.getvalue()

    def __setstate__(self, state: bytes) -> None:
        self.state = state  # torch 2.4 cannot load within a load


def of_dtypes() -> Any:
    """A tensor of each dtype that this release can make of bytes."""
    made = {}
    for name in DTYPES:
        try:
            made[name] = torch.arange(64, dtype=torch.uint8).view(getattr(torch, name.removeprefix("torch.")))
            torch.save(made[name], io.BytesIO())
        except (RuntimeError, TypeError, ValueError, KeyError):
            made.pop(name, None)
    assert len(made) > 10
    return made


def views() -> Any:
    whole = torch.arange(1000.0)
    return {"a": whole, "b": whole[10:20], "c": whole[::2], "d": whole.view(10, 100).T, "again": [whole, whole[:0]]}


def subclasses() -> Any:
    weight = torch.arange(5.0).as_subclass(Weight)
    weight.note = "kept"  # type: ignore[attr-defined]
    return {"w": weight, "p": torch.nn.Parameter(torch.ones(3))}


STATES: dict[str, Callable[[], Any]] = {
    "each dtype": of_dtypes,
    "views of one storage": views,
    "subclasses": subclasses,
    "nothing": dict,
    "empty tensors": lambda: [torch.empty(0), torch.empty(0, 5, dtype=torch.int64), torch.zeros(3), torch.empty(0)],
    "more than a chunk": lambda: {
        name: torch.arange(size, dtype=torch.uint8)
        for name, size in (("a", 3 * 2**22 + 5), ("b", 2**22), ("c", 2**22 - 1), ("d", 2**18), ("e", 1))
    },
    "many": lambda: {str(number): torch.full((number % 70,), number) for number in range(1500)},
    "storages": lambda: [torch.arange(9.0).untyped_storage(), torch.arange(9).untyped_storage()[2:]],
    "sparse, quantized, without data": lambda: [
        torch.eye(5).to_sparse(),
        torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8),
        torch.empty(1000, device="meta"),
    ],
    "state that uses torch.save": lambda: {"x": torch.ones(4), "nested": Nested()},
    "a pickle of more than a chunk": lambda: {"text": "xy" * 2**22, "t": torch.ones(1)},
}


def write(way: str, state: Any, path: Path, sync: bool = True) -> dict[Path, File]:
    """Write a state in place of torch, and return what is noted."""
    files: dict[Path, File] = {}
    recorder, note = Recorder(), files.__setitem__
    for _ in range(2):  # the second time, with the memory of the first
        files.clear()
        recorder.begin()
        open_file = recorder.opened if way == "later" else partial(opened, sync=sync, note=note)
        with in_place_of_torch(path.parent, open_file):
            torch.save(state, path)
        assert bool(files) == (way == "at once")
        recorder.write(sync, note)
    return files


def read(path: Path, **options: Any) -> Any:
    return torch.load(str(path), **{"weights_only": False, **options})


def pickled(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", STATES)
def test_the_bytes_are_those_of_torch(tmp_path: Path, kind: str, way: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "ours").mkdir()
    state = STATES[kind]()
    torch.save(state, tmp_path / "torch" / "x.pt")
    path = tmp_path / "ours" / "x.pt"
    assert write(way, state, path) == {path: describe_file(path)}
    assert path.read_bytes() == (tmp_path / "torch" / "x.pt").read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for options in ({}, {"mmap": True}):
        assert pickled(read(path, **options)) == pickled(read(tmp_path / "torch" / "x.pt", **options))


@pytest.mark.parametrize("name", ["x", "a.b.c.pt", ".mp_rank_00_model_states.pt.0123456789ab", "ü.pt", "a b.pt"])
def test_the_names_of_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "torch").mkdir()
    torch.save({"a": torch.ones(3)}, str(tmp_path / "torch" / name))
    write("at once", {"a": torch.ones(3)}, tmp_path / name)
    assert (tmp_path / name).read_bytes() == (tmp_path / "torch" / name).read_bytes()


@pytest.mark.everyday
@pytest.mark.short
@pytest.mark.parametrize("setting", ["compute_crc32", "storage_alignment", "skip_data"])
def test_settings_of_torch(tmp_path: Path, setting: str) -> None:
    """Checksums can be turned off, data be aligned for direct reads, and the data be left to others."""
    config = pytest.importorskip("torch.utils.serialization.config", reason="this torch has no such settings")
    (tmp_path / "torch").mkdir()
    state, path = {"a": torch.ones(300), "b": torch.ones(5)}, tmp_path / "x.pt"
    values = {"compute_crc32": False, "storage_alignment": 4096}
    changed = config.patch(f"save.{setting}", values[setting]) if setting in values else nullcontext()
    skipping = torch.serialization.skip_data() if setting == "skip_data" else nullcontext()
    with changed, skipping:
        torch.save(state, tmp_path / "torch" / "x.pt")
        files: dict[Path, File] = {}
        with in_place_of_torch(tmp_path, partial(opened, sync=False, note=files.__setitem__)):
            torch.save(state, path)
    assert path.read_bytes() == (tmp_path / "torch" / "x.pt").read_bytes()
    assert bool(files) == (setting != "skip_data")  # else torch has written it


def test_what_torch_writes_itself(tmp_path: Path) -> None:
    """Files elsewhere, open files, and its former format."""
    folder = tmp_path / "folder"
    folder.mkdir()
    written: list[Path] = []
    with in_place_of_torch(folder, partial(opened, sync=True, note=lambda path, _: written.append(path))):
        torch.save({"a": torch.ones(3)}, tmp_path / "beside.pt")
        torch.save({"a": torch.ones(3)}, folder / "old.pt", _use_new_zipfile_serialization=False)
        with (folder / "open.pt").open("wb") as file:
            torch.save({"a": torch.ones(3)}, file)
        torch.save({"a": torch.ones(3)}, folder / "ours.pt")
    assert written == [folder / "ours.pt"]
    for path in (tmp_path / "beside.pt", *folder.iterdir()):
        assert read(path)["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk(tmp_path: Path, way: str) -> None:
    """The error is that of the system, nothing is noted, and the file is closed."""
    before = len([*Path("/proc/self/fd").iterdir()])
    (tmp_path / "x.pt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write(way, {"a": torch.ones(2**20)}, tmp_path / "x.pt")
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_an_error_of_the_sync(tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    noted: dict[Path, File] = {}
    with (
        overridden([(os, "fsync", fail)]),
        pytest.raises(OSError, match="Input/output"),
        in_place_of_torch(tmp_path, partial(opened, sync=True, note=noted.__setitem__)),
    ):
        torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    assert not noted


def test_a_state_that_cannot_be_pickled_leaves_no_archive(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pickle"):
        write("at once", {"a": lambda: 1}, tmp_path / "x.pt")
    assert not zipfile.is_zipfile(tmp_path / "x.pt")


class Sparse(io.FileIO):
    """A file with holes for large writes, all of which are of zeros."""

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < 2**20:
            return super().write(bytes(data)) or 0
        assert not any(bytes(data[:64]))
        self.seek(size, os.SEEK_CUR)
        return size


def test_storages_of_more_than_4_gib(tmp_path: Path) -> None:
    """Sparse in memory and on the disk; another record begins beyond 4 GiB."""
    size = 2**32 + 123
    big = torch.empty(size, dtype=torch.uint8)  # no page of it is touched, so all are zero
    state = {"big": big, "small": torch.arange(3), "empty": torch.empty(0)}
    theirs, ours = tmp_path / "torch.pt", tmp_path / "ü.pt"
    with Sparse(theirs, "wb") as file:
        torch.save(state, file)
    with Sparse(ours, "wb") as file:
        archive = Archive(file, ours, sync=False)
        with in_place_of_torch(tmp_path, lambda _: nullcontext(archive)):
            torch.save(state, ours)
        description = archive.finish()
    assert description == describe_file(ours)
    assert ours.stat().st_size == theirs.stat().st_size > size
    with ours.open("rb") as one, theirs.open("rb") as other:
        assert one.read(2**20) == other.read(2**20)
        assert [file.seek(size) for file in (one, other)] == [size, size]
        assert one.read() == other.read()
    loaded = read(ours, mmap=True)
    assert loaded["small"].tolist() == [0, 1, 2]
    assert loaded["big"].shape == (size,)
    assert loaded["big"][-5:].tolist() == [0] * 5
    with zipfile.ZipFile(ours) as archive_of_python:
        assert archive_of_python.testzip() is None


def test_the_disk_begins_with_what_is_much(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        begun, much = 0, SYNCED_BYTES
        for count, expected in ((much - 1, 0), (1, much), (7, much), (much, 2 * much + 7)):
            file.write(bytes(count))
            begun = begin_sync(file, begun)
            assert begun == expected
