"""Runs of engines that nobody owns, which go on from one another: in other ZeRO stages, precisions and world sizes.

A run always takes the same samples in a step, and each model has parameters whose sizes nothing divides. What an engine
holds is read from its own attributes, not by the package. Everything here runs inside a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

import ds_frozen_patch
from kit import runs
from kit.cell import CELL

SAMPLES = 24  # in each step
STEPS = 3  # before the save
NEXT = 5  # after it
NAMES = ("first", "second", "scale", "odd", "last")  # of what is trained, if a test does not say

trains_in_half = pytest.mark.skipif(
    (0, 14) <= CELL.releases[1].release < (0, 17), reason="this DeepSpeed cannot train in bf16 in stage 0"
)

State = dict[str, dict[str, torch.Tensor]]
"""The master of each trained parameter and the optimizer's state of it, by name."""


class Net(torch.nn.Module):
    """A frozen base, trained parameters of sizes that nothing divides, and a buffer."""

    seen: Any

    def __init__(
        self, seed: int = 1, names: tuple[str, ...] = NAMES, adapters: tuple[str, ...] = (), strided: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(6, 7)
        self.first = torch.nn.Linear(7, 5)
        self.second = torch.nn.Linear(5, 7, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.odd = torch.nn.Parameter(torch.arange(35.0).reshape(5, 7) / 35)
        self.last = torch.nn.Linear(7, 3)
        torch.manual_seed(9)  # whatever the base
        self.adapters = torch.nn.ModuleDict({name: torch.nn.Linear(7, 7, bias=False) for name in adapters})
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in names)
            if strided and parameter.ndim == 2:  # as `channels_last` has them
                parameter.data = parameter.data.t().contiguous().t()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = torch.tanh(self.base(batch))
        hidden = hidden + self.second(torch.tanh(self.first(hidden))) * self.scale
        hidden = torch.tanh(hidden @ self.odd.t() @ self.odd)
        for adapter in self.adapters.values():
            hidden = hidden + torch.tanh(adapter(hidden))
        loss: torch.Tensor = self.last(hidden).float().square().mean()
        return loss


class Blocks(Net):
    """Parameters of 16 and 12 blocks of 256 elements, which is what 8-bit optimizers have one scale for."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed, names=())
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(6, 64).requires_grad_(False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, size, bias=False) for size in (64, 64, 48))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.base(batch)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        loss: torch.Tensor = hidden.float().square().mean()
        return loss


class Lion(torch.optim.Optimizer):
    """As published: one moment, and the sign of a mixture as the step."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                kept = self.state[parameter]
                if not kept:
                    kept["exp_avg"] = torch.zeros_like(parameter)
                moment, gradient = kept["exp_avg"], parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_((0.9 * moment + 0.1 * gradient).sign_(), alpha=-group["lr"])
                moment.mul_(0.99).add_(gradient, alpha=0.01)


def muon(groups: Any) -> Any:
    """Muon for matrices, and its AdamW for the rest; the parameters say so too."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    trained = [parameter for group in groups for parameter in group["params"]]
    for parameter in trained:
        parameter.use_muon = parameter.ndim == 2
    parts = {uses: [parameter for parameter in trained if parameter.use_muon == uses] for uses in (True, False)}
    return MuonWithAuxAdam([{"params": part, "use_muon": uses} for uses, part in parts.items()])


def imported(module: str, name: str, **options: Any) -> Callable[[Any], Any]:
    """An optimizer of a library that is imported only where it is used."""
    return lambda groups: getattr(import_module(module), name)(groups, **options)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "Lion": Lion,
    "Muon": muon,
    "FusedAdam": imported("deepspeed.ops.adam", "FusedAdam"),
    "DeepSpeedCPUAdam": imported("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    "AdamW8bit": imported("bitsandbytes.optim", "AdamW8bit", min_8bit_size=16),
    "AdamW8bit of torchao": imported("torchao.optim", "AdamW8bit", block_size=16),
}


def begin(
    stage: int,
    precision: str = "fp32",
    optimizer: str = "AdamW",
    round_robin: bool = False,
    sub_group_size: int = 20,
    number: int = 2,
    lr: float = 1e-2,
    accumulates: str | None = None,
    aligned: bool = False,
    scheduled: bool = False,
    peft: bool = False,
    **model: Any,
) -> Any:
    """An engine that is served, with parameter groups of different settings."""
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    module: Any = Blocks(**model) if optimizer.startswith("AdamW8bit") else Net(**model)
    if peft:
        module = get_peft_model(module, LoraConfig(r=2, target_modules=["first", "last"]))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [{"params": trained[::number], "lr": lr}]
    groups += [{"params": trained[index::number], "lr": 1e-3, "weight_decay": 0.1} for index in range(1, number)]
    if optimizer == "Adagrad":
        groups = [{"params": trained, "lr": 1e-2}]  # of several, DeepSpeed makes one, and fails
    zero: dict[str, Any] = {"round_robin_gradients": round_robin, **({"parameter_alignment": True} if aligned else {})}
    if stage == 3:
        zero = {"stage3_param_persistence_threshold": 0, "sub_group_size": sub_group_size}
    config = {
        **runs.config(stage, **zero),
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "gradient_clipping": 0.0,
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        **({"data_types": {"grad_accum_dtype": accumulates}} if accumulates else {}),
    }
    made = OPTIMIZERS[optimizer](groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, [lambda step: 1 / (1 + step)] * number) if scheduled else None
    engine = deepspeed.initialize(model=module, optimizer=made, lr_scheduler=scheduler, config=config)[0]
    ds_frozen_patch.serve(engine)
    return engine


def go_on(engine: Any, steps: int) -> list[float]:
    """Train; return the loss of each step over all ranks' samples."""
    losses = []
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_steps)
        batch = torch.randn(SAMPLES, 6, generator=generator).chunk(dist.get_world_size())[dist.get_rank()]
        loss = engine(batch.to(dtype))
        engine.backward(loss)
        engine.step()
        if hasattr(engine.optimizer, "fp32_groups"):  # in bf16 in stage 0, DeepSpeed 0.17 keeps and sums up gradients
            engine.optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def put(engine: Any, values: Mapping[str, torch.Tensor], state: State) -> None:
    """Set the parameters of an engine in stage 0 in fp32, and the optimizer's state of those that it trains."""
    for name, parameter in engine.module.named_parameters():
        parameter.data.copy_(values.get(name, parameter.data))
        if name in state and parameter.requires_grad:
            kept = {key: value.clone() for key, value in state[name].items() if key != "master"}
            engine.optimizer.state[parameter] = kept


