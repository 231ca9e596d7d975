"""The newest releases that were tested, in a file that the matrix writes. They decide nothing: `patch()` warns."""

from __future__ import annotations

from ..common.probing import Target

TESTED = {"lightning": "2.6.6", "deepspeed": "0.19.8", "accelerate": "1.15.0", "transformers": "5.24.0"}
"""The newest releases in `ci/matrix.json`, and in the locks of its cells."""


def newer_than_tested(what: Target, version: str | None) -> str | None:
    """The newest release that was tested, if `version` is newer; a `.devN` or `+git` build of it is not."""
    from packaging.version import InvalidVersion, Version

    tested = TESTED["lightning" if "lightning" in what.name else what.name]
    try:
        return tested if version is not None and Version(Version(version).base_version) > Version(tested) else None
    except InvalidVersion:
        return None
