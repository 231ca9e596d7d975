"""The settings of `patch()`, one set for each process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from . import process
from .common.text import did_you_mean

FLAG = "exclude_frozen_parameters"
"""The argument that leaves frozen parameters out, of DeepSpeed's `save_checkpoint` and of Lightning's strategies."""

VerifyBase = Literal["error", "warn", "off"]
Export = Literal["safetensors", "peft"]

OTHERS = tuple(f"DS_FROZEN_PATCH{end}" for end in ("", "_STRICT", "_CPU", "_WARNED", "_SCRATCH"))
"""The variables that are no settings: those of `ds-frozen-patch run`, one that its bootstrap sets, and `buckets`'."""


def _option(default: Any, text: str, choices: Any = None, example: str = "") -> Any:
    """An option: a choice between a `Literal`'s words, a list of patterns such as the example, or else a switch."""
    kind = "choice" if choices else "patterns" if example else "switch"
    described = {"help": text, "kind": kind, "choices": get_args(choices), "example": example}
    return field(default=default, metadata=described)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `patch()`.

    Each is declared here alone: the signature and the docstring of `patch()`, its check, its environment variable and
    the option of `ds-frozen-patch run` are made from the field. Its `metadata` has `help`, `kind` ("choice", "patterns"
    or "switch"), the `choices` of a choice, and an `example` of a pattern.
    """

    verify_base: VerifyBase = _option(  # noqa: RUF009  -- it returns a field
        "error",
        "What to do if a checkpoint is loaded onto another base than the one it was saved with: `error` refuses"
        " it, `warn` only warns, `off` skips the comparison.",
        choices=VerifyBase,
    )
    keep: Sequence[str] = _option(
        (),
        "Shell patterns such as `*.random_features`: frozen parameters with matching names are saved anyway,"
        " because no base has their values.",
        example="*.random_features",
    )
    leave_out: Sequence[str] = _option(
        (),
        "Shell patterns such as `*.qweight`: buffers with matching names are left out as part of the base, and"
        " frozen parameters are left out even if training changes them. The buffers of the quantized layers of"
        " GPTQ, AWQ, HQQ, optimum-quanto and torchao are left out without it.",
        example="*.qweight",
    )
    export: Export | None = _option(  # noqa: RUF009
        None,
        "Also write the trained weights into each checkpoint's directory, as `ds-frozen-patch export` does:"
        " `safetensors` writes a file `trainable.safetensors`, `peft` a folder `adapter`.",
        choices=Export,
    )
    elastic: bool | None = _option(
        None,
        "By default, a checkpoint that was saved at another world size, or in another ZeRO stage or precision,"
        " is resharded when it is loaded; nothing is written. `True` also lets a run train other parameters than"
        " the checkpoint's, and `False` makes both an error, which says how to reshard by hand.",
    )
    restart_optimizer: bool = _option(
        False,
        "Resume from the checkpoint's master weights with a fresh optimizer, which may be of another kind; it keeps"
        " the learning rates.",
    )
    fsync: bool = _option(
        True,
        "Wait in each save until its files are on disk, so that a power cut or a crash of the machine loses"
        " neither it nor the checkpoint that it replaces. If off, it can lose both.",
    )
    weights_only: bool = _option(
        False,
        "Let a load accept only tensors, plain values and DeepSpeed's own classes, and refuse anything else before"
        " it reads it (torch 2.6 or newer; releases before 2.10 have known bypasses). If off, a load runs code that"
        " the checkpoint names, without a warning, as it does without `patch()`.",
    )
    whole_model: bool = _option(
        True,
        "Let Hugging Face's Trainer add the file of the whole model, frozen parameters included, to each"
        " `checkpoint-N`, as it does without `patch()`. PEFT's adapters, what Trainer uploads and checkpoints of"
        " `save_only_model=True` do not change.",
    )
    async_save: bool = _option(
        False,
        "Let training continue as soon as a save has copied what it writes into memory. The checkpoint gets its"
        " name when its files are complete. The next save, a load, `wait()` and the end of the program wait for"
        " that, and raise its errors. A save that a program or a callback makes by itself waits too, except within"
        " `no_wait()`.",
    )
    verify_files: bool = _option(
        True,
        "Read every file of a checkpoint before loading it, to compare it with the checksums that it contains. If"
        " off, a flipped bit may be loaded; a truncated file, or one of another save or rank, is still an error.",
    )


OPTIONS: dict[str, Field[Any]] = {option.name: option for option in fields(Settings)}


def described(option: Field[Any]) -> str:
    """The help of an option, with its default."""
    text: str = option.metadata["help"]
    return text if option.default in (None, ()) else f"{text} Default: {option.default!r}."


def matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether one of the names matches one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def checked(arguments: Mapping[str, Any], before: Settings | None = None) -> Settings:
    """New settings from the arguments of `patch()`.

    Args:
        arguments: by name.
        before: the settings until now; None for those of the environment.

    Raises:
        ValueError: a word or an environment variable is not one of the possible ones.
        TypeError: an argument has the wrong type.
    """
    new = from_environment() if before is None else before
    if unknown := [name for name in arguments if name not in OPTIONS]:
        raise TypeError(f"patch() has no option {unknown[0]!r}. {did_you_mean(unknown[0], OPTIONS)}".strip())
    return replace(new, **{name: _checked(OPTIONS[name], value, name) for name, value in arguments.items()})


def from_environment() -> Settings:
    """The settings that the environment variables give, or the defaults.

    Raises:
        ValueError: a variable has none of its possible values, or has our prefix and no meaning.
    """
    names = [*OTHERS, *map(variable, OPTIONS)]
    for name in sorted(os.environ):
        if name.startswith("DS_FROZEN_PATCH_") and name not in names:
            raise ValueError(f"The environment variable {name} has no effect. {did_you_mean(name, names)}".strip())
    words = {name: os.environ.get(variable(name), "") for name in OPTIONS}
    return Settings(**{name: _from_word(OPTIONS[name], word) for name, word in words.items() if word})


def current() -> Settings:
    """The settings of the `patch()` in force, or those of the environment."""
    return process.state.settings or from_environment()


@contextmanager
def full_checkpoint() -> Iterator[None]:
    """Save full checkpoints while this lasts, frozen parameters included.

    Enter it on every rank, around `trainer.save_checkpoint(...)` or `fabric.save(...)`.
    """
    process.state.full_requests += 1
    try:
        yield
    finally:
        process.state.full_requests -= 1


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


def _from_word(option: Field[Any], word: str) -> Any:
    name = variable(option.name)
    if option.metadata["kind"] == "patterns":
        return tuple(pattern.strip() for pattern in word.split(",") if pattern.strip())
    return switch(name) if option.metadata["kind"] == "switch" else _checked(option, word, name)


def _checked(option: Field[Any], value: Any, origin: str) -> Any:
    """The value of an option, if it is possible; `origin` is what the error calls it."""
    if value is None and option.default is None:
        return None
    if option.metadata["kind"] == "patterns":
        patterns = (None,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
        if not all(isinstance(pattern, str) for pattern in patterns):
            example = option.metadata["example"]
            raise TypeError(f"{origin} must be a list of patterns such as [{example!r}], not {value!r}")
        return patterns
    if option.metadata["kind"] == "switch":
        if not isinstance(value, bool):
            raise TypeError(f"{origin} must be True or False, not {value!r}")
    elif value not in option.metadata["choices"]:
        *others, last = map(repr, option.metadata["choices"])
        raise ValueError(f"{origin} must be {', '.join(others)} or {last}, not {value!r}")
    return value
