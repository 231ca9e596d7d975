"""`ds-frozen-patch consolidate`: a checkpoint's weights in one file, bit for bit, merged with a base."""

from __future__ import annotations

import errno
import json
import mmap
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from kit import runs
from kit.cell import BF16, PRECISIONS
from kit.checkpoints import (
    EMBEDDING,
    HEAD,
    MODULES,
    NORM,
    Checkpoints,
    base_model,
    loaded,
    precision_of,
    raw,
    record_in,
    snapshot,
    weights_of,
)
from safetensors.torch import load_file, load_model, save_file

from ds_frozen_patch import CheckpointError, consolidate, prune
from ds_frozen_patch.checkpoint.format.records import new_memory
from ds_frozen_patch.record import KEY, Record

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday]

Weights = dict[str, torch.Tensor]


def bits(weights: Weights) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: (tensor.dtype, tensor.shape, raw(tensor)) for name, tensor in weights.items()}


def in_fp32(weights: Weights) -> Weights:
    """Return floats in fp32, the rest unchanged."""
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def module_of(checkpoint: Path) -> Weights:
    """Return the half-precision weights that the model computed with; in ZeRO-3 they are placeholders."""
    found: Weights = loaded(min((checkpoint / "checkpoint").glob("*model_states.pt")))["module"]
    return found


def by_deepspeed(checkpoint: Path, stage: int, trainable_only: bool = False) -> Weights:
    """Return the result of DeepSpeed's own converter, plus the frozen weights that it omits in stage 1."""
    if not stage:
        return module_of(checkpoint)
    found: Weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), exclude_frozen_parameters=trainable_only)
    return {**(module_of(checkpoint) if stage == 1 else {}), **found}


EVERY_STAGE = [(0, 2), *((stage, world_size) for stage in (1, 2, 3) for world_size in (1, 2, 3))]
ROUND_TRIPS = [
    *((stage, world_size, precision_of(stage), "lora") for stage, world_size in EVERY_STAGE),
    *((stage, 2, PRECISIONS[-1], "lora") for stage in (2, 3)),
    *((stage, 2, precision_of(stage), "odd") for stage in (0, 1)),
    *(pytest.param(stage, 2, precision_of(stage), "odd", marks=pytest.mark.short) for stage in (2, 3)),
    (3, 3, precision_of(3), "odd"),
    (0, 2, precision_of(0), "half"),  # without a list of trained parameters
]


@pytest.mark.parametrize(("stage", "world_size", "precision", "module"), ROUND_TRIPS)
def test_bit_for_bit(
    checkpoints: Checkpoints, tmp_path: Path, stage: int, world_size: int, precision: str, module: str
) -> None:
    out = checkpoints(stage, world_size, precision, module=module)
    full, small = out / "full.ckpt", out / "small.ckpt"
    before = snapshot(out)
    done = consolidate(full, tmp_path / "full.ckpt")
    whole = weights_of(tmp_path / "full.ckpt")
    theirs = by_deepspeed(full, stage)
    assert theirs.keys() == whole.keys() == module_of(full).keys()
    assert {n: raw(t.float()) for n, t in whole.items()} == {n: raw(t.float()) for n, t in theirs.items()}
    buffers = {"seen", "mask"}  # DeepSpeed makes floats of them
    assert {n: t.dtype for n, t in whole.items() if n not in buffers} == {
        n: t.dtype for n, t in theirs.items() if n not in buffers
    }
    assert (whole["seen"].dtype, whole["seen"].item()) == (torch.int64, runs.BATCHES)
    assert (done.is_whole, done.tensors, done.dtype) == (True, len(whole) - 1, None)
    assert whole[HEAD].data_ptr() == whole[EMBEDDING].data_ptr()
    consolidate(full, tmp_path / "fp32.ckpt", dtype="fp32")
    assert bits(weights_of(tmp_path / "fp32.ckpt")) == bits(in_fp32(whole))
    # Rounded, they are what the run computed with.
    half = {name: value.dtype for name, value in module_of(full).items()}
    digests = {name: runs.digest(value.to(half[name])) for name, value in whole.items()}
    of_the_run = {name: d for name, d in checkpoints.trained[out].items() if not name.endswith("inv_freq")}
    assert {name: digests[name] for name in of_the_run} == of_the_run
    assert len(of_the_run) == len(whole) - 1

    done = consolidate(small, tmp_path / "small.ckpt")
    part = weights_of(tmp_path / "small.ckpt")
    left_out = record_in(small).names
    assert part.keys() == whole.keys() - left_out
    assert bits(part) == bits({name: whole[name] for name in part})
    assert not done.is_whole
    if stage:
        reference = by_deepspeed(small, stage, trainable_only=True)
        assert {n: raw(t.float()) for n, t in reference.items()} == {n: raw(part[n].float()) for n in reference}

    done = consolidate(small, tmp_path / "merged.ckpt", base=full)
    merged = weights_of(tmp_path / "merged.ckpt")
    assert bits(merged) == bits(whole)
    assert done.is_whole
    assert done.unverified == ()
    assert merged[HEAD].data_ptr() == merged[EMBEDDING].data_ptr()
    assert snapshot(out) == before