def state_of(engine: Any) -> State:
    """What the engine's optimizer holds of each parameter; every rank must call it."""
    optimizer, names = engine.optimizer, engine.param_names
    stage = engine.zero_optimization_stage()
    found: State = {}
    if hasattr(optimizer, "fp32_groups") or isinstance(optimizer, torch.optim.Optimizer):  # in stage 0
        inner = getattr(optimizer, "optimizer", optimizer)
        groups = getattr(optimizer, "fp16_groups", [group["params"] for group in inner.param_groups])
        for parameters, group in zip(groups, inner.param_groups, strict=True):
            states = [_tensors(inner.state[master]) for master in group["params"]]
            steps = [state["step"] for state in states if "step" in state]
            most = {"step": max(steps)} if steps else {}  # FusedAdam counts those of the last parameter alone
            for parameter, master, state in zip(parameters, group["params"], states, strict=True):
                found[names[parameter]] = {"master": master.detach().clone(), **state, **most}
        return found
    for index, (parameters, flat) in enumerate(zip(*_flat_groups(optimizer), strict=True)):
        # Since DeepSpeed 0.19.8 there may be gaps between the parameters.
        offsets = getattr(optimizer, "round_robin_bit16_offsets", {index: None})[index]
        parts = {"master": flat.detach(), **_tensors(optimizer.optimizer.state[flat])}
        for key, part in parts.items():
            if part.numel() != flat.numel() or key == "step":
                for parameter in parameters:
                    found.setdefault(names[parameter], {})[key] = part.clone()
                continue
            shards = [part]
            if not hasattr(optimizer, "fp32_groups_flat"):
                shards = [torch.empty_like(part) for _ in range(dist.get_world_size())]
                dist.all_gather(shards, part.contiguous())
            begin = 0
            for number, parameter in enumerate(parameters):
                if stage == 3:
                    size = parameter.ds_tensor.ds_numel
                    whole = torch.cat([shard[begin : begin + size] for shard in shards])[: parameter.ds_numel]
                    begin += size
                else:
                    begin = begin if offsets is None else offsets[number]
                    whole = torch.cat(shards)[begin : begin + parameter.numel()]
                    begin += parameter.numel()
                shape = parameter.ds_shape if stage == 3 else parameter.shape
                found.setdefault(names[parameter], {})[key] = whole.view(shape).clone()
    return found


