"""What `patch()` was told: one set of settings per process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

VERIFY_BASE = ("error", "warn", "off")
EXPORT = ("safetensors", "peft")
VERIFY_BASE_VARIABLE = "DS_FROZEN_PATCH_VERIFY_BASE"
ELASTIC_VARIABLE = "DS_FROZEN_PATCH_ELASTIC"


@dataclass(frozen=True)
class Settings:
    """See `patch()`."""

    verify_base: str = "error"
    keep: tuple[str, ...] = ()
    export: str | None = None
    fp32_weights: bool = False
    elastic: bool | None = None

    def keeps(self, names: Iterable[str]) -> bool:
        """Whether a frozen parameter with these names is to be saved all the same."""
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.keep)


def settings(
    verify_base: str | None = None,
    keep: Iterable[str] | None = None,
    export: str | None = None,
    fp32_weights: bool | None = None,
    elastic: bool | None = None,
    before: Settings | None = None,
) -> Settings:
    """Checked settings; None leaves what was there before: an earlier call's, the environment's, the default.

    Raises:
        ValueError: `verify_base`, or an environment variable, or `export` is none of their words.
        TypeError: `keep` is not a collection of strings, or `fp32_weights` or `elastic` no bool.
    """
    if before is None:
        before = Settings(
            _word(os.environ.get(VERIFY_BASE_VARIABLE, "error"), VERIFY_BASE_VARIABLE),
            elastic=_switch(os.environ.get(ELASTIC_VARIABLE, ""), ELASTIC_VARIABLE),
        )
    if verify_base is not None:
        before = replace(before, verify_base=_word(verify_base, "verify_base"))
    if keep is not None:
        patterns = list(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else [keep]
        if isinstance(keep, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"keep must be a list of patterns such as ['*.random_features'], not {keep!r}")
        before = replace(before, keep=tuple(patterns))
    if export is not None:
        if export not in EXPORT:
            raise ValueError(f"export must be 'safetensors' or 'peft', not {export!r}")
        before = replace(before, export=export)
    if fp32_weights is not None:
        if not isinstance(fp32_weights, bool):
            raise TypeError(f"fp32_weights must be True or False, not {fp32_weights!r}")
        before = replace(before, fp32_weights=fp32_weights)
    if elastic is not None:
        if not isinstance(elastic, bool):
            raise TypeError(f"elastic must be True or False, not {elastic!r}")
        before = replace(before, elastic=elastic)
    return before


def current() -> Settings:
    """The settings of the `patch()` in force, or the defaults."""
    return _in_force or settings()


def put_in_force(new: Settings | None) -> None:
    """Let `current()` give these from now on; None for the defaults."""
    global _in_force
    _in_force = new


_in_force: Settings | None = None


def _word(word: object, origin: str) -> str:
    if not isinstance(word, str) or word not in VERIFY_BASE:
        raise ValueError(f"{origin} must be 'error', 'warn' or 'off', not {word!r}")
    return word


def _switch(word: str, origin: str) -> bool | None:
    if word not in ("", "0", "1"):
        raise ValueError(f"{origin} must be '1' or '0', not {word!r}")
    return bool(int(word)) if word else None