@pytest.mark.parametrize(
    ("stage", "dtype"), [(2, "bf16"), (3, "bf16"), pytest.param(3, "fp16", marks=pytest.mark.short), (0, "bf16")]
)
def test_other_dtypes_are_fp32_rounded(checkpoints: Checkpoints, tmp_path: Path, stage: int, dtype: str) -> None:
    full = checkpoints(stage, module="odd") / "full.ckpt"
    consolidate(full, tmp_path / "fp32.ckpt", dtype="fp32")
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    wide = weights_of(tmp_path / "fp32.ckpt")
    expected = {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in wide.items()}
    assert expected["seen"].dtype == torch.int64
    assert expected["mask"].dtype == torch.bool
    for name in ("half.ckpt", "half.safetensors"):
        done = consolidate(full, tmp_path / name, dtype=dtype)
        found = weights_of(tmp_path / name) if name.endswith("ckpt") else load_file(tmp_path / name)
        assert bits(found) == bits({name: expected[name] for name in found})
        assert expected.keys() - found.keys() == (set() if name.endswith("ckpt") else {HEAD})
        assert done.size == sum(t.nbytes for t in {t.data_ptr(): t for t in found.values()}.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_from_plain_deepspeed(checkpoints: Checkpoints, tmp_path: Path, stage: int) -> None:
    full = checkpoints.by_deepspeed(stage) / "full.ckpt"
    consolidate(full, tmp_path / "one.ckpt")
    found = weights_of(tmp_path / "one.ckpt")
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(full))
    assert {n: raw(found[n].float()) for n in theirs} == {n: raw(t.float()) for n, t in theirs.items()}
    alike = checkpoints(stage)
    assert {f"model.{name}" for name in found} | {"seen"} == set(module_of(alike / "full.ckpt"))
    # Pruned and merged it is the same again.
    prune(full, tmp_path / "small.ckpt")
    consolidate(tmp_path / "small.ckpt", tmp_path / "merged.ckpt", base=full)
    assert bits(weights_of(tmp_path / "merged.ckpt")) == bits(found)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_lightning_loads_a_merged_file_strictly(
    checkpoints: Checkpoints, tmp_path: Path, base: Path, stage: int
) -> None:
    out = checkpoints(stage, hidden=16)
    consolidate(out / "full.ckpt", tmp_path / "full.ckpt")
    consolidate(out / "small.ckpt", tmp_path / "merged.ckpt", base=out / "full.ckpt")
    for name in ("full.ckpt", "merged.ckpt"):
        state = loaded(tmp_path / name)
        assert not state.keys() & {"module", "param_shapes", "frozen_param_fragments", "ds_config", "optimizer", KEY}
        assert (state["epoch"], state["global_step"]) == (1, runs.BATCHES)
        assert state["hyper_parameters"] == {"seed": 1, "tied": True, "hidden": 16, "vocabulary": 96, "rank": 4}
        module = runs.LoraRun.load_from_checkpoint(tmp_path / name, map_location="cpu", seed=3)
        assert module.hparams["hidden"] == 16
        found = dict(module.state_dict())
        assert bits(found) == bits(in_fp32(state["state_dict"]))
        assert module.seen.item() == runs.BATCHES
        torch.load(tmp_path / name, weights_only=True)  # plain values only
    consolidate(out / "small.ckpt", tmp_path / "small.ckpt")
    with pytest.raises(RuntimeError, match="Missing key"):
        runs.LoraRun.load_from_checkpoint(tmp_path / "small.ckpt", map_location="cpu", strict=True)
    kept = Record.from_json(loaded(tmp_path / "small.ckpt")[KEY], "small.ckpt")
    assert kept == replace(record_in(out / "small.ckpt"), files={})


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["lora", "odd"])
def test_safetensors_are_loaded_strictly(checkpoints: Checkpoints, tmp_path: Path, stage: int, name: str) -> None:
    full = checkpoints(stage, module=name) / "full.ckpt"
    consolidate(full, tmp_path / "one.ckpt")
    consolidate(full, tmp_path / "one.safetensors")
    module = MODULES[name](seed=3)
    assert not any(load_model(module, tmp_path / "one.safetensors", strict=True))
    assert bits(dict(module.state_dict())) == bits(in_fp32(weights_of(tmp_path / "one.ckpt")))
    assert module.model.get_output_embeddings().weight is module.model.get_input_embeddings().weight


