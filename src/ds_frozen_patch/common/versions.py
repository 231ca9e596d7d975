"""The releases of installed packages."""

from __future__ import annotations

from importlib import metadata


def version_of(distribution: str) -> str:
    """The release of a package, by its name on the package index; empty if it has no metadata, as in a source tree."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