def _flat_groups(optimizer: Any) -> tuple[Any, Any]:
    """The parameters of each flat tensor, and the flat masters; in ZeRO this rank's shards of them."""
    for groups, flats in (
        ("fp16_groups", "fp32_partitioned_groups_flat"),
        ("round_robin_bit16_groups", "single_partition_of_fp32_groups"),
        ("bf16_groups", "fp32_groups_flat_partition"),  # DeepSpeed's BF16_Optimizer, in stage 0 and 1
        ("fp16_groups", "fp32_groups_flat"),  # its FP16_Optimizer, in stage 0 with FusedAdam
    ):
        if hasattr(optimizer, flats):
            return getattr(optimizer, groups), getattr(optimizer, flats)
    raise AssertionError(type(optimizer))


def _tensors(state: Any) -> dict[str, torch.Tensor]:
    kept = {key: torch.as_tensor(value).detach().clone() for key, value in state.items() if value is not None}
    for key in kept.keys() & {"absmax1", "absmax2"}:  # each is the scale of a block of elements
        like = kept["state1"]
        kept[key] = kept[key].repeat_interleave(256)[: like.numel()].view_as(like)
    return kept


def train_and_save(out: str, stage: int, **options: Any) -> tuple[State, list[float]]:
    """Train, save both ways, and train on; return what the engine held at the save, and the losses after it."""
    ds_frozen_patch.patch()
    engine = begin(stage, **options)
    go_on(engine, STEPS)
    engine.save_checkpoint(f"{out}/small", tag="a")
    with ds_frozen_patch.full_checkpoint():
        engine.save_checkpoint(f"{out}/full", tag="a")
    state = state_of(engine)
    return state, go_on(engine, NEXT)


def resume_from(
    paths: list[str], stage: int, elastic: bool | None = True, restart: bool = False, seed: int = 1, **options: Any
) -> list[tuple[State, list[float], int]]:
    """Go on from each checkpoint; return what the engine holds after the load, its losses, and its buffer.

    With another `seed`, the engine is built on another base, which a full checkpoint replaces.
    """
    ds_frozen_patch.patch(elastic=elastic, restart_optimizer=restart)
    found = []
    for path in paths:
        engine = begin(stage, seed=seed, **options)
        loaded, _ = engine.load_checkpoint(path)
        assert loaded.startswith(path), loaded
        state = state_of(engine)
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                assert name not in state or torch.equal(parameter, state[name]["master"].to(parameter.dtype)), name
        found.append((state, go_on(engine, NEXT), int(engine.module.seen)))
    return found


def refusal_of(path: str, stage: int, elastic: bool | None = None, **options: Any) -> tuple[str, str]:
    """What a load raises."""
    ds_frozen_patch.patch(elastic=elastic)
    return runs.refusal(begin(stage, **options).load_checkpoint, path)


def difference(one: State, other: State) -> float:
    """The largest difference of any value; the same names and keys must be there."""
    assert one.keys() == other.keys()
    largest = 0.0
    for name, values in one.items():
        assert values.keys() == other[name].keys(), name
        for key, value in values.items():
            assert value.shape == other[name][key].shape, (name, key)
            apart = (value.double() - other[name][key].double()).abs().max().item()
            assert apart == apart, (name, key)
            largest = max(largest, apart)
    return largest


def apart(losses: list[float], others: list[float]) -> float:
    """The largest relative difference of two runs' losses."""
    assert len(losses) == len(others)
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))
