"""Fault injection: a short part runs with the other tests, all of it by `nox -s faults`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kit.cell import CELL

# Nothing here depends on releases.
collect_ignore_glob = [] if CELL.name == "everyday" else ["test_*.py"]


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether the whole suite was requested."""
    return bool(request.config.getoption("--faults"))


@pytest.fixture
def counted(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """`counted("`kill -9` during a save", 40)` records for the table how often a fault was injected; call it at the
    end.
    """
    return record_property


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run in the everyday cell only; what is short may take as long as any other test."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.everyday)
            item.add_marker(pytest.mark.once)
            if not config.getoption("--faults"):
                item.add_marker(pytest.mark.timeout(float(config.getini("timeout"))), append=False)
