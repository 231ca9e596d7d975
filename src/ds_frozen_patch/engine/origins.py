"""Where the values of a parameter come from: from the program that built it, or from a served engine.

What is frozen is read when training begins, or at the first save, as the program has built it. The first save compares
all of it with its values then, and each later one another sixteenth, since a write through `.data` leaves no trace: so
a change of all values is noticed at once, and one of a few values within sixteen saves.

What differs, what an engine has optimized, or what a checkpoint has replaced is no base, for every later engine of this
process too. This is kept by the modules that hold the parameters: torch does not swap tensors that have weak
references, and an attribute of a tensor would be in the program's pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..common.collectives import digest, world_size
from ..fingerprint import Content, Shard, is_readable, layout_of, own_values, read, row_sums
from ..internals import partition_of
from ..parameters import PARAMETER, PART, Contents, ModuleTensor, part_suffix, plain
from ..settings import current as settings
from .served import ServedEngine, attached
from .topology import shard_of
from .tuners import unmerged

if TYPE_CHECKING:
    import torch


@dataclass
class Origin:
    """What is known of a parameter or buffer, and of the parts of a parameter.

    Attributes:
        is_trained: an optimizer has been made for it.
        has_stepped: that optimizer's engine has begun to train.
        is_changed: training has changed it though it was frozen, or a checkpoint has replaced it; all ranks know.
        is_built_once: no program builds it again: it belongs to an adapter, or PEFT has rewritten it at random.
        is_suspected: as `is_changed`, as far as this rank has seen.
        head: a digest of its first values on this rank before DeepSpeed has shared those of rank 0; 0 if there is none.
        built: what the program has built, of it and its parts: by an empty string or by the part's suffix.
    """

    is_trained: bool = False
    has_stepped: bool = False
    is_changed: bool = False
    is_built_once: bool = False
    is_suspected: bool = False
    head: int = 0
    built: dict[str, Content] = field(default_factory=dict)


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
                # What replaces a tensor is compared with it: libraries for quantization replace what they change.
                before = Origin(built=dict(origin.built)) if origin is not None else Origin()
                origin = elsewhere.setdefault(id(tensor), before)
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


def built_of(origin_of: Mapping[str, Origin], entry: ModuleTensor) -> Content | None:
    """What the program has built; None if that was not read."""
    origin = origin_of.get(entry.group)
    return origin.built.get(_part(entry)) if origin is not None else None


def record(engine: Any, origin_of: Mapping[str, Origin], entries: Iterable[ModuleTensor]) -> None:
    """Read what has not been read yet, and may be frozen later, unless it may have been trained or replaced already."""
    shard_of = _shards(engine)
    for entry in entries:
        if not entry.is_frozen and entry.kind != PARAMETER and not settings().leaves_out(entry.names):
            continue
        origin = origin_of.get(entry.group)
        if (
            origin is None
            or origin.is_trained
            or origin.is_changed
            or origin.is_suspected
            or _part(entry) in origin.built
        ):
            continue
        if (content := read(entry.tensor, shard_of(entry.tensor))) is not None:
            origin.built[_part(entry)] = content


def differing(
    engine: Any, origin_of: Mapping[str, Origin], entries: Iterable[ModuleTensor], number: int
) -> list[ModuleTensor]:
    """What differs from what the program has built, as far as this rank sees; `number` as in `Content`."""
    found, shard_of = [], _shards(engine)
    for entry in entries:
        built, tensor = built_of(origin_of, entry), entry.tensor
        if built and is_readable(tensor) and built.differs_from(tensor, shard_of(tensor), number):
            found.append(entry)
    return found


def notice_earlier_training(module: torch.nn.Module) -> None:
    """Before a new engine is made for a module: what earlier engines of this process have changed is no base.

    The same is true of copies of what they have trained, such as a teacher, or an adapter to compare with.
    """
    trained = {id(tensor): tensor for tensor, origin in _living() if origin.has_stepped}
    origin_of = origins(module)
    _note_heads(module, origin_of)
    if not trained and not any(origin.built for origin in origin_of.values()):
        return
    frozen = [entry for entry in Contents(module).tensors if entry.is_frozen and entry.group in origin_of]
    copied = {sketch(tensor) for tensor in trained.values()} - {None}
    for entry in frozen:
        built = built_of(origin_of, entry)
        if built is None:
            is_suspected = bool(copied) and sketch(entry.tensor) in copied
        else:
            is_same_layout = is_readable(entry.tensor) and layout_of(entry.tensor) == built.layout
            is_suspected = is_same_layout and built.differs_from(entry.tensor, None, number=1)
        origin_of[entry.group].is_suspected |= is_suspected


def _note_heads(module: torch.nn.Module, origin_of: Mapping[str, Origin]) -> None:
    """Note what each rank has built, to find at the first save what they have drawn at random without a common seed."""
    for name, parameter in Contents(module).parameters.items() if world_size() > 1 else ():
        origin = origin_of.get(name)
        if (
            origin is None
            or parameter.requires_grad
            or origin.built
            or origin.head
            or partition_of(parameter) is not parameter
        ):
            continue
        values = sketch(parameter)
        origin.head = digest(values) & 0xFFFFFF if values is not None else 0


def forget_other_layouts(engine: Any) -> None:
    """After the set-up of an engine, which changes dtypes and partitions: read what has changed so once more."""
    origin_of, shard_of = origins(engine.module), _shards(engine)
    for entry in Contents(engine.module).tensors:
        built = built_of(origin_of, entry)
        if built is not None and layout_of(entry.tensor, shard_of(entry.tensor)) != built.layout:
            del origin_of[entry.group].built[_part(entry)]


def _shards(engine: Any) -> Callable[[Any], Shard | None]:
    """Which shard of a tensor this rank has; see `fingerprints`."""
    served = attached(engine)
    is_divided = served is not None and served.topology.is_divided
    return partial(shard_of, engine) if is_divided else lambda _: None


def sketch(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Equal for copies of a tensor, by its first values; None if these are all the same, or cannot be read."""
    if not is_readable(tensor):
        return None
    values = own_values(tensor)
    first = values[:4096]
    if not len(first) or bool((first == first[0]).all()):
        return None
    return values.dtype, len(values), *row_sums(first, 0)[1].tolist()


