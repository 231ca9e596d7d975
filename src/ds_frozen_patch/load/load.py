"""One load, from a path to the agreement of the ranks that all of them can load it.

Before DeepSpeed reads anything, each rank reads a share of the files, and all meet once: what is wrong on one rank, or
with one file, is raised on every rank. The first rank lists the folder and tells the others through the process group's
store; on disks of their own (`use_node_local_storage`) each rank looks for its own files.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ..checkpoint.format.archive import read
from ..checkpoint.zero.labels import LABEL
from ..checkpoint.zero.layout import Layout, UnknownLayoutError, find, latest_tag
from ..checkpoint.zero.states import Said, check_alike, configured_stage, number
from ..common.collectives import default_store, digest, gather, gather_numbers, world_size
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..engine.frozen import frozen
from ..manifest import KEY, Manifest, digest_of, reference
from ..save.save import left_behind
from ..save.saving import warn
from ..settings import current as settings
from .integrity import is_zip, own_share, share_of

current: ContextVar[Load | None] = ContextVar("ds_frozen_patch_load", default=None)
"""The load that is running: upstream's code lies between its parts."""

_numbers = count()


@dataclass(frozen=True)
class Saved:
    """Who saved a checkpoint: so many ranks, in that ZeRO stage, with the optimizer cut into parts or not."""

    ranks: int
    stage: int
    in_parts: bool


@dataclass(frozen=True)
class Look:
    """What one look at a folder has found: its tag and files, or the reason why there are none."""

    tag: str | None = None
    model: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    saved: Saved | None = None
    problem: str = ""

    def layout(self, root: str | Path) -> Layout:
        """As `find` gives it."""
        folder = Path(root, self.tag or "")
        files = [tuple(folder / name for name in names) for names in (self.model, self.optimizer)]
        return Layout(Path(root), self.tag or "", *files)


