"""Promise 16: a 4-bit or 8-bit base is left out completely, resumes strictly, and is verified completely."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import quantized, runs, stages
from kit.cell import TRAINER
from kit.checkpoints import model_states, size
from kit.quantized import AVAILABLE, DAMAGES, QuantizedRun

import ds_frozen_patch
from ds_frozen_patch import CheckpointError, reshard

pytestmark = [pytest.mark.promise(16), pytest.mark.quantized]

BASES = [kind for kind in AVAILABLE if kind != "bf16"]
FIRST = ("nf4-double", "int8", "hqq", "quanto-int4", "torchao-int8", "gptq")  # what CI runs; `-s quantized` runs all
MARKS = {kind: () if kind in FIRST else (pytest.mark.everyday,) for kind in BASES}
MARKS["gptq"] = (pytest.mark.short,)  # it needs no library
STAGES = [
    *(pytest.param(kind, 2, marks=MARKS[kind]) for kind in BASES),
    *((kind, stage) for kind in BASES if kind == "nf4-double" for stage in (0, 1)),
    # It partitions floating dtypes alone.
    *(pytest.param(kind, 3, marks=MARKS[kind]) for kind in BASES if kind in ("nf4-in-bf16", "gptq", "awq")),
]


def trainer(out: str, stage: int, **options: Any) -> Any:
    return runs.trainer(out, 2, stage, precision="bf16-true", **options)


def trained(module: torch.nn.Module) -> dict[str, str]:
    return {name: runs.digest(p) for name, p in module.named_parameters() if p.requires_grad} | {
        "seen": runs.digest(module.seen)  # type: ignore[arg-type]
    }


def a_life(out: str, kind: str, stage: int) -> dict[str, Any]:
    """Train, resume, test and save in other ways, all from one base."""
    ds_frozen_patch.patch()
    found: dict[str, Any] = {}
    data = runs.batches(2)
    with quantized.without_broadcast(), runs.heard() as found["heard"]:
        whole = trainer(out, stage)
        module = QuantizedRun(kind)
        whole.fit(module, data)
        whole.save_checkpoint(f"{out}/weights.ckpt", weights_only=True)
        with ds_frozen_patch.full_checkpoint():
            whole.save_checkpoint(f"{out}/full.ckpt")
        found["whole"] = module.losses[runs.BATCHES :], trained(module)
        found["tested"] = whole.test(module, data, verbose=False)
        resumed, module = trainer(f"{out}/again", stage), QuantizedRun(kind)
        resumed.fit(module, data, ckpt_path=f"{out}/epoch=0.ckpt")
        found["resumed"] = module.losses, trained(module)
        for name in ("epoch=1.ckpt", "full.ckpt", "weights.ckpt"):
            again = trainer(f"{out}/again", stage)
            found[name] = again.test(QuantizedRun(kind), data, ckpt_path=f"{out}/{name}", verbose=False)
    module.cpu()  # no reference of ours keeps a tensor from being moved
    return found


@pytest.fixture(scope="module")
def control(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], int]:
    """The size of a checkpoint over a base in bf16, by ZeRO stage."""

    @cache
    def saved(stage: int) -> int:
        out = tmp_path_factory.mktemp(f"bf16-{stage}")
        ranks(2, a_life, out=str(out), kind="bf16", stage=stage)
        return size(out / "epoch=0.ckpt")

    return saved


@pytest.mark.parametrize(("kind", "stage"), STAGES)
def test_train_resume_and_test(
    ranks: Any, tmp_path: Path, control: Callable[[int], int], record_property: Any, kind: str, stage: int
) -> None:
    for found in ranks(2, a_life, alone=quantized.alone(kind), out=str(tmp_path), kind=kind, stage=stage):
        assert found["resumed"] == found["whole"]
        assert found["epoch=1.ckpt"] == found["full.ckpt"] == found["weights.ckpt"] == found["tested"]
        assert not [message for message in found["heard"] if "ds_frozen_patch" in message and "WARN" in message]
    saved_bytes = size(tmp_path / "epoch=0.ckpt")
    assert saved_bytes <= 1.02 * control(stage) + 24 * 1024
    rows = {"kind": kind, "stage": stage, "bytes": saved_bytes, "control": control(stage)}
    for name, value in (rows | {"full": size(tmp_path / "full.ckpt")}).items():
        record_property(name, value)
    for saved in model_states(tmp_path / "epoch=0.ckpt"):
        assert all("lora_" in name or name == "seen" for name in saved["module"])


def refusals(out: str, kind: str, stage: int) -> dict[str, tuple[str, str]]:
    """Return the error of a load onto each wrong base; the adapters do not matter."""
    ds_frozen_patch.patch()
    data = runs.batches(2)
    found = {}
    with quantized.without_broadcast():
        trainer(out, stage, epochs=1).fit(QuantizedRun(kind), data)
        damages = [*DAMAGES[kind], ("another seed", None)]
        for name, damage in damages:
            module = QuantizedRun(kind, seed=1 if damage else 2)
            if damage:
                damage(module)
            again = trainer(f"{out}/again", stage)
            try:
                found[name] = runs.refusal(again.test, module, data, ckpt_path=f"{out}/epoch=0.ckpt", verbose=False)
            except AssertionError:
                found[name] = "", "accepted"
        again = trainer(f"{out}/again", stage)
        said = runs.refusal(again.test, QuantizedRun("bf16"), data, ckpt_path=f"{out}/epoch=0.ckpt", verbose=False)
        found["not quantized"] = said
    return found


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS[kind]) for kind in BASES])
def test_another_base_is_refused_by_name(ranks: Any, tmp_path: Path, record_property: Any, kind: str) -> None:
    stage = 3 if kind == "nf4-in-bf16" else 2
    for found in ranks(2, refusals, alone=quantized.alone(kind), out=str(tmp_path), kind=kind, stage=stage):
        assert len(found) >= 3
        assert {damage: error for damage, (error, _) in found.items()} == dict.fromkeys(
            found, "CheckpointMismatchError"
        )
        elsewhere = found.pop("not quantized")[1]
        assert "layers.0." in elsewhere
        assert all("layers.0.self_attn.q_proj" in text for _, text in found.values())
    record_property("kind", kind)
    record_property("refused", ", ".join(name for name in found))


@pytest.mark.everyday  # with the newest libraries alone: older transformers want a GPU for this
def test_the_program_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of `docs/guides/quantized.md`, on a small base in a folder of the name that it has on the hub."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "quantized.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(import ds_frozen_patch\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block
    runs.LoraRun().model.unload().save_pretrained(tmp_path / "meta-llama" / "Llama-3.1-8B")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    try:
        exec(block[1], names)
        assert ds_frozen_patch.status()[TRAINER].state == "wrapped"
    finally:
        ds_frozen_patch.unpatch()
    parameters = dict(names["model"].named_parameters())
    assert {type(p).__name__ for name, p in parameters.items() if "q_proj.base_layer" in name} == {"Params4bit"}
    assert all(p.requires_grad == ("lora_" in name) for name, p in parameters.items())


class Optimizer8(runs.LoraRun):
    """Over a base in bf16; the optimizer keeps its moments in 8 bits."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self.library = library

    def configure_optimizers(self) -> Any:
        optim = importlib.import_module(f"{self.library}.optim")
        size = {"min_8bit_size": 16} if self.library == "bitsandbytes" else {"block_size": 16}
        return optim.AdamW8bit([p for p in self.parameters() if p.requires_grad], lr=1e-2, **size)


