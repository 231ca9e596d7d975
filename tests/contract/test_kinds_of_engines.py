"""Every kind of engine that DeepSpeed makes is served on purpose, or passed on as it came."""

from __future__ import annotations

import inspect
import io
import json
import shutil
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import training
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from kit import owners, runs, stages
from kit.cell import pl
from kit.checkpoints import left_out_of
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import ds_frozen_patch
from ds_frozen_patch.engine.served import attached
from ds_frozen_patch.frameworks.plain import owner_of
from ds_frozen_patch.frameworks.serving import begin_serving
from ds_frozen_patch.record import carried

pytestmark = [pytest.mark.promise(25), pytest.mark.everyday]
VOCABULARY = 64
STEPS = 2
TENSOR_PARALLEL = {"tensor_parallel": {"autotp_size": 2}}
LAYER = "base_model.model.model.layers"
IS_NEW = "checkpoint_mp_rank" in inspect.signature(deepspeed.DeepSpeedEngine._get_expert_ckpt_name).parameters
"""Before, DeepSpeed cannot load the optimizer of experts in stage 0, save with its own `parallel_state_sp`, or train
with tensor parallelism on CPUs, with or without us."""
needs_new = pytest.mark.skipif(not IS_NEW, reason="this DeepSpeed cannot do it by itself")


class Expert(LlamaMLP):
    """A frozen expert but for a scale, which is trained: ZeRO 1 and 2 require experts with a trained parameter."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scale  # type: ignore[no-untyped-call]


class Experts(torch.nn.Module):
    """The MLP of a layer of a model like Mixtral."""

    def __init__(self, config: Any, ep_size: int, number: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.moe = MoE(config.hidden_size, Expert(config), num_experts=4, ep_size=ep_size, k=1, capacity_factor=4.0)
        inner = self.moe.deepspeed_moe.experts.deepspeed_experts
        first = dist.get_rank() % ep_size * len(inner)
        for index, expert in enumerate(inner):
            generator = torch.Generator().manual_seed(100 * number + first + index)
            for linear in (expert.gate_proj, expert.up_proj, expert.down_proj):
                torch.nn.init.normal_(linear.weight, std=0.02, generator=generator)

    def forward(self, x: Any) -> Any:
        return self.moe(x)[0]


def with_lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def like_mixtral(ep_size: int, train_experts: bool) -> Any:
    torch.manual_seed(1)
    config = training.llama_config(64, 64, layers=2, vocabulary=VOCABULARY, tied=True)
    model: Any = LlamaForCausalLM(config)
    for number, layer in enumerate(model.model.layers):
        layer.mlp = Experts(config, ep_size, number)
    model = with_lora(model)
    for name, parameter in model.named_parameters():
        if name.endswith(".scale") or (train_experts and ".deepspeed_experts." in name):
            parameter.requires_grad_(True)
    return model


def plain_llama() -> Any:
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(training.llama_config(128, 64, layers=2, vocabulary=VOCABULARY, tied=True))
    return with_lora(model)


def adam_of(model: Any) -> Any:
    """AdamW on what is trained, with a group for the experts if there are any, as ZeRO needs it."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    group: Any = {"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}
    has_experts = any(not getattr(p, "allreduce", True) for p in group["params"])
    return torch.optim.AdamW(split(group) if has_experts else [group], lr=0.05)


def accelerator_of(stage: int, batch: int = 1, **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    settings = {"zero_optimization": {"stage": 0}, **runs.config(stage), "train_micro_batch_size_per_gpu": batch}
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings), **options)


def engine_of(model: Any, stage: int, config: dict[str, Any] | None = None, mpu: Any = None, by: Any = None) -> Any:
    settings = runs.config(stage) | {"train_micro_batch_size_per_gpu": 1} | (config or {})
    engine = deepspeed.initialize(model=model, config=settings, optimizer=adam_of(model), mpu=mpu)[0]
    (by or ds_frozen_patch.serve)(engine)
    return engine