@dataclass
class Load:
    """One load.

    Attributes:
        strategy: that loads.
        asked_for: what Fabric is to restore.
        engine: that loads, once it is known.
        source: the directory, on this rank.
        tag: the folder in it.
        restores_optimizer: whether the optimizer's state is loaded too.
        base_is_known: whether every rank knows the fingerprints of what is frozen.
        manifest: the one of a ZeRO-3 checkpoint, where this rank's file only refers to it.
        module: the module's state as this rank's file has it, where DeepSpeed makes another of it.
        state: what of the checkpoint's own state is needed afterwards.
    """

    strategy: Any
    asked_for: tuple[Any, ...] = ()
    engine: Any = None
    source: str = ""
    tag: str | None = None
    restores_optimizer: bool = False
    base_is_known: bool = False
    manifest: Manifest | None = None
    module: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    _number: int = field(default_factory=lambda: next(_numbers))
    _looks: int = 0

    @property
    def is_on_own_disks(self) -> bool:
        """Whether nodes have disks of their own: in the run's configuration, which an engine for tests has not got."""
        config = getattr(self.strategy, "config", None)
        section = config.get("checkpoint") if isinstance(config, Mapping) else None
        said = isinstance(section, Mapping) and section.get("use_node_local_storage")
        return bool(said or (self.engine is not None and self.engine.use_node_local_storage()))

    def look(self) -> Look:
        """What is in the folder: as the first rank sees it, or on disks of their own this rank."""
        if self.is_on_own_disks:
            return _look_at_own(self.engine, self.source, self.tag)
        store = default_store()
        if self.strategy.is_global_zero:
            return self.tell(_look(self.source, self.tag))
        if store is None:
            return _look(self.source, self.tag)
        return _unpacked(store.get(self._key()))

    def tell(self, look: Look) -> Look:
        """Let the other ranks have what the first rank has seen; it must tell them, for they wait for it."""
        store = default_store()
        if store is not None and self.strategy.is_global_zero:
            store.set(self._key(), _packed(look))
        return look

    def _key(self) -> str:
        self._looks += 1
        return f"ds_frozen_patch/load{self._number}.{self._looks}"

    def check(self, look: Look) -> None:
        """Read this rank's share of the files, and meet; every rank must call it.

        Raises:
            CheckpointError: on every rank, if one has found a file to be missing, damaged, or of another save.
        """
        said, alike = self._read_and_meet(look)
        if not alike and self.is_on_own_disks:
            self._take_one_save()
            said, alike = self._read_and_meet(self.look())
        if not alike:
            check_alike([one for share in gather(said) for one in share])
            raise CheckpointError(
                f"{self.source} holds files of more than one save. Take all files from one checkpoint."
            )

    def _read_and_meet(self, look: Look) -> tuple[list[Said], bool]:
        """What the files of this rank's share say of their save, and whether all ranks' shares are of one save."""
        said: list[Said] = []
        problem: Exception | None = CheckpointError(look.problem) if look.problem else None
        if problem is None and look.tag is not None:
            try:
                said = self._read_share(look)
                check_alike(said)
                self.manifest = self._read_manifest(look.tag)
            except (CheckpointError, CheckpointMismatchError) as error:
                problem = error
        return said, self.meet("a checkpoint", problem, said)

    def _read_share(self, look: Look) -> list[Said]:
        layout = look.layout(self.source)
        if self.is_on_own_disks:
            return own_share(layout, self.strategy.global_rank, self.strategy.local_rank)
        return share_of(layout, self.strategy.global_rank, world_size(), self.restores_optimizer)

    def _read_manifest(self, tag: str) -> Manifest | None:
        """The manifest that this rank's file of ZeRO-3 refers to; None if it does not."""
        file = Path(self.engine._get_ckpt_name(self.source, tag))
        if not self.engine.zero_optimization_partition_weights() or not is_zip(file):
            return None
        state = read(file, trust=True).state
        said = reference(state.get(KEY)) if isinstance(state, dict) else None
        if said is None:
            Manifest.from_checkpoint(state)
            return None
        first = file.with_name(Path(said[0]).name)
        found = read(first, trust=True).state if first.is_file() else {}
        if not isinstance(found, dict) or KEY not in found or digest_of(found[KEY]) != said[1]:
            raise CheckpointMismatchError(
                f"{file} says that the manifest is in {said[0]!r}, which has none of this save. Take a whole copy."
            )
        return Manifest.from_checkpoint(found)

    def meet(self, what: str, problem: Exception | None = None, said: Sequence[Said] = ()) -> bool:
        """Raise on every rank what is wrong on one; every rank must call it, once for each load.

        Args:
            what: what this rank has found at the path.
            problem: what this rank would raise.
            said: what the files of this rank's share say of their save.

        Returns:
            Whether the shares of all ranks are of one save.

        Raises:
            CheckpointError: something is wrong on another rank.
            CheckpointMismatchError: the ranks have found, or were told, different things.
        """
        told = settings()
        request = f"{what}, verify_base={told.verify_base!r}, elastic={told.elastic!r}"
        kinds = {one.kind: digest((one.save, sorted(one.alike.items()))) for one in said}
        save = digest(said[0].save) if said else 0
        own = [problem is not None, digest(request), self._knows_base(), save, *map(kinds.get, _KINDS, (0, 0))]
        everyone = gather_numbers(own, self.strategy.root_device)
        self.base_is_known = all(one[2] for one in everyone)
        if any(one[0] for one in everyone):
            self._raise(problem)
        if len({one[1] for one in everyone}) > 1:
            found = {text: rank for rank, text in reversed(list(enumerate(gather(request))))}
            differ = "; ".join(f"rank {rank}: {text}" for text, rank in found.items())
            raise CheckpointMismatchError(
                f"The ranks do not load the same ({differ}). Give every rank the same path and the same settings."
            )
        return not any(len({one[column] for one in everyone} - {0}) > 1 for column in (3, 4, 5))

    def _knows_base(self) -> bool:
        from ..fingerprint import process_memory

        module = getattr(self.engine or self.strategy.model, "module", None)
        if module is None or settings().verify_base == "off":
            return True
        return all(process_memory().holds(one.tensor) for one in frozen(module))

    def _raise(self, problem: Exception | None) -> None:
        of_a_file = problem is None or isinstance(problem, CheckpointError)
        found = gather((str(problem or ""), of_a_file))
        if problem is not None and not of_a_file:
            raise problem
        texts = [text if plain else f"Rank {rank}: {text}" for rank, (text, plain) in enumerate(found) if text]
        raise CheckpointError("\n".join(dict.fromkeys(texts))) from problem

    def _take_one_save(self) -> None:
        """Where a kill between two nodes' renames has left another save on each, choose one that all of them have.

        Raises:
            CheckpointError: there is none.
        """
        copies: dict[str, tuple[int, str]] = {}
        for copy in (Path(self.source), *left_behind(Path(self.source))):
            if (found := _save_of(_look_at_own(self.engine, str(copy), self.tag), copy)) is not None:
                copies.setdefault(found[0], (found[1], str(copy)))
        everyone = gather((next(iter(copies), None), copies))
        named = {first for first, _ in everyone}
        common = [save for save in copies if save in named and all(save in others for _, others in everyone)]
        if not common:
            lines = [
                f"rank {rank}: of step {others[first][0]}" if first else f"rank {rank}: of an unknown save"
                for rank, (first, others) in enumerate(everyone)
            ]
            raise CheckpointError(
                f"The nodes hold different saves of {self.source} ({'; '.join(lines[:10])}). A save was killed between"
                " two nodes. Load a checkpoint that all nodes have of one save."
            )
        save = max(common, key=lambda one: (everyone[0][1][one][0], one))
        step, self.source = copies[save]
        warn(
            self.strategy,
            "A save was killed when some nodes had given it its name, and others not. All of them load the one of step"
            f" {step}, which each has: here from {self.source}.",
        )


