"""The one reader of `torch.save` files: torch reads what it accepts in the same way; it refuses everything else.

The archives here are assembled field by field, so that each field can be wrong.
"""

from __future__ import annotations

import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_frozen_patch import CheckpointError
from ds_frozen_patch.checkpoint.format.archive import read_archive
from ds_frozen_patch.checkpoint.format.records import check_file
from ds_frozen_patch.checkpoint.format.stored import Storage, StoredTensor
from ds_frozen_patch.checkpoint.format.writing import write_archive
from ds_frozen_patch.checkpoint.format.zip_directory import open_regular, read_chunks, read_directory

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]

FAIR, FOUL = (pickle.dumps({"module": word}, protocol=2) for word in ("fair", "foul"))
LARGE = 0xFFFFFFFF
ZIP64 = struct.pack("<HHQ", 1, 8, 0)


@dataclass
class Entry:
    """A record, with the fields of its header and of its entry in the directory; None where they are correct."""

    name: bytes
    content: bytes
    folder: bytes = b"archive"
    has_checksum: bool = True
    flags: int = 0
    method: int = 0
    extra: bytes = b""
    comment: bytes = b""
    disk: int = 0
    attributes: int = 0
    size: int | None = None
    packed: int | None = None
    offset: int | None = None
    header_name: bytes | None = None
    header_extra: bytes = b""
    before: bytes = b""
    descriptor: bytes = b""

    @property
    def path(self) -> bytes:
        return self.folder + b"/" + self.name if self.folder else self.name

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.content) if self.has_checksum else 0

    def header(self) -> bytes:
        name = self.path if self.header_name is None else self.header_name
        sizes = (self.checksum, len(self.content), len(self.content))
        fixed = struct.pack(
            "<4s5H3L2H", b"PK\3\4", 20, self.flags, self.method, 0, 0, *sizes, len(name), len(self.header_extra)
        )
        return fixed + name + self.header_extra

    def entry(self, offset: int) -> bytes:
        said = [
            value if lie is None else lie
            for value, lie in ((len(self.content), self.packed), (len(self.content), self.size), (offset, self.offset))
        ]
        lengths = (len(self.path), len(self.extra), len(self.comment))
        kept = (self.disk, 0, self.attributes)
        fixed = struct.pack(
            "<4s6H3L5H2L",
            b"PK\1\2",
            20,
            20,
            self.flags,
            self.method,
            0,
            0,
            self.checksum,
            *said[:2],
            *lengths,
            *kept,
            said[2],
        )
        return fixed + self.path + self.extra + self.comment


@dataclass
class Body:
    """Records and their directory; `shift` is subtracted from the offsets."""

    entries: list[Entry]
    before_directory: bytes = b""

    def build(self, begin: int = 0) -> tuple[bytes, bytes]:
        records, directory = b"", b""
        for one in self.entries:
            records += one.before
            directory += one.entry(begin + len(records))
            records += one.header() + one.content + one.descriptor
        return records + self.before_directory, directory


