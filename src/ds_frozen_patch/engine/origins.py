"""Where the values of a parameter come from: from the program that built it, or from a served engine.

What an engine has optimized, seen changed, or replaced from a checkpoint is no base, for every later engine of this
process too, until the program builds a new parameter. It is kept by the modules that hold the parameters: torch does
not swap tensors that have weak references, and an attribute of a tensor would be in the program's pickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from ..fingerprint import is_readable, own_values
from ..parameters import PARAMETER, PART, Contents, ModuleTensor, part_suffix, plain, shape_of
from .served import ServedEngine

if TYPE_CHECKING:
    import torch

_Key = TypeVar("_Key")
VALUES = 64
"""About how many values of each tensor are compared, evenly spaced from its first to its last."""


@dataclass(frozen=True)
class Sample:
    """Some values of a tensor.

    Attributes:
        raw: the values.
        dtype: of the tensor, a `torch.dtype`.
        layout: the shape of the whole tensor, and the number of elements that this rank has of it.
    """

    raw: bytes
    dtype: Any
    layout: tuple[int, ...]

    @property
    def is_constant(self) -> bool:
        """Whether all values are equal, as those of new parameters can be."""
        size: int = self.dtype.itemsize
        return self.raw == self.raw[:size] * (len(self.raw) // size)

    def differs_from(self, now: Sample) -> bool:
        """Whether the tensor has changed since; a program that builds it again would round it as was done here.

        Other partitions than before cannot be compared, so they count as equal.
        """
        if self.layout != now.layout or self == now:
            return False
        kinds = self.dtype, now.dtype
        is_rounded = all(kind.is_floating_point for kind in kinds) and now.dtype.itemsize <= self.dtype.itemsize
        if not is_rounded or self.dtype == now.dtype:
            return True
        import torch

        rounded = torch.frombuffer(bytearray(self.raw), dtype=self.dtype).to(now.dtype)
        return rounded.view(torch.uint8).numpy().tobytes() != now.raw


@dataclass
class Origin:
    """What is known of a parameter or buffer, and of the parts of a parameter.

    Attributes:
        is_trained: an optimizer has been made for it.
        is_changed: training has changed it though it was frozen, or a checkpoint has replaced it; all ranks know.
        is_suspected: as `is_changed`, as far as this rank has seen.
        samples: of it and its parts when training began: by an empty string or by the part's suffix.
    """

    is_trained: bool = False
    is_changed: bool = False
    is_suspected: bool = False
    samples: dict[str, Sample] = field(default_factory=dict)


_known: WeakKeyDictionary[Any, dict[str, tuple[int, Origin]]] = WeakKeyDictionary()
"""By module: for each of its own parameters and buffers, by name, its identity and what is known of it."""


def origins(module: torch.nn.Module) -> dict[str, Origin]:
    """What is known of each parameter and buffer of a module, by all plain names."""
    origin_of: dict[str, Origin] = {}
    elsewhere: dict[int, Origin] | None = None
    for path, inner in module.named_modules(remove_duplicate=False):
        entries = _known.get(inner, {})
        for name, tensor in _held_by(inner):
            identity, origin = entries.get(name, (0, None))
            if origin is None or identity != id(tensor):
                if elsewhere is None:
                    elsewhere = {id(living): its_origin for living, its_origin in _living()}
                origin = elsewhere.setdefault(id(tensor), Origin())
                _known.setdefault(inner, {})[name] = id(tensor), origin
            origin_of[plain(f"{path}.{name}" if path else name)] = origin
    return origin_of


def _living() -> Iterator[tuple[Any, Origin]]:
    """The known tensors that are still where they were."""
    for module, entries in list(_known.items()):
        for name, tensor in _held_by(module):
            identity, origin = entries.get(name, (0, None))
            if identity == id(tensor) and origin is not None:
                yield tensor, origin


def _held_by(module: Any) -> Iterator[tuple[str, Any]]:
    """A module's own parameters and buffers."""
    for held in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in held.items() if tensor is not None)


