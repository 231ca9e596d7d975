"""Probing a class as it is installed: its methods and their parameters, never its version.

The live class once its module is imported, and before that its source, so that probing imports nothing.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from importlib import util
from importlib.machinery import ModuleSpec
from pathlib import Path
from textwrap import dedent
from types import CodeType
from typing import Any

from .versions import version_of

Parameters = Mapping[str, tuple[str, ...]]
"""The methods of a class that were found, each with the names of its parameters."""


@dataclass(frozen=True)
class Methods:
    """What was seen of a class: its methods, and a function that returns the names that one of them uses inside."""

    parameters: Parameters
    names_in: Callable[[str], Container[str]]

    def unused(self, method: str, names: Iterable[str]) -> list[str]:
        """Which of these names a method does not use."""
        used = self.names_in(method)
        return [name for name in names if name not in used]


@dataclass(frozen=True)
class Finding:
    """The result of probing a class.

    `verdict` is "native", "patchable", "refused" or "not installed". `reason` says what was found, and `remedy` what to
    do about a refusal. `complete`: nothing is left for the shim to do.
    """

    verdict: str
    version: str | None = None
    reason: str = ""
    remedy: str = ""
    complete: bool = False


@dataclass(frozen=True)
class Target:
    """A class that is wrapped, or a function beside one.

    Attributes:
        name: the package that `status()` shows.
        module: that has the class.
        class_name: of the class; empty for a function of the module.
        methods: that the shim relies on, most of which it wraps.
        distributions: that may have brought it, by their names on the package index.
        judge: makes a finding of what was seen, its version given; a missing method is found before.
        remedy: what to do if it cannot be served.
        tested: the distribution whose newest tested release counts, see `patching.tested`.
    """

    name: str
    module: str
    class_name: str
    methods: tuple[str, ...]
    distributions: tuple[str, ...] = ()
    judge: Callable[[str | None, Methods], Finding] | None = None
    remedy: str = ""
    tested: str = ""

    def refused(self, version: str | None, reason: str) -> Finding:
        """A finding that it cannot be served."""
        return Finding("refused", version, reason, self.remedy)

    def refused_without(self, version: str | None, seen: Methods, uses: Mapping[str, Iterable[str]]) -> Finding | None:
        """A finding that it cannot be served if a method does not use all of these names; otherwise None."""
        for method, names in uses.items():
            if missing := seen.unused(method, names):
                return self.refused(version, f"{self.class_name}.{method} does not use {', '.join(missing)}")
        return None


def probe(what: Target) -> Finding:
    """Judge a class as it is installed, without importing its module if its source is enough."""
    root = package_folder(what.name)
    cls = imported_class(what)
    if root is None and cls is None:
        return Finding("not installed")
    version = _version(what, root)
    seen = _look_at(what, cls) if cls else _read_source(what, root)
    if not cls and (seen is None or any(method not in seen.parameters for method in what.methods)):
        # A method may be inherited, or the class made in another way.
        try:
            module = importlib.import_module(what.module)
        except ImportError as error:
            return what.refused(version, f"{what.module} cannot be imported: {error}")
        seen = _look_at(what, getattr(module, what.class_name, None))
    return _judge(what, version, seen)


def imported_class(what: Target) -> Any | None:
    """The live class, or None as long as its module is not, or only half, imported."""
    return getattr(sys.modules.get(what.module), what.class_name, None)


def _judge(what: Target, version: str | None, seen: Methods | None) -> Finding:
    if seen is None:
        return what.refused(version, f"{what.module} has no class {what.class_name}")
    if missing := [method for method in what.methods if method not in seen.parameters]:
        return what.refused(version, f"{what.class_name} has no method {', '.join(missing)}")
    assert what.judge is not None
    return what.judge(version, seen)


def package_folder(name: str) -> Path | None:
    """The folder of a package that may have a parent, found without importing either."""
    top, *rest = name.split(".")
    try:
        spec = _find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    for location in spec.submodule_search_locations:
        folder = Path(location, *rest)
        if folder.is_dir():
            return folder
    return None


def _find_spec(name: str) -> ModuleSpec | None:
    """`importlib.util.find_spec`, but unnoticed by the finder of `ds-frozen-patch run`, which waits for an import."""
    if name in sys.modules:
        return util.find_spec(name)
    finders = (finder for finder in sys.meta_path if not hasattr(finder, "before_framework"))
    # As Python does, which passes over a finder without the method.
    searches = (finder.find_spec for finder in finders if hasattr(finder, "find_spec"))
    return next((spec for search in searches if (spec := search(name, None)) is not None), None)


def _version(what: Target, root: Path | None) -> str | None:
    # lightning_fabric comes in the wheel of pytorch-lightning too: its own file says which it is.
    if root is not None and (note := root / "version.info").is_file():
        return note.read_text(encoding="utf-8").strip()
    return next(filter(None, map(version_of, what.distributions)), None)


def _read_source(what: Target, root: Path | None) -> Methods | None:
    if root is None:
        return None
    file = root.joinpath(*what.module[len(what.name) + 1 :].split(".")).with_suffix(".py")
    try:
        methods = _methods(file.read_text(encoding="utf-8"), what)
    except (OSError, SyntaxError, ValueError):
        return None
    parameters = {name: _argument_names(method.args) for name, method in methods.items()}
    return Methods(parameters, lambda name: _names_used(methods[name]))


def _methods(source: str, what: Target) -> dict[str, ast.FunctionDef]:
    """The methods of a class that are asked for, each parsed by itself: all of DeepSpeed's engine takes 70 ms."""
    begin = re.search(rf"^class {what.class_name}\b", source, re.MULTILINE)
    its_lines = re.split(r"\n(?=[A-Za-z@])", source[begin.start() :], maxsplit=1)[0] if begin else ""
    # What begins a statement of the class, and not the bracket that ends a list of arguments.
    statements = re.split(r"^(?= {4}[A-Za-z@#])", its_lines, flags=re.MULTILINE)
    methods = {}
    for statement in statements:
        if (match := re.match(r" {4}def (\w+)\(", statement)) and match[1] in what.methods:
            (method,) = ast.parse(dedent(statement)).body
            if isinstance(method, ast.FunctionDef):
                methods[match[1]] = method
    return methods


def _names_used(method: ast.FunctionDef) -> frozenset[str]:
    """The names of variables, attributes, arguments and imports in a method, in its inner functions too."""
    kinds = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.alias: "name"}
    return frozenset(getattr(node, kinds[type(node)]) for node in ast.walk(method) if type(node) in kinds)


def _names_in_code(code: CodeType) -> frozenset[str]:
    """As `_names_used`, of a compiled method."""
    inner = (_names_in_code(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset((*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)).union(*inner)


def _argument_names(arguments: ast.arguments) -> tuple[str, ...]:
    return tuple(item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _look_at(what: Target, cls: Any) -> Methods | None:
    if not isinstance(cls, type):
        return None
    methods = {name: method for name in what.methods if callable(method := getattr(cls, name, None))}
    parameters = {name: tuple(inspect.signature(method).parameters) for name, method in methods.items()}
    codes = {name: getattr(inspect.unwrap(method), "__code__", None) for name, method in methods.items()}
    return Methods(parameters, lambda name: _names_in_code(code) if (code := codes[name]) else ())