@dataclass
class Archive:
    """A file: `end`, `end64` and `locator` are added to the correct values of these fields."""

    entries: list[Entry]
    before: bytes = b""
    counts_before: bool = True
    before_directory: bytes = b""
    after_directory: bytes = b""
    second: Body | None = None
    has_end64: bool = True
    end64_of_second: bool = False
    comment: bytes = b""
    after: bytes = b""
    end: dict[int, int] = field(default_factory=dict)
    end64: dict[int, int] = field(default_factory=dict)
    locator: dict[int, int] = field(default_factory=dict)
    bodies_apart: bool = False

    def build(self) -> bytes:
        start = len(self.before) if self.counts_before else 0
        records, directory = Body(self.entries, self.before_directory).build(start)
        content = self.before + records + directory
        told = [0, 0, len(self.entries), len(self.entries), len(directory), start + len(records)]
        first_end = len(content)
        if self.second is not None:
            content += self._end64(told) if self.end64_of_second else b""
            # As far on as the first begins, or with offsets of its own.
            records, directory = self.second.build(len(content) if self.bodies_apart else 0)
            other = [0, 0, *[len(self.second.entries)] * 2, len(directory), len(content) + len(records)]
            content += records + directory
        content += self.after_directory
        if self.has_end64:
            place = first_end if self.end64_of_second and self.second else len(content)
            content += self._end64(other if self.end64_of_second and self.second else told)
            content += b"PK\6\7" + struct.pack("<LQL", *_added([0, place, 1], self.locator, (32, 64, 32)))
        short = [min(value, most) for value, most in zip(told, (0xFFFF,) * 4 + (LARGE,) * 2, strict=True)]
        content += b"PK\5\6" + struct.pack(
            "<4H2LH", *_added([*short, len(self.comment)], self.end, (16,) * 4 + (32, 32, 16))
        )
        return content + self.comment + self.after

    def _end64(self, said: list[int]) -> bytes:
        fields = _added([44, 45, 45, *said], self.end64, (64, 16, 16, 32, 32, 64, 64, 64, 64))
        return b"PK\6\6" + struct.pack("<Q2H2L4Q", *fields)


def _added(values: list[int], changes: dict[int, int], bits: tuple[int, ...]) -> list[int]:
    return [
        (value + changes.get(at, 0)) % (1 << width) for at, (value, width) in enumerate(zip(values, bits, strict=True))
    ]


def entries(pickled: bytes = FAIR, folder: bytes = b"archive", **options: Any) -> list[Entry]:
    """Return what torch writes, without alignment."""
    contents = {
        b"data.pkl": pickled,
        b"byteorder": b"little",
        b"data/0": b"\1\2\3\4" * 4,
        b"data/a": b"",
        b"version": b"3\n",
        b".data/serialization_id": b"0" * 40,
    }
    return [Entry(name, content, folder, **options) for name, content in contents.items()]


def ours(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return what our reader finds in a file: the position and the bytes of each record."""
    read_archive(path, trust=True)
    with open_regular(path) as file:
        return {name: (one.begin, b"".join(read_chunks(file, one))) for name, one in read_directory(file).items()}


def torchs(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return what torch finds in it."""
    with path.open("rb") as file:
        assert torch.serialization._is_zipfile(file)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    assert "constants.pkl" not in reader.get_all_records()  # else it is TorchScript
    found = {name: (reader.get_record_offset(name), reader.get_record(name)) for name in reader.get_all_records()}
    assert reader.get_record("data.pkl") == found["data.pkl"][1]
    return found


def difference(path: Path) -> str | None:
    """Return what torch finds and our reader does not, in a file that our reader accepts; "" if it refuses the file."""
    try:
        found = ours(path)
    except CheckpointError:
        return ""
    except ValueError as error:
        return f"it raised {error!r}"
    try:
        others = torchs(path)
    except Exception as error:
        return f"torch raised {error!r:.200}"
    odd = [name for name in found.keys() | others.keys() if found.get(name) != others.get(name)]
    return f"they differ in {sorted(odd)[:3]}" if odd else None


# Lies, one at a time: (an archive, a source of chances) -> None. Several are told of one archive.
Lie = Callable[[Archive, random.Random], Any]


def of_an_entry(name: str, *values: Any) -> Lie:
    def lie(archive: Archive, chance: random.Random) -> None:
        value = chance.choice(values)
        setattr(chance.choice(archive.entries), name, value() if callable(value) else value)

    return lie


def of_the_file(name: str, *values: Any) -> Lie:
    return lambda archive, chance: setattr(archive, name, chance.choice(values))


def of_an_end(which: str, count: int) -> Lie:
    def lie(archive: Archive, chance: random.Random) -> None:
        getattr(archive, which)[chance.randrange(count)] = chance.choice(
            (1, -1, 2, 22, -22, 46, -76, 98, LARGE, 1 << 40)
        )

    return lie


def doubled(spell: Callable[[bytes], bytes]) -> Lie:
    """Add a record again, with the same name in another encoding."""

    def lie(archive: Archive, chance: random.Random) -> None:
        one = chance.choice(archive.entries)
        other = replace(
            one, name=spell(one.name), content=FOUL if one.name == b"data.pkl" else b"\5" * len(one.content)
        )
        archive.entries.insert(chance.randrange(len(archive.entries) + 1), other)

    return lie


def more(name: bytes, content: bytes = b"5", folder: bytes = b"archive") -> Lie:
    return lambda archive, chance: archive.entries.insert(
        chance.randrange(len(archive.entries) + 1), Entry(name, content, folder)
    )


def second_body(apart: bool, two_ends: bool) -> Lie:
    def lie(archive: Archive, chance: random.Random) -> None:
        archive.second = Body(entries(FOUL if archive.entries[0].content == FAIR else FAIR))
        archive.bodies_apart, archive.end64_of_second = apart, two_ends
        archive.has_end64 = two_ends or chance.random() < 0.5

    return lie


def swapped(name: str) -> Lie:
    """Exchange the fields of two entries."""

    def lie(archive: Archive, chance: random.Random) -> None:
        one, other = chance.sample(archive.entries, 2)
        values = getattr(one, name), getattr(other, name)
        setattr(one, name, values[1])
        setattr(other, name, values[0])

    return lie


def swapped_headers(archive: Archive, chance: random.Random) -> None:
    one, other = chance.sample(archive.entries, 2)
    one.header_name, other.header_name = other.path, one.path


def large_sizes(archive: Archive, chance: random.Random) -> None:
    """Put sizes into the extra field for more than 4 GiB: the correct ones, or not."""
    one = chance.choice(archive.entries)
    size = len(one.content) + chance.choice((0, 0, 0, 1, -1, 8))
    values = [size % (1 << 64), chance.choice((size, len(one.content))) % (1 << 64)][: chance.choice((2, 2, 2, 1))]
    one.size, one.packed = LARGE, chance.choice((LARGE, LARGE, len(one.content)))
    one.extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)
    if chance.random() < 0.2:
        one.extra *= 2


