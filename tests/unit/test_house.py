"""Imports within the package, lazy ones included, flow one way: from each subpackage to those below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ds_frozen_patch

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]

ROOT = Path(ds_frozen_patch.__file__).parent
ROOMS = (
    ("common",),
    ("publish", "settings", "testing"),
    ("parameters",),
    ("fingerprint",),
    ("workarounds",),
    ("manifest",),
    ("checkpoint",),
    ("core.record",),
    ("checkpoint.zero",),
    ("checkpoint.adapters",),
    ("engine",),
    ("core.base",),
    ("save", "load"),
    ("core",),
    ("tools",),
    ("frameworks",),
    ("patching",),
    ("cli", "bootstrap", "__init__"),
    ("__main__",),
)
UPWARD = {("load.elastic", "tools.reshard"), ("save.export_trained", "tools.export")}
"""Imported when it is needed: nothing that runs in a training needs the tools otherwise."""
HEIGHTS = {room: height for height, rooms in enumerate(ROOMS) for room in rooms}


def modules() -> dict[str, Path]:
    files = {file.relative_to(ROOT).with_suffix(""): file for file in ROOT.rglob("*.py")}
    return {".".join(path.parts[:-1] if path.name == "__init__" else path.parts): file for path, file in files.items()}


MODULES = modules()


def imports(name: str) -> set[str]:
    """Return the modules of the package that a module imports anywhere, except for type checkers."""
    file = MODULES[name]
    package = name.split(".") if file.name == "__init__.py" and name else name.split(".")[:-1]
    found = set()
    nodes = list(ast.parse(file.read_text()).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)  # type: ignore[arg-type]
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else (node.module or "").split(".")[1:]
            if not node.level and (node.module or "").split(".")[0] != "ds_frozen_patch":
                continue
            whole = [*base, *((node.module or "").split(".") if node.level and node.module else [])]
            for alias in node.names:
                inner = ".".join([*whole, alias.name])
                found.add(inner if inner in MODULES else ".".join(whole))
    return found - {"", name}


def room(name: str) -> str:
    """Return the subpackage or module that a module belongs to."""
    first_two = ".".join(name.split(".")[:2])
    return first_two if first_two in HEIGHTS else name.split(".")[0] or "__init__"


GRAPH = {name: imports(name) for name in MODULES}


def test_the_graph_is_not_empty() -> None:
    assert sum(map(len, GRAPH.values())) > 100
    assert "save.agreement" in GRAPH["core.save"]


@pytest.mark.parametrize("name", MODULES)
def test_imports_flow_one_way(name: str) -> None:
    upward = {
        other
        for other in GRAPH[name]
        if room(other) != room(name) and HEIGHTS[room(other)] >= HEIGHTS[room(name)] and (name, other) not in UPWARD
    }
    assert not upward


def test_no_circle() -> None:
    left = {name: set(others) for name, others in GRAPH.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_the_core_is_read_in_one_sitting() -> None:
    lengths = {file.name: len(file.read_text().splitlines()) for file in (ROOT / "core").glob("*.py")}
    assert lengths.keys() == {"__init__.py", "base.py", "record.py", "save.py", "load.py"}
    assert sum(lengths.values()) <= 600
