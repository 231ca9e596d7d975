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
from ..parameters import PARAMETER, PART, ModuleTensor, contents, part_suffix, plain, shape_of
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
    found: dict[str, Origin] = {}
    elsewhere: dict[int, Origin] | None = None
    for path, inner in module.named_modules(remove_duplicate=False):
        own = _known.get(inner, {})
        for name, tensor in _held_by(inner):
            identity, origin = own.get(name, (0, None))
            if origin is None or identity != id(tensor):
                if elsewhere is None:
                    elsewhere = {id(one): its for one, its in _living()}
                origin = elsewhere.setdefault(id(tensor), Origin())
                _known.setdefault(inner, {})[name] = id(tensor), origin
            found[plain(f"{path}.{name}" if path else name)] = origin
    return found


def _living() -> Iterator[tuple[Any, Origin]]:
    """The known tensors that are still where they were."""
    for module, own in list(_known.items()):
        for name, tensor in _held_by(module):
            identity, origin = own.get(name, (0, None))
            if identity == id(tensor) and origin is not None:
                yield tensor, origin


def _held_by(module: Any) -> Iterator[tuple[str, Any]]:
    """A module's own parameters and buffers."""
    for held in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in held.items() if tensor is not None)


def sample(tensors: Mapping[_Key, torch.Tensor]) -> dict[_Key, Sample]:
    """Samples of what can be read; with one transfer for each device."""
    import torch

    picked: dict[torch.device, list[tuple[_Key, torch.Tensor, Any, tuple[int, ...]]]] = {}
    for key, tensor in tensors.items():
        if is_readable(tensor):
            values = own_values(tensor)
            some = values[:: max(len(values) // VALUES, 1)].contiguous().view(torch.uint8)
            one = key, some, values.dtype, (*shape_of(tensor), len(values))
            picked.setdefault(some.device, []).append(one)
    found: dict[_Key, Sample] = {}
    for ones in picked.values():
        together = torch.cat([some for _, some, _, _ in ones]).cpu().numpy().tobytes()
        begin = 0
        for key, some, dtype, layout in ones:
            found[key] = Sample(together[begin : begin + len(some)], dtype, layout)
            begin += len(some)
    return found


def remember(module: torch.nn.Module) -> None:
    """Take samples of a whole module when training begins; changes before that are how the program builds it."""
    known = origins(module)
    for one, taken in sample({one: one.tensor for one in contents(module)}).items():
        if one.group in known:
            known[one.group].samples[_part(one)] = taken


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


def changed(known: Mapping[str, Origin], held: Iterable[ModuleTensor]) -> set[str]:
    """The groups (see `ModuleTensor`) that differ from what training began with, as far as this rank sees."""
    before = {one: known[one.group].samples.get(_part(one)) for one in held if one.group in known}
    taken = sample({one: one.tensor for one, then in before.items() if then is not None})
    return {one.group for one, now in taken.items() if (then := before[one]) is not None and then.differs_from(now)}


def notice_earlier_training(module: torch.nn.Module) -> None:
    """Before a new engine is made for a module: what earlier engines of this process have changed is no base.

    The same is true of copies of what they have trained, such as a teacher, or an adapter to compare with.
    """
    trained = {id(tensor): (tensor, origin) for tensor, origin in _living() if origin.is_trained}
    known = origins(module)
    if not any(origin.samples for origin in known.values()) and not trained:
        return
    held = contents(module)
    suspected = changed(known, held)
    now = sample({key: tensor for key, (tensor, _) in trained.items()})
    copied = {
        one
        for key, one in now.items()
        if (then := trained[key][1].samples.get("")) is not None and then.differs_from(one) and not one.is_constant
    }
    if copied:
        frozen = sample({one: one.tensor for one in held if one.is_frozen})
        suspected |= {one.group for one, its in frozen.items() if its in copied}
    for name in suspected & known.keys():
        known[name].is_suspected = True


@contextmanager
def replacing(module: torch.nn.Module) -> Iterator[None]:
    """Remember what a checkpoint replaces meanwhile: what was trainable, and frozen values that differ afterwards."""
    before = sample({one: one.tensor for one in contents(module) if one.is_frozen})
    yield
    known, held = origins(module), contents(module)
    names = {(one.group, _part(one)): then for one, then in before.items()}
    after = sample({one: one.tensor for one in held if one.is_frozen})
    replaced = {one.group for one in held if one.kind == PARAMETER and not one.is_frozen}
    for one, now in after.items():
        then = names.get((one.group, _part(one)))
        if then is not None and then.differs_from(now):
            replaced.add(one.group)
        if one.group in known and (taken := known[one.group].samples):
            taken[_part(one)] = now
    for name in replaced & known.keys():
        known[name].is_suspected = True


def _part(one: ModuleTensor) -> str:
    return part_suffix(one.name, one.group) if one.kind == PART else ""
