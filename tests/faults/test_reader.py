"""The tools' reader against torch's, on mutated pickles and archives: equal tensors, or ours refuses the file.

Ours imports and runs nothing, and raises nothing but CheckpointError.
"""

from __future__ import annotations

import collections
import random
import resource
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import state_of_one_rank
from memory import memory

from ds_frozen_patch import CheckpointError, inspect, prune
from ds_frozen_patch.checkpoint.format.archive import read_archive
from ds_frozen_patch.checkpoint.format.records import Records, from_stored
from ds_frozen_patch.checkpoint.format.stored import StandIn, StoredTensor

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]

LARGEST = 10_000
"""The most elements of a tensor whose values are compared; others have a stride of 0, or wrong sizes."""
TOKENS = [
    *(f"{kind}Storage" for kind in ("Float", "Half", "BFloat16", "Long", "Int", "Byte", "Bool", "ComplexFloat")),
    "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter",
    "_rebuild_parameter_with_state", "_rebuild_from_type_v2", "data", "grad", "requires_grad", "cpu", "meta", "storage",
]  # fmt: skip
OPCODES = b".0123(N)]}TKMJ\x88\x89tl\x85\x86\x87RQbesuahjqrc\x8c\x94\x81"


def states() -> list[Any]:
    """What DeepSpeed, Lightning and programs save."""
    base = torch.arange(12.0)
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.ds_id = 3  # type: ignore[attr-defined]
    weights = collections.OrderedDict(a=base.view(3, 4).t(), b=base[3:7], c=torch.arange(5, dtype=torch.bfloat16))
    adam = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4), "parameter": parameter}
    dtypes = {"f": torch.float32, "i": torch.int32, "u": torch.uint8, "z": torch.complex64}
    return [
        {"module": weights, "global_steps": 7, "names": ["x", ("y", 2.5, None)], "flags": {True, 3}},
        {"optimizer_state_dict": {"state": {0: adam, 1: adam}, "single": [base, base], "zero_stage": 2}},
        {name: torch.ones(4, dtype=dtype) for name, dtype in dtypes.items()},
        {"empty": torch.empty(0, 3), "expanded": torch.ones(1).expand(4), "scalar": torch.tensor(1.5)},
    ]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The records of such files, by name."""
    folder, found = tmp_path_factory.mktemp("samples"), []
    for number, state in enumerate(states()):
        for protocol in (2, 4):
            file = folder / f"{number}-{protocol}.pt"
            torch.save(state, file, pickle_protocol=protocol)
            with zipfile.ZipFile(file) as opened:
                found.append({name: opened.read(name) for name in opened.namelist()})
    return found


def mutated(chance: random.Random, pickled: bytes) -> bytes:
    """A pickle of which a few bytes, words or parts are others."""
    content = bytearray(pickled)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        at, how = chance.randrange(len(content)), chance.random()
        if how < 0.4:
            content[at] = chance.choice((content[at] ^ (1 << chance.randrange(8)), chance.choice(OPCODES)))
        elif how < 0.6:  # a number or the place of a value, which are small
            content[at] = chance.randrange(12)
        elif how < 0.75:
            _replace_word(chance, content)
        elif how < 0.85:  # the name of a storage
            digits = [place for place, byte in enumerate(content) if byte in b"0123456789"]
            content[chance.choice(digits)] = chance.choice(b"0123")
        else:  # a part is there twice, or elsewhere
            end = min(at + chance.choice((1, 2, 5, 20, 60)), len(content))
            part, to = content[at:end], chance.randrange(len(content))
            content[to : to + chance.choice((0, len(part)))] = part
    return bytes(content)


def _replace_word(chance: random.Random, content: bytearray) -> None:
    there = [word for word in TOKENS if word.encode() in content]
    if not there:
        return
    word, other = chance.choice(there).encode(), chance.choice(TOKENS).encode()
    at = chance.choice([at for at in range(len(content)) if content.startswith(word, at)])
    content[at : at + len(word)] = other
    # The length of a text is before it.
    for size in (4, 1):
        if at >= size and int.from_bytes(content[at - size : at], "little") == len(word):
            content[at - size : at] = len(other).to_bytes(size, "little")
            return


def pairs(ours: Any, theirs: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any, Any]]:
    """Our value and torch's at each place, but for what contains itself."""
    yield path, ours, theirs
    if depth > 20:
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for (key, one), (other_key, other) in zip(ours.items(), theirs.items(), strict=False):
            yield f"{path}, key", key, other_key
            yield from pairs(one, other, f"{path}[{key!r:.30}]", depth + 1)
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from pairs(one, other, f"{path}[{number}]", depth + 1)


QUIET = ("builtins.id", "object.", "open", "os.", "pickle.find_class", "sys.excepthook (<built-in function excepthook>")
"""The beginnings of audit events that import and run nothing.

The last is Python's complaint about a bytearray for which there is no memory.
"""
is_watched = False
events: list[str] = []


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    text = f"{event} {str(arguments)[:100]}"
    if is_watched and not text.startswith(QUIET) and not (event == "import" and arguments[0] in sys.modules):
        events.append(text)


@pytest.fixture(scope="module", autouse=True)
def hooked() -> None:
    import encodings.cp437
    import encodings.unicode_escape  # noqa: F401  -- for the texts of old pickles

    sys.addaudithook(hook)  # there is no way to take it off again


def read(file: Path) -> Any:
    """Read a file by the tools' reader, watched, and with limited memory: a pickle can ask for any size."""
    global is_watched
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + (1 << 30), limit[1]))
    is_watched = True
    try:
        return read_archive(file).state
    finally:
        is_watched = False
        resource.setrlimit(resource.RLIMIT_AS, limit)


