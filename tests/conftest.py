from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """`ranks(2, function, **arguments)` runs a function on two CPU ranks and returns their results."""
    pools: dict[int, Ranks] = {}

    def run(world_size: int, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        if world_size not in pools:
            log = tmp_path_factory.mktemp(f"ranks{world_size}") / "output.txt"
            pools[world_size] = Ranks(world_size, "lightning", log)
        return pools[world_size](function, **arguments)

    yield run
    for pool in pools.values():
        pool.stop()
