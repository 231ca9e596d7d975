"""What a save and a load cost as ranks are added: counted on 1 to 8 ranks, and worked out for thousands.

Each rank is a node of its own, which is the worst case. `nox -s scale` makes the tables of ci/matrix/scale.md.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.checkpoints import model_states, record_in
from torch.distributed import distributed_c10d

import ds_frozen_patch
from ds_frozen_patch import testing
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.publish import in_flight

pytestmark = [pytest.mark.promise(18), pytest.mark.everyday]


# Counts what a rank does: collectives and requests where torch hands them to C++, and uses of files

COLLECTIVES: dict[str, int | None] = {"_reduce_scatter_base": 1, "reduce_scatter": 1, "barrier": None}
COLLECTIVES |= dict.fromkeys(("_allgather_base", "allgather", "allreduce", "alltoall", "alltoall_base", "broadcast"), 0)
COLLECTIVES |= dict.fromkeys(("gather", "reduce", "scatter", "send", "recv"), 0)
"""The methods of a process group, and which argument has the most bytes."""
REQUESTS = ("add", "check", "compare_set", "get", "set", "wait")
CHANGES = ("os.link", "os.mkdir", "os.rename", "os.remove", "os.rmdir")

_running: list[tuple[str, Counter[str]]] = []
_local = threading.local()


@contextmanager
def counted(folder: str) -> Iterator[Counter[str]]:
    """Count what this rank does within the block, in all threads; of files, those in the folder.

    The counts are "collectives", "collective bytes", "objects" (unpickled from a collective), "requests" and "request
    bytes" (of the store), "polls" (requests that only read a counter), "read", "read NAME", "written", "listed",
    "names listed", "looked up" (stat) and "changed" (the names of files). A file that is opened to be synced is "read".
    """
    counts: Counter[str] = Counter()
    _listen()
    _running.append((folder, counts))
    try:
        with overridden(_counting(counts, folder)):
            yield counts
    finally:
        _running.pop()


@contextmanager
def own_calls() -> Iterator[Counter[tuple[str, str]]]:
    """Count the calls of this package's functions within the block, by module and name; not in other threads.

    Comprehensions and lambdas are not counted, nor what lets DeepSpeed run on CPU ranks; a generator is, each time that
    it goes on.
    """
    root = str(Path(ds_frozen_patch.__file__).parent)
    counts: Counter[tuple[str, str]] = Counter()

    def hear(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        name = code.co_filename
        if event == "call" and name.startswith(root) and name != testing.__file__ and code.co_name[0] != "<":
            counts[code.co_filename.removeprefix(root), code.co_qualname] += 1

    sys.setprofile(hear)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def _counting(counts: Counter[str], folder: str) -> list[tuple[Any, str, Any]]:
    group, store = torch._C._distributed_c10d.ProcessGroup, torch._C._distributed_c10d.Store

    def after(owner: Any, name: str, count: Callable[..., None]) -> tuple[Any, str, Any]:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = None
            try:
                result = original(*args, **kwargs)
                return result
            finally:
                count(result, *args)

        return owner, name, call

    def collective(largest: int | None) -> Callable[..., None]:
        def count(_: Any, group: Any, *args: Any) -> None:
            counts["collectives"] += 1
            counts["collective bytes"] += 0 if largest is None else _size(args[largest])

        return count

    def request(name: str) -> Callable[..., None]:
        def count(result: Any, store: Any, *args: Any) -> None:
            is_poll = name == "add" and args[1] == 0
            counts["polls" if is_poll else "requests"] += 1
            counts["request bytes"] += 0 if is_poll else _size([*args, result])

        return count

    def unpickled(*_: Any) -> None:
        counts["objects"] += 1

    def looked_up(_: Any, path: Any, *args: Any) -> None:
        counts["looked up"] += _is_inside(path, folder)

    def written(_: Any, path: Any, *args: Any) -> None:
        counts["written"] += _is_inside(path, folder)  # torch.save opens it in C++, which no audit event tells

    return [
        *(after(group, name, collective(largest)) for name, largest in COLLECTIVES.items() if hasattr(group, name)),
        *(after(store, name, request(name)) for name in REQUESTS),
        after(distributed_c10d, "_tensor_to_object", unpickled),
        *(after(os, name, looked_up) for name in ("stat", "lstat")),
        after(torch._C, "PyTorchFileWriter", written),
    ]


@cache
def _listen() -> None:
    sys.addaudithook(_on_event)  # it cannot be removed again


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if not _running or getattr(_local, "is_within", False):
        return
    folder, counts = _running[-1]
    if event in CHANGES:
        counts["changed"] += 1
    elif event not in ("open", "os.listdir", "os.scandir") or not _is_inside(args[0], folder):
        return
    elif event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
        counts["written"] += 1
    elif event == "open":
        counts["read"] += 1
        counts[f"read {Path(args[0]).name}"] += 1
    else:
        counts["listed"] += 1
        _local.is_within = True
        with suppress(OSError):  # which the listing itself will raise
            counts["names listed"] += len(list(Path(args[0]).iterdir()))
        _local.is_within = False


def _is_inside(path: Any, folder: str) -> bool:
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(folder)


def _size(value: Any) -> int:
    """The bytes of tensors, of texts, and of numbers."""
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return len(value) if isinstance(value, str | bytes) else 8 * isinstance(value, int)


# What is counted

COUNTED, WORKED_OUT = (1, 2, 4, 8), (64, 512, 4096)
STEPS = ("first save", "save", "async save", "load")
SLACK = 3
"""By so much, stat calls differ between runs: ranks race for a folder."""

Counts = dict[str, Counter[str]]
Row = Callable[[list[Counter[str]]], int]


def most(key: str) -> Row:
    return lambda ranks: max(counts[key] for counts in ranks)


def first(key: str) -> Row:
    return lambda ranks: ranks[0][key]


def others(key: str) -> Row:
    return lambda ranks: max((counts[key] for counts in ranks[1:]), default=0)


def total(key: str) -> Row:
    return lambda ranks: sum(counts[key] for counts in ranks)


def most_read(ranks: list[Counter[str]]) -> int:
    counts = sum(ranks, Counter())
    return max((count for key, count in counts.items() if key.startswith("read ")), default=0)


ROWS: dict[str, tuple[int, Row]] = {
    "collectives, each rank": (0, most("collectives")),
    "bytes that rank 0 receives in collectives": (1, first("collective bytes")),
    "pickled objects received, all ranks": (1, total("objects")),
    "store requests, all ranks": (1, total("requests")),
    "bytes of store requests, all ranks": (1, total("request bytes")),
    "files written, rank 0": (0, first("written")),
    "files written, each other rank": (0, others("written")),
    "files opened to read or sync, rank 0": (0, first("read")),
    "files opened to read or sync, each other rank": (0, others("read")),
    "opens of the most-opened file, all ranks": (1, most_read),
    "folders listed, rank 0": (0, first("listed")),
    "folders listed, each other rank": (0, others("listed")),
    "folder entries listed, all ranks": (1, total("names listed")),
    "stat calls, rank 0": (1, first("looked up")),
    "stat calls, each other rank": (0, others("looked up")),
    "names changed (mkdir, rename, remove), rank 0": (1, first("changed")),
    "names changed (mkdir, rename, remove), each other rank": (0, others("changed")),
}
"""What is shown, how it may grow (not at all, with the ranks), and how it is found in the counts of all ranks."""
GROWTH = ("no", "with the ranks", "with their square")


def growth(values: Sequence[int]) -> int:
    """How a count grows that has these values at 2, 4 and 8 ranks: its degree as a polynomial, at most 2."""
    two, four, eight = values
    if max(values) - min(values) <= SLACK:
        return 0
    return 1 if eight - four <= 2 * (four - two) + max(SLACK, eight // 50) else 2


def is_near(values: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two rows do not differ, but for the slack."""
    return bool(others) and all(abs(one - other) <= SLACK for one, other in zip(values, others, strict=True))


