"""Probing a class as it is installed: its methods and their parameters, never its version.

Probing imports nothing. Until a program imports the module of the class, only the text of its source is searched for
names; the import shows the rest.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Installed:
    """A class as it is installed.

    Attributes:
        cls: the class, or None until its module is imported.
        text: the source of its module; empty if that cannot be read.
    """

    cls: Any | None
    text: str

    def takes(self, method: str, argument: str) -> bool:
        """Whether a method has an argument; before the import, whether its module has the name at all."""
        if self.cls is None:
            return argument in self.text
        return argument in inspect.signature(getattr(self.cls, method)).parameters


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
        judge: makes a finding of what is installed, its version given; a missing method is found before.
        remedy: what to do if it cannot be served.
        tested: the distribution whose newest tested release counts, see `patching.tested`.
    """

    name: str
    module: str
    class_name: str
    methods: tuple[str, ...]
    distributions: tuple[str, ...] = ()
    judge: Callable[[str | None, Installed], Finding] | None = None
    remedy: str = ""
    tested: str = ""

    def refused(self, version: str | None, reason: str) -> Finding:
        """A finding that it cannot be served."""
        return Finding("refused", version, reason, self.remedy)

    def refused_without(self, version: str | None, text: str, names: tuple[str, ...]) -> Finding | None:
        """A finding that it cannot be served if its module does not use all of these names; otherwise None."""
        missing = [name for name in names if text and name not in text]
        return self.refused(version, f"{self.module} does not use {', '.join(missing)}") if missing else None


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
    version, text = _version(what, root), _source(what, root)
    # Before the class is looked up: another thread may end the import meanwhile.
    is_imported = is_imported or (module is not None and not getattr(module.__spec__, "_initializing", False))
    cls = imported_class(what)
    is_imported = is_imported or cls is not None
    if is_imported and not isinstance(cls, type):
        return what.refused(version, f"{what.module} has no class {what.class_name}")
    if not is_imported and not text:
        return what.refused(version, f"{what.module} cannot be read")
    if is_imported and (missing := [name for name in what.methods if not callable(getattr(cls, name, None))]):
        return what.refused(version, f"{what.class_name} has no method {', '.join(missing)}")
    assert what.judge is not None
    return what.judge(version, Installed(cls, text))


def imported_class(what: Target) -> Any | None:
    """The live class, or None as long as its module is not, or only half, imported."""
    return getattr(sys.modules.get(what.module), what.class_name, None)


def package_folder(name: str) -> Path | None:
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
