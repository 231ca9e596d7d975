"""Engines that no framework has created: `patch()` alone serves them, and none is saved whole without a word."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from kit import owners, runs
from kit.owners import Run

import ds_frozen_patch
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.engine.served import attached
from ds_frozen_patch.patching import tested
from ds_frozen_patch.patching.patch import patch_quietly
from ds_frozen_patch.testing import adapt_deepspeed

pytestmark = [pytest.mark.promise(19), pytest.mark.promise(12), pytest.mark.everyday]


def names_in(place: Path) -> set[str]:
    """The parameters in the file of a ZeRO-2 checkpoint's module."""
    (file,) = place.glob("mp_rank_00_model_states.pt")
    return set(torch.load(file, weights_only=False)["module"])


def said_of(messages: list[str]) -> int:
    return sum("did not see this engine being created" in message for message in messages)


def before_patch(out: str) -> Any:
    """Save an engine that is older than `patch()`, on purpose and not, and serve it then."""
    run = Run("deepspeed", out, 2, 2)
    with owners.served(), runs.heard() as messages:
        run.engine.save_checkpoint(out, tag="on purpose", exclude_frozen_parameters=False)
        with ds_frozen_patch.full_checkpoint():
            run.engine.save_checkpoint(out, tag="as full")
        in_silence = said_of(messages)
        for tag in ("first", "second"):
            run.engine.save_checkpoint(out, tag=tag)
        in_words = said_of(messages)
        ds_frozen_patch.serve(run.engine)
        run.engine.save_checkpoint(out, tag="served")
        return in_silence, in_words, said_of(messages), owners.trained(run.module)


def test_an_engine_older_than_patch(ranks: Any, tmp_path: Path) -> None:
    seen = ranks(2, before_patch, out=str(tmp_path))
    assert [counts for *counts, _ in seen] == [[0, 1, 1], [0, 0, 0]]
    trained = set(seen[0][-1])
    for tag in ("on purpose", "as full", "first", "second"):
        assert names_in(tmp_path / tag) > trained
    assert names_in(tmp_path / "served") == trained


def copied_meanwhile(out: str) -> Any:
    """What another thread gets of the weights while the engine saves."""
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        writer, names = run.engine.checkpoint_engine, list[set[str]]()
        write = writer.save

        def write_while_others_copy(*args: Any, **kwargs: Any) -> None:
            thread = threading.Thread(target=lambda: names.append(set(run.engine.module_state_dict())))
            thread.start()
            thread.join()
            write(*args, **kwargs)

        with overridden([(writer, "save", write_while_others_copy)]):
            run.engine.save_checkpoint(out, tag="a")
        return names, set(run.engine.module_state_dict()), owners.trained(run.module)


@pytest.mark.short
def test_another_thread_copies_the_weights_during_a_save(ranks: Any, tmp_path: Path) -> None:
    for names, everything, trained in ranks(2, copied_meanwhile, out=str(tmp_path)):
        assert names
        assert all(copied == everything for copied in names)
        assert names_in(tmp_path / "a") == set(trained) < everything


def nothing_frozen(out: str) -> Any:
    module = owners.model(owners.BY_HAND, 1).requires_grad_(True)
    run = Run("deepspeed", out, 2, 2, module=module)
    with owners.served(), runs.heard() as messages:
        run.save(run.at(0))
    return said_of(messages)


@pytest.mark.short
def test_an_engine_with_nothing_frozen_needs_no_word(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, nothing_frozen, out=str(tmp_path)) == [0, 0]


def two_engines(out: str) -> Any:
    """Like TRL: a reference model beside Accelerate's engine, by the program itself."""
    with owners.served():
        run = Run("accelerate", out, 2, 2)
        config = {**runs.config(3), "train_micro_batch_size_per_gpu": 1}
        reference = deepspeed.initialize(model=owners.model(owners.PEFT, 2).requires_grad_(False), config=config)[0]
        after = Run("accelerate", out, 2, 2)
        return [made and made.owner.logger.name for made in map(attached, (run.engine, reference, after.engine))]


def test_a_reference_model_beside_another_owner(ranks: Any, tmp_path: Path) -> None:
    names = ["accelerate.ds_frozen_patch", "ds_frozen_patch", "accelerate.ds_frozen_patch"]
    assert ranks(2, two_engines, out=str(tmp_path)) == [names] * 2


def quietly_patched(out: str) -> Any:
    """Under `run`, what is new to us is said once the program creates an engine."""
    with overridden([(tested, "TESTED", dict.fromkeys(tested.TESTED, "0.1"))]), runs.heard() as messages:
        patch_quietly(pytest.fail)
        before = len(messages)
        for _ in range(2):
            Run("deepspeed", out, 2, 2)
    ds_frozen_patch.unpatch()
    return before, sum("newer than all tested" in message for message in messages)


def test_run_says_nothing_before_an_engine(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, quietly_patched, out=str(tmp_path)) == [(0, 1), (0, 0)]


class Alone:
    """An `mpu` by which each rank trains an engine of its own."""

    def __init__(self) -> None:
        groups = [dist.new_group([number]) for number in range(dist.get_world_size())]
        self.group = groups[dist.get_rank()]

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name.startswith("__") or "parallel" not in name:
            raise AttributeError(name)
        values = {"group": self.group, "size": 1, "rank": 0, "id": 0}
        return lambda: values[name.rpartition("_")[2]]


def on_some_ranks() -> Any:
    """Rank 1 creates an engine of its own, as it can without us."""
    adapt_deepspeed()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    alone = Alone()
    with owners.served(), runs.heard() as messages:
        if os.environ["RANK"] == "1":
            module = torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 1))
            config = {**runs.config(0), "train_batch_size": 1}
            adam = torch.optim.AdamW(module[1].parameters())
            deepspeed.initialize(model=module, config=config, optimizer=adam, mpu=alone)
    return [message for message in messages if "that only some ranks of the process group have" in message]


def test_an_engine_of_some_ranks_is_passed_on(ranks: Any) -> None:
    none, (_,) = ranks(2, on_some_ranks, alone=True)
    assert none == []