def at(ranks: int, values: Sequence[int]) -> int:
    """Its value at so many ranks."""
    two, four, eight = values
    slope = (eight - four) / 4
    bend = (slope - (four - two) / 2) / 6 * (ranks - 4)
    return round((eight, eight + slope * (ranks - 8), eight + (slope + bend) * (ranks - 8))[growth(values)])


def saves_and_loads(out: str, world_size: int) -> dict[str, Counts]:
    """Return the counts of this rank by ZeRO stage and step, without and with `patch()`."""
    os.environ.update(NODE_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", LOCAL_SIZE="1")
    found: dict[str, Counts] = {}
    for stage in (2, 3):
        for who in ("plain", "patched"):
            if who == "patched":
                ds_frozen_patch.patch()
            path = f"{out}/zero{stage}/{who}.ckpt"
            nodes: dict[str, Any] = {"num_nodes": world_size, "limit_train_batches": 1, "enable_checkpointing": False}
            trainer = runs.trainer(f"{out}/logs", 1, stage, epochs=1, **nodes)
            trainer.fit(runs.LoraRun(), runs.batches(world_size))
            counts = found[f"{who} {stage}"] = {}
            for step in STEPS:
                if step == "async save" and who == "patched":
                    ds_frozen_patch.patch(async_save=True)
                with counted(out) as counts[step]:
                    if step == "load":
                        trainer.strategy.load_checkpoint(path)
                    else:
                        trainer.strategy.save_checkpoint({"epoch": 1}, path)
                        in_flight.wait()
                if step != "async save":  # how often these ask depends on the time
                    counts[step]["requests"] += counts[step]["polls"]
            ds_frozen_patch.unpatch()
    return found


@pytest.fixture(scope="module")
def found(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[dict[str, Counts]]]]:
    """The folder, and the counts of each rank, by the number of ranks."""
    folders = {size: tmp_path_factory.mktemp(f"scale{size}") for size in COUNTED}
    for out in folders.values():
        (out / "zero2").mkdir()
        (out / "zero3").mkdir()
    return {
        size: (out, ranks(size, saves_and_loads, alone=size == max(COUNTED), out=str(out), world_size=size))
        for size, out in folders.items()
    }