def unicode_path(archive: Archive, chance: random.Random) -> None:
    """Add the name that `zipfile` uses since Python 3.13, and torch does not."""
    one, other = chance.sample(archive.entries, 2)
    name = b"\1" + struct.pack("<L", zlib.crc32(one.path)) + other.path
    one.extra = struct.pack("<HH", 0x7075, len(name)) + name


def padding(count: int) -> bytes:
    return struct.pack("<HH", 0x4246, count) + b"Z" * count


STRUCTURED: list[Lie] = [
    second_body(False, False),
    second_body(True, False),
    second_body(True, True),
    second_body(False, True),
    doubled(bytes.upper),
    doubled(bytes.title),
    doubled(bytes),
    doubled(lambda name: name + b"\0x"),
    doubled(lambda name: name + b"/"),
    doubled(lambda name: b"./" + name),
    swapped("name"),
    swapped("content"),
    swapped("offset"),
    swapped_headers,
    large_sizes,
    unicode_path,
    more(b"constants.pkl"),
    more(b".data/version", b"4\n"),
    more(b"code/__torch__.py"),
    more(b"code/__torch__.py.debug_pkl"),
    more(b"data.pkl", FOUL, b"other"),
    more(b"data.pkl", FOUL, b"ARCHIVE"),
    more(b"data.pkl", FOUL, b""),
    more(b"data/1.debug_pkl"),
    more(b"data/" + b"9" * 600),
    more(b"data/9"),
    lambda archive, _: archive.entries.reverse(),
    lambda archive, chance: chance.shuffle(archive.entries),
    lambda archive, chance: archive.entries.pop(chance.randrange(len(archive.entries))),
    of_an_entry("has_checksum", False),
    of_an_entry("flags", 1, 8, 0x20, 0x40, 0x800, 0x808, 0x2000),
    of_an_entry("method", 8, 1, 12),
    of_an_entry("extra", b"x", b"FB", padding(0), padding(7), padding(7) * 2, ZIP64, b"\x55\x54\1\0x"),
    of_an_entry("header_extra", b"x", padding(0), padding(60), ZIP64, b"\x55\x54\1\0x"),
    of_an_entry("comment", b"x", b"PK\5\6" + bytes(18)),
    of_an_entry("disk", 1, 0xFFFF),
    of_an_entry("attributes", 0x10, 0x20, 0o600 << 16, 0o120777 << 16, 0o100644 << 16, (0o40755 << 16) | 0x10),
    of_an_entry("size", 0, 1, 5, LARGE, 1 << 20),
    of_an_entry("packed", 0, 1, 5, LARGE, 1 << 20),
    of_an_entry("offset", 0, 1, 30, 60, LARGE),
    of_an_entry("before", b"x", bytes(12), bytes(16), b"PK\3\4"),
    of_an_entry("descriptor", bytes(16), b"PK\7\x08" + bytes(12), bytes(24), bytes(17)),
    of_an_entry("folder", b"archive", b"ARCHIVE", b"a b", b"", b"a\\b", b"\xc3\xa9", b".."),
    of_the_file("before", b"x", b"\x80\2.", bytes(64), b"PK\3\4" + bytes(60)),
    of_the_file("counts_before", False),
    of_the_file("before_directory", b"x", bytes(16), bytes(46), b"PK\1\2" + bytes(42)),
    of_the_file("after_directory", b"x", bytes(20), b"PK\6\7" + bytes(16), b"PK\1\2" + bytes(42)),
    of_the_file("has_end64", False),
    of_the_file("comment", b"x", b"PK\5\6" + bytes(18)),
    of_the_file("after", b"x", bytes(22), b"PK\5\6" + bytes(18)),
    of_an_end("end", 7),
    of_an_end("end64", 9),
    of_an_end("locator", 3),
]  # fmt: skip


