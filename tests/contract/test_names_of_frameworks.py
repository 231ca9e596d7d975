"""A framework in which a name is another, for each that we use: it saves and resumes as without `patch()`.

To the framework itself the names stay there; our functions do not find them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import owners, runs
from kit.cell import FABRIC, TRAINER
from kit.hidden import hidden

import ds_frozen_patch
from ds_frozen_patch.common import names
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.engine.served import attached
from ds_frozen_patch.frameworks import plain
from ds_frozen_patch.patching.patch import patch_quietly
from ds_frozen_patch.patching.wrapping import TARGETS

pytestmark = [pytest.mark.promise(15), pytest.mark.everyday, pytest.mark.once]

SERVED = {what.name: what for what in TARGETS if what.name in (TRAINER, FABRIC, "accelerate", "transformers")}
Case = tuple[str, str, tuple[str, ...], bool]


def cases_of(name: str) -> list[Case]:
    """The names that are used of a framework, but for those of callbacks, loggers and models."""
    what = SERVED[name]
    used = [one for one in what.names.used if one.of in what.kinds or "." in one.of]
    needed = {(one.of, one.names) for one in used if one.is_needed}
    optional = {(one.of, one.names) for one in used} - needed
    return [(name, *one, True) for one in sorted(needed)] + [(name, *one, False) for one in sorted(optional)]


def train_by_trainer(out: str) -> Any:
    for path in (None, f"{out}/one.ckpt"):
        trainer = runs.trainer(out, 1, 2, epochs=1 if path is None else 2, enable_checkpointing=False)
        trainer.fit(runs.LoraRun(), runs.batches(1), ckpt_path=path)
        trainer.save_checkpoint(f"{out}/weights.ckpt", weights_only=True)
        trainer.save_checkpoint(f"{out}/one.ckpt")
    assert trainer.global_step == 2 * len(runs.batches(1))
    return trainer.strategy.model


def train_by_fabric(out: str) -> Any:
    saved: Any = None
    for _ in range(2):
        fabric = runs.fabric(1, 2)
        model, optimizer = runs.fabric_setup(fabric)
        if saved is not None:
            fabric.load(f"{out}/one.ckpt", {"model": model, "optimizer": optimizer})
            assert runs.trained_state(model.module) == saved
        runs.fabric_epoch(fabric, model, optimizer)
        saved = runs.trained_state(model.module)
        fabric.save(f"{out}/one.ckpt", {"model": model, "optimizer": optimizer})
    return model._forward_module


def train_by_accelerate(out: str) -> Any:
    numbered = {"project_dir": out, "project_config": project(out)}
    for epoch in (0, 1):
        run = owners.Run("accelerate", out, 1, 2, accelerator=numbered)
        if epoch:
            run.accelerator.load_state()
            assert int(run.module.base_model.model.count) == owners.STEPS
        run.train_epoch()
        run.accelerator.save_state()
    return run.engine


def project(out: str) -> Any:
    from accelerate.utils import ProjectConfiguration

    return ProjectConfiguration(project_dir=out, automatic_checkpoint_naming=True, total_limit=3, iteration=0)


def train_by_transformers(out: str) -> Any:
    for epochs in (1, 2):
        options: dict[str, Any] = {"num_train_epochs": epochs, "save_total_limit": 2}
        run = owners.Run("trainer", out, 1, 2, owners.BY_HAND, **options)  # it leaves the base of PEFT out itself
        run.train(resume=epochs == 2)
    assert run.trainer.state.global_step == 2 * owners.STEPS
    return run.trainer.model_wrapped


TRAIN: dict[str, Callable[[str], Any]] = {
    TRAINER: train_by_trainer,
    FABRIC: train_by_fabric,
    "accelerate": train_by_accelerate,
    "transformers": train_by_transformers,
}


def each_name_hidden(out: str, name: str) -> dict[Case, Any]:
    """For each case, whether the engine is served, or what was raised; what was warned of; and the state of `name`."""
    found, has, what = {}, names.has, SERVED[name]
    for number, case in enumerate(cases_of(name)):
        _, of, hides, _ = case
        ds_frozen_patch.unpatch()
        ds_frozen_patch.patch()
        place = Path(out, str(number))
        place.mkdir()
        owner = pkgutil.resolve_name(what.kinds[of]) if of in what.kinds else import_module(of)

        def seen(one: Any, each: str, owner: Any = owner, hides: Any = hides) -> bool:
            return has(one, each) and not (one is owner and each in hides)

        with runs.heard("accelerate") as heard, ExitStack() as stack:
            stack.enter_context(overridden([(names, "has", seen)]))
            stack.enter_context(hidden(owner, hides))
            try:
                result: Any = attached(TRAIN[name](str(place))) is not None
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        files = [torch.load(file, weights_only=False) for file in owners.model_files(place)]
        whole = [any("embed_tokens" in key for key in state["module"]) for state in files]
        warned = [message for message in heard if "does not support" in message]
        found[case] = result, warned, set(whole), ds_frozen_patch.status()[name]
    return found


@pytest.fixture(scope="module")
def found(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[Case, Any]]:
    known: dict[str, Any] = {}

    def found(name: str) -> Any:
        if name not in known:
            known[name] = ranks(1, each_name_hidden, out=str(tmp_path_factory.mktemp("names")), name=name)[0]
        return known[name]

    return found


def identity(case: Case) -> str:
    return f"{'-or-'.join(case[2])} of {case[1]} of {case[0]}"


@pytest.mark.parametrize("case", [case for name in SERVED for case in cases_of(name)], ids=identity)
def test_a_framework_that_lacks_a_name_is_left_as_it_is(found: Any, case: Case) -> None:
    result, warned, whole, status = found(case[0])[case]
    name, of, hides, is_needed = case
    if not is_needed:
        assert (result, warned, whole, status.state) == (True, [], {False}, "wrapped")
        return
    assert (result, whole) == (False, {True})
    assert len(warned) == 2  # an engine each
    for warning in warned:
        assert f"does not support {name} " in warning
        assert f": it lacks {' or '.join(hides)} of {of}. Checkpoints of this engine contain frozen" in warning
    assert (status.state, status.found) == ("cannot be wrapped", f"it lacks {' or '.join(hides)} of {of}")


def under_run(out: str, strict: str) -> tuple[list[str], int]:
    """What ends a program of Accelerate under `run` where a name is another, and how often it is warned."""
    refused: list[str] = []
    ds_frozen_patch.unpatch()
    lacking_it = [(names, "has", lambda one, name, has=names.has: name != "save_iteration" and has(one, name))]
    with runs.heard("accelerate") as heard, overridden(lacking_it), pytest.MonkeyPatch.context() as patched:
        patched.setenv("DS_FROZEN_PATCH_STRICT", strict)
        patch_quietly(refused.append)
        owners.Run("accelerate", out, 1, 2)
    return refused, sum("it lacks save_iteration of Accelerator" in message for message in heard)


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_strict_run_ends(ranks: Any, tmp_path: Path, strict: str) -> None:
    ((refused, warned),) = ranks(1, under_run, out=str(tmp_path), strict=strict)
    assert len(refused) == int(strict)
    assert all("it lacks save_iteration of Accelerator" in text for text in refused)
    assert warned == 1  # for here, the program goes on


def test_what_objects_of_a_class_have() -> None:
    class Base:
        attribute = 1

        def __init__(self) -> None:
            self.set_in_it = 2

        @property
        def shown(self) -> int:
            return 3

    class Inner(Base): ...

    assert all(names.has(Inner, name) for name in ("attribute", "set_in_it", "shown"))
    assert not names.has(Inner, "other")
    assert not names.has(Base(), "other")
    assert names.has(Base(), "set_in_it")
    assert names.has(torch, "Tensor")
    assert not names.has(None, "attribute")
    assert plain.lacking(SERVED[TRAINER]) == ""
