"""The tools on checkpoints over quantized bases: what they count, leave out, verify, merge and export."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import quantized, runs
from kit.checkpoints import assert_pruned, changed, loaded, raw, record_in, snapshot
from kit.quantized import AVAILABLE, KINDS, QuantizedRun
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoModelForCausalLM

import ds_frozen_patch
from ds_frozen_patch import CheckpointError, consolidate, export, inspect, load_trainable, merge, prune, verify
from ds_frozen_patch.cli import main
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.record import KEY, LeftOut

pytestmark = [pytest.mark.promise(16), pytest.mark.quantized]

BASES = [kind for kind in AVAILABLE if kind != "bf16"]
OF_SUBCLASSES = [kind for kind in BASES if kind.startswith(("quanto", "torchao"))]
OF_TORCHAO = [kind for kind in BASES if kind.startswith("torchao")]
UNQUANTIZED = ["nf4", "nf4-double", "nf4-in-bf16", "int8"]
SHORT = {"gptq": pytest.mark.short}  # it needs no library
SAVED = [
    *(pytest.param(kind, 2, marks=SHORT.get(kind, ())) for kind in BASES),
    ("nf4", 1),
    ("hqq", 1),
    ("gptq", 1),
    ("quanto-int8", 1),
    ("nf4-in-bf16", 3),
]
LAYER = "model.layers.0.self_attn.q_proj"
ENTRIES = {
    "nf4": ["weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"],
    "nf4-double": ["weight", "weight.absmax", "weight.nested_absmax", "weight.nested_quant_map"],
    "int8": ["weight", "SCB"],
    "hqq": ["W_q", "scale", "zero", "group_size"],
    "quanto-int8": ["weight._data", "weight._scale"],
    "quanto-int4": ["weight._data._data", "weight._scale", "weight._shift"],
    "torchao-intx": ["weight.qdata", "weight.scale", "weight.zero_point"],
    "gptq": ["qweight", "qzeros", "scales", "g_idx"],
    "awq": ["qweight", "qzeros", "scales"],
}
"""Of each kind, what a base folder has of one layer: the packed weight, and what says what it means."""


def save(out: str, kind: str, stage: int) -> None:
    """Save checkpoints of the same state, the adapter that PEFT saves for it, and folders of the base."""
    ds_frozen_patch.patch(export="safetensors")
    with quantized.without_broadcast():
        trainer = runs.trainer(out, 2, stage, precision="bf16-true", epochs=1, enable_checkpointing=False)
        module = QuantizedRun(kind)
        trainer.fit(module, runs.batches(2))
        trainer.save_checkpoint(f"{out}/small.ckpt")
        with ds_frozen_patch.full_checkpoint():
            trainer.save_checkpoint(f"{out}/full.ckpt")
    if trainer.is_global_zero and stage < 3:
        module.model.save_pretrained(f"{out}/adapter")


def save_base(folder: Path, kind: str) -> None:
    """Save a quantized model's folder: a safetensors file, or for torchao's tensors one of torch.save."""
    folder.mkdir()
    state = {name: tensor for name, tensor in KINDS[kind](1).state_dict().items() if name != "lm_head.weight"}
    if any(map(is_traceable_wrapper_subclass, state.values())):
        torch.save(state, folder / "pytorch_model.bin")
    else:
        plain = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        save_file(plain, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="session")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`saved(kind, stage)`: a folder with `small.ckpt`, `full.ckpt` and `adapter`, made once."""
    made: dict[tuple[str, int], Path] = {}

    def make(kind: str, stage: int = 2) -> Path:
        if (kind, stage) not in made:
            out = tmp_path_factory.mktemp(f"{kind}-{stage}")
            ranks(2, save, out=str(out), kind=kind, stage=stage)
            made[kind, stage] = out
        return made[kind, stage]

    return make


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folders(kind)`: the folder of the quantized model; for kind "bf16" that of the original."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("bases") / kind
            save_base(made[kind], kind)
        return made[kind]

    return make


def entries(left_out: tuple[LeftOut, ...]) -> dict[str, LeftOut]:
    return {one.name: one for one in left_out}


def model_states(path: Path) -> Path:
    return min((path / "checkpoint").glob("*model_states.pt"))


@pytest.mark.parametrize(("kind", "stage"), SAVED)
def test_prune_equals_a_trainable_only_save(saved: Callable[..., Path], tmp_path: Path, kind: str, stage: int) -> None:
    out = saved(kind, stage)
    shutil.copytree(out / "small.ckpt", tmp_path / "small.ckpt", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(out / "full.ckpt", tmp_path / "full.ckpt", ignore=shutil.ignore_patterns("*.safetensors"))
    before = snapshot(out / "full.ckpt")
    done = prune(tmp_path / "full.ckpt", tmp_path / "pruned.ckpt")
    assert snapshot(out / "full.ckpt") == before
    if kind not in OF_SUBCLASSES:
        assert_pruned(tmp_path / "pruned.ckpt", tmp_path / "small.ckpt")
        return
    pruned, small = loaded(model_states(tmp_path / "pruned.ckpt")), loaded(model_states(out / "small.ckpt"))
    assert list(pruned["module"]) == list(small["module"])
    ours, theirs = entries(done.record.left_out), entries(record_in(out / "small.ckpt").left_out)
    assert done.record.total_bytes == record_in(out / "small.ckpt").total_bytes
    # ZeRO-1 does not list frozen parameters, and quanto's state dicts have only the tensors that they consist of.
    unknown = {name for name, one in theirs.items() if not hasattr(torch, one.dtype)}
    assert ours.keys() | unknown == theirs.keys()
    assert stage == 1 or ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert one == (replace(theirs[name], fingerprint=None) if name in unknown else theirs[name])


def go_on(path: str, out: str, kind: str, stage: int) -> tuple[list[float], dict[str, str]]:
    ds_frozen_patch.patch()
    with quantized.without_broadcast():
        trainer = runs.trainer(out, 2, stage, precision="bf16-true", enable_checkpointing=False)
        module = QuantizedRun(kind)
        trainer.fit(module, runs.batches(2), ckpt_path=path)
    trained = {name: runs.digest(p) for name, p in module.named_parameters() if p.requires_grad and stage < 3}
    return module.losses, {**trained, "seen": runs.digest(module.seen)}


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *(("nf4", 2), ("nf4-in-bf16", 3), ("int8", 2), ("hqq", 1), ("gptq", 2)),
        *(("quanto-int8", 1), ("quanto-int4", 1), ("quanto-int4", 2), ("torchao-int8", 2)),
    ],
)
def test_a_pruned_checkpoint_resumes(
    saved: Callable[..., Path], ranks: Any, tmp_path: Path, kind: str, stage: int
) -> None:
    out = saved(kind, stage)
    prune(out / "full.ckpt", tmp_path / "pruned.ckpt")
    found = []
    for path in (out / "small.ckpt", tmp_path / "pruned.ckpt"):
        options = {"out": str(tmp_path / "run"), "kind": kind, "stage": stage}
        found.append(ranks(2, go_on, alone=quantized.alone(kind), path=str(path), **options))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [kind for kind in BASES if kind not in OF_TORCHAO])
def test_leftover_entries_of_frozen_weights(saved: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """As DeepSpeed saves it by its own flag."""
    out = saved(kind)
    shutil.copytree(out / "small.ckpt", tmp_path / "old.ckpt")
    everything = loaded(model_states(out / "full.ckpt"))
    parameters = {*everything["frozen_param_shapes"], *everything["shared_params"]}

    def make_old(state: dict[str, Any]) -> None:
        state["module"] = {name: item for name, item in everything["module"].items() if name not in parameters}
        state["buffer_names"] = everything["buffer_names"]
        del state[KEY]

    changed(model_states(tmp_path / "old.ckpt"), make_old)
    next((tmp_path / "old.ckpt").rglob(RECORD)).unlink()
    found = verify(tmp_path / "old.ckpt")
    assert found.trained == 8
    assert not [problem for problem in found.problems if "size of the left-out parameters" not in problem]
    exported = export(tmp_path / "old.ckpt", tmp_path / "out.safetensors")
    assert all("lora_" in name or name == "seen" for name in exported.tensors)
    load_trainable(QuantizedRun(kind), tmp_path / "old.ckpt")


@pytest.mark.parametrize(("kind", "stage"), SAVED)
def test_inspect_and_verify_count_parameters(saved: Callable[..., Path], kind: str, stage: int) -> None:
    out = saved(kind, stage)
    for name, count in (("small.ckpt", 6 if kind in ("gptq", "awq") else 20), ("full.ckpt", 0)):
        found = verify(out / name)
        assert (found.problems, found.trained, found.left_out, found.unverified) == ((), 8, count, ())
    small, full = inspect(out / "small.ckpt"), inspect(out / "full.ckpt")
    assert small.kinds.get("frozen weights", 0) == 0
    assert small.kinds["buffers"] == full.kinds["buffers"] == 8 * (2 if stage == 3 else 1)
    assert small.record is not None
    # GPTQ's and AWQ's layers have two names for their buffers in PEFT's; TinyGemm's tensors are quanto's second copy.
    if kind not in ("gptq", "awq", "quanto-int4") and stage < 3:
        assert full.kinds["frozen weights"] == small.record.total_bytes


@pytest.mark.parametrize("kind", BASES)
def test_verify_compares_a_quantized_base(
    saved: Callable[..., Path], folders: Callable[[str], Path], kind: str
) -> None:
    small = saved(kind) / "small.ckpt"
    for base in (folders(kind), saved(kind) / "full.ckpt"):
        found = verify(small, base=base)
        assert found.problems == ()
        assert found.compared == {"gptq": 6, "awq": 6}.get(kind, 6 if kind in OF_SUBCLASSES else 20)
        unknown = {name.removesuffix("weight") for name in found.unverified}
        assert len(unknown) == (14 if kind in OF_SUBCLASSES and kind != "quanto-int4" else len(unknown))
        assert kind in OF_SUBCLASSES or not unknown


def flip_in(folder: Path, name: str) -> None:
    """Change one byte of a tensor in a folder's file."""
    if (folder / "pytorch_model.bin").is_file():
        state = loaded(folder / "pytorch_model.bin")
        weight, _, inner = name.removeprefix(f"{LAYER}.").partition(".")
        quantized.flip(getattr(state[f"{LAYER}.{weight}"], inner))
        torch.save(state, folder / "pytorch_model.bin")
    else:
        state = load_file(folder / "model.safetensors")
        if name.endswith("scales"):  # which the run rounds to bf16
            state[name][0, 0] *= 2
        else:
            quantized.flip(state[name])
        save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("kind", "entry"), [(kind, entry) for kind, names in ENTRIES.items() for entry in names])
def test_one_changed_byte_of_a_base(
    saved: Callable[..., Path], folders: Callable[[str], Path], tmp_path: Path, kind: str, entry: str
) -> None:
    base = shutil.copytree(folders(kind), tmp_path / "base")
    flip_in(base, f"{LAYER}.{entry}")
    (problem,) = verify(saved(kind) / "small.ckpt", base=base).problems
    assert "is not the base that the run used" in problem
    assert f"q_proj.base_layer.{entry}'" in problem
    assert problem.count("layers.") == (2 if kind in ("gptq", "awq") else 1)
    if kind not in OF_TORCHAO:
        with pytest.raises(CheckpointError, match="is not the base that the run used"):
            consolidate(saved(kind) / "small.ckpt", tmp_path / "out.ckpt", base=base)
        assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize("kind", [kind for kind in BASES if kind not in OF_TORCHAO])
@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_consolidate_merges_a_quantized_base(
    saved: Callable[..., Path], folders: Callable[[str], Path], tmp_path: Path, kind: str, suffix: str
) -> None:
    out = saved(kind)
    consolidate(out / "full.ckpt", tmp_path / f"full{suffix}", dtype="bf16")
    done = consolidate(out / "small.ckpt", tmp_path / f"whole{suffix}", dtype="bf16", base=folders(kind))
    assert done.is_whole
    read: Callable[[Path], Any] = load_file if suffix == ".safetensors" else lambda file: loaded(file)["state_dict"]
    whole, full = read(tmp_path / f"whole{suffix}"), read(tmp_path / f"full{suffix}")
    assert whole.keys() == full.keys()
    saved_ones = loaded(model_states(out / "full.ckpt"))["module"]
    assert whole.keys() | ({"model.base_model.model.lm_head.weight"} if suffix == ".safetensors" else set()) == {
        *saved_ones
    }
    for name, tensor in whole.items():
        # What was trained is in bf16 too, so that all is as the module had it.
        assert (tensor.dtype, tensor.shape) == (saved_ones[name].dtype, saved_ones[name].shape), name
        assert raw(tensor) == raw(full[name]) == raw(saved_ones[name]), name


@pytest.mark.parametrize("kind", OF_TORCHAO)
def test_consolidate_keeps_torchaos_tensors(
    saved: Callable[..., Path], folders: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    out = saved(kind)
    consolidate(out / "full.ckpt", tmp_path / "full.ckpt")
    state: dict[str, Any] = loaded(tmp_path / "full.ckpt")["state_dict"]
    module = QuantizedRun(kind)
    module.load_state_dict(state)
    saved_ones: dict[str, Any] = loaded(model_states(out / "full.ckpt"))["module"]
    quantized_ones = [name for name, tensor in saved_ones.items() if is_traceable_wrapper_subclass(tensor)]
    assert len(quantized_ones) == 14
    for name in quantized_ones:
        assert type(state[name]) is type(saved_ones[name])
        assert torch.equal(state[name].dequantize(), saved_ones[name].dequantize())
    with pytest.raises(CheckpointError, match="torchao tensors, which safetensors files cannot contain"):
        consolidate(out / "full.ckpt", tmp_path / "full.safetensors")
    with pytest.raises(CheckpointError, match="torchao tensors, which only torchao can create"):
        consolidate(out / "small.ckpt", tmp_path / "whole.ckpt", base=folders(kind))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SHORT.get(kind, ())) for kind in BASES])
def test_an_unquantized_base_is_compared_at_load_only(
    saved: Callable[..., Path],
    folders: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """What the run has quantized is not, but all else is."""
    small = saved(kind) / "small.ckpt"
    found = verify(small, base=folders("bf16"))
    assert (found.problems, found.was_quantized) == ((), True)
    assert found.compared == 6
    assert all("_proj" in name for name in found.unverified)
    assert main(["verify", str(small), "--base", str(folders("bf16"))]) == 0
    assert "The run quantized its base, which is compared at load only." in capsys.readouterr().out
    assert not verify(small, base=folders(kind)).was_quantized

    quantized.original(2).save_pretrained(tmp_path / "another")
    (problem,) = verify(small, base=tmp_path / "another").problems
    assert "is not the base that the run used" in problem
    if kind not in OF_TORCHAO:
        with pytest.raises(CheckpointError, match=r"it was quantized\.$"):
            consolidate(small, tmp_path / "out.ckpt", base=folders("bf16"))
        assert not (tmp_path / "out.ckpt").exists()


def test_partitions_quantized_by_zero(saved: Callable[..., Path], tmp_path: Path) -> None:
    """ZeRO++ stores frozen partitions in int8 without saving their scales; bitsandbytes has an int8 of its own."""
    path = shutil.copytree(saved("int8") / "full.ckpt", tmp_path / "full.ckpt")

    def say(state: dict[str, Any]) -> None:
        state["ds_config"]["zero_optimization"]["zero_quantized_nontrainable_weights"] = True

    for file in path.rglob("*_states.pt"):
        changed(file, say)
    found = prune(path, tmp_path / "pruned.ckpt").record
    assert {one.dtype for one in found.left_out if one.fingerprint is None} == {"int8"}


def of_layer(module: torch.nn.Module) -> dict[str, bytes]:
    state: dict[str, Any] = quantized.layer(module).state_dict()
    return {name: raw(item) for name, item in state.items() if not is_traceable_wrapper_subclass(item)}


@pytest.mark.parametrize("kind", BASES)
def test_exports_equal_what_peft_saves_and_load(saved: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    out = saved(kind)
    theirs = load_file(out / "adapter" / "adapter_model.safetensors")
    for name in ("small", "full"):
        export(out / f"{name}.ckpt", tmp_path / name, format="peft", dtype="bf16", adapter_config=out / "adapter")
        ours = load_file(tmp_path / name / "adapter_model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key]) for key in ours)
    export(out / "full.ckpt", tmp_path / "out.safetensors")
    ready = out / "small.ckpt" / "trainable.safetensors"
    assert load_file(ready).keys() == load_file(tmp_path / "out.safetensors").keys()
    for path in (out / "small.ckpt", out / "full.ckpt", ready, tmp_path / "out.safetensors"):
        module = QuantizedRun(kind, seed=2)
        base = of_layer(module)
        load_trainable(module, path)
        assert of_layer(module) == base  # whole: not with another one's packed weight and its own scales
        assert module.seen.item() == runs.BATCHES
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                own = name.removeprefix("model.").replace(".default", "")
                assert torch.equal(parameter.bfloat16(), theirs[own]), (path, name)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SHORT.get(kind, ())) for kind in BASES])
def test_merge_into_the_unquantized_base(saved: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    small = saved(kind) / "small.ckpt"
    quantized.original(1).save_pretrained(tmp_path / "base")
    done = merge(small, tmp_path / "served", base=tmp_path / "base")
    assert (done.notes, done.folded) == (("The run had quantized its base, which is compared at load only.",), 4)
    load: Any = AutoModelForCausalLM.from_pretrained
    model, info = load(tmp_path / "served", torch_dtype="auto", output_loading_info=True)
    assert not any(info.values())
    export(small, tmp_path / "adapter", format="peft")
    wanted = PeftModel.from_pretrained(quantized.original(1), tmp_path / "adapter").merge_and_unload()
    ours, theirs = ({name: raw(own) for name, own in one.state_dict().items()} for one in (model, wanted))
    assert ours == theirs

    another = quantized.original(2)
    another.save_pretrained(tmp_path / "another")
    with pytest.raises(CheckpointError, match="is not the base that the run used"):
        merge(small, tmp_path / "wrong", base=tmp_path / "another")
    assert not (tmp_path / "wrong").exists()
