"""The base: what is frozen, still as the program has built it, and what each run builds again.

What is frozen is read when training begins, or at the first save. That first save compares all of it with its values
then, and each later one another sixteenth and a few values of each tensor, since a write through `.data` leaves no
trace: so a change of all values is noticed at once, and one of a few values within sixteen saves.

What differs, what an engine has optimized, or what a checkpoint has replaced is no base, for every later engine of this
process too. This is kept by the modules that hold the parameters: torch does not swap tensors that have weak
references, and an attribute of a tensor would be in the program's pickles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from . import process
from .engine import tuners
from .engine.served import ServedEngine, attached, warn
from .engine.topology import is_divided, shard_of
from .fingerprint import Content, Shard, changes, fingerprints, layout_of, read, sketch, unread
from .internals import optimized, partition_of
from .parameters import BUFFER, PARAMETER, PART, Contents, ModuleTensor, plain
from .ranks import add_up, world_size
from .settings import current as settings
from .settings import matches

if TYPE_CHECKING:
    import torch


SHARES = 16
"""After so many saves all of the base has been compared again."""


class Maker(IntEnum):
    """What has made the values of a parameter or buffer, the same on all ranks. All but the first are saved."""

    PROGRAM = 0
    PROGRAM_ONCE = 1
    """No later run makes them again: those of an adapter, and what is drawn at random."""
    OPTIMIZER = 2
    """An optimizer has been made for it."""
    TRAINING = 3
    """The engine of that optimizer has begun to train."""


@dataclass
class Origin:
    """What is known of a parameter or buffer, and of the parts of a parameter.

    Attributes:
        maker: of its values.
        is_changed: whether this rank has seen that training has changed it though it was frozen, or that a checkpoint
            has replaced it.
        head: a digest of its first values on this rank before DeepSpeed has shared those of rank 0; 0 if there is none.
        built: what the program has built, of it and its parts: by `ModuleTensor.suffix`.
    """

    maker: Maker = Maker.PROGRAM
    is_changed: bool = False
    head: int = 0
    built: dict[str, Content] = field(default_factory=dict)


def origins(contents: Contents) -> defaultdict[str, Origin]:
    """The origins of all that a module contains at present, by all plain names."""
    by_identity: dict[int, Origin] | None = None
    origin_of = defaultdict[str, Origin](Origin)
    for path, inner in contents.layers.items():
        members = {**inner._parameters, **inner._buffers}
        by_name = process.state.origins.setdefault(inner, {}) if members else {}
        for name, tensor in members.items():
            if tensor is None:
                continue
            identity, origin = by_name.get(name, (0, None))
            if origin is None or identity != id(tensor):  # it is new here
                if by_identity is None:
                    by_identity = {id(living): known for living, known in _living()}
                # What replaces a tensor is compared with it: libraries for quantization replace what they change.
                new = Origin(built=dict(origin.built) if origin else {})
                origin = by_identity.setdefault(id(tensor), new)
                by_name[name] = id(tensor), origin
            origin_of[plain(f"{path}.{name}" if path else name)] = origin
    return origin_of


def _living() -> list[tuple[Any, Origin]]:
    """The tensors of this process that have an origin, and are still where they were."""
    return [
        (tensor, by_name[name][1])
        for module, by_name in list(process.state.origins.items())
        for name, tensor in {**module._parameters, **module._buffers}.items()
        if name in by_name and by_name[name][0] == id(tensor)
    ]


def frozen(contents: Contents) -> list[ModuleTensor]:
    """What of a module may be its base."""
    named = settings().leave_out
    return [e for e in contents.tensors if e.is_frozen or (e.kind == BUFFER and matches(e.names, named))]


class Base:
    """The base of an engine at a moment.

    Attributes:
        contents: of the module.
        origin_of: the origins of its parameters and buffers.
        frozen: what may be the base.
        left_out: what a save leaves out, the same on every rank; see `compared`.
        changed: the groups of that (see `ModuleTensor`) that are no base any more, as far as this rank sees.
        unmerged: what adapters were merged into and taken out of again, with the largest value that it had meanwhile.
        merged: what adapters are merged into at present.
        is_known: whether this rank knows the fingerprints of the others; then, whether every rank does.
        is_agreed: whether every rank has seen the same changes.
        shard_of: which shard of a tensor this rank has; see `fingerprint.read`.
    """

    def __init__(self, engine: Any, contents: Contents | None = None) -> None:
        served = attached(engine)
        self.contents = contents or Contents(engine.module)
        self.origin_of = origins(self.contents)
        self.frozen = frozen(self.contents)
        self.left_out: list[ModuleTensor] = []
        self.changed: set[str] = set()
        self.unmerged, self.merged = dict[str, float](), set[str]()
        self.is_known = self.is_agreed = False
        self._engine = engine
        self._is_divided = served is not None and served.topology.is_divided
        self.shard_of: Callable[[Any], Shard | None] = partial(shard_of, engine) if self._is_divided else lambda _: None

    def built(self, entry: ModuleTensor) -> Content | None:
        """What the program has built; None if that was not read."""
        return self.origin_of[entry.group].built.get(entry.suffix)

    def record(self, entries: Iterable[ModuleTensor]) -> None:
        """Read what has not been read yet, unless it may have been trained or replaced already."""
        for entry in entries:
            origin = self.origin_of[entry.group]
            is_as_built = origin.maker < Maker.OPTIMIZER and not origin.is_changed
            if is_as_built and entry.suffix not in origin.built and layout_of(entry.tensor):
                origin.built[entry.suffix] = read(entry.tensor, self.shard_of(entry.tensor))

    def differing(self, entries: Iterable[ModuleTensor], rows: range | None = None) -> list[ModuleTensor]:
        """What differs from what the program has built, as far as this rank sees; `rows` as in `changes`."""
        read = [(entry, built) for entry in entries if (built := self.built(entry))]
        earlier = [(built, entry.tensor, self.shard_of(entry.tensor)) for entry, built in read]
        return [entry for (entry, _), has_changed in zip(read, changes(earlier, rows), strict=True) if has_changed]

    # A load

    def is_as_recorded(self) -> bool:
        """Whether this rank knows the fingerprints of what is frozen, and it has not changed since."""
        contents = [self.built(entry) for entry in self.frozen if layout_of(entry.tensor)]
        return all(content and content.fingerprint for content in contents) and not self.differing(self.frozen)

    def fingerprints_now(self, entries: Sequence[ModuleTensor], is_as_recorded: bool) -> list[str | None]:
        """The fingerprints of some of the contents at present; every rank must call it.

        Args:
            entries: what is read of these for the first time counts as built.
            is_as_recorded: on every rank.
        """
        if is_as_recorded:
            return [built.fingerprint if built else None for built in map(self.built, entries)]
        changed = set(self.differing(entries))
        self.record(entry for entry in entries if entry.is_frozen or entry.kind == BUFFER)
        contents = [
            (None if entry in changed else self.built(entry)) or read(entry.tensor, self.shard_of(entry.tensor))
            for entry in entries
        ]
        return fingerprints(contents, self._engine.device)

    # A save

    def compared(self, served: ServedEngine) -> Base:
        """Find what a save is to leave out, and what of it has changed, on which the ranks have then to agree.

        The first time all of it is compared with what the program built, and again after a change; else a share.
        """
        now, in_optimizer, overruled = settings(), optimized(self._engine), set[str]()
        # Of what the ranks have different shards of, only plain parameters have a fingerprint: made of all shards.
        others = [entry for entry in self.frozen if entry.kind != PARAMETER]
        parameters = self.contents.parameters
        kept = {e.group for e in others if is_divided(self._engine, parameters.get(e.group, e.tensor))}
        for entry in self.frozen:
            maker, is_overruled = self.origin_of[entry.group].maker, matches(entry.names, now.leave_out)
            is_kept = maker > Maker.PROGRAM and not is_overruled
            is_kept |= maker >= Maker.OPTIMIZER and entry.tensor in in_optimizer
            if (is_kept and entry.kind != PART) or matches(entry.names, now.keep):
                kept.add(entry.group)
            if entry.group not in kept:
                self.left_out.append(entry)
                overruled.update({entry.group} if is_overruled else ())
        compared = [entry for entry in self.left_out if entry.group not in overruled]
        unchanged = [entry for entry in compared if not self.origin_of[entry.group].is_changed]
        differ = self.differing(unchanged, self._share(unchanged, served))
        if process.state.merged:
            self.unmerged, self.merged = tuners.merges(self._engine.module)
        self.record(self.left_out)
        drifted = {
            entry.group
            for entry in differ
            for name in self.unmerged.keys() & {*entry.names}
            if (built := self.built(entry)) and built.is_rounded_to(entry.tensor, self.unmerged[name])
        }
        if served.undoes_merges:
            drifted |= {entry.group for entry in differ if self.merged & {*entry.names}}
        for entry in differ:
            self.origin_of[entry.group].is_changed |= entry.group not in drifted
        self.changed = {entry.group for entry in compared if self.origin_of[entry.group].is_changed}
        contents = [self.built(entry) for entry in self.left_out if entry.group not in self.changed]
        self.is_known = all(content is None or content.fingerprint for content in contents)
        return self

    def _share(self, entries: Iterable[ModuleTensor], served: ServedEngine) -> range | None:
        """Another sixteenth of the rows; None for all of them, unless they are those of the save before."""
        count = sum(len(built.sums) for built in map(self.built, entries) if built and built.sums is not None)
        served.comparisons = served.comparisons + 1 if count == served.compared_rows else 0
        served.compared_rows, turn = count, served.comparisons % SHARES
        return range(count * turn // SHARES, count * (turn + 1) // SHARES) if served.comparisons else None

    def settle(self) -> tuple[set[str], set[str]]:
        """Do not leave out what is no base; every rank must call it, unless all know that they have seen the same.

        Returns:
            The groups that a rank has seen changed, and those that the ranks have built differently before DeepSpeed
            has shared rank 0's values: they have drawn these at random, without a common seed.
        """
        import torch

        changed, drawn = self.changed, set[str]()
        if not (self.is_known and self.is_agreed):
            entries, named = self.left_out, settings().leave_out
            heads = torch.tensor([self.origin_of[e.group].head if e.kind == PARAMETER else 0 for e in entries]).long()
            heads *= not self._is_divided
            flags = torch.tensor([entry.group in changed for entry in entries]).long()
            rows = add_up(torch.stack([flags, heads.sign(), heads, heads**2]), self._engine.device)
            for entry, is_changed, count, total, squares in zip(entries, *rows.tolist(), strict=True):
                if is_changed:
                    changed.add(entry.group)
                # Numbers are equal only if the square of their sum is the sum of their squares, times how many.
                elif count == world_size() and total**2 != count * squares and not matches(entry.names, named):
                    drawn.add(entry.group)
        for group in changed:
            self.origin_of[group].is_changed = True
        for group in drawn:
            self.origin_of[group].maker = Maker.PROGRAM_ONCE
        self.left_out = [entry for entry in self.left_out if entry.group not in changed | drawn]
        return changed, drawn

    def fingerprints(self) -> list[str | None]:
        """Those of what is left out, as the program built it; every rank must call it."""
        contents = [self.built(e) or unread(e.tensor, self.shard_of(e.tensor)) for e in self.left_out]
        if not self.is_known:
            fingerprints(contents, self._engine.device)
        return [content.fingerprint for content in contents]


def notice_earlier_training(module: torch.nn.Module) -> None:
    """Before a new engine is made for a module: what earlier engines of this process have changed is no base.

    The same is true of copies of what they have trained, such as a teacher, or an adapter to compare with.
    """
    trained = [tensor for tensor, origin in _living() if origin.maker is Maker.TRAINING]
    contents = Contents(module)
    origin_of = origins(contents)
    for name, parameter in contents.parameters.items() if world_size() > 1 else ():
        origin = origin_of[name]
        if not (parameter.requires_grad or origin.built or origin.head or partition_of(parameter) is not parameter):
            origin.head = sketch(parameter) & 0xFFFFFF
    if not trained and not any(origin.built for origin in origin_of.values()):
        return
    copied = {sketch(tensor) for tensor in trained} - {0}
    for entry in (entry for entry in contents.tensors if entry.is_frozen):
        origin = origin_of[entry.group]
        if built := origin.built.get(entry.suffix):
            has_layout = layout_of(entry.tensor) == built.layout
            origin.is_changed |= has_layout and changes([(built, entry.tensor, None)], range(0))[0]
        else:
            origin.is_changed |= bool(copied) and sketch(entry.tensor) in copied


def watch_base(engine: Any, served: ServedEngine) -> Base:
    """Note what a new engine optimizes and what no program builds again, and read the rest when training begins.

    What an optimizer has is no base even if it is frozen later. In ZeRO stage 0, one that is made of all parameters of
    a module also has those that are frozen from the start.
    """
    base, in_optimizer = Base(engine), optimized(engine)
    for name, parameter in base.contents.parameters.items():
        if parameter in in_optimizer and parameter.requires_grad:
            base.origin_of[name].maker = max(base.origin_of[name].maker, Maker.OPTIMIZER)
    inits = tuners.rewritten(engine.module)
    at_random = [name for name in inits if name in base.origin_of and not base.origin_of[name].head]
    for name in {*tuners.built_once(engine.module), *at_random}:
        base.origin_of[name].maker = max(base.origin_of[name].maker, Maker.PROGRAM_ONCE)
    if at_random:
        warn(
            served.owner,
            f"PEFT has rewritten the base at random (init_lora_weights={inits[at_random[0]]!r}), and the program sets"
            " no seed before, so no later run builds it again: checkpoints contain these weights. Set a seed before the"
            " model is built, and they are left out; or name them in patch(leave_out=[...]).",
        )
    for entry in base.contents.tensors:  # what the set-up has given another dtype or partition is read once more
        if (built := base.built(entry)) and layout_of(entry.tensor, base.shard_of(entry.tensor)) != built.layout:
            del base.origin_of[entry.group].built[entry.suffix]

    def begin(engine: Any) -> None:
        handle.remove()  # once is enough
        served.begin, base = None, Base(engine)
        base.record(entry for entry in base.contents.tensors if entry.kind == PARAMETER)
        base.record(base.frozen)
        for origin in base.origin_of.values():
            origin.maker = Maker.TRAINING if origin.maker is Maker.OPTIMIZER else origin.maker

    served.begin = begin
    handle = engine.register_forward_pre_hook(lambda engine, _: begin(engine) if engine.module.training else None)
    served.undo.append(lambda _: handle.remove())
    return base


@contextmanager
def replacing(engine: Any, left_out: frozenset[str] | None = None) -> Iterator[None]:
    """Remember what a checkpoint replaces meanwhile: what was trainable, and frozen values that differ afterwards.

    Args:
        engine: that the checkpoint is loaded into.
        left_out: from a trainable-only checkpoint; its other parameters were trained, even if their values are equal.
            Without it, all frozen values are compared.
    """
    if left_out is None:
        before = Base(engine)
        before.record(entry for entry in before.contents.tensors if entry.is_frozen)
    yield
    base = Base(engine)
    parameters = [entry for entry in base.contents.tensors if entry.kind == PARAMETER]
    replaced = [e for e in parameters if not e.is_frozen or (left_out is not None and e.name not in left_out)]
    if left_out is None:
        replaced += base.differing(entry for entry in base.contents.tensors if entry.is_frozen)
    for entry in replaced:
        base.origin_of[entry.group].is_changed = True
