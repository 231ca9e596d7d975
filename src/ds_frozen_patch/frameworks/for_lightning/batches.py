"""`patch(resume_batches=True)`: a run that was saved within an epoch goes on with the batches that are left.

Lightning counts them, and starts its dataloader at the first batch all the same. Here, what the loader's sampler has
yielded already is skipped before anything is read. accelerate's `skip_first_batches` does the same in a new loader;
this keeps the loader that Lightning has made, with its workers. The shuffle is the saved one: the checkpoint has the
states that the generators of loader and sampler had at the beginning of the epoch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from ... import settings
from ...engine.owner import warn
from .owner import owner_of

KEY = "ds_frozen_patch_batches"
"""What a save adds to Lightning's checkpoint. Lightning ignores it."""

_DRAWN_BY = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")
"""Samplers of torch that draw from the process's own random numbers if they have no generator."""

loaded: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()
"""By strategy, what of the last loaded checkpoint is for the next epoch to begin: the state of the loops, and `KEY`."""
_begun: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # by strategy: this epoch's random states


def add_position(strategy: Any, checkpoint: dict[str, Any]) -> None:
    """Add to what Trainer saves how this epoch's batches were drawn."""
    import torch

    if checkpoint.get("loops") and (begin := _begun.get(strategy)):
        checkpoint[KEY] = {**begin, "now": torch.get_rng_state(), "ranks": int(strategy.world_size)}


