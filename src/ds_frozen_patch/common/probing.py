"""Probing a class as it is installed: its methods and their parameters, never its version.

Probing imports nothing. Until a program imports the module of the class, only the text of its source is searched; the
import shows the rest, and the first engine whether all names are there that are used of the framework.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any

from .names import Names

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""What is called instead of a function, with wrapt's arguments: the function (bound), its instance, args and kwargs."""


@dataclass(frozen=True)
class Finding:
    """The result of probing a class.

    `verdict` is "has the flag", "patchable", "refused" or "not installed". `reason` says what was found, and `remedy`
    what to do about a refusal. `complete`: nothing is left for `patch()` to do.
    """

    verdict: str
    reason: str = ""
    version: str | None = None
    remedy: str = ""
    complete: bool = False


@dataclass(frozen=True, eq=False)
class Target:
    """A class that is wrapped, of a framework or of DeepSpeed.

    Attributes:
        name: the package that `status()` shows.
        module: that has the class.
        class_name: of the class.
        wrappers: of its methods, all of which it must have.
        judge: makes a finding of the class, None until its module is imported, and of the text of that, if it is known.
        distributions: that may have brought it, by their names on the package index.
        remedy: what to do if it cannot be wrapped.
        beside: wrappers of functions and of other classes' methods, where they exist, by paths such as
            "package.module:Class.method".
        names: that are used of it, but for these.
        kinds: where each kind is that `names` speaks of.
        is_optional: whether the package is no reason for `patch()` to raise: others install it too.
    """

    name: str
    module: str
    class_name: str
    wrappers: Mapping[str, Wrapper]
    judge: Callable[[Any | None, str], Finding]
    distributions: tuple[str, ...]
    remedy: str
    beside: Mapping[str, Wrapper] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    kinds: Mapping[str, str] = field(default_factory=dict)
    is_optional: bool = False

    @property
    def cls(self) -> Any | None:
        """The live class, or None as long as its module is not, or only half, imported."""
        return getattr(sys.modules.get(self.module), self.class_name, None)


def modules_of(what: Target) -> set[str]:
    """The modules of which something is wrapped."""
    return {what.module, *(path.partition(":")[0] for path in what.beside)}


def takes(cls: Any | None, text: str, method: str, argument: str) -> bool:
    """Whether a method has an argument; before the import, whether its module has the name at all."""
    return argument in (text if cls is None else inspect.signature(getattr(cls, method)).parameters)


def probe(what: Target, is_imported: bool = False) -> Finding:
    """Judge a class as it is installed, without importing its module.

    Args:
        what: the target.
        is_imported: whether its module is known to be complete; else one that is being imported is not judged yet.
    """
    root = package_folder(what.name)
    module = sys.modules.get(what.module)
    if root is None and module is None:
        return Finding("not installed")
    # Before the class is looked up: another thread may end the import meanwhile.
    is_imported = is_imported or (module is not None and not getattr(module.__spec__, "_initializing", False))
    finding = _judge(what, what.cls, _source(what, root), is_imported)
    remedy = what.remedy if finding.verdict == "refused" else ""
    return replace(finding, version=_version(what, root), remedy=remedy)


def _judge(what: Target, cls: Any | None, text: str, is_imported: bool) -> Finding:
    if cls is None and not is_imported:
        return what.judge(None, text) if text else Finding("refused", f"{what.module} cannot be read")
    if not isinstance(cls, type):
        return Finding("refused", f"{what.module} has no class {what.class_name}")
    if missing := [name for name in what.wrappers if not callable(getattr(cls, name, None))]:
        return Finding("refused", f"{what.class_name} has no method {', '.join(missing)}")
    return what.judge(cls, text)


def package_folder(name: str) -> Path | None:
    """The folder of a package that may have a parent, found without importing either."""
    top, *rest = name.split(".")
    try:
        spec = util.find_spec(top)
    except (ImportError, ValueError):
        return None
    locations = spec.submodule_search_locations if spec is not None else None
    return next((folder for location in locations or () if (folder := Path(location, *rest)).is_dir()), None)


def _version(what: Target, root: Path | None) -> str | None:
    # lightning_fabric comes in the wheel of pytorch-lightning too: its own file says which it is.
    if root is not None and (note := root / "version.info").is_file():
        return note.read_text(encoding="utf-8").strip()
    return next(filter(None, map(version_of, what.distributions)), None)


def _source(what: Target, root: Path | None) -> str:
    """The text of a target's module; empty if there is none to read."""
    if root is None:
        return ""
    file = root.joinpath(*what.module[len(what.name) + 1 :].split(".")).with_suffix(".py")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def version_of(distribution: str) -> str:
    """The release of a package, by its name on the package index; empty if it has no metadata, as in a source tree."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