def mutated(chance: random.Random, samples: list[bytes]) -> bytes:
    """Return a file with one or a few wrong fields, or a few bytes of another file."""
    if chance.random() < 0.75:
        archive = Archive(entries(chance.choice((FAIR, FOUL)), has_checksum=chance.random() < 0.5))
        archive.has_end64 = chance.random() < 0.5
        for _ in range(chance.choice((1, 1, 2, 2, 3))):
            chance.choice(STRUCTURED)(archive, chance)
        content = bytearray(archive.build())
        if chance.random() < 0.7:
            return bytes(content)
    else:
        content = bytearray(chance.choice(samples))
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(content))
        if chance.random() < 0.8:  # not in a tensor or a pickle, of which most of a file consists
            marks = [
                mark for kind in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7") for mark in _all(content, kind)
            ]
            at = min((chance.choice(marks) if marks else 0) + chance.randrange(60), len(content) - 1)
        content[at] = chance.choice((content[at] ^ (1 << chance.randrange(8)), 0, 0xFF, 1, chance.randrange(256)))
    return bytes(content)


def _all(content: bytes | bytearray, mark: bytes) -> list[int]:
    found, at = [], content.find(mark)
    while at >= 0:
        found.append(at)
        at = content.find(mark, at + 1)
    return found


@pytest.fixture
def samples(tmp_path: Path) -> list[bytes]:
    """Return files that torch and this package write."""
    state = {"module": {"a": torch.arange(9.0), "b": torch.ones(3, dtype=torch.int8)}}
    torch.save(state, tmp_path / "step=1 of 2.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "unchecked.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    return [file.read_bytes() for file in sorted(tmp_path.glob("*.pt"))]


def test_torch_agrees_on_accepted_files(
    tmp_path: Path, samples: list[bytes], pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    count = 300_000 if pytestconfig.getoption("--faults") else 6_000
    chance, accepted, wrong = random.Random(23), 0, []
    for number in range(count):
        file = tmp_path / "mutated.pt"
        file.write_bytes(mutated(chance, samples))
        told = difference(file)
        accepted += told is None
        if told:
            wrong.append(f"{number}: {told}")
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong[:20]])
    assert accepted > count / 50  # else nothing was compared
    record_property("a mutated archive", count)


# Files that torch reads, and that make sense to another reader too: each has another pickle for each of them.