_KINDS = ("model", "optimizer")


def _look(source: str, tag: str | None) -> Look:
    """What is in a folder that has all files."""
    try:
        layout = find(source, tag)
    except UnknownLayoutError:
        return Look()
    except CheckpointError as error:
        return Look(problem=str(error))
    model, optimizer = ([file.name for file in files] for files in (layout.model, layout.optimizer))
    return Look(layout.tag, tuple(model), tuple(optimizer), _saved(layout))


def _look_at_own(engine: Any, source: str, tag: str | None) -> Look:
    """What there is of a rank's own files."""
    try:
        name = latest_tag(Path(source)) if tag is None else tag
    except CheckpointError as error:
        return Look(problem=str(error))
    model = Path(engine._get_ckpt_name(source, name))
    optimizer = []
    if hasattr(engine.optimizer, "dp_process_group") and engine.zero_optimization():
        optimizer = [Path(engine._get_zero_ckpt_name(source, name))]
    for file in (model, *optimizer):
        if not file.is_file():
            return Look(problem=f"There is no {file} on this rank's disk. Take a whole copy of the checkpoint.")
    layout = Layout(Path(source), name, (model,), tuple(optimizer))
    return Look(name, (model.name,), tuple(file.name for file in optimizer), _saved(layout))


def _saved(layout: Layout) -> Saved | None:
    try:
        model = read(layout.model[0], trust=True).state
    except CheckpointError:
        return None
    ranks = number(model.get("dp_world_size")) if isinstance(model, dict) else None
    return Saved(ranks, configured_stage(model), bool(layout.optimizer)) if ranks else None


def _save_of(look: Look, source: Path) -> tuple[str, int] | None:
    """Of which save a rank's own files are, and of which step."""
    if look.tag is None:
        return None
    try:
        state = read(look.layout(source).model[0], trust=True).state
        label, step = state[LABEL]["save"], state["global_steps"]
    except (CheckpointError, KeyError, TypeError):
        return None
    return (label, step) if isinstance(label, str) and isinstance(step, int) else None


def _packed(look: Look) -> bytes:
    """As short as it can be, because every rank fetches it: a thousand ranks have two thousand files."""
    return zlib.compress(json.dumps(asdict(look)).encode())


def _unpacked(content: bytes) -> Look:
    told = json.loads(zlib.decompress(content))
    saved = Saved(**told.pop("saved")) if told["saved"] else None
    return Look(told["tag"], tuple(told["model"]), tuple(told["optimizer"]), saved, told["problem"])
