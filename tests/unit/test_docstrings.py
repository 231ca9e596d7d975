"""Docstrings of public names describe every parameter of a function and every field of its result."""

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