@dataclass(frozen=True)
class Changes:
    """The base at a save, as far as this rank sees.

    Attributes:
        changed: the groups that training or a checkpoint has changed.
        rounded: those that adapters have changed which PEFT has merged and taken out again. The base is as built.
        built: what this rank has read of each candidate, as the program built it; None if that was not read.
    """

    changed: set[str]
    rounded: set[str]
    built: dict[ModuleTensor, Content | None]


def record_at_start(engine: Any, served: ServedEngine) -> None:
    """Read what a new engine does not train when training begins; changes before that are how the program builds it."""

    def begin(engine: Any) -> None:
        handle.remove()  # once is enough
        served.begin = None
        origin_of = origins(engine.module)
        record(engine, origin_of, Contents(engine.module).tensors)
        for origin in origin_of.values():
            origin.has_stepped |= origin.is_trained

    served.begin = begin
    handle = engine.register_forward_pre_hook(lambda engine, _: begin(engine) if engine.module.training else None)
    served.undo.append(lambda _: handle.remove())


def since_start(
    engine: Any, served: ServedEngine, origin_of: Mapping[str, Origin], candidates: Sequence[ModuleTensor]
) -> Changes:
    """What has changed of the candidates, as far as this rank sees: of all values the first time, then of a share."""
    built = {entry: built_of(origin_of, entry) for entry in candidates}
    compared = [entry for entry in candidates if entry.group in origin_of and not settings().leaves_out(entry.names)]
    differ = differing(engine, origin_of, [entry for entry in compared if built[entry]], served.comparisons)
    served.comparisons += bool(candidates)
    if unread := [entry for entry in candidates if built[entry] is None]:
        record(engine, origin_of, unread)
        built |= {entry: built_of(origin_of, entry) for entry in unread}
    largest = unmerged(engine.module) if differ else {}
    rounded = {
        entry.group
        for entry in differ
        for name in largest.keys() & {*entry.names}
        if (content := built[entry]) and content.is_rounded_to(entry.tensor, largest[name])
    }
    changed = {entry.group for entry in differ} - rounded
    return Changes(changed | {e.group for e in compared if origin_of[e.group].is_suspected}, rounded - changed, built)


@contextmanager
def replacing(engine: Any, left_out: frozenset[str] | None = None) -> Iterator[None]:
    """Remember what a checkpoint replaces meanwhile: what was trainable, and frozen values that differ afterwards.

    Args:
        engine: that the checkpoint is loaded into.
        left_out: from a trainable-only checkpoint; its other parameters were trained, even if their values are equal.
            Without it, all frozen values are compared.
    """
    module = engine.module
    if left_out is None:
        record(engine, origins(module), [entry for entry in Contents(module).tensors if entry.is_frozen])
    yield
    origin_of, everything = origins(module), Contents(module).tensors
    replaced = {
        entry.group
        for entry in everything
        if entry.kind == PARAMETER and (not entry.is_frozen or (left_out is not None and entry.name not in left_out))
    }
    if left_out is None:
        frozen = [entry for entry in everything if entry.is_frozen]
        replaced |= {entry.group for entry in differing(engine, origin_of, frozen, 0)}
    for name in replaced & origin_of.keys():
        origin_of[name].is_suspected = True


def _part(entry: ModuleTensor) -> str:
    return part_suffix(entry.name, entry.group) if entry.kind == PART else ""
