"""Promise 23: what an earlier training of the same process has changed is no base for the next one."""

from __future__ import annotations

import copy
import io
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import zero
from kit import owners, runs
from kit.cell import DeepSpeedStrategy, ModelCheckpoint, pl
from kit.checkpoints import left_out_of
from kit.owners import Run
from peft import LoraConfig
from safetensors.torch import load_file

import ds_frozen_patch

pytestmark = [pytest.mark.promise(23), pytest.mark.everyday, pytest.mark.once]


class Phases(runs.LoraRun):
    """Trains its adapters, then only a head on top of what they give."""

    def __init__(self, phase: str, seed: int = 1) -> None:
        super().__init__(seed)
        torch.manual_seed(3)
        self.head = torch.nn.Linear(4, 4)
        self.begin(phase)

    def begin(self, phase: str) -> Phases:
        self.losses.clear()
        for name, parameter in self.named_parameters():
            kind = "head" if name.startswith("head") else "adapters" if "lora_" in name else "base"
            parameter.requires_grad_(kind == phase)
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        head: torch.Tensor = self.head(torch.full((4,), loss.item(), dtype=self.head.weight.dtype))
        return loss + head.square().sum()


def in_phases(out: str, stage: int, module: Phases, then: Callable[[Any], Any], first: bool = True) -> Any:
    """Train, unless a test is to load what was trained, change the module, and train on; what that comes to."""
    ds_frozen_patch.patch(export="safetensors")
    if first:
        runs.trainer(f"{out}/first", 2, stage, epochs=1).fit(module, runs.batches(2))
    else:
        tested = f"{out}/first/epoch=0.ckpt"
        runs.trainer(out, 2, stage).test(module, runs.batches(2), ckpt_path=tested, verbose=False)
    runs.trainer(f"{out}/second", 2, stage).fit(then(module), runs.batches(2))
    return runs.trained_state(module), module.losses[runs.BATCHES :]


def two_phases(out: str, stage: int, first: bool = True) -> Any:
    return in_phases(out, stage, Phases("adapters"), lambda module: module.begin("head"), first)


def resumed(out: str, stage: int) -> Any:
    """As a new process: it has neither trained nor loaded the adapters."""
    ds_frozen_patch.patch()
    module = Phases("head")
    runs.trainer(f"{out}/again", 2, stage).fit(module, runs.batches(2), ckpt_path=f"{out}/second/epoch=0.ckpt")
    return runs.trained_state(module), module.losses


@pytest.mark.short
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_second_training_keeps_what_the_first_one_has_trained(ranks: Any, tmp_path: Path, stage: int) -> None:
    whole = ranks(2, two_phases, out=str(tmp_path), stage=stage)
    left_out = left_out_of(tmp_path / "second" / "epoch=0.ckpt")
    assert not [name for name in left_out if "lora_" in name]
    assert [name for name in left_out if "embed_tokens" in name]
    exported = load_file(tmp_path / "second" / "epoch=0.ckpt" / "trainable.safetensors")
    assert {name.partition(".")[0] for name in exported} == {"head", "model", "seen"}
    assert not left_out.intersection(exported)
    assert ranks(2, resumed, out=str(tmp_path), stage=stage) == whole


def set_up_twice(out: str, stage: int) -> None:
    ds_frozen_patch.patch()
    made = runs.fabric(2, stage)
    module = Phases("adapters")
    for phase in ("adapters", "head"):
        chosen = [p for p in module.begin(phase).parameters() if p.requires_grad]
        model, optimizer = made.setup(module, torch.optim.AdamW(chosen, lr=1e-2))
        for tokens in made.setup_dataloaders(runs.batches(2)):
            made.backward(model(tokens), model=model)
            optimizer.step()
            optimizer.zero_grad()
    made.save(f"{out}/checkpoint", {"model": model})


