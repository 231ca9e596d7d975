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

from ..fingerprint import block_sums, is_readable, own_values
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
        by_name = _known.get(inner, {})
        for name, tensor in _tensors_of(inner):
            identity, origin = by_name.get(name, (0, None))
            if origin is None or identity != id(tensor):
                if elsewhere is None:
                    elsewhere = {id(living): its_origin for living, its_origin in _living()}
                origin = elsewhere.setdefault(id(tensor), Origin())
                _known.setdefault(inner, {})[name] = id(tensor), origin
            origin_of[plain(f"{path}.{name}" if path else name)] = origin
    return origin_of


def _living() -> Iterator[tuple[Any, Origin]]:
    """The known tensors that are still where they were."""
    for module, by_name in list(_known.items()):
        for name, tensor in _tensors_of(module):
            identity, origin = by_name.get(name, (0, None))
            if identity == id(tensor) and origin is not None:
                yield tensor, origin


def _tensors_of(module: Any) -> Iterator[tuple[str, Any]]:
    """A module's own parameters and buffers."""
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


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
    for entry, taken in sample({entry: entry.tensor for entry in Contents(module).tensors}).items():
        if entry.group in origin_of:
            origin_of[entry.group].samples[_part(entry)] = taken


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
    entries = [entry for entry in candidates if entry.group in origin_of]
    before = {entry: then for entry in entries if (then := origin_of[entry.group].samples.get(_part(entry)))}
    now = sample({entry: entry.tensor for entry in before})
    return {entry.group for entry, values in now.items() if before[entry].differs_from(values)}


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
        if (then := trained[key][1].samples.get("")) and then.differs_from(values) and not values.is_constant
    }
    if copied:
        frozen = sample({entry: entry.tensor for entry in everything if entry.is_frozen})
        suspected |= {entry.group for entry, values in frozen.items() if values in copied}
    for name in suspected & origin_of.keys():
        origin_of[name].is_suspected = True


@contextmanager
def replacing(module: torch.nn.Module, left_out: frozenset[str] | None = None) -> Iterator[None]:
    """Remember what a checkpoint replaces meanwhile: what was trainable, and frozen values that differ afterwards.

    Args:
        module: that the checkpoint is loaded into.
        left_out: from a trainable-only checkpoint; its other parameters were trained, also where no sample shows it.
            Without it, all frozen values are compared.
    """
    before = sample(
        {(entry.group, _part(entry)): entry.tensor for entry in Contents(module).tensors if entry.is_frozen}
    )
    sums = _sums(module) if left_out is None else {}
    yield
    origin_of, everything = origins(module), Contents(module).tensors
    after = sample({entry: entry.tensor for entry in everything if entry.is_frozen})
    replaced = {
        entry.group
        for entry in everything
        if entry.kind == PARAMETER and (not entry.is_frozen or (left_out is not None and entry.name not in left_out))
    }
    if sums:
        replaced |= {key[0] for key, values in _sums(module).items() if not values.equal(sums.get(key, values))}
    for entry, now in after.items():
        then = before.get((entry.group, _part(entry)))
        if then is not None and then.differs_from(now):
            replaced.add(entry.group)
        if entry.group in origin_of and (taken := origin_of[entry.group].samples):
            taken[_part(entry)] = now
    for name in replaced & origin_of.keys():
        origin_of[name].is_suspected = True


def _sums(module: torch.nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Sums of what this rank has of each frozen tensor, by group and part; see `block_sums`."""
    entries = [entry for entry in Contents(module).tensors if entry.is_frozen and is_readable(entry.tensor)]
    return {(entry.group, _part(entry)): block_sums(own_values(entry.tensor), 0)[1].cpu() for entry in entries}


def _part(entry: ModuleTensor) -> str:
    return part_suffix(entry.name, entry.group) if entry.kind == PART else ""