@pytest.mark.parametrize("limit", [10_000, 30_000, 10**9])
def test_a_sharded_folder(checkpoints: Checkpoints, tmp_path: Path, limit: int) -> None:
    full = checkpoints(3) / "full.ckpt"
    done = consolidate(full, tmp_path / "folder", max_shard_size=limit)
    consolidate(full, tmp_path / "one.safetensors")
    folder, whole = tmp_path / "folder", load_file(tmp_path / "one.safetensors")
    shards = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    assert sorted(shards) == sorted(done.files)
    if limit == 10**9:
        assert [item.name for item in folder.iterdir()] == ["model.safetensors"]
        index = dict.fromkeys(whole, "model.safetensors")
    else:
        said = json.loads((folder / "model.safetensors.index.json").read_text())
        index = said["weight_map"]
        assert said["metadata"]["total_size"] == done.size == sum(tensor.nbytes for tensor in whole.values())
        count = len(shards)
        assert sorted(shards) == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        assert {item.name for item in folder.iterdir()} == {*shards, "model.safetensors.index.json"}
    sizes = [sum(tensor.nbytes for tensor in shards[name].values()) for name in sorted(shards)]
    assert all(size <= limit or len(shards[name]) == 1 for name, size in zip(sorted(shards), sizes, strict=True))
    assert all(one + next_ > limit for one, next_ in pairwise(sizes))  # none is cut without need
    assert {name: file for file, shard in shards.items() for name in shard} == index
    assert bits({name: tensor for shard in shards.values() for name, tensor in shard.items()}) == bits(whole)
    # It is a base itself.
    consolidate(checkpoints(3) / "small.ckpt", tmp_path / "merged.safetensors", base=folder)
    assert bits(load_file(tmp_path / "merged.safetensors")) == bits(whole)


# Bases, in all the ways that one lies on a disk: each writes into a folder, and gives the path to pass.


def of_torch(folder: Path, out: Path) -> Path:
    folder.mkdir()
    torch.save(base_model().state_dict(), folder / "pytorch_model.bin")
    return folder


def saved(folder: Path, **options: Any) -> Path:
    base_model().save_pretrained(folder, **options)
    assert (folder / "model.safetensors.index.json").exists() == bool(options)
    return folder


def consolidated(file: Path, out: Path, **options: Any) -> Path:
    consolidate(out / "full.ckpt", file, **options)
    return file


def as_inner_model(folder: Path, out: Path) -> Path:
    """As AutoModel saves it: without a head, and without `model.` in the names."""
    base_model().model.save_pretrained(folder)
    return folder


BASES: dict[str, Callable[[Path, Path], Path]] = {
    "folder": lambda folder, out: saved(folder),
    "sharded folder": lambda folder, out: saved(folder, max_shard_size="30KB"),
    "file": lambda folder, out: saved(folder) / "model.safetensors",
    "folder of torch": of_torch,
    "file of torch": lambda folder, out: of_torch(folder, out) / "pytorch_model.bin",
    "full checkpoint": lambda folder, out: out / "full.ckpt",
    "consolidated": lambda folder, out: consolidated(folder / "one.ckpt", out, dtype="bf16" if BF16 else "fp32"),
    "consolidated, safetensors": lambda folder, out: consolidated(folder / "one.safetensors", out),
    "inner model": as_inner_model,
}


@pytest.mark.short
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", BASES)
def test_bases_in_every_format(checkpoints: Checkpoints, tmp_path: Path, stage: int, kind: str) -> None:
    """The files are in fp32 and the run was in bf16: the values are those of the run."""
    out = checkpoints(stage)
    base = BASES[kind](tmp_path / "base", out)
    before = snapshot(base)
    done = consolidate(out / "small.ckpt", tmp_path / "merged.ckpt", base=base)
    consolidate(out / "full.ckpt", tmp_path / "full.ckpt")
    merged = weights_of(tmp_path / "merged.ckpt")
    assert bits(merged) == bits(weights_of(tmp_path / "full.ckpt"))
    assert merged[HEAD].data_ptr() == merged[EMBEDDING].data_ptr()
    assert (done.is_whole, done.unverified) == (True, ())
    consolidate(out / "small.ckpt", tmp_path / "fp32.ckpt", base=base, dtype="fp32")
    wide = weights_of(tmp_path / "fp32.ckpt")
    frozen = [name for name in merged if "lora_" not in name]
    assert bits({name: wide[name] for name in frozen}) == bits(in_fp32({name: merged[name] for name in frozen}))
    assert snapshot(base) == before