def values(found: Any, who: str, stage: int, step: str, row: Row) -> list[int]:
    """Return a row at each number of ranks."""
    return [row([counts[f"{who} {stage}"][step] for counts in found[size][1]]) for size in COUNTED]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("step", STEPS)
def test_nothing_grows_faster_than_the_ranks(found: Any, stage: int, step: str, record_property: Any) -> None:
    too_fast = {}
    for name, (allowed, row) in ROWS.items():
        ours, plain = (values(found, who, stage, step, row) for who in ("patched", "plain"))
        added = [one - other for one, other in zip(ours, plain, strict=True)][1:]
        is_more = added[-1] > added[0]  # a load asks for less than DeepSpeed alone
        if is_more and growth(added) > allowed:
            too_fast[name] = added
        usual = values(found, "patched", stage, "save", row) if step in ("first save", "async save") else []
        if stage == 3 and any([*ours, *plain]) and not is_near(ours, usual):
            more = [*(at(ranks, ours[1:]) for ranks in WORKED_OUT), at(max(WORKED_OUT), plain[1:])]
            shown = [*map("{:,}".format, ours), GROWTH[growth(ours[1:])], *map("{:,}".format, more)]
            record_property(step, " | ".join([name, *shown]))
    assert not too_fast


@pytest.mark.parametrize("stage", [2, 3])
def test_a_load_asks_for_no_more_than_the_ranks(found: Any, stage: int) -> None:
    """Without `patch()` each rank lists the folder, and looks up the files of every rank."""
    asked = ("folder entries listed, all ranks", "stat calls, rank 0", "stat calls, each other rank")
    for name in asked:
        ours, plain = (values(found, who, stage, "load", ROWS[name][1]) for who in ("patched", "plain"))
        assert growth(ours[1:]) <= ("all ranks" in name) < growth(plain[1:]), (name, ours, plain)


@pytest.mark.parametrize("stage", [2, 3])
def test_collectives_that_are_added(found: Any, stage: int) -> None:
    """Three to a save, four to a load; up to two more to the first save of a process, and no object."""
    for step, most_added in {"first save": 5, "save": 3, "async save": 2, "load": 4}.items():
        for what, allowed in {"collectives": most_added, "objects": 0}.items():
            ours, plain = (values(found, who, stage, step, most(what)) for who in ("patched", "plain"))
            assert all(one <= other + allowed for one, other in zip(ours, plain, strict=True)), (step, what)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", COUNTED)
def test_a_file_of_a_rank_has_the_id_of_the_save_alone(found: Any, stage: int, size: int) -> None:
    path = found[size][0] / f"zero{stage}" / "patched.ckpt"
    ours = [{key: item for key, item in state.items() if "frozen_patch" in key} for state in model_states(path)]
    assert ours == [{"ds_frozen_patch": record_in(path).save}] * (size if stage == 3 else 1)


# How much of our code one save and one load pass


def own_length(out: str, stage: int) -> dict[str, tuple[int, int, int]]:
    """Return how many functions and modules of ours one save and one load pass, and with how many calls."""
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, 2, stage, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(2))
    trainer.save_checkpoint(f"{out}/first.ckpt")
    found = {}
    for step in ("save", "load"):
        with own_calls() as calls:
            if step == "save":
                trainer.save_checkpoint(f"{out}/one.ckpt")
            else:
                trainer.strategy.load_checkpoint(f"{out}/one.ckpt")
        found[step] = len(calls), len({module for module, _ in calls}), calls.total()
    return found


LENGTHS = {"save": (143, 26, 1200), "load": (143, 30, 1520)}
"""The most, of functions, modules and calls. Aims are 80 functions in 14 modules, and 110 in 16."""


@pytest.mark.once
@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified names")
@pytest.mark.parametrize("stage", [2, 3])
def test_one_save_and_one_load_are_short(ranks: Any, tmp_path: Path, stage: int) -> None:
    for found in ranks(2, own_length, out=str(tmp_path), stage=stage, alone=True):  # what ran before can add calls
        print(f"ZeRO-{stage}, functions, modules and calls: {found}")
        for step, most_of_each in LENGTHS.items():
            assert all(count <= limit for count, limit in zip(found[step], most_of_each, strict=True)), (step, found)
