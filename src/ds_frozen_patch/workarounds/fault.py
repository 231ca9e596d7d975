"""What is declared of a fault of another project, and whether an installed release has it."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.probing import package_folder
from ..common.versions import version_of


@dataclass(frozen=True)
class Fault:
    """A fault of another project.

    Attributes:
        name: that `status()` shows.
        effect: what happens without this package, for the documentation.
        cure: what this package does about it, for the documentation.
        since: the first release that has it; empty if that is the first supported one.
        mended: the first release that no longer has it; empty if there is none.
        with_deepspeed: the first release of DeepSpeed with which it has it; empty if that is every one.
        thread: a report or a change of DeepSpeed's repository, such as "issues/1"; empty if none was found.
        patch: the file of our series that mends it, without its folder; empty if there is none.
        mark: a file in the package, and a text in it that shows that it is mended, upstream or by our patch.
    """

    name: str
    effect: str
    cure: str
    since: str = ""
    mended: str = ""
    with_deepspeed: str = ""
    thread: str = ""
    patch: str = ""
    mark: tuple[str, str] | None = None

    def is_of(self, version: str | None) -> bool:
        """True if a release has this fault, or may have it because its version is unknown."""
        if self.with_deepspeed and is_older(version_of("deepspeed"), self.with_deepspeed):
            return False
        return not is_older(version, self.since) and (not self.mended or is_older(version, self.mended, unknown=True))

    def is_installed(self, package: str) -> bool:
        """True unless the source of an installed package shows that this fault is mended in it."""
        return self.mark is None or self.mark[1] not in source(package, self.mark[0])


def source(package: str, file: str) -> str:
    """The text of a file of an installed package, which is not imported; empty if it cannot be read."""
    folder = package_folder(package)
    try:
        return (folder / file).read_text(encoding="utf-8") if folder is not None else ""
    except OSError:
        return ""


def is_older(version: str | None, than: str, unknown: bool = False) -> bool:
    """True if a version is older than another one, which may be empty; `unknown` if it is not a version."""
    from packaging.version import InvalidVersion, Version

    try:
        return bool(than) and Version(version or "") < Version(than)
    except InvalidVersion:
        return unknown
