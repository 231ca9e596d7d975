"""The four targets and DeepSpeed: what is installed, and what it can already do.

A class is judged by its features, never by its version: by the live class once its
module is imported, and before that by its source, so that probing imports nothing.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from textwrap import dedent
from typing import Any

FLAG = "exclude_frozen_parameters"
TESTED = {"lightning": "2.6.6", "deepspeed": "0.19.8"}
"""The newest releases of `ci/matrix.json`. They decide nothing: `patch()` says so of what is newer."""

LOADS_STRICTLY = "_prepare_load"
"""What a strategy's `load_checkpoint` calls where our patch series for Lightning is applied (`patches/`)."""

Parameters = Mapping[str, tuple[str, ...]]
"""The methods of a class that were found, each with the names of its parameters."""


@dataclass(frozen=True)
class Seen:
    """What was seen of a class: its methods, and whether it is that of a Lightning with our patch series."""

    parameters: Parameters
    has_series: bool


@dataclass(frozen=True)
class Probed:
    """One class to look at: where it is, and the methods that the shim relies on."""

    name: str
    module: str
    class_name: str
    methods: tuple[str, ...]
    distributions: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """What probing a class gave.

    `verdict` is "native", "patchable", "refused" or "not installed". `reason` says what was
    found, and `remedy` what to do about a refusal. `complete`: nothing is left for the shim to do.
    """

    verdict: str
    version: str | None = None
    reason: str = ""
    remedy: str = ""
    complete: bool = False


_TRAINER = ("__init__", "setup", "save_checkpoint", "load_checkpoint")
_FABRIC = ("__init__", "setup_module_and_optimizers", "setup_module", "save_checkpoint", "load_checkpoint")


def _strategy(name: str, methods: tuple[str, ...], *distributions: str) -> Probed:
    return Probed(name, f"{name}.strategies.deepspeed", "DeepSpeedStrategy", methods, distributions)


TARGETS = (
    _strategy("lightning.pytorch", _TRAINER, "lightning"),
    _strategy("lightning.fabric", _FABRIC, "lightning"),
    _strategy("pytorch_lightning", _TRAINER, "pytorch-lightning"),
    _strategy("lightning_fabric", _FABRIC, "lightning-fabric", "pytorch-lightning"),
)
ENGINE = Probed(
    "deepspeed",
    "deepspeed.runtime.engine",
    "DeepSpeedEngine",
    ("save_checkpoint", "load_checkpoint", "module_state_dict", "load_module_state_dict"),
    ("deepspeed",),
)
BESIDE = tuple(
    Probed(name, f"{name}.{module}", class_name, (attribute,), ())
    for name in ("lightning.pytorch", "pytorch_lightning")
    for module, class_name, attribute in (
        ("utilities.deepspeed", "", "convert_zero_checkpoint_to_fp32_state_dict"),
        ("callbacks.model_checkpoint", "ModelCheckpoint", "_find_last_checkpoints"),
    )
)
"""A function of a module, or of a class in it, that is wrapped beside its package's target, where it is there."""


def probe(what: Probed) -> Finding:
    """Judge one class as it is installed, without importing its module if its source tells enough."""
    root = _package_folder(what.name)
    cls = imported_class(what)
    if root is None and cls is None:
        return Finding("not installed")
    version = _version(what, root)
    seen = _look_at(what, cls) if cls else _read_source(what, root)
    if not cls and (seen is None or any(method not in seen.parameters for method in what.methods)):
        # The source leaves something open: a method may be inherited, a class made in another way.
        try:
            module = importlib.import_module(what.module)
        except ImportError as error:
            return _refused(what, version, f"{what.module} cannot be imported: {error}")
        seen = _look_at(what, getattr(module, what.class_name, None))
    return _judge(what, version, seen)


def newer_than_tested(what: Probed, version: str | None) -> str | None:
    """The newest release that was tested, if `version` is newer; a `.devN` or `+git` build of a release is not."""
    from packaging.version import InvalidVersion, Version

    tested = TESTED["deepspeed" if what is ENGINE else "lightning"]
    try:
        newer = version is not None and Version(Version(version).base_version) > Version(tested)
    except InvalidVersion:
        return None
    return tested if newer else None