def with_8_bits(out: str, library: str, stage: int) -> Any:
    ds_frozen_patch.patch()
    modules = [Optimizer8(library), Optimizer8(library)]
    trainer(out, stage).fit(modules[0], runs.batches(2))
    trainer(f"{out}/again", stage).fit(modules[1], runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")
    return modules[1].losses == modules[0].losses[runs.BATCHES :], trained(modules[1]) == trained(modules[0])


def test_optimizers_with_8_bits_in_other_stages(ranks: Any, tmp_path: Path) -> None:
    """Where every parameter and shard begins with a block, which has one scale; otherwise the masters alone go on."""
    pytest.importorskip("bitsandbytes.optim")
    options: dict[str, Any] = {"optimizer": "AdamW8bit", "sub_group_size": 10**9}
    outs = {stage: tmp_path / f"{stage}" for stage in range(4)}
    saved = [ranks(2, stages.train_and_save, out=str(out), stage=stage, **options)[0] for stage, out in outs.items()]
    paths = [str(out / kind) for out in outs.values() for kind in ("small", "full")]
    for number, stage in ((4, 2), (4, 3), (1, 1), (2, 0)):
        found = ranks(number, stages.resume_from, paths=paths, stage=stage, **options)[0]
        expected = [run for run in saved for _ in ("small", "full")]
        for path, (state, losses, _), (there, continued) in zip(paths, found, expected, strict=True):
            assert {"state1", "absmax1", "qmap2"} <= next(iter(state.values())).keys()
            assert stages.difference(state, there) == 0, (path, number, stage)
            assert stages.apart(losses, continued) <= 1e-3, (path, number, stage)
    ranks(3, stages.train_and_save, out=str(tmp_path / "of 3"), stage=2, **options)
    for source, stage, number in ((paths[2], 2, 3), (paths[2], 3, 3), (str(tmp_path / "of 3" / "small"), 2, 1)):
        with pytest.raises(CheckpointError, match=r"each 256 elements, and a parameter or a shard, .*restart"):
            reshard(source, tmp_path / "out", stage=stage, ranks=number)
    assert reshard(paths[2], tmp_path / "out", ranks=3, restart_optimizer=True).ranks == 3


def save_with_torchao(out: str, stage: int) -> None:
    ds_frozen_patch.patch()
    engine = stages.begin(stage, optimizer="AdamW8bit of torchao")
    stages.go_on(engine, 1)
    engine.save_checkpoint(out, tag="a")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_blocks_in_subclasses_need_a_fresh_optimizer(ranks: Any, tmp_path: Path, stage: int) -> None:
    """What holds more than one value for all elements is not copied to every shard."""
    pytest.importorskip("torchao.optim")
    ranks(1, save_with_torchao, out=str(tmp_path / "small"), stage=stage, alone=True)
    with pytest.raises(
        CheckpointError,
        match=r"how 'exp_avg' in the optimizer's state corresponds to the \d+ weights is unknown.*restart",
    ):
        reshard(tmp_path / "small", tmp_path / "out", ranks=2, stage=stage or 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_optimizers_with_8_bits(ranks: Any, tmp_path: Path, library: str, stage: int) -> None:
    """In processes of their own: torchao's optimizers change what its quantized weights can do."""
    pytest.importorskip(f"{library}.optim")
    assert ranks(2, with_8_bits, out=str(tmp_path), library=library, stage=stage, alone=True) == [(True, True)] * 2
