from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """`ranks(2, function, **arguments)` runs a function on two CPU ranks and returns their results.

    With `alone=True` the ranks are stopped afterwards, for what leaves a mark on DeepSpeed: once a process has used
    hpZ's groups, every later ZeRO-3 engine in it does.
    """
    pools: dict[int, Ranks] = {}

    def run(world_size: int, function: Callable[..., Any], /, alone: bool = False, **arguments: Any) -> list[Any]:
        if world_size not in pools:
            log = tmp_path_factory.mktemp(f"ranks{world_size}") / "output.txt"
            pools[world_size] = Ranks(world_size, "lightning", log)
        try:
            return pools[world_size](function, **arguments)
        finally:
            if alone:
                pools[world_size].stop()

    yield run
    for pool in pools.values():
        pool.stop()