def imported_class(what: Probed) -> Any | None:
    """The live class, or None as long as its module is not, or only half, imported."""
    return getattr(sys.modules.get(what.module), what.class_name, None)


def _judge(what: Probed, version: str | None, seen: Seen | None) -> Finding:
    if seen is None:
        return _refused(what, version, f"{what.module} has no class {what.class_name}")
    missing = [method for method in what.methods if method not in seen.parameters]
    if missing:
        return _refused(what, version, f"{what.class_name} has no method {', '.join(missing)}")
    if what is ENGINE:
        if FLAG not in seen.parameters["save_checkpoint"]:
            return _refused(what, version, f"DeepSpeedEngine.save_checkpoint has no argument {FLAG}")
        return Finding("patchable", version, f"save_checkpoint takes {FLAG}")
    if FLAG in seen.parameters["__init__"] and seen.has_series:
        reason = f"complete, by the patch series: say DeepSpeedStrategy({FLAG}=True)"
        return Finding("native", version, reason, complete=True)
    if FLAG in seen.parameters["__init__"]:
        return Finding("native", version, f"has {FLAG}; tied aliases, strict load and ZeRO-3 test need the shim")
    return Finding("patchable", version, f"has no {FLAG}")


def _refused(what: Probed, version: str | None, reason: str) -> Finding:
    remedy = (
        "install DeepSpeed 0.10.1 or newer: pip install -U 'deepspeed>=0.10.1'"
        if what is ENGINE
        else f"install a release that the README lists, or uninstall {what.distributions[-1]} if nothing uses it"
    )
    return Finding("refused", version, reason, remedy)


def _package_folder(name: str) -> Path | None:
    """The folder of a package that may have a parent, found without importing either."""
    top, *rest = name.split(".")
    try:
        spec = util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    for location in spec.submodule_search_locations:
        folder = Path(location, *rest)
        if folder.is_dir():
            return folder
    return None


def _version(what: Probed, root: Path | None) -> str | None:
    # lightning_fabric comes in the wheel of pytorch-lightning too: its own file says which it is.
    if root is not None and (note := root / "version.info").is_file():
        return note.read_text(encoding="utf-8").strip()
    for distribution in what.distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _read_source(what: Probed, root: Path | None) -> Seen | None:
    if root is None:
        return None
    file = root.joinpath(*what.module[len(what.name) + 1 :].split(".")).with_suffix(".py")
    try:
        methods = _methods(file.read_text(encoding="utf-8"), what)
    except (OSError, SyntaxError, ValueError):
        return None
    parameters = {name: _argument_names(method.args) for name, method in methods.items()}
    return Seen(parameters, "load_checkpoint" in methods and _prepares(methods["load_checkpoint"]))


def _methods(source: str, what: Probed) -> dict[str, ast.FunctionDef]:
    """The methods of a class that are asked for, each parsed by itself: all of DeepSpeed's engine takes 70 ms."""
    its_lines = re.search(rf"^class {what.class_name}\b.*?(?=^[A-Za-z@]|\Z)", source, re.MULTILINE | re.DOTALL)
    # What begins a statement of the class, and not the bracket that ends a list of arguments.
    statements = re.split(r"^(?= {4}[A-Za-z@#])", its_lines[0] if its_lines else "", flags=re.MULTILINE)
    found = {}
    for statement in statements:
        if (said := re.match(r" {4}def (\w+)\(", statement)) and said[1] in what.methods:
            (method,) = ast.parse(dedent(statement)).body
            if isinstance(method, ast.FunctionDef):
                found[said[1]] = method
    return found


def _prepares(method: ast.FunctionDef) -> bool:
    return any(LOADS_STRICTLY in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in ast.walk(method))


def _argument_names(arguments: ast.arguments) -> tuple[str, ...]:
    return tuple(item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _look_at(what: Probed, cls: Any) -> Seen | None:
    if not isinstance(cls, type):
        return None
    methods = {name: getattr(cls, name, None) for name in what.methods}
    parameters = {name: tuple(inspect.signature(item).parameters) for name, item in methods.items() if callable(item)}
    code = getattr(inspect.unwrap(methods["load_checkpoint"] or len), "__code__", None)
    return Seen(parameters, code is not None and LOADS_STRICTLY in code.co_names)