def short_offset(archive: Archive) -> None:
    archive.has_end64 = False
    archive.second = Body(entries(FAIR))


def two_zip64_records(archive: Archive) -> None:
    archive.second, archive.bodies_apart, archive.end64_of_second = Body(entries(FAIR)), True, True


def in_other_letters(archive: Archive) -> None:
    archive.entries = [*entries(FAIR), Entry(b"DATA.PKL", FOUL)]


def tensors_in_other_letters(archive: Archive) -> None:
    archive.entries += [Entry(b"DATA/0", b"\5" * 16)]


def path_in_unicode(archive: Archive) -> None:
    hidden = next(one for one in archive.entries if one.name == b"data.pkl")
    shown = Entry(b"data/7", FAIR)
    name = b"\1" + struct.pack("<L", zlib.crc32(shown.path)) + hidden.path
    shown.extra = struct.pack("<HH", 0x7075, len(name)) + name
    archive.entries.append(shown)


def folder_of_dos(archive: Archive) -> None:
    archive.entries[0].attributes = 0x10


def torch_script(archive: Archive) -> None:
    archive.entries.append(Entry(b"constants.pkl", FOUL))


def another_folder_first(archive: Archive) -> None:
    archive.entries.insert(0, Entry(b"data.pkl", FOUL, b"other"))


def something_before(archive: Archive) -> None:
    archive.before, archive.counts_before = FAIR, True


def something_before_that_no_offset_counts(archive: Archive) -> None:
    archive.before, archive.counts_before = FAIR, False


def something_between(archive: Archive) -> None:
    archive.entries[1].before = FAIR


def something_after(archive: Archive) -> None:
    archive.after = Archive(entries(FAIR)).build()


def a_comment(archive: Archive) -> None:
    archive.comment = Archive(entries(FAIR)).build()


def name_in_the_header(archive: Archive) -> None:
    archive.entries[0].header_name = b"archive/data/99"


def large_in_the_directory(archive: Archive) -> None:
    archive.end = {5: LARGE - 1}


ODD = [
    short_offset, two_zip64_records, in_other_letters, tensors_in_other_letters, path_in_unicode, folder_of_dos,
    torch_script, another_folder_first, something_before, something_before_that_no_offset_counts, something_between,
    something_after, a_comment, name_in_the_header, large_in_the_directory,
]  # fmt: skip


@pytest.mark.short
@pytest.mark.parametrize("make", ODD)
def test_two_readers(tmp_path: Path, make: Callable[[Archive], None]) -> None:
    archive = Archive(entries(FOUL))
    make(archive)
    (tmp_path / "odd.pt").write_bytes(archive.build())
    with pytest.raises(CheckpointError, match="Get a complete copy of it"):
        read_archive(tmp_path / "odd.pt")
    with pytest.raises(CheckpointError, match="Get a complete copy of it"):
        check_file(tmp_path / "odd.pt")


@pytest.mark.parametrize("make", [short_offset, two_zip64_records, in_other_letters])
def test_two_readers_find_different_pickles(tmp_path: Path, make: Callable[[Archive], None]) -> None:
    """The files that our reader refuses are a real risk: `zipfile` finds one pickle there, and torch the other."""
    archive = Archive(entries(FOUL))
    make(archive)
    (tmp_path / "odd.pt").write_bytes(archive.build())
    with zipfile.ZipFile(tmp_path / "odd.pt") as shown:
        assert shown.read("archive/data.pkl") == FAIR
    assert torch.load(tmp_path / "odd.pt", weights_only=False) == {"module": "foul"}


# What must go on to be read.


def test_files_of_torch_are_readable(tmp_path: Path, samples: list[bytes]) -> None:
    files = sorted(tmp_path.glob("*.pt"))
    assert len(files) == len(samples) == 2
    for file in files:
        assert difference(file) is None
        check_file(file)
        assert set(read_archive(file).state["module"]) == {"a", "b"}


