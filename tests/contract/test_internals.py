"""A DeepSpeed in which a name is another, for each name that is not public: saves and loads are as without `patch()`.

To DeepSpeed itself the names stay there; our functions do not find them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from kit import runs
from kit.checkpoints import model_states
from kit.hidden import hidden

import ds_frozen_patch
from ds_frozen_patch import internals, process
from ds_frozen_patch.engine.served import attached

pytestmark = [pytest.mark.promise(25), pytest.mark.everyday]

import_module("ds_frozen_patch.cures")  # which declares names too
NEEDED = sorted({(used.of, used.names) for used in internals.NAMES.used if used.is_needed})
OPTIONAL = sorted({(used.of, used.names) for used in internals.NAMES.used} - {*NEEDED})
OPTIONAL = [case for case in OPTIONAL if not any(case[1] == needed for _, needed in NEEDED)]
ELSEWHERE = ("engines with tensor parallelism", "parameters of experts", "engines with experts")
"""Of engines that take more ranks, or another model."""
STAGES = {"the optimizer in ZeRO stage 3": 3, "partitioned parameters": 3, "partitions": 3}
Case = tuple[str, tuple[str, ...]]


def hiding(case: Case, reference: dict[int, Any]) -> Any:
    of, names = case
    having = internals._objects(reference[STAGES.get(of, 2)]).get(of) or [import_module(of)]
    one = having[0]
    kind = torch.Tensor if isinstance(one, torch.Tensor) else type(one)
    return hidden(one if isinstance(one, ModuleType) else kind, names)


def engine_of(stage: int) -> Any:
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 3))
    module[0].requires_grad_(False)
    more = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = {**runs.config(stage, **more), "train_micro_batch_size_per_gpu": 1}
    return deepspeed.initialize(model=module, config=config, optimizer=torch.optim.AdamW(module[1].parameters()))[0]


def values(engine: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def save_and_load(folder: str, stage: int) -> tuple[bool, list[str]]:
    """Whether the engine is served, and what a load has not restored of what a save has saved."""
    engine = engine_of(stage)
    loss = engine(torch.ones(1, 6)).sum()
    engine.backward(loss)
    engine.step()
    saved = values(engine)
    engine.save_checkpoint(folder, tag="a")
    parameters = list((engine.module[1] if attached(engine) else engine.module).parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        for parameter in parameters:
            parameter.add_(1)
    engine.load_checkpoint(folder, tag="a")
    now = values(engine)
    return attached(engine) is not None, [name for name, value in saved.items() if not torch.equal(value, now[name])]


def each_name_hidden(out: str, cases: list[Case]) -> dict[Case, Any]:
    """For each case, `save_and_load` or what it has raised, what was warned of, and the names in the file."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    ds_frozen_patch.patch()
    reference, found = {stage: engine_of(stage) for stage in (2, 3)}, {}
    for number, case in enumerate(cases):
        folder, stage = f"{out}/{number}", STAGES.get(case[0], 2)
        process.state.origins.clear()  # of engines that have the name, which those tests leave that ran here before
        with runs.heard() as heard:
            try:
                with hiding(case, reference):
                    result: Any = save_and_load(folder, stage)
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        warned = [message for message in heard if message.startswith("WARNING")]
        found[case] = result, warned
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def found(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Any]:
    cases = [case for case in (*NEEDED, *OPTIONAL) if case[0] not in ELSEWHERE]
    result: dict[Case, Any] = ranks(1, each_name_hidden, out=str(tmp_path_factory.mktemp("names")), cases=cases)[0]
    return result


def identity(case: Case) -> str:
    return f"{'-or-'.join(case[1])} of {case[0]}"


@pytest.mark.short
@pytest.mark.parametrize("case", [case for case in NEEDED if case[0] not in ELSEWHERE], ids=identity)
def test_an_engine_that_lacks_a_name_is_left_to_deepspeed(found: Any, case: Case) -> None:
    result, warned = found[case]
    assert result == (False, [])
    (warning,) = warned
    assert f"does not support DeepSpeed {deepspeed.__version__}, which lacks " in warning
    assert f"{' or '.join(case[1])} of {case[0]}" in warning
    assert "Checkpoints of this engine contain frozen parameters too" in warning


@pytest.mark.short
@pytest.mark.parametrize("case", OPTIONAL, ids=identity)
def test_an_optional_name(found: Any, case: Case) -> None:
    result, warned = found[case]
    assert result == (True, [])
    assert not [message for message in warned if "does not support" in message]


def by_lightning(out: str, names: tuple[str, ...]) -> Any:
    """The names in the file of the model's states that Trainer saves, and whether it resumes from it."""
    ds_frozen_patch.patch()
    with hidden(deepspeed.DeepSpeedEngine, names), runs.heard() as heard:
        for path in (None, f"{out}/one.ckpt"):
            trainer = runs.trainer(out, 1, 2, epochs=1 if path is None else 2, enable_checkpointing=False)
            trainer.fit(runs.LoraRun(), runs.batches(1), ckpt_path=path)
            trainer.save_checkpoint(f"{out}/one.ckpt")
    return trainer.global_step, [message for message in heard if "does not support" in message]


def test_an_engine_of_lightning(ranks: Any, tmp_path: Path) -> None:
    """One warning for each engine, by our logger of that Lightning."""
    ((steps, warned),) = ranks(1, by_lightning, out=str(tmp_path), names=("_get_ckpt_name",))
    assert steps == 2 * len(runs.batches(1))
    assert len(warned) == 2
    (states,) = model_states(tmp_path / "one.ckpt")
    assert any("base_layer" in name for name in states["module"])


def experts_without(out: str, names: tuple[str, ...]) -> Any:
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    ds_frozen_patch.patch()
    module: Any = torch.nn.Sequential(torch.nn.Linear(6, 6), MoE(6, torch.nn.Linear(6, 6), num_experts=2, k=1))
    module[0].requires_grad_(False)
    with hidden(torch.Tensor, names), runs.heard() as heard:
        adam = torch.optim.AdamW(module[1].parameters())
        engine = deepspeed.initialize(model=module, config={"train_micro_batch_size_per_gpu": 1}, optimizer=adam)[0]
        saved = values(engine)
        engine.save_checkpoint(out, tag="a")
        with torch.no_grad():
            module[0].weight.add_(1)
        engine.load_checkpoint(out, tag="a", load_optimizer_states=False)
    now = values(engine)
    warned = [message for message in heard if "does not support" in message]
    return [name for name, value in saved.items() if not torch.equal(value, now[name])], warned


@pytest.mark.parametrize("name", [case[1] for case in NEEDED if case[0] == "parameters of experts"], ids="".join)
def test_an_engine_with_experts(ranks: Any, tmp_path: Path, name: tuple[str, ...]) -> None:
    (((different, warned),)) = ranks(1, experts_without, out=str(tmp_path), names=name)
    assert not different
    assert len(warned) == 1
    assert f"{name[0]} of parameters of experts" in warned[0]