@pytest.mark.parametrize("stage", [2, 3])
def test_fabric_sets_a_module_up_twice(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(2, set_up_twice, out=str(tmp_path), stage=stage)
    left_out = left_out_of(tmp_path / "checkpoint")
    assert left_out
    assert not [name for name in left_out if "lora_" in name]


def first_phase(out: str, stage: int) -> None:
    ds_frozen_patch.patch()
    runs.trainer(f"{out}/first", 2, stage, epochs=1).fit(Phases("adapters"), runs.batches(2))


def test_what_a_test_has_loaded_is_kept(ranks: Any, tmp_path: Path) -> None:
    ranks(2, first_phase, out=str(tmp_path), stage=3)
    whole = ranks(2, two_phases, out=str(tmp_path), stage=3, first=False)
    assert ranks(2, resumed, out=str(tmp_path), stage=3) == whole


def next_adapter(module: Any) -> Any:
    """As a second fine-tuning on top of the first one's adapter, which is active and frozen."""
    torch.manual_seed(5)
    module.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    module.base_model.set_adapter(["default", "second"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".second." in name)
    return module


def by_owner(out: str, by: str, stage: int) -> Any:
    options: dict[str, Any] = {"num_train_epochs": 1} if by == "trainer" else {}
    with owners.served():
        first = Run(by, f"{out}/first", 2, stage, **options)
        first.train(epochs=1)
        second = Run(by, f"{out}/second", 2, stage, module=next_adapter(first.module))
        losses, state = second.train()
    return losses[2 * owners.STEPS :], state


def told(out: str, by: str) -> list[str]:
    """What is seen on stderr, of a program that has set no level."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("ds_frozen_patch" if by == "deepspeed" else "accelerate.ds_frozen_patch")
    logger.addHandler(handler)
    try:
        with owners.served():
            Run(by, out, 2, 2).train()
    finally:
        logger.removeHandler(handler)
    return [line for line in stream.getvalue().splitlines() if "checkpoints leave out" in line]


@pytest.mark.promise(19)
@pytest.mark.parametrize("by", owners.OWNERS)
def test_the_first_save_is_seen(ranks: Any, tmp_path: Path, by: str) -> None:
    (said,), nothing = ranks(2, told, out=str(tmp_path), by=by)  # once, by rank 0
    assert said.startswith("ds_frozen_patch: checkpoints leave out ")
    assert "A resume needs them" in said
    assert nothing == []


def resumed_by_owner(out: str, by: str, stage: int) -> Any:
    with owners.served():
        run = Run(by, f"{out}/again", 2, stage, module=next_adapter(owners.model(owners.PEFT, 1)))
        return run.train(run.at(0, f"{out}/second"))


@pytest.mark.promise(19)
@pytest.mark.parametrize(("by", "stage"), [("deepspeed", 2), ("accelerate", 3), ("trainer", 2)])
def test_two_trainings_by_each_owner(ranks: Any, tmp_path: Path, by: str, stage: int) -> None:
    whole = ranks(2, by_owner, out=str(tmp_path), by=by, stage=stage)
    assert ranks(2, resumed_by_owner, out=str(tmp_path), by=by, stage=stage) == whole


class Distilled(Phases):
    """Has a copy of its adapters' first layer, as a teacher, or as TRL's reference adapter."""

    def copy_teacher(self) -> Distilled:
        trained = next(layer for name, layer in self.named_modules() if name.endswith("lora_A.default"))
        self.teacher = copy.deepcopy(trained).requires_grad_(False)
        untrained = self.model.get_input_embeddings()
        self.reference = copy.deepcopy(untrained).requires_grad_(False)
        return self


def distilled(out: str) -> None:
    in_phases(out, 2, Distilled("adapters"), Distilled.copy_teacher)


def test_a_copy_of_what_was_trained_is_kept(ranks: Any, tmp_path: Path) -> None:
    ranks(2, distilled, out=str(tmp_path))
    left_out = left_out_of(tmp_path / "second" / "epoch=0.ckpt")
    assert "teacher.weight" not in left_out
    assert "reference.weight" in left_out


def merged(out: str) -> None:
    def merge(module: Phases) -> Phases:
        module.model.merge_adapter()
        return module.begin("head")

    in_phases(out, 2, Phases("adapters"), merge)


def merged_by_trainer(out: str) -> str:
    with owners.served():
        first = Run("trainer", f"{out}/first", 2, 2, num_train_epochs=1)
        first.train(epochs=1)
        first.module.merge_adapter()
        for name, parameter in first.module.named_parameters():
            parameter.requires_grad_("norm" in name)
        second = Run("trainer", f"{out}/second", 2, 2, module=first.module)
        second.train()
        return str(second.at(0))


@pytest.mark.parametrize("run", [merged, merged_by_trainer])
def test_a_merged_base_is_kept(ranks: Any, tmp_path: Path, run: Callable[[str], Any]) -> None:
    """Plain Trainer leaves it out; but here no adapter that is merged and unmerged around a save explains it."""
    place = ranks(2, run, out=str(tmp_path))[0] or tmp_path / "second" / "epoch=0.ckpt"
    left_out = left_out_of(Path(place))
    assert not [name for name in left_out if "q_proj.base_layer" in name]
    assert [name for name in left_out if "k_proj" in name]


def from_a_file_of_another_base(out: str, stage: int) -> None:
    ds_frozen_patch.patch()
    data, file = runs.batches(2), f"{out}/weights.ckpt"
    first = runs.trainer(out, 2, stage, epochs=1, enable_checkpointing=False)
    first.fit(Phases("adapters", seed=2), data)
    with ds_frozen_patch.full_checkpoint():
        first.save_checkpoint(file, weights_only=True)
    runs.trainer(f"{out}/second", 2, stage).fit(Phases("adapters", seed=1), data, ckpt_path=file)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_base_from_a_single_file_is_kept(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(2, from_a_file_of_another_base, out=str(tmp_path), stage=stage)
    assert not [name for name in left_out_of(tmp_path / "second" / "epoch=0.ckpt") if "embed_tokens" in name]


class Thawed(runs.LoraRun):
    """Unfreezes a layer once training has begun, so that no optimizer has it."""

    def on_train_start(self) -> None:
        self.thawed.requires_grad_(True)
        with zero.GatheredParameters([self.thawed], modifier_rank=0), torch.no_grad():
            self.thawed.mul_(2)

    @property
    def thawed(self) -> Any:
        return next(p for name, p in self.named_parameters() if name.endswith("k_proj.weight"))


def thaw(out: str, stage: int) -> float:
    ds_frozen_patch.patch()
    data = runs.batches(2)
    runs.trainer(out, 2, stage, epochs=1).fit(Thawed(), data)
    module = Thawed()
    with zero.GatheredParameters([module.thawed], modifier_rank=0), torch.no_grad():
        module.thawed.zero_()
    runs.trainer(out, 2, stage).test(module, data, ckpt_path=f"{out}/epoch=0.ckpt", verbose=False)
    with zero.GatheredParameters([module.thawed]):
        return float(module.thawed.float().abs().sum())


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.short)])
def test_what_no_optimizer_has_is_saved(ranks: Any, tmp_path: Path, stage: int) -> None:
    assert min(ranks(2, thaw, out=str(tmp_path), stage=stage)) > 0
    left_out = left_out_of(tmp_path / "epoch=0.ckpt")
    assert [name for name in left_out if "embed_tokens" in name]
    assert not [name for name in left_out if "layers.0.self_attn.k_proj" in name]


class HeadOnly(Phases):
    """Trains adapters and head; its own `state_dict` has only the head, as those of reward models."""

    def begin(self, phase: str) -> Phases:
        super().begin("adapters")
        self.head.requires_grad_(True)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "head." in name or "seen" in name}


def head_only(out: str, stage: int) -> Any:
    ds_frozen_patch.patch()
    data = runs.batches(2)
    found: dict[str, Any] = {}
    with runs.heard() as found["heard"]:
        module = HeadOnly("")
        runs.trainer(out, 2, stage).fit(module, data)
        found["whole"] = runs.trained_state(module), module.losses[runs.BATCHES :]
        module = HeadOnly("")
        runs.trainer(f"{out}/again", 2, stage).fit(module, data, ckpt_path=f"{out}/epoch=0.ckpt")
        found["resumed"] = runs.trained_state(module), module.losses
        module = HeadOnly("")
        runs.trainer(f"{out}/again", 2, stage).test(module, data, ckpt_path=f"{out}/epoch=1.ckpt", verbose=False)
        found["tested"] = runs.trained_state(module)
    return found


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.short), 3])
def test_a_state_dict_without_what_is_trained(ranks: Any, tmp_path: Path, stage: int) -> None:
    found, other = ranks(2, head_only, out=str(tmp_path), stage=stage)
    for one in (found, other):
        assert one["resumed"] == one["whole"]
        lora = {name: value for name, value in one["whole"][0].items() if "lora_" in name}
        assert lora == {name: value for name, value in one["tested"].items() if "lora_" in name}
    assert ds_frozen_patch.verify(tmp_path / "epoch=1.ckpt").problems == ()
    assert len([said for said in found["heard"] if "state_dict() lacks" in said]) == (2 if stage else 0)


class Renamed(runs.LoraRun):
    """Its state dict has other names than its parameters."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        if way == "hook":
            hook: Any = self.register_state_dict_post_hook
            hook(lambda module, state, *_: self.rename(state))

    def rename(self, state: Any) -> None:
        for name in [name for name in state if "lora_" in name]:
            state[name.replace("lora_", "adapter_")] = state.pop(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.way == "hook":
            return super().state_dict(*args, **kwargs)
        if self.way == "renaming":
            state = super().state_dict(*args, **kwargs)
        else:
            if args or kwargs:
                raise TypeError("takes no arguments")
            state = {name: 2 * value for name, value in super().state_dict().items()}
        self.rename(state)
        return state


def renamed(out: str, way: str) -> dict[str, Any]:
    ds_frozen_patch.patch()
    module = Renamed(way)
    config = runs.config(3, stage3_param_persistence_threshold=0)  # else small parameters stay whole
    trainer = runs.trainer(out, 2, 3, epochs=1, enable_checkpointing=False, strategy=DeepSpeedStrategy(config=config))
    trainer.fit(module, runs.batches(2))
    trainer.save_checkpoint(f"{out}/weights.ckpt", weights_only=True)
    found = {}
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            with zero.GatheredParameters([parameter]):
                found[name.replace("lora_", "adapter_")] = (1 + (way == "copying")) * parameter.detach().clone()
    return found


@pytest.mark.parametrize("way", ["hook", "renaming", "copying"])
def test_a_single_file_has_values_under_other_names(ranks: Any, tmp_path: Path, way: str) -> None:
    expected = ranks(2, renamed, out=str(tmp_path), way=way)[0]
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=False)["state_dict"]
    assert expected
    for name, value in expected.items():
        assert torch.equal(saved[name], value)


class Average(pl.Callback):
    """An average of all weights, as the EMA callbacks of many programs keep it."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["current_model_state"] = pl_module.state_dict()  # as Lightning's WeightAveraging


def averaged(out: str) -> list[str]:
    ds_frozen_patch.patch()
    files = ModelCheckpoint(out, filename="{epoch}", save_top_k=-1)
    with runs.heard() as heard:
        runs.trainer(out, 2, 2, callbacks=[files, Average()]).fit(runs.LoraRun(), runs.batches(2))
    return [said for said in heard if "leaves out all the same" in said]


def test_copies_of_the_base_in_a_callback_are_told(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, averaged, out=str(tmp_path))
    by_callback, by_hook = first  # once
    assert "client_state['callbacks']['Average']." in by_callback
    assert "client_state['current_model_state']." in by_hook
    assert second == []


KINDS = ("frozen", "trained", "loose", "averaged", "frozen late", "thawed")
"""What a layer is in a phase. A loose one asks for gradients, and no optimizer has it."""


class Odd(torch.nn.Module):
    """Some layers, tied or not, under other names in its state dict or not."""

    layers: Any

    def __init__(self, seed: int) -> None:
        super().__init__()
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6, bias=False) for _ in range(6)])
        if chosen.random() < 0.4:
            self.layers[5].weight = self.layers[0].weight
        if chosen.random() < 0.3:
            hook: Any = self.register_state_dict_post_hook
            hook(lambda module, state, *_: state.update({f"other.{name}": state.pop(name) for name in list(state)}))
            before: Any = self._register_load_state_dict_pre_hook
            before(lambda state, *_: [state.update({n.removeprefix("other."): state.pop(n)}) for n in list(state)])
        self.phases = [[chosen.choice(KINDS) for _ in self.layers] for _ in range(2)]
        for phase in self.phases:
            phase[chosen.randrange(1, 5)] = "trained"
            if self.layers[5].weight is self.layers[0].weight:
                phase[5] = phase[0]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def odd_engine(module: Odd, phase: int, stage: int) -> Any:
    for layer, kind in zip(module.layers, module.phases[phase], strict=True):
        layer.weight.requires_grad_(kind in ("trained", "loose", "frozen late"))
    kinds = zip(module.layers, module.phases[phase], strict=True)
    trained = dict.fromkeys(layer.weight for layer, kind in kinds if kind in ("trained", "frozen late"))
    trained = {weight: None for weight in trained if weight.requires_grad}
    config = runs.config(stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))
    config |= {"train_micro_batch_size_per_gpu": 1}
    engine = deepspeed.initialize(model=module, config=config, optimizer=torch.optim.AdamW(list(trained), lr=0.1))[0]
    ds_frozen_patch.serve(engine)
    return engine


def odd_phase(module: Odd, phase: int, stage: int) -> Any:
    engine = odd_engine(module, phase, stage)
    for step in range(2):
        engine.backward(engine(torch.ones(1, 6)))
        engine.step()
        for layer, kind in zip(module.layers, module.phases[phase], strict=True):
            if kind == "averaged" and not layer.weight.requires_grad:
                with zero.GatheredParameters([layer.weight], modifier_rank=0), torch.no_grad():
                    layer.weight.mul_(0.5)
            if step == 0 and kind in ("frozen late", "thawed"):
                layer.weight.requires_grad_(kind == "thawed")
    return engine


def odd_values(module: Odd) -> list[Any]:
    found = []
    for layer in module.layers:
        with zero.GatheredParameters([layer.weight]):
            found.append(layer.weight.detach().clone())
    return found


def odd_runs(out: str, stage: int, seeds: list[int]) -> dict[int, str]:
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    wrong = {}
    for seed in seeds:
        module = Odd(seed)
        odd_phase(module, 0, stage).destroy()  # and its hooks
        engine = odd_phase(module, 1, stage)
        engine.save_checkpoint(f"{out}/{seed}")
        saved, phases = odd_values(module), module.phases
        again = Odd(seed)
        engine = odd_engine(again, 1, stage)
        engine.load_checkpoint(f"{out}/{seed}")
        pairs = enumerate(zip(saved, odd_values(again), strict=True))
        if lost := [
            f"{number}: {phases[0][number]}, {phases[1][number]}" for number, (a, b) in pairs if not a.equal(b)
        ]:
            wrong[seed] = "; ".join(lost)
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_checkpoint_and_base_give_back_every_value(ranks: Any, tmp_path: Path, stage: int) -> None:
    assert ranks(2, odd_runs, out=str(tmp_path), stage=stage, seeds=list(range(8))) == [{}, {}]
