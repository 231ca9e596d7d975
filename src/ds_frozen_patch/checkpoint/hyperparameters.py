"""Find and remove hyper-parameters by whose names Lightning would import classes and call functions.

`load_from_checkpoint` calls the function that `_instantiator` names; LightningCLI sets it to a function of Lightning.
That function imports and instantiates each class that a dictionary in the hyper-parameters names as `class_path`.
Lightning 2.6.6 accepts no other `_instantiator`, and as `_class_path` only classes that are already imported; but it
still instantiates those in nested dictionaries. LightningCLI does the same for the single file of a `--ckpt_path`,
whatever `_instantiator` is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from .format.allowed import MAPPINGS
from .format.stored import StandIn, children

KEYS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams", "module_arguments")
"""The keys of hyper-parameters in a checkpoint; the last two are those of releases before 1.0."""
_INSTANTIATOR = "_instantiator"
_CLASSES = ("_class_path", "class_path")
_LIGHTNINGS = (None, "lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
# The keys of what Lightning calls with the hyper-parameters, and the values that are allowed.
_TYPES = ("hparams_type", "datamodule_hparams_type")
_MADE_OF_THEM = (*MAPPINGS, "argparse.Namespace", "builtins.dict", "omegaconf.dictconfig.DictConfig")


def unexpected_callables(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What Lightning would call for a checkpoint's hyper-parameters, other than its own functions; each with its key.

    Args:
        state: the checkpoint's.
    """
    for key in _TYPES:
        kind = state.get(key)
        if not (kind is None or isinstance(kind, str) or getattr(kind, "stands_for", "") in _MADE_OF_THEM):
            yield key, kind
    for key in KEYS:
        for value in _values_under((_INSTANTIATOR,), state.get(key)):
            if not (value is None or (isinstance(value, str) and value in _LIGHTNINGS)):
                yield f"{_INSTANTIATOR}` of `{key}", value


def without_classes(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Remove hyper-parameters that name classes for Lightning to instantiate; returns the state and their names.

    Args:
        state: the checkpoint's; stand-ins in it are modified.
    """
    cleaned: dict[str, Any] = dict(state)
    dropped: list[str] = []
    for key in KEYS:
        if key not in cleaned or not _names_classes(cleaned[key], set()):
            continue
        kept: list[tuple[Any, Any]] = []
        odd: list[tuple[Any, Any]] = []
        seen = {id(cleaned[key])}  # omegaconf's values refer to their container
        for name, value in _entries(cleaned[key]):
            names_classes = len(odd) > _MOST or _is_mark(name, _MARKS) or _names_classes(value, seen)
            (odd if names_classes else kept).append((name, value))
        dropped += [str(name) for name, _ in odd]
        cleaned[key] = _with_entries(cleaned[key], kept)
        if _names_classes(cleaned[key], set()):  # in an unknown format
            del cleaned[key]
            dropped.append(key)
    return cleaned, dropped


_MARKS = (_INSTANTIATOR, *_CLASSES)
_MOST = 100  # values with marks; each needs a traversal of its own


def _names_classes(value: Any, seen: set[int]) -> bool:
    """Whether a value contains one of `_MARKS`; if not, everything in it is added to `seen`."""
    now: set[int] = set()
    if any(True for _ in _values_under(_MARKS, value, seen, now)):
        return True
    seen |= now
    return False


def _values_under(
    marks: Collection[str], value: Any, seen: Collection[int] = (), now: set[int] | None = None
) -> Iterator[Any]:
    """The values under such keys in dictionaries, and those that follow the keys in pairs, lists or arguments, from
    which a dictionary could be created.

    Args:
        marks: the keys.
        value: hyper-parameters.
        seen: the ids of values to skip.
        now: the ids of the traversed values are added to it.
    """
    waiting, now = [value], set() if now is None else now
    while waiting:
        item = waiting.pop()
        if id(item) in seen or id(item) in now or not isinstance(item, dict | list | tuple | set | frozenset | StandIn):
            continue
        now.add(id(item))
        if isinstance(item, dict):
            pairs: Iterable[tuple[Any, Any]] = chain(item.items(), getattr(item, "__dict__", {}).items())
        else:
            pairs = item.pairs if isinstance(item, StandIn) else ()
        yield from (value for key, value in pairs if _is_mark(key, marks))
        inner = list(children(item))
        if not isinstance(item, dict):
            following = zip(inner, [*inner[1:], *inner[-1:]], strict=True)
            yield from (value for key, value in following if isinstance(key, str) and key in marks)
        waiting += inner


def _is_mark(key: Any, marks: Collection[str]) -> bool:
    """Whether a key is one of the marks, or a string of numpy, which can be equal to one."""
    if isinstance(key, StandIn):
        dtype = next((item for item in key.arguments if isinstance(item, StandIn)), key)
        return key.stands_for.endswith(".scalar") and str(dtype.arguments[:1])[2:3] == "U"
    return isinstance(key, str) and key in marks


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """The hyper-parameters by name, for every known kind of container; empty for others."""
    if isinstance(value, StandIn):
        return value.pairs or _attributes(value).items()
    return value.items() if isinstance(value, dict) else ()


def _attributes(value: StandIn) -> dict[Any, Any]:
    state = value.state if isinstance(value.state, dict) else {}
    content = state.get("_content")  # omegaconf's containers
    return content if isinstance(content, dict) else state


def _with_entries(value: Any, entries: list[tuple[Any, Any]]) -> Any:
    """The same container with other entries."""
    if not isinstance(value, StandIn):
        return type(value)(entries) if isinstance(value, dict) else value
    # It is modified in place: omegaconf's values refer to it.
    if value.pairs:
        value.pairs = entries
    elif _attributes(value) is value.state:
        value.state = dict(entries)
    elif isinstance(value.state, dict):
        value.state = {**value.state, "_content": dict(entries)}
    return value
