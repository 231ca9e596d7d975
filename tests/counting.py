"""Counts what a rank does within a block: collectives, requests to the process group's store, and uses of files.

Collectives and requests are counted where torch hands them to C++, whoever makes them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

import ds_frozen_patch
from ds_frozen_patch import testing
from ds_frozen_patch.common.overrides import overridden

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
