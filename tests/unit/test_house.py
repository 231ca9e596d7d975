"""Imports within the package, lazy ones included, flow one way: neither modules nor packages form a circle.

And docstrings of public names describe every parameter of a function and every field of its result.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ds_frozen_patch
from ds_frozen_patch.testing import cpu_strategy

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]

ROOT = Path(ds_frozen_patch.__file__).parent
NEVER = [("save", "load"), ("load", "save"), ("tools", "frameworks"), ("tools", "patching"), ("checkpoint", "engine")]
"""Packages, the first of which does not import the second."""


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


GRAPH = {name: imports(name) for name in MODULES}


def package(name: str) -> str:
    return name.split(".")[0] or "__init__"


def packages() -> dict[str, set[str]]:
    """Return what each package imports of others; a module beside them counts as one."""
    graph: dict[str, set[str]] = {package(name): set() for name in MODULES}
    for name, others in GRAPH.items():
        graph[package(name)] |= {package(other) for other in others} - {package(name)}
    return graph


def test_the_graph_is_not_empty() -> None:
    assert sum(map(len, GRAPH.values())) > 100
    assert "save.publishing" in GRAPH["core.save"]


@pytest.mark.parametrize("graph", [GRAPH, packages()], ids=["modules", "packages"])
def test_no_circle(graph: dict[str, set[str]]) -> None:
    left = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left


@pytest.mark.parametrize(("one", "other"), NEVER)
def test_packages_that_do_not_know_each_other(one: str, other: str) -> None:
    assert other in packages()
    assert other not in packages()[one]


# Docstrings

PUBLIC = {name: getattr(ds_frozen_patch, name) for name in ds_frozen_patch.__all__} | {"cpu_strategy": cpu_strategy}
FUNCTIONS = [name for name, public in PUBLIC.items() if inspect.isfunction(public)]
CLASSES = [name for name, public in PUBLIC.items() if inspect.isclass(public)]


def section(public: Any, title: str) -> dict[str, str]:
    """Return the entries of a section of a docstring, such as Args, by name."""
    found = re.search(rf"^{title}:\n((?: .*\n?|\n)*)", inspect.getdoc(public) or "", re.MULTILINE)
    return dict(re.findall(r"^ {4}(\w+): (.*)", found[1], re.MULTILINE)) if found else {}


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter(name: str) -> None:
    """A function that takes another one's parameters may refer to it: "`patch(...)` as a context manager"."""
    function = PUBLIC[name]
    documented, taken = list(section(function, "Args")), parameters_of(function)
    refers_to = re.match(r"`(\w+)\(\.\.\.\)`", inspect.getdoc(function) or "")
    if refers_to:
        assert not documented
        assert taken == parameters_of(PUBLIC[refers_to[1]])
    else:
        assert documented == taken


@pytest.mark.parametrize("name", CLASSES)
def test_every_class(name: str) -> None:
    """Each class has a docstring of its own that describes each field, and so has each method and property."""
    cls = PUBLIC[name]
    said = str(cls.__doc__)
    assert said
    assert not said.startswith(f"{name}(")  # which is what a dataclass makes up
    fields = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    told = [field for field in fields if field in section(cls, "Attributes") or f"`{field}`" in said]
    assert told == fields
    own = {attribute: value for attribute, value in vars(cls).items() if not attribute.startswith("_")}
    assert not [attribute for attribute, value in own.items() if attribute not in fields and not inspect.getdoc(value)]


def test_type_checkers_see_the_public_names() -> None:
    """The imports for type checkers and the table for Python list the same names."""
    tree = ast.parse(Path(ds_frozen_patch.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {(alias.asname, node.module) for node in imports for alias in node.names} == set(
        ds_frozen_patch._MODULES.items()
    )