def difference(file: Path) -> tuple[bool, str]:
    """Whether both read a file, and what differs."""
    try:
        ours = read(file)
    except CheckpointError:
        return False, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        return False, ""  # nobody loads it
    try:
        with Records() as records:
            for path, one, other in pairs(ours, theirs):
                if told := _differs(records, one, other):
                    return True, f"{path}: {told}"
    except CheckpointError:  # of a checksum
        return False, ""
    return True, ""


def _differs(records: Records, one: Any, other: Any) -> str:
    if isinstance(one, StoredTensor) != isinstance(other, torch.Tensor):
        # Our stand-ins are for tensors that are in no storage.
        return "" if isinstance(one, StandIn) else f"we read {one!r:.100}, torch {type(other).__name__}"
    if isinstance(one, StoredTensor):
        about = (one.dtype, one.shape), (str(other.dtype).removeprefix("torch."), tuple(other.shape))
        if about[0] != about[1]:
            return f"we read {about[0]}, torch {about[1]}"
        if 0 < one.numel <= LARGEST:
            read = bytes(records.read(from_stored(one)))
            copy = torch.empty(one.numel, dtype=other.dtype).copy_(other.detach().reshape(-1))
            theirs = copy.view(torch.uint8).numpy().tobytes()
            return "" if read == theirs else f"we read {read[:16]!r}, torch {theirs[:16]!r}"
        return ""
    if isinstance(one, dict | list | tuple | set | frozenset | str | bytes | int | float | complex | None):
        same = len(one) == len(other) if isinstance(one, dict | list | tuple) else one == other or one != one
        if not same or type(one).__name__.replace("Ordered", "OrderedDict") != type(other).__name__:
            return f"we read {one!r:.60}, torch {other!r:.60}"
    return ""


def disagreements(file: Path, count: int, least: float, write: Callable[[], object]) -> None:
    """Let both read what is written into a file this many times."""
    both, wrong = 0, []
    for number in range(count):
        write()
        are_read, told = difference(file)
        both += are_read
        if told:
            wrong.append(f"{number}: {told}")
    assert events == []
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong[:20]])
    assert both > count * least  # else nothing was compared


def test_torch_agrees_on_mutated_pickles(
    tmp_path: Path, samples: list[dict[str, bytes]], long: bool, counted: Callable[[str, int], None]
) -> None:
    count, chance, file = 100_000 if long else 600, random.Random(11), tmp_path / "mutated.pt"

    def write() -> None:
        records = chance.choice(samples)
        with zipfile.ZipFile(file, "w") as opened:
            for name, content in records.items():
                opened.writestr(name, mutated(chance, content) if name.endswith("/data.pkl") else content)

    disagreements(file, count, 1 / 40, write)
    counted("mutated pickle, read by the tools and by torch", count)


MARKS = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7")
"""The beginnings of an archive's headers, entries of its directory, and ends."""


def mutated_archive(chance: random.Random, files: list[bytes]) -> bytes:
    """A file of which a few fields are others, or that has a part of another file before or after it."""
    content, other = bytearray(chance.choice(files)), chance.choice(files)
    places = [at for mark in MARKS for at in range(len(content)) if content.startswith(mark, at)]
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = min(chance.choice(places) + chance.randrange(60), len(content) - 1)
        content[at] = chance.choice((content[at] ^ (1 << chance.randrange(8)), 0, 0xFF, 1, chance.randrange(256)))
    if chance.random() < 0.2:
        end = other.rindex(b"PK\1\2") if chance.random() < 0.5 else len(other)
        content[:] = other[:end] + content if chance.random() < 0.5 else content + other[end:]
    return bytes(content)


def test_torch_agrees_on_mutated_archives(tmp_path: Path, long: bool, counted: Callable[[str, int], None]) -> None:
    count, chance, file, files = 100_000 if long else 600, random.Random(23), tmp_path / "mutated.pt", []
    for number, state in enumerate(states()):
        torch.save(state, tmp_path / f"step={number} of 4.pt")
        files.append((tmp_path / f"step={number} of 4.pt").read_bytes())
        assert difference(tmp_path / f"step={number} of 4.pt") == (True, "")
    disagreements(file, count, 1 / 50, lambda: file.write_bytes(mutated_archive(chance, files)))
    counted("a mutated archive", count)


def test_a_record_of_more_than_4_gib(tmp_path: Path) -> None:
    """The sizes and offsets are in fields of 64 bits. The file is mostly a hole."""
    path, size = tmp_path / "in.ckpt", (4 << 30) + 64
    (path / "checkpoint").mkdir(parents=True)
    (path / "latest").write_text("checkpoint")
    weights = {"frozen.weight": torch.zeros(size, dtype=torch.uint8), "trained.weight": torch.ones(2)}
    with open(path / "checkpoint" / "mp_rank_00_model_states.pt", "wb", 0) as file:  # noqa: PTH123
        holes: Any = Holes(file)
        torch.save(state_of_one_rank(weights), holes)
    assert inspect(path).prunable == size
    prune(path, tmp_path / "pruned.ckpt", fingerprints=False)
    (found,) = (tmp_path / "pruned.ckpt").rglob("*_states.pt")
    assert torch.equal(torch.load(found, weights_only=False)["module"]["trained.weight"], torch.ones(2))


class Holes:
    """A file that large zeros do not fill."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, content: Any) -> int:
        if len(content) >= 1 << 16 and not any(content[:16]):
            self.file.truncate(self.file.seek(len(content), 1))
            return len(content)
        return int(self.file.write(content))

    def flush(self) -> None: ...