def begin_epoch(wrapped: Callable[..., None], loop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`_TrainingEpochLoop.on_run_start`: an epoch begins, or goes on."""
    trainer = loop.trainer
    loops, position = loaded.pop(trainer.strategy, (None, None))
    count = _processed(loops)
    if not loop.restarting or count > trainer.num_training_batches:
        count = 0
    if not count and not _is_served(trainer):
        return wrapped(*args, **kwargs)
    (fetcher,) = inspect.signature(wrapped).bind(*args, **kwargs).args
    loaders = list(fetcher.combined_loader.flattened)
    if not _is_served(trainer):
        if count < trainer.num_training_batches and not _have_states(trainer, loaders):
            warn(owner_of(trainer.strategy), _NOT_ASKED.format(count))
        return wrapped(*args, **kwargs)
    if _have_states(trainer, loaders):
        wrapped(*args, **kwargs)
        return _restore_lost(trainer.fit_loop, fetcher, count)
    _begun[trainer.strategy] = _random_states(loaders)
    before = _iterator_of(fetcher)
    wrapped(*args, **kwargs)
    if count:
        return _go_on(loop, fetcher, loaders, count, position if isinstance(position, Mapping) else {})
    if before is None or before is _iterator_of(fetcher):  # workers have started, which draws random numbers
        _restore(loaders, _begun[trainer.strategy])
        iter(fetcher)
    return None


def _processed(loops: Any) -> int:
    """How many batches of its epoch the run had processed that saved this state of Lightning's loops."""
    progress = ((loops or {}).get("fit_loop") or {}).get("epoch_loop.batch_progress") or {}
    return int((progress.get("current") or {}).get("processed", 0))


def _iterator_of(fetcher: Any) -> Any:
    return getattr(fetcher.combined_loader, "_iterator", None)


def _is_served(trainer: Any) -> bool:
    is_deepspeed = any(cls.__name__ == "DeepSpeedStrategy" for cls in type(trainer.strategy).__mro__)
    return is_deepspeed and settings.current().resume_batches


def _have_states(trainer: Any, loaders: list[Any]) -> bool:
    """Whether Lightning, since 2.2, restores where the loaders were."""
    restores = hasattr(trainer.fit_loop, "_load_combined_loader_states")
    return restores and any(hasattr(loader, "load_state_dict") for loader in loaders)


def _go_on(loop: Any, fetcher: Any, loaders: list[Any], count: int, position: Mapping[str, Any]) -> None:
    """Begin the saved epoch as it began, without its first batches."""
    import torch

    trainer, progress = loop.trainer, loop.batch_progress.current
    is_drawn_again = trainer.world_size == 1 and _restore_saved(loaders, position)
    if is_drawn_again:
        _begun[trainer.strategy] = {name: position[name] for name in ("global", "generators")}
    if has_skipped := _can_skip(loaders):
        with _without_first(loaders[0], count) as skipping:
            iter(fetcher)
            has_skipped = skipping.skip()  # now: a shuffle is drawn before the state of the save is restored
    else:
        iter(fetcher)
    reasons = _inexact(trainer, loaders[0], count, is_drawn_again) if has_skipped else [_CANNOT_SKIP]
    if reasons and count < trainer.num_training_batches:
        warn(owner_of(trainer.strategy), f"{_GOES_ON.format(count)} {' '.join(reasons)}")
    fetcher.fetched += count
    fetcher.done = fetcher.fetched == fetcher.length
    if is_drawn_again:
        torch.set_rng_state(position["now"])
    if count == trainer.num_training_batches and not progress.ready:  # Lightning 2.5 and newer are in the next epoch
        _begun[trainer.strategy] = _random_states(loaders)
        iter(fetcher)
        return
    for name in ("ready", "started", "processed", "completed"):  # before 2.5, Lightning would train one of them again
        setattr(progress, name, count)


def _restore_lost(fit_loop: Any, fetcher: Any, count: int) -> None:
    """Restore the state of loaders that have one, if Lightning has made the loaders before it has read the state."""
    if getattr(fit_loop, "_combined_loader_states_to_load", None):
        fit_loop._load_combined_loader_states()
        iter(fetcher)
        fetcher.fetched += count


def _samplers(loader: Any) -> list[Any]:
    """The samplers of a loader, from the outer to the inner."""
    samplers, sampler = [], getattr(loader, "batch_sampler", None)
    if sampler is None:
        sampler = getattr(loader, "sampler", None)
    while sampler is not None and sampler not in samplers:
        samplers.append(sampler)
        in_wrapper = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # Lightning's, for several ranks
        sampler = getattr(sampler, "sampler", in_wrapper)
    return samplers


def _generators(loaders: list[Any]) -> list[Any]:
    """The generators of loaders and samplers, each once."""
    holders = [holder for loader in loaders for holder in (loader, *_samplers(loader))]
    generators = [getattr(holder, "generator", None) for holder in holders]
    return list({id(generator): generator for generator in generators if hasattr(generator, "get_state")}.values())


def _random_states(loaders: list[Any]) -> dict[str, Any]:
    import torch

    states = [generator.get_state() for generator in _generators(loaders)]
    return {"global": torch.get_rng_state(), "generators": states}


def _restore(loaders: list[Any], states: Mapping[str, Any]) -> None:
    import torch

    torch.set_rng_state(states["global"])
    for generator, state in zip(_generators(loaders), states["generators"], strict=False):
        generator.set_state(state)


def _restore_saved(loaders: list[Any], position: Mapping[str, Any]) -> bool:
    """Restore a checkpoint's random states; return False, and change nothing, if it has none of a single rank."""
    import torch

    before = _random_states(loaders)
    try:
        if position["ranks"] != 1:
            return False
        torch.set_rng_state(position["now"])
        _restore(loaders, position)
    except (AttributeError, KeyError, RuntimeError, TypeError):
        _restore(loaders, before)
        return False
    return True


def _can_skip(loaders: list[Any]) -> bool:
    """Whether there is one loader, of torch, whose sampler says what comes next."""
    from torch.utils.data import DataLoader, IterableDataset

    return (
        len(loaders) == 1 and isinstance(loaders[0], DataLoader) and not isinstance(loaders[0].dataset, IterableDataset)
    )


_GOES_ON = "The checkpoint was saved within an epoch, after {} batches, and this run cannot go on from there exactly:"
_CANNOT_SKIP = (
    "only a single torch DataLoader over a map-style dataset can skip batches, and only if its __iter__ creates the"
    " iterator at once. It starts again at the first batch of the epoch. Give any other loader state_dict() and"
    " load_state_dict()."
)


def _inexact(trainer: Any, loader: Any, count: int, is_drawn_again: bool) -> list[str]:
    """Why the batches, or what is made of them, may differ from those of the uninterrupted run."""
    reasons = []
    names = {cls.__name__ for sampler in _samplers(loader) for cls in type(sampler).__mro__}
    if not is_drawn_again and names.intersection(_DRAWN_BY):
        reasons.append(
            "the shuffle is drawn anew, as the checkpoint has no random states to restore: it was saved without"
            " resume_batches=True, or with several ranks and without DistributedSampler."
        )
    if count % trainer.accumulate_grad_batches:
        reasons.append("the gradients that were accumulated since the last step are not in the checkpoint.")
    if loader.num_workers:
        reasons.append("its workers draw their random numbers anew, such as those of augmentations.")
    return reasons


_NOT_ASKED = (
    "The checkpoint was saved within an epoch, after {} batches. Lightning starts again at the first batch of the"
    " epoch. To go on with those that are left, pass resume_batches=True to patch(), at the save as well."
)


class _Rest:
    """The rest of what a sampler yields. The first ones are skipped when the next is asked for, or by `skip`."""

    def __init__(self, iterator: Iterator[Any], count: int) -> None:
        self._iterator, self._count = iterator, count

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)

    def skip(self) -> None:
        count, self._count = self._count, 0
        for _ in islice(self._iterator, count):
            pass


class _SkippingSampler:
    """A sampler without its first items until `end`.

    A loader with workers begins to iterate twice before it asks for anything.
    """

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count
        self._rest: _Rest | None = None

    def __iter__(self) -> Iterator[Any]:
        self._rest = _Rest(iter(self._sampler), self._count)
        return self._rest

    def __len__(self) -> int:
        return len(self._sampler)

    def skip(self) -> bool:
        """Skip the first items now; return False if no iteration has begun."""
        if self._rest is not None:
            self._rest.skip()
        return self._rest is not None

    def end(self) -> None:
        """Let later iterations, of an iterator that keeps this sampler, have all items."""
        self._count = 0


@contextmanager
def _without_first(loader: Any, count: int) -> Iterator[_SkippingSampler]:
    """While this lasts, an iteration of the loader that begins lacks its first batches.

    A loader lets nobody set its sampler, but its iterators ask for it when they are made. Persistent workers have one
    iterator, which keeps the sampler.
    """
    holder, name = loader, "batch_sampler" if loader.batch_sampler is not None else "sampler"
    if getattr(loader, "_iterator", None) is not None:
        holder, name = loader._iterator, "_index_sampler"
    sampler = vars(holder)[name]
    skipping = vars(holder)[name] = _SkippingSampler(sampler, count)
    try:
        yield skipping
    finally:
        skipping.end()
        vars(holder)[name] = sampler
