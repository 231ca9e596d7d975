"""Hyper-parameters: what Lightning would run by the names in them, and a copy without that.

`load_from_checkpoint` calls what `_instantiator` names, which LightningCLI sets to a function of Lightning's own.
That imports and makes each class that a dictionary among the hyper-parameters names as its `class_path`. Lightning
2.6.6 takes no other `_instantiator`, and takes as `_class_path` only what is imported already; but it still makes what
the dictionaries further inside name. LightningCLI does so too for the single file of a `--ckpt_path`, whatever
`_instantiator` is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from .format.allowed import MAPPINGS
from .format.stored import StandIn, inside

KEYS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams", "module_arguments")
"""Where Lightning keeps hyper-parameters in a checkpoint, the last two in releases before 1.0."""
_INSTANTIATOR = "_instantiator"
_CLASSES = ("_class_path", "class_path")
_LIGHTNINGS = (None, "lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
# What Lightning calls with the hyper-parameters, and what it may be.
_TYPES = ("hparams_type", "datamodule_hparams_type")
_MADE_OF_THEM = (*MAPPINGS, "argparse.Namespace", "builtins.dict", "omegaconf.dictconfig.DictConfig")


def would_run(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a checkpoint's hyper-parameters name, for Lightning to call, that is not Lightning's own; each with its key.

    Args:
        state: the checkpoint's.
    """
    for key in _TYPES:
        kind = state.get(key)
        if not (kind is None or isinstance(kind, str) or getattr(kind, "stands_for", "") in _MADE_OF_THEM):
            yield key, kind
    for key in KEYS:
        for said in _said_as((_INSTANTIATOR,), state.get(key)):
            if not (said is None or (isinstance(said, str) and said in _LIGHTNINGS)):
                yield f"{_INSTANTIATOR}` of `{key}", said


def without_classes(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint's state without hyper-parameters by which Lightning makes classes, and their names.

    Args:
        state: the checkpoint's; stand-ins in it are changed.
    """
    made: dict[str, Any] = dict(state)
    dropped: list[str] = []
    for key in KEYS:
        if key not in made or not _names_classes(made[key], set()):
            continue
        kept: list[tuple[Any, Any]] = []
        odd: list[tuple[Any, Any]] = []
        seen = {id(made[key])}  # omegaconf's values refer to what they are in
        for name, value in _entries(made[key]):
            names_classes = len(odd) > _MOST or _is_one(name, _MARKS) or _names_classes(value, seen)
            (odd if names_classes else kept).append((name, value))
        dropped += [str(name) for name, _ in odd]
        made[key] = _with_entries(made[key], kept)
        if _names_classes(made[key], set()):  # in a form that is not known
            del made[key]
            dropped.append(key)
    return made, dropped


_MARKS = (_INSTANTIATOR, *_CLASSES)
_MOST = 100  # of what is gone through again for each


def _names_classes(value: Any, seen: set[int]) -> bool:
    """Whether one of `_MARKS` is in it; if not, all in it is then among what was seen."""
    now: set[int] = set()
    if any(True for _ in _said_as(_MARKS, value, seen, now)):
        return True
    seen |= now
    return False


def _said_as(
    marks: Collection[str], value: Any, seen: Collection[int] = (), now: set[int] | None = None
) -> Iterator[Any]:
    """What is said under such names: as a key of a dictionary, or before it in a pair, a list or arguments, of which a
    dictionary could be made.

    Args:
        marks: the names.
        value: hyper-parameters.
        seen: the addresses of what is not looked into again.
        now: takes those of what is looked into.
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
        yield from (said for key, said in pairs if _is_one(key, marks))
        held = list(inside(item))
        if not isinstance(item, dict):
            following = zip(held, [*held[1:], *held[-1:]], strict=True)
            yield from (said for key, said in following if isinstance(key, str) and key in marks)
        waiting += held


def _is_one(key: Any, marks: Collection[str]) -> bool:
    """Whether a key is one of the names, or a text of numpy's: that can be equal to one."""
    if isinstance(key, StandIn):
        dtype = next((item for item in key.arguments if isinstance(item, StandIn)), key)
        return key.stands_for.endswith(".scalar") and str(dtype.arguments[:1])[2:3] == "U"
    return isinstance(key, str) and key in marks


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """The hyper-parameters by name, whatever keeps them; nothing for what is not known to."""
    if isinstance(value, StandIn):
        return value.pairs or _attributes(value).items()
    return value.items() if isinstance(value, dict) else ()


def _attributes(value: StandIn) -> dict[Any, Any]:
    state = value.state if isinstance(value.state, dict) else {}
    content = state.get("_content")  # of omegaconf's
    return content if isinstance(content, dict) else state


def _with_entries(value: Any, entries: list[tuple[Any, Any]]) -> Any:
    """The same with other entries."""
    if not isinstance(value, StandIn):
        return type(value)(entries) if isinstance(value, dict) else value
    # It is changed itself: omegaconf's values refer to it.
    if value.pairs:
        value.pairs = entries
    elif _attributes(value) is value.state:
        value.state = dict(entries)
    elif isinstance(value.state, dict):
        value.state = {**value.state, "_content": dict(entries)}
    return value
