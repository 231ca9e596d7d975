"""Limits on how the values in an unpickled state refer to each other."""

from __future__ import annotations

from functools import partial
from typing import Any

from .stored import StandIn, StorageType, StoredTensor, children

DEPTH = 100
"""How deeply values may be nested in a file."""


def check_references(state: Any, room: int) -> None:
    """Raise ValueError for a state that is nested too deeply, or that takes more than `room` steps to traverse.

    A pickle stores an object once, however often it is referenced. So a small file can contain a structure that `json`
    or `repr` would need forever to print. This counts Python's own containers, which these functions traverse, but not
    the contents of stand-ins, which they do not. A container that contains itself counts once, and may be referenced
    only a few times.

    Args:
        state: what was unpickled.
        room: the maximum number of steps.
    """
    sizes: dict[int, tuple[int, int, bool]] = {}
    references = 0
    for root in _containers(state):
        if id(root) in sizes:
            continue
        frames, open_ = [_Frame(root)], {id(root)}
        while frames:
            frame = frames[-1]
            for item in frame.rest:
                if not isinstance(item, _CONTAINERS):
                    frame.add(_length(item), 0, False)
                elif id(item) in open_:
                    references += 1
                    frame.add(1, 1, True)
                elif id(item) in sizes:
                    references += sizes[id(item)][2]
                    frame.add(*sizes[id(item)])
                else:
                    open_.add(id(item))
                    frames.append(_Frame(item))
                    break
            else:
                frames.pop()
                open_.remove(id(frame.item))
                sizes[id(frame.item)] = frame.size, frame.depth, frame.holds_itself
                if frames:
                    frames[-1].add(*sizes[id(frame.item)])
            if (
                frame.size > room
                or frame.depth > DEPTH
                or len(frames) > DEPTH
                or references > _MAX_REFERENCES_TO_CYCLES
            ):
                raise ValueError("its values are nested too deeply, or are too many")


_MAX_REFERENCES_TO_CYCLES = 4
"""How often containers that contain themselves may be referenced; each reference can double the output."""


def _containers(state: Any) -> list[Any]:
    """Python's own containers in a state; raises ValueError if it is too deep, or has a function as a value."""
    if isinstance(state, StorageType):
        raise ValueError("a class of torch is a value")
    containers, seen = [state], {id(state)}
    waiting = [children(state)]
    while waiting:
        for item in waiting[-1]:
            if isinstance(item, partial | StorageType):
                raise ValueError("a function or a class of torch is a value")
            if isinstance(item, (*_CONTAINERS, StandIn, StoredTensor)) and id(item) not in seen:
                seen.add(id(item))
                waiting.append(children(item))
                if isinstance(item, _CONTAINERS):
                    containers.append(item)
                break
        else:
            waiting.pop()
        if len(waiting) > DEPTH:
            raise ValueError("its values are nested too deeply")
    return containers


class _Frame:
    """A container during the traversal: its remaining items, its size so far, and its depth."""

    def __init__(self, item: Any) -> None:
        self.item, self.rest = item, children(item)
        self.size = self.depth = 1
        self.holds_itself = False

    def add(self, size: int, depth: int, holds_itself: bool) -> None:
        self.size += size
        self.depth = max(self.depth, depth + 1)
        self.holds_itself |= holds_itself


_CONTAINERS = (dict, list, tuple, set, frozenset)


def _length(item: Any) -> int:
    return 1 + (len(item) if isinstance(item, str | bytes | bytearray) else 0)