def sample(tensors: Mapping[_Key, torch.Tensor]) -> dict[_Key, Sample]:
    """Samples of what can be read; with one transfer for each device."""
    import torch

    by_device: dict[torch.device, list[tuple[_Key, torch.Tensor, Any, tuple[int, ...]]]] = {}
    for key, tensor in tensors.items():
        if is_readable(tensor):
            values = own_values(tensor)
            picked_values = values[:: max(len(values) // VALUES, 1)].contiguous().view(torch.uint8)
            item = key, picked_values, values.dtype, (*shape_of(tensor), len(values))
            by_device.setdefault(picked_values.device, []).append(item)
    samples: dict[_Key, Sample] = {}
    for items in by_device.values():
        together = torch.cat([picked_values for _, picked_values, _, _ in items]).cpu().numpy().tobytes()
        begin = 0
        for key, picked_values, dtype, layout in items:
            samples[key] = Sample(together[begin : begin + len(picked_values)], dtype, layout)
            begin += len(picked_values)
    return samples


def remember(module: torch.nn.Module) -> None:
    """Take samples of a whole module when training begins; changes before that are how the program builds it."""
    origin_of = origins(module)
    for held, taken in sample({held: held.tensor for held in Contents(module).tensors}).items():
        if held.group in origin_of:
            origin_of[held.group].samples[_part(held)] = taken


def sample_at_start(engine: Any, served: ServedEngine) -> None:
    """Remember the values of a new engine's module when training begins."""

    def sample(engine: Any, _: Any) -> None:
        if engine.module.training:
            handle.remove()  # once is enough
            _sample(engine, served)

    handle = engine.register_forward_pre_hook(sample)
    served.undo.append(lambda _: handle.remove())


def sample_at_save(engine: Any, served: ServedEngine) -> None:
    """Remember them at the first save, if the program has trained without a call of the engine."""
    if engine.global_steps:
        _sample(engine, served)


def _sample(engine: Any, served: ServedEngine) -> None:
    if not served.is_sampled:
        served.is_sampled = True
        remember(engine.module)


def changed(origin_of: Mapping[str, Origin], candidates: Iterable[ModuleTensor]) -> set[str]:
    """The groups (see `ModuleTensor`) that differ from what training began with, as far as this rank sees."""
    before = {held: origin_of[held.group].samples.get(_part(held)) for held in candidates if held.group in origin_of}
    taken = sample({held: held.tensor for held, then in before.items() if then is not None})
    return {held.group for held, now in taken.items() if (then := before[held]) is not None and then.differs_from(now)}


def notice_earlier_training(module: torch.nn.Module) -> None:
    """Before a new engine is made for a module: what earlier engines of this process have changed is no base.

    The same is true of copies of what they have trained, such as a teacher, or an adapter to compare with.
    """
    trained = {id(tensor): (tensor, origin) for tensor, origin in _living() if origin.is_trained}
    origin_of = origins(module)
    if not any(origin.samples for origin in origin_of.values()) and not trained:
        return
    everything = Contents(module).tensors
    suspected = changed(origin_of, everything)
    now = sample({key: tensor for key, (tensor, _) in trained.items()})
    copied = {
        values
        for key, values in now.items()
        if (then := trained[key][1].samples.get("")) is not None
        and then.differs_from(values)
        and not values.is_constant
    }
    if copied:
        frozen = sample({held: held.tensor for held in everything if held.is_frozen})
        suspected |= {held.group for held, values in frozen.items() if values in copied}
    for name in suspected & origin_of.keys():
        origin_of[name].is_suspected = True


@contextmanager
def replacing(module: torch.nn.Module, left_out: frozenset[str] | None = None) -> Iterator[None]:
    """Remember what a checkpoint replaces meanwhile: what was trainable, and frozen values that differ afterwards.

    Args:
        module: that the checkpoint is loaded into.
        left_out: from a trainable-only checkpoint; its other parameters were trained, also where no sample shows it.
    """
    before = sample({held: held.tensor for held in Contents(module).tensors if held.is_frozen})
    yield
    origin_of, everything = origins(module), Contents(module).tensors
    samples_before = {(held.group, _part(held)): then for held, then in before.items()}
    after = sample({held: held.tensor for held in everything if held.is_frozen})
    replaced = {
        held.group
        for held in everything
        if held.kind == PARAMETER and (not held.is_frozen or (left_out is not None and held.name not in left_out))
    }
    for held, now in after.items():
        then = samples_before.get((held.group, _part(held)))
        if then is not None and then.differs_from(now):
            replaced.add(held.group)
        if held.group in origin_of and (taken := origin_of[held.group].samples):
            taken[_part(held)] = now
    for name in replaced & origin_of.keys():
        origin_of[name].is_suspected = True


def _part(held: ModuleTensor) -> str:
    return part_suffix(held.name, held.group) if held.kind == PART else ""
