"""The settings of `patch()`, one set for each process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from .common.text import did_you_mean

FLAG = "exclude_frozen_parameters"
"""The argument that leaves frozen parameters out, of DeepSpeed's `save_checkpoint` and of Lightning's strategies."""

VerifyBase = Literal["error", "warn", "off"]
Export = Literal["safetensors", "peft"]
Optimizer = Literal["load", "restart"]
VERIFY_BASE: tuple[str, ...] = get_args(VerifyBase)
EXPORT: tuple[str, ...] = get_args(Export)
OPTIMIZER: tuple[str, ...] = get_args(Optimizer)

OF_RUN = tuple(f"DS_FROZEN_PATCH{end}" for end in ("", "_STRICT", "_CPU", "_WARNED"))
"""The environment variables that are no settings: those of `ds-frozen-patch run`, and one that its bootstrap sets."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `patch()`."""

    verify_base: str = "error"
    keep: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    export: str | None = None
    fp32_weights: bool = False
    elastic: bool | None = None
    optimizer: str = "load"
    sync: bool = True
    trust: bool = True
    whole_model: bool = True
    async_save: bool = False
    verify_files: bool = True
    resume_batches: bool = False

    def keeps(self, names: Iterable[str]) -> bool:
        """Whether something frozen with these names is saved all the same."""
        return matches(names, self.keep)

    def leaves_out(self, names: Iterable[str]) -> bool:
        """Whether what has these names is base, even if it is a buffer, or training changes it."""
        return matches(names, self.leave_out)


def matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether one of the names matches one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def checked(arguments: Mapping[str, Any], before: Settings | None = None) -> Settings:
    """New settings from the arguments of `patch()`.

    Args:
        arguments: by name; None leaves a setting as it was.
        before: the settings until now; None for those of the environment.

    Raises:
        ValueError: a word or an environment variable is not one of the possible ones.
        TypeError: an argument has the wrong type.
    """
    new = from_environment() if before is None else before
    return replace(new, **{name: _CHECKS[name](value, name) for name, value in arguments.items() if value is not None})


def from_environment() -> Settings:
    """The settings that the environment variables give, or the defaults.

    Raises:
        ValueError: a variable has none of its possible values.
    """
    words = {name: os.environ.get(variable(name), "") for name in _CHECKS}
    values = {name: _from_word(name, word) for name, word in words.items() if word}
    return replace(Settings(), **values)


def unknown_variables() -> list[str]:
    """What is wrong with each environment variable that has our prefix, and no meaning."""
    names = [*OF_RUN, *map(variable, _CHECKS)]
    unknown = sorted(name for name in os.environ if name.startswith("DS_FROZEN_PATCH") and name not in names)
    return [f"The environment variable {name} has no effect. {did_you_mean(name, names)}".strip() for name in unknown]


def current() -> Settings:
    """The settings of the `patch()` in force, or those of the environment."""
    return _in_force or from_environment()


def put_in_force(new: Settings | None) -> None:
    """Let `current()` return these from now on; None for those of the environment."""
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
    """The environment variable that counts if `patch()` is called without this argument."""
    return f"DS_FROZEN_PATCH_{setting.upper()}"


def switch(name: str) -> bool | None:
    """The value of an environment variable that is 1 or 0; None if it is empty or not set.

    Raises:
        ValueError: it is something else.
    """
    word = os.environ.get(name, "")
    if word not in ("", "0", "1"):
        raise ValueError(f"{name} must be '1' or '0', not {word!r}")
    return word == "1" if word else None


def _from_word(name: str, word: str) -> Any:
    if name in ("keep", "leave_out"):
        return tuple(pattern.strip() for pattern in word.split(",") if pattern.strip())
    if _CHECKS[name] is _bool:
        return switch(variable(name))
    return _CHECKS[name](word, variable(name))


def _patterns(example: str) -> Callable[[Any, str], tuple[str, ...]]:
    def check(value: Any, origin: str) -> tuple[str, ...]:
        patterns = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
        if isinstance(value, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"{origin} must be a list of patterns such as [{example!r}], not {value!r}")
        return tuple(patterns)

    return check


def _one_of(words: tuple[str, ...]) -> Callable[[Any, str], str]:
    def check(value: Any, origin: str) -> str:
        if not isinstance(value, str) or value not in words:
            *others, last = map(repr, words)
            raise ValueError(f"{origin} must be {', '.join(others)} or {last}, not {value!r}")
        return value

    return check


def _bool(value: Any, origin: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{origin} must be True or False, not {value!r}")
    return value


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "verify_base": _one_of(VERIFY_BASE),
    "keep": _patterns("*.random_features"),
    "leave_out": _patterns("*.qweight"),
    "export": _one_of(EXPORT),
    "fp32_weights": _bool,
    "elastic": _bool,
    "optimizer": _one_of(OPTIMIZER),
    "sync": _bool,
    "trust": _bool,
    "whole_model": _bool,
    "async_save": _bool,
    "verify_files": _bool,
    "resume_batches": _bool,
}
