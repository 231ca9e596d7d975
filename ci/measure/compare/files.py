"""What is done with a checkpoint's files, inside a rank: converters, PEFT's loader, a look into them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import training
from compare.systems import METADATA, Base, begin
from compare.task import Run, digest
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from lightning.pytorch.utilities import deepspeed as of_lightning
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

EMBEDDING = ("embed_tokens.weight", "lm_head.weight")


def universal(run: Run, folder: str, target: str) -> None:
    """Run DeepSpeed's converter to universal checkpoints on the folder of a checkpoint that DeepSpeed wrote."""
    # What lies beside that folder belongs to the checkpoint too.
    assert run.resume
    inner = Path(folder).relative_to(run.resume)
    if inner.name:
        shutil.copytree(run.resume, target, ignore=lambda _, names: {inner.name} & set(names))
    training.convert_to_universal(ds_to_universal, Path(folder), Path(target, inner))


def consolidate(run: Run, folder: str, target: str, **options: Any) -> dict[str, str]:
    """Run the system's converter to one fp32 file; returns a digest of each tensor in it."""
    if run.owner == "Lightning":
        begin(run)
        of_lightning.convert_zero_checkpoint_to_fp32_state_dict(str(run.resume), target)
        state = torch.load(target, weights_only=False)["state_dict"]
    elif run.owner == "FSDP2 and DCP":
        dcp_to_torch_save(folder, target)
        state = torch.load(target, weights_only=False)["model"]
    else:
        place = Path(folder)
        convert_zero_checkpoint_to_fp32_state_dict(str(place.parent), target, tag=place.name, **options)
        (file,) = Path(target).iterdir()
        state = torch.load(file, weights_only=True)
    return {name.removeprefix("module."): digest(value) for name, value in state.items()}


def adapter(run: Run, folder: str) -> dict[str, str]:
    """Load an adapter's folder with PEFT; returns a digest of each trained parameter."""
    loaded = PeftModel.from_pretrained(Base(run.seed), folder, is_trainable=True)
    return {name: digest(value) for name, value in loaded.named_parameters() if value.requires_grad}


def embeddings(run: Run, checkpoint: str) -> list[str]:
    """Return the names under which any file of a checkpoint holds the tied embedding, whole or a part of it."""
    names: set[str] = set()
    for file in Path(checkpoint).rglob("*"):
        if file.name == METADATA:  # of torch's distributed checkpoints
            names |= FileSystemReader(file.parent).read_metadata().state_dict_metadata.keys()
        elif file.suffix == ".safetensors":
            names |= {name for name, _ in _tensors(load_file(file))}
        elif file.suffix in (".pt", ".ckpt", ".bin") and "states" in file.name:
            loaded = torch.load(file, map_location="cpu", weights_only=False)
            names |= {name for name, value in _tensors(loaded) if value.numel()}
    return sorted(name for name in names if name.endswith(EMBEDDING))


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, name)