@pytest.mark.parametrize("has_end64", [False, True])
@pytest.mark.parametrize("folder", [b"archive", b"epoch=1-step=2", b"a b.c'(1)"])
def test_other_archives_are_read(tmp_path: Path, folder: bytes, has_end64: bool) -> None:
    """As torch wrote them before 2.1, and as `write_archive` writes them, with few records."""
    for kept in (slice(None), slice(0, -1), slice(4, None)):
        archive = Archive([Entry(b"data.pkl", FAIR, folder), *entries(folder=folder)[1:][kept]], has_end64=has_end64)
        (tmp_path / "old.pt").write_bytes(archive.build())
        if b"version" in {one.name for one in archive.entries}:
            assert difference(tmp_path / "old.pt") is None
            assert read_archive(tmp_path / "old.pt").state == {"module": "fair"}


def test_written_files_are_readable(tmp_path: Path) -> None:
    tensor = StoredTensor(Storage(None, "0", "float32", 4), "float32", 0, (4,), (1,))
    write_archive(tmp_path / "made.ckpt", {"state_dict": {"a": tensor}}, lambda *_: [b"\0" * 16])
    assert difference(tmp_path / "made.ckpt") is None


def test_records_of_more_than_4_gib(tmp_path: Path) -> None:
    """Sizes and offsets in 64-bit fields, in a file that is mostly a hole."""
    size, at = 5 << 30, []
    files = [*entries(has_checksum=False)[:2], Entry(b"data/1", b"", has_checksum=False), entries()[4]]
    directory = b""
    with (tmp_path / "large.pt").open("wb") as file:
        for one in files:
            is_large, offset = one.name == b"data/1", file.tell()
            at.append(offset)
            values = [size, size] * is_large + [offset] * (offset >= LARGE)
            one.extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
            one.size = one.packed = LARGE if is_large else None
            one.has_checksum = False
            directory += one.entry(min(offset, LARGE))
            file.write(one.header() + one.content)
            file.seek(size if is_large else 0, os.SEEK_CUR)
        begin = file.tell()
        file.write(directory)
        fields = (0, 0, len(files), len(files), len(directory), begin)
        file.write(b"PK\6\6" + struct.pack("<Q2H2L4Q", 44, 45, 45, *fields))
        file.write(b"PK\6\7" + struct.pack("<LQL", 0, begin + len(directory), 1))
        file.write(b"PK\5\6" + struct.pack("<4H2LH", 0, 0, len(files), len(files), len(directory), LARGE, 0))
    assert at[-1] > LARGE
    with open_regular(tmp_path / "large.pt") as opened:
        found = read_directory(opened)
    reader: Any = torch._C.PyTorchFileReader(str(tmp_path / "large.pt"))
    assert {name: one.begin for name, one in found.items()} == {
        name: reader.get_record_offset(name) for name in reader.get_all_records()
    }
    assert found["data/1"].size == size
    assert read_archive(tmp_path / "large.pt").state == {"module": "fair"}


@pytest.mark.parametrize("content", [b"", b"0\n", b"11\n", b"x", b"3" * 100])
def test_an_unsupported_version(tmp_path: Path, content: bytes) -> None:
    archive = Archive([replace(one, content=content) if one.name == b"version" else one for one in entries()])
    (tmp_path / "odd.pt").write_bytes(archive.build())
    with pytest.raises(CheckpointError, match="version"):
        read_archive(tmp_path / "odd.pt")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "zero.pt").symlink_to("/dev/zero")
    (tmp_path / "folder.pt").mkdir()
    for file in tmp_path.iterdir():
        with pytest.raises(CheckpointError, match=r"cannot be read, is truncated.*(not a regular file|directory)"):
            read_archive(file)
        with pytest.raises(CheckpointError, match=r"cannot be read, is truncated.*(not a regular file|directory)"):
            check_file(file)
    (tmp_path / "folder.pt").rmdir()
    (tmp_path / "file.pt").write_bytes(Archive(entries()).build())
    (tmp_path / "link.pt").symlink_to("file.pt")  # as those of Hugging Face's cache are
    assert read_archive(tmp_path / "link.pt").state == {"module": "fair"}