def test_a_run_with_untied_embeddings(checkpoints: Checkpoints, tmp_path: Path) -> None:
    out = checkpoints(3, tied=False)
    base_model(tied=False).save_pretrained(tmp_path / "base")
    consolidate(out / "small.ckpt", tmp_path / "merged.ckpt", base=tmp_path / "base")
    consolidate(out / "full.ckpt", tmp_path / "full.ckpt")
    found = weights_of(tmp_path / "merged.ckpt")
    assert bits(found) == bits(weights_of(tmp_path / "full.ckpt"))
    assert not torch.equal(found[HEAD], found[EMBEDDING])


def another_seed(weights: Weights) -> Weights:
    return {name: t.contiguous() for name, t in base_model(seed=2).state_dict().items() if name != "lm_head.weight"}


def one_element(weights: Weights) -> Weights:
    values = weights["model.embed_tokens.weight"].bfloat16()
    values[-1, -1] = torch.nextafter(values[-1, -1], torch.tensor(9.0).bfloat16())
    return {**weights, "model.embed_tokens.weight": values.float()}


WRONG_BASES: list[Any] = [
    (another_seed, r"is not the base that the run used: the values differ in '.*weight'"),
    pytest.param(
        one_element,
        rf"is not the base that the run used: the values differ in '{EMBEDDING}'\. Pass the base",
        marks=pytest.mark.short,
    ),
    (
        lambda weights: {**weights, "model.norm.weight": torch.ones(33)},
        rf"is not the base that the run used: '{NORM}' has shape \[33\] instead of \[32\]",
    ),
    (
        lambda weights: {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"},
        rf"lacks '{NORM}'\. Pass the base",
    ),
    (lambda weights: {"something": torch.ones(3)}, r"lacks .* and 10 more\. Pass the base"),
]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("change", "said"), WRONG_BASES)
@pytest.mark.parametrize("target", ["merged.ckpt", "merged.safetensors", "merged"])
def test_a_wrong_base_is_refused_by_name(
    checkpoints: Checkpoints,
    tmp_path: Path,
    base: Path,
    stage: int,
    change: Callable[[Weights], Weights],
    said: str,
    target: str,
) -> None:
    (tmp_path / "wrong").mkdir()
    save_file(change(load_file(base / "model.safetensors")), tmp_path / "wrong" / "model.safetensors")
    with pytest.raises(CheckpointError, match=said) as refused:
        consolidate(checkpoints(stage) / "small.ckpt", tmp_path / target, base=tmp_path / "wrong")
    assert str(tmp_path / "wrong") in str(refused.value)
    assert [item.name for item in tmp_path.iterdir()] == ["wrong"]


def test_checkpoints_that_take_no_base(checkpoints: Checkpoints, tmp_path: Path, base: Path) -> None:
    for name, given, said in (
        ("full.ckpt", base, "is a full checkpoint: it needs no base"),
        ("small.ckpt", tmp_path / "nowhere", "There is no base at"),
        ("small.ckpt", tmp_path, "contains no base: no "),
    ):
        with pytest.raises(CheckpointError, match=said):
            consolidate(checkpoints(2) / name, tmp_path / "one.ckpt", base=given)
    with pytest.raises(ValueError, match="dtype must be one of fp32, bf16, fp16, or None, not 'fp8'"):
        consolidate(checkpoints(2) / "small.ckpt", tmp_path / "one.ckpt", dtype="fp8")
    assert list(tmp_path.iterdir()) == []


def test_parameters_without_a_fingerprint_are_named(checkpoints: Checkpoints, tmp_path: Path, base: Path) -> None:
    prune(checkpoints(2) / "full.ckpt", tmp_path / "small.ckpt", fingerprints=False)
    done = consolidate(tmp_path / "small.ckpt", tmp_path / "merged.ckpt", base=base)
    consolidate(checkpoints(2) / "full.ckpt", tmp_path / "full.ckpt")
    assert len(done.unverified) == 20
    assert bits(weights_of(tmp_path / "merged.ckpt")) == bits(weights_of(tmp_path / "full.ckpt"))


class WithoutLargePages(mmap.mmap):
    """Memory of a kernel that has no large pages."""

    def madvise(self, *_: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_memory_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", WithoutLargePages)
    for size in (0, 1, 2**21, 2**21 + 1):
        memory = new_memory(size)
        memory[size // 2 :] = b"1" * (size - size // 2)
        assert bytes(memory[size // 2 :]) == b"1" * (size - size // 2)
        assert len(memory) == size
