"""What `patch()` was told: one set of settings per process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

FLAG = "exclude_frozen_parameters"
"""The argument that leaves frozen parameters out, of DeepSpeed's `save_checkpoint` and of Lightning's strategies."""

VERIFY_BASE = ("error", "warn", "off")
EXPORT = ("safetensors", "peft")


@dataclass(frozen=True)
class Settings:
    """See `patch()`."""

    verify_base: str = "error"
    keep: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    export: str | None = None
    fp32_weights: bool = False
    elastic: bool | None = None
    sync: bool = True
    trust: bool | None = None

    def keeps(self, names: Iterable[str]) -> bool:
        """Whether something frozen with these names is to be saved all the same."""
        return matches(names, self.keep)

    def leaves_out(self, names: Iterable[str]) -> bool:
        """Whether what has these names is base, though it is a buffer, or training changes it."""
        return matches(names, self.leave_out)


def matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether one of the names matches one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def settings(
    verify_base: str | None = None,
    keep: Iterable[str] | None = None,
    export: str | None = None,
    fp32_weights: bool | None = None,
    elastic: bool | None = None,
    sync: bool | None = None,
    leave_out: Iterable[str] | None = None,
    trust: bool | None = None,
    before: Settings | None = None,
) -> Settings:
    """Checked settings; None leaves what was there before: an earlier call's, the environment's, the default.

    Raises:
        ValueError: `verify_base`, `export` or an environment variable is none of their words.
        TypeError: `keep` or `leave_out` is not a collection of strings, or another argument is no
            bool.
    """
    new = _from_environment() if before is None else before
    if verify_base is not None:
        new = replace(new, verify_base=_word(verify_base, VERIFY_BASE, "verify_base"))
    if keep is not None:
        new = replace(new, keep=_patterns(keep, "keep", "*.random_features"))
    if leave_out is not None:
        new = replace(new, leave_out=_patterns(leave_out, "leave_out", "*.qweight"))
    if export is not None:
        new = replace(new, export=_word(export, EXPORT, "export"))
    if fp32_weights is not None:
        new = replace(new, fp32_weights=_bool(fp32_weights, "fp32_weights"))
    if elastic is not None:
        new = replace(new, elastic=_bool(elastic, "elastic"))
    if sync is not None:
        new = replace(new, sync=_bool(sync, "sync"))
    if trust is not None:
        new = replace(new, trust=_bool(trust, "trust"))
    return new


def current() -> Settings:
    """The settings of the `patch()` in force, or the defaults."""
    return _in_force or settings()


def put_in_force(new: Settings | None) -> None:
    """Let `current()` give these from now on; None for the defaults."""
    global _in_force
    _in_force = new


_in_force: Settings | None = None


_full_requests = 0


@contextmanager
def full_checkpoint() -> Iterator[None]:
    """Save full checkpoints while this lasts, frozen parameters included.

    Enter it on every rank, around `trainer.save_checkpoint(...)` or `fabric.save(...)`.
    """
    global _full_requests
    _full_requests += 1
    try:
        yield
    finally:
        _full_requests -= 1


def full_is_requested() -> bool:
    """Whether this is within `full_checkpoint()`."""
    return _full_requests > 0


def variable(setting: str) -> str:
    """The environment variable that counts where `patch()` is called without this argument."""
    return f"DS_FROZEN_PATCH_{setting.upper()}"


def switch(variable: str) -> bool | None:
    """What an environment variable says that is 1 or 0; None where it is empty or not set.

    Raises:
        ValueError: it is something else.
    """
    word = os.environ.get(variable, "")
    if word not in ("", "0", "1"):
        raise ValueError(f"{variable} must be '1' or '0', not {word!r}")
    return word == "1" if word else None


def _from_environment() -> Settings:
    sync = switch(variable("sync"))
    words = {name: os.environ.get(variable(name), "") for name in ("verify_base", "keep", "leave_out", "export")}
    return Settings(
        _word(words["verify_base"] or "error", VERIFY_BASE, variable("verify_base")),
        _listed(words["keep"]),
        _listed(words["leave_out"]),
        _word(words["export"], EXPORT, variable("export")) if words["export"] else None,
        switch(variable("fp32_weights")) or False,
        switch(variable("elastic")),
        sync is not False,
        switch(variable("trust")),
    )


def _listed(words: str) -> tuple[str, ...]:
    return tuple(pattern.strip() for pattern in words.split(",") if pattern.strip())


def _patterns(given: Any, origin: str, example: str) -> tuple[str, ...]:
    patterns = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if isinstance(given, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{origin} must be a list of patterns such as [{example!r}], not {given!r}")
    return tuple(patterns)


def _word(word: object, words: tuple[str, ...], origin: str) -> str:
    if not isinstance(word, str) or word not in words:
        *others, last = map(repr, words)
        raise ValueError(f"{origin} must be {', '.join(others)} or {last}, not {word!r}")
    return word


def _bool(value: object, origin: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{origin} must be True or False, not {value!r}")
    return value