def train(engine: Any, seed: int, alike: bool = False) -> list[float]:
    """Two steps, on the same samples on every rank or on others on each."""
    generator = torch.Generator().manual_seed(seed if alike else 100 * seed + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2, 8), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def values(module: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def differing(module: Any, saved: dict[str, Any]) -> list[str]:
    return [name for name, value in module.state_dict().items() if not torch.equal(value, saved[name])]


def experts_run(out: str, stage: int, ep_size: int, train_experts: bool) -> Any:
    """Save, train on, resume in a new engine; then load onto a base of which one value of one rank's expert differs."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    engine = engine_of(like_mixtral(ep_size, train_experts), stage)
    train(engine, 1)
    engine.save_checkpoint(f"{out}/full", tag="checkpoint", exclude_frozen_parameters=False)
    engine.save_checkpoint(out, tag="checkpoint")
    saved, losses = values(engine.module), train(engine, 2)
    again = engine_of(like_mixtral(ep_size, train_experts), stage)
    with_optimizer = stage > 0 or IS_NEW
    again.load_checkpoint(out, tag="checkpoint", load_optimizer_states=with_optimizer)
    different = differing(again.module, saved)
    resumed = train(again, 2)
    other = like_mixtral(ep_size, train_experts)
    weight = other.get_submodule(f"{LAYER}.1.mlp.moe.deepspeed_moe.experts.deepspeed_experts.1.up_proj").weight
    if dist.get_rank() % ep_size == ep_size - 1:  # the last of those that have different experts
        with torch.no_grad():
            weight[0, 0] += 1
    load = engine_of(other, stage).load_checkpoint
    error = runs.outcome(load, out, tag="checkpoint", load_optimizer_states=with_optimizer)
    return different, resumed == losses or not with_optimizer, error


def experts_of(checkpoint: Path) -> list[Path]:
    return sorted((checkpoint / "checkpoint").glob("layer_*_expert_*.pt"))


@pytest.mark.parametrize(
    ("stage", "world_size", "ep_size"),
    [(0, 2, 1), pytest.param(0, 4, 2, marks=pytest.mark.short), (1, 2, 2), (2, 4, 2)],
)
def test_frozen_experts_are_left_out_of_their_files(
    ranks: Any, tmp_path: Path, world_size: int, ep_size: int, stage: int
) -> None:
    for different, is_same, error in ranks(
        world_size, experts_run, out=str(tmp_path), stage=stage, ep_size=ep_size, train_experts=False, alone=True
    ):
        assert not different
        assert is_same
        assert error[0] == "CheckpointMismatchError"
        assert "layers.1.mlp.moe.deepspeed_moe.experts.deepspeed_experts.1.up_proj.weight" in error[1]
    files = experts_of(tmp_path)
    assert len(files) == 8
    for file in files:
        assert [name.rpartition(".")[2] for name in torch.load(file)] == ["scale"]
    full = experts_of(tmp_path / "full")
    assert len(torch.load(full[0])) == 4
    everything = [list(at.glob("checkpoint/*.pt")) for at in (tmp_path, tmp_path / "full")]
    sizes = [[sum(file.stat().st_size for file in found) for found in pair] for pair in ((files, full), everything)]
    print(f"ZeRO-{stage}, {world_size} ranks, {ep_size=}: experts, all files: {sizes}")  # for the docs
    assert sizes[0][0] < 0.1 * sizes[0][1]
    assert sizes[1][0] < 0.5 * sizes[1][1]


@pytest.mark.parametrize("stage", [0, 2])
def test_trained_experts_are_saved(ranks: Any, tmp_path: Path, stage: int) -> None:
    for different, is_same, error in ranks(
        2, experts_run, out=str(tmp_path), stage=stage, ep_size=2, train_experts=True, alone=True
    ):
        assert not different
        assert is_same
        assert error == ("", "")  # the checkpoint has the value
    for file in (tmp_path / "checkpoint").glob("layer_*_expert_*.pt"):
        assert len(torch.load(file)) == 4


def mixed_experts(out: str, pattern: str) -> Any:
    """Load a checkpoint that has a file of a later one."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    engine = engine_of(like_mixtral(2, train_experts=True), 2)
    for tag in ("first", "second"):
        train(engine, 1)
        engine.save_checkpoint(out, tag=tag)
    (file,) = Path(out, "second").glob(pattern)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copy(file, Path(out, "first"))
    dist.barrier()
    return file.name, runs.refusal(engine.load_checkpoint, out, tag="first")


@pytest.mark.promise(24)
@pytest.mark.parametrize("pattern", ["layer_0_expert_1_*", "*zero_pp_rank_1_*optim_states.pt"])
def test_experts_of_another_save(ranks: Any, tmp_path: Path, pattern: str) -> None:
    for name, (kind, said) in ranks(2, mixed_experts, out=str(tmp_path), pattern=pattern, alone=True):
        assert kind == "CheckpointError"
        assert f"{name} is of another save than ds_frozen_patch.json beside it" in said


class Grid:
    """A model-parallel unit as a program passes it to `deepspeed.initialize`: sequence parallelism over all ranks."""

    def __init__(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        alone, together = (0, 1, [dist.new_group([each]) for each in range(size)][rank]), (rank, size, dist.new_group())
        kinds = {"model": alone, "data": alone, "sequence": together, "sequence_data": together}
        for kind, known in kinds.items():
            for what, value in zip(("rank", "world_size", "group"), known, strict=True):
                setattr(self, f"get_{kind}_parallel_{what}", partial(getattr, SimpleNamespace(value=value), "value"))


def sequence_run(out: str, stage: int, by: str) -> Any:
    """Every rank has a part of the same sequences: here all of them, since attention is not what is tested."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    mpu = Grid() if by == "program" else in_pairs()
    return resumed_like_uninterrupted(out, stage, plain_llama, mpu=mpu)


def in_pairs() -> Any:
    """DeepSpeed's own unit for sequence parallelism, with two ranks for each sequence."""
    mpu = import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    mpu.initialize_sequence_parallel(sequence_parallel_size=2)
    return mpu


def new_engine(kind: str, stage: int) -> Any:
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    if kind == "sequences":
        return engine_of(plain_llama(), stage, mpu=in_pairs())
    if kind == "tensors":
        return engine_of(without_lora(is_frozen=True), stage, config=TENSOR_PARALLEL)
    return engine_of(like_mixtral(2, train_experts=True), stage)


def save_of(kind: str, out: str, stage: int) -> Any:
    engine = new_engine(kind, stage)
    train(engine, 1, alike=True)
    engine.save_checkpoint(out, tag="checkpoint")
    return None if kind != "sequences" else (stages.state_of(engine), train(engine, 2, alike=True))


def go_on(kind: str, out: str, stage: int) -> Any:
    ds_frozen_patch.patch(elastic=True)
    engine = new_engine(kind, stage)
    if kind != "sequences":
        return runs.refusal(engine.load_checkpoint, out, tag="checkpoint")
    engine.load_checkpoint(out, tag="checkpoint")
    return stages.state_of(engine), train(engine, 2, alike=True)


@needs_new
@pytest.mark.parametrize(("before", "after"), [((4, 3), (2, 3)), ((2, 1), (4, 2))])
def test_sequence_parallel_runs_go_on_at_another_world_size(
    ranks: Any, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Each is a world size and a ZeRO stage. The samples are the same on all ranks, so the losses are too.

    But in ZeRO-3 DeepSpeed takes other steps with sequence parallelism than below it, from the start.
    """
    run = {"kind": "sequences", "out": str(tmp_path), "alone": True}
    (state, losses), *_ = ranks(before[0], save_of, stage=before[1], **run)
    for restored, next_losses in ranks(after[0], go_on, stage=after[1], **run):
        assert stages.difference(restored, state) == 0
        if (before[1] == 3) == (after[1] == 3):
            assert next_losses == pytest.approx(losses, rel=1e-5)


@needs_new
@pytest.mark.parametrize(
    ("kind", "before", "after"), [("tensors", (2, 2), (4, 2)), ("experts", (2, 0), (2, 2)), ("experts", (2, 2), (4, 2))]
)
def test_divided_engines_go_on_as_they_were_saved_only(
    ranks: Any, tmp_path: Path, kind: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    run = {"kind": kind, "out": str(tmp_path), "alone": True}
    ranks(before[0], save_of, stage=before[1], **run)
    for name, message in ranks(after[0], go_on, stage=after[1], **run):
        assert name == "CheckpointMismatchError"
        assert "patch(elastic=True) changes neither the world size nor the ZeRO stage" in message


def resumed_like_uninterrupted(out: str, stage: int, build: Any, **options: Any) -> Any:
    engine = engine_of(build(), stage, **options)
    train(engine, 1, alike=True)
    engine.save_checkpoint(out, tag="checkpoint")
    saved, losses = values(engine.module), train(engine, 2, alike=True)
    again = engine_of(build(), stage, **options)
    again.load_checkpoint(out, tag="checkpoint")
    different = differing(again.module, saved)
    return different, train(again, 2, alike=True) == losses


OF_DEEPSPEED = [pytest.param("deepspeed", *at, marks=needs_new) for at in ((0, 2), (2, 2), (3, 2), (3, 4))]


@pytest.mark.parametrize(("by", "stage", "size"), [("program", 1, 2), ("program", 3, 2), *OF_DEEPSPEED])
def test_sequence_parallel_engines_are_served(ranks: Any, tmp_path: Path, by: str, stage: int, size: int) -> None:
    """Of four ranks, in two groups, DeepSpeed counts all as the world size."""
    assert ranks(size, sequence_run, out=str(tmp_path), stage=stage, by=by, alone=True) == [([], True)] * size
    assert left_out_of(tmp_path / "checkpoint")
    if (by, stage) != ("program", 3):  # there DeepSpeed divides parameters and optimizer over different ranks
        assert not ds_frozen_patch.verify(tmp_path, "checkpoint").problems
    if by == "deepspeed":
        assert json.loads((tmp_path / "checkpoint" / "ds_frozen_patch.json").read_text())["world_size"] == size


def without_lora(is_frozen: bool, heads: int = 2) -> Any:
    """A model for tensor parallelism, of which DeepSpeed trains no LoRA: nothing is frozen, or all but the MLPs."""
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(training.llama_config(64 * heads, 64, layers=2, vocabulary=VOCABULARY, tied=True))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen or ".mlp." in name)
    return model


def tensor_parallel_run(out: str, stage: int, is_frozen: bool) -> Any:
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    result = resumed_like_uninterrupted(out, stage, partial(without_lora, is_frozen), config=TENSOR_PARALLEL)
    other = without_lora(is_frozen)
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight[-1, -1] += 1  # in the shard of rank 1
    load = engine_of(other, stage, config=TENSOR_PARALLEL).load_checkpoint
    return *result, runs.outcome(load, out, tag="checkpoint")


@needs_new
@pytest.mark.parametrize(
    ("stage", "world_size", "is_frozen"), [(0, 2, True), (1, 2, False), (1, 4, True), (2, 2, True), (2, 4, True)]
)
def test_tensor_parallel_engines_are_served(
    ranks: Any, tmp_path: Path, world_size: int, is_frozen: bool, stage: int
) -> None:
    for different, is_same, error in ranks(
        world_size, tensor_parallel_run, out=str(tmp_path), stage=stage, is_frozen=is_frozen, alone=True
    ):
        assert not different
        assert is_same
        assert error[0] == ("CheckpointMismatchError" if is_frozen else "")
        assert ("layers.1.self_attn.v_proj" in error[1]) == is_frozen
    states = [torch.load(file, weights_only=False) for file in (tmp_path / "checkpoint").glob("mp_*_model_states.pt")]
    assert len(states) == 2
    for state in states:
        assert ("model.layers.1.self_attn.v_proj.weight" in state["module"]) != is_frozen
        # DeepSpeed's own, where it has one, or none: ours would say that nothing is divided.
        assert state.get("universal_checkpoint_info") != {"universal_checkpoint_version": 0.2}


class Sharded(torch.nn.Module):
    """A LoRA layer of DeepSpeed's, whose frozen weight is divided among the ranks."""

    def __init__(self) -> None:
        from deepspeed.linear import LoRAConfig as Config
        from deepspeed.linear import OptimizedLinear

        super().__init__()
        torch.manual_seed(1)
        lora = Config(lora_r=2, lora_alpha=2, base_weight_sharding=2)
        self.inner = OptimizedLinear(64, 64, lora_config=lora, dtype=torch.float32, device="cpu")
        self.inner.init_lora()

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return SimpleNamespace(loss=self.inner(input_ids.float().repeat(1, 8)).square().mean())


def passed_on(out: str, kind: str) -> Any:
    """A save and a load by an owner who does not call `serve()`, and what `serve()` raises."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)

    def serve(engine: Any) -> None:
        ds_frozen_patch.patch()
        begin_serving(engine, owner_of(engine))

    uneven = {"build": partial(without_lora, True, heads=1), "config": TENSOR_PARALLEL}
    options: dict[str, Any] = {"build": Sharded} if kind == "sharded" else uneven
    with runs.heard() as messages:
        if kind == "sharded":  # DeepSpeed cannot load it, plain or not: the shards of other ranks are in no checkpoint
            engine_of(Sharded(), 2, by=serve).save_checkpoint(out, tag="checkpoint")
            result: Any = ([], True)
        else:
            result = resumed_like_uninterrupted(out, 2, **options, by=serve)
    with pytest.raises(ds_frozen_patch.PatchError) as raised:
        engine_of(options["build"](), 2, options.get("config"))
    return *result, messages, str(raised.value)


def pipeline_run(out: str) -> Any:
    """Save and load two stages of a pipeline, by an owner who does not call `serve()`."""
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    ds_frozen_patch.patch()
    engines = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(8, 8).requires_grad_(number % 2 > 0) for number in range(4)]
        module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss())
        adam = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1)
        settings = runs.config(0) | {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 1}
        engine = deepspeed.initialize(model=module, config=settings, optimizer=adam)[0]
        begin_serving(engine, owner_of(engine))
        engines.append(engine)
    engines[0].save_checkpoint(out, tag="checkpoint")
    engines[1].load_checkpoint(out, tag="checkpoint")
    with pytest.raises(ds_frozen_patch.PatchError) as raised:
        ds_frozen_patch.serve(engines[0])
    return differing(engines[1].module, values(engines[0].module)), str(raised.value)


def test_a_pipeline_is_passed_on(ranks: Any, tmp_path: Path) -> None:
    for different, error in ranks(2, pipeline_run, out=str(tmp_path), alone=True):
        assert not different
        assert "pipeline parallelism" in error
    layers = [torch.load(file) for file in (tmp_path / "checkpoint").glob("layer_*-model_states.pt")]
    assert [sorted(layer) for layer in layers] == [["bias", "weight"]] * 4


FROZEN = {"sharded": {"inner.weight"}, "uneven": {"model.norm.weight", "model.layers.0.self_attn.q_proj.weight"}}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("sharded", "deepspeed.linear with base_weight_sharding"),
        pytest.param("uneven", "tensor parallelism whose shards differ", marks=needs_new),
    ],
)
def test_other_engines_are_passed_on_whole(ranks: Any, tmp_path: Path, kind: str, named: str) -> None:
    first, second = ranks(2, passed_on, out=str(tmp_path), kind=kind, alone=True)
    assert [first[:2], second[:2]] == [([], True)] * 2
    warnings = [message for message in first[2] if "does not support" in message]
    assert len(warnings) == (1 if kind == "sharded" else 2)  # one for each engine
    assert named in warnings[0]
    assert named in first[3]
    for file in (tmp_path / "checkpoint").glob("*_states.pt"):
        state = torch.load(file, weights_only=False)
        assert not [key for key in state if key.startswith("ds_frozen_patch")]
        assert "module" not in state or state["module"].keys() >= FROZEN[kind]
    assert not (tmp_path / "checkpoint" / "ds_frozen_patch.json").exists()


def sequence_by_accelerate(out: str, stage: int, resume: bool) -> list[float]:
    """Save and train on, or resume, with sequence-parallel attention, which a process can set up once."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    ds_frozen_patch.patch()
    training.on_cpu_ranks()
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa", sp_seq_length_is_variable=True)
    parallel = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
    accelerator, model = accelerator_of(stage, batch=2, parallelism_config=parallel), plain_llama()
    engine = accelerator.prepare(model, adam_of(model))[0]
    if resume:
        accelerator.load_state(out)
    else:
        train(engine, 1)
        accelerator.save_state(out)
    return train(engine, 2)


@needs_new
@pytest.mark.parametrize("stage", [0, 3])
def test_sequence_parallelism_of_accelerate(ranks: Any, tmp_path: Path, stage: int) -> None:
    losses = ranks(2, sequence_by_accelerate, out=str(tmp_path), stage=stage, resume=False, alone=True)
    assert ranks(2, sequence_by_accelerate, out=str(tmp_path), stage=stage, resume=True, alone=True) == losses
    assert left_out_of(tmp_path)


def on_unknown_ranks(out: str) -> Any:
    """Accelerate takes each rank for the only one, as it does with CPU ranks of torch's launcher."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    ds_frozen_patch.patch()
    accelerator, model = accelerator_of(2), plain_llama()
    engine = accelerator.prepare(model, adam_of(model))[0]
    train(engine, 1)
    engine.save_checkpoint(out, tag="checkpoint")
    return accelerator.process_index, attached(engine) is not None


def test_ranks_that_accelerate_does_not_know(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, on_unknown_ranks, out=str(tmp_path), alone=True) == [(0, True)] * 2
    assert left_out_of(tmp_path / "checkpoint")


def experts_by_accelerate(out: str) -> Any:
    ds_frozen_patch.patch()

    def accelerated() -> tuple[Any, Any]:
        training.on_cpu_ranks()
        accelerator, model = accelerator_of(2), like_mixtral(2, train_experts=False)
        return accelerator, accelerator.prepare(model, adam_of(model))[0]

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    accelerator, engine = accelerated()
    train(engine, 1)
    accelerator.save_state(out)
    saved, losses = values(engine.module), train(engine, 2)
    accelerator, engine = accelerated()
    accelerator.load_state(out)
    return differing(engine.module, saved), train(engine, 2) == losses


class ExpertsOfLightning(pl.LightningModule):
    """The same by Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = like_mixtral(2, train_experts=False)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return adam_of(self)


def experts_by_lightning(out: str) -> Any:
    ds_frozen_patch.patch()
    tokens = torch.randint(VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(0))
    batches: Any = torch.utils.data.DataLoader(tokens, batch_size=2)  # type: ignore[arg-type]
    modules = [ExpertsOfLightning(), ExpertsOfLightning()]
    runs.trainer(out, 2, 2, precision="32-true").fit(modules[0], batches)
    runs.trainer(f"{out}/again", 2, 2, precision="32-true").fit(modules[1], batches, ckpt_path=f"{out}/epoch=0.ckpt")
    losses = modules[0].losses[-len(modules[1].losses) :]
    return differing(modules[1], values(modules[0])), modules[1].losses == losses


@pytest.mark.parametrize("run", [experts_by_accelerate, experts_by_lightning])
def test_frozen_experts_of_other_owners(ranks: Any, tmp_path: Path, run: Any) -> None:
    assert ranks(2, run, out=str(tmp_path), alone=True) == [([], True)] * 2
    files = list(tmp_path.rglob("layer_*_expert_*.pt"))
    assert len(files) >= 8
    for file in files:
        assert [name.rpartition(".")[2] for name in torch.load(file)] == ["scale"]


class WritesLater(TorchCheckpointEngine):  # type: ignore[misc]
    """Writes in the next step, as DeepSpeed's own engines do that write in the background."""

    def __init__(self) -> None:
        super().__init__()
        self.info: Any = None
        self.files: dict[str, bytes] = {}

    def is_decoupled(self) -> bool:
        return True

    def create(self, info: Any) -> None:
        self.info = info

    def get_commit_info(self) -> Any:
        return self.info

    def save(self, state_dict: Any, path: str) -> None:
        content = io.BytesIO()
        torch.save(state_dict, content)
        self.files[path] = content.getvalue()

    def commit(self, info: Any) -> bool:
        for path, content in self.files.items():
            Path(path).write_bytes(content)
        self.info, self.files = None, {}
        return True


def save_later(out: str, export: str, name: str) -> Any:
    with owners.served(export=export), runs.heard() as heard:
        run = owners.Run("deepspeed", out, 2, 2)
        run.engine.checkpoint_engine = WritesLater()
        run.save(run.at(0))
        earlier = run.at(1) / name
        earlier.parent.mkdir(parents=True, exist_ok=True)
        earlier.touch()
        run.save(run.at(1), 1)
        saved, before = values(run.module), {file.name for file in run.at(1).rglob("*") if file.is_file()}
        run.train_epoch()
        again = owners.Run("deepspeed", out, 2, 2, seed=1)
        again.load(run.at(1))
        written = {file.name for file in run.at(1).iterdir()}
        run.save(run.at(1), 1)
        kept = {file.name for file in run.at(1).iterdir()}
        said = runs.refusal(owners.Run("deepspeed", out, 2, 2, seed=7).load, run.at(1))[1]
    return differing(again.module, saved), before, kept == written and "The base is not the one" in said, heard


@pytest.mark.short
@pytest.mark.parametrize(
    ("export", "name"), [("safetensors", "trainable.safetensors"), ("peft", "adapter/adapter_model.safetensors")]
)
def test_a_checkpoint_engine_that_writes_later(ranks: Any, tmp_path: Path, export: str, name: str) -> None:
    """It exports nothing, and removes what an earlier save has exported there."""
    first, second = ranks(2, save_later, out=str(tmp_path), export=export, name=name)
    for different, before, is_kept, heard in (first, second):
        assert not different
        assert before == set()
        assert is_kept
        said = [message for message in heard if "WritesLater writes after a save has returned" in message]
        assert len(said) == (heard is first[3])
        skipped = [message for message in heard if f"patch(export={export!r}) has no effect" in message]
        assert len(skipped) == (heard is first[3]), heard
    assert (tmp_path / "latest").read_text() == "epoch1"
    assert not (tmp_path / "epoch1" / "ds_frozen_patch.json").exists()  # it is in the files, which it cannot describe
    (file,) = owners.model_files(tmp_path / "epoch1")
    assert carried(torch.load(file, weights_only=False), file).names


def state_by_the_program(out: str) -> Any:
    with owners.served():
        run, other = (owners.Run("deepspeed", out, 2, 2, seed=seed) for seed in (1, 2))
        state = run.engine.module_state_dict()
        other.engine.load_module_state_dict({"module": state})
    return differing(other.module, values(run.module)), sorted(state) == sorted(run.module.state_dict())


@pytest.mark.short
def test_a_program_that_takes_and_loads_the_state_itself(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, state_by_the_program, out=str(tmp_path)) == [([], True)] * 2
