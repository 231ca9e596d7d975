"""What is done with a checkpoint's files: DeepSpeed's converters, PEFT's loader, a look into it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sharded
import training
from compare.task import Run, base, digest

EMBEDDING = ("embed_tokens.weight", "lm_head.weight")


def universal(run: Run, folder: str, target: str) -> None:
    """Run DeepSpeed's converter to universal checkpoints on the folder of a checkpoint that DeepSpeed wrote."""
    from deepspeed.checkpoint import ds_to_universal

    # What lies beside that folder belongs to the checkpoint too.
    assert run.resume
    inner = Path(folder).relative_to(run.resume)
    if inner.name:
        shutil.copytree(run.resume, target, ignore=lambda _, names: {inner.name} & set(names))
    training.convert_to_universal(ds_to_universal, Path(folder), Path(target, inner))


def consolidate(run: Run, folder: str, target: str, **options: Any) -> dict[str, str]:
    """Run DeepSpeed's converter to one fp32 file; returns a digest of each tensor in it."""
    import torch
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    place = Path(folder)
    convert_zero_checkpoint_to_fp32_state_dict(str(place.parent), target, tag=place.name, **options)
    (file,) = Path(target).iterdir()
    return {name: digest(value) for name, value in torch.load(file, weights_only=True).items()}


def adapter(run: Run, folder: str) -> dict[str, str]:
    """Load an adapter's folder with PEFT; returns a digest of each trained parameter."""
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(base(run.seed), folder, is_trainable=True)
    return {name: digest(value) for name, value in loaded.named_parameters() if value.requires_grad}


def embeddings(run: Run, checkpoint: str) -> list[str]:
    """Return the names under which any file of a checkpoint holds the tied embedding, whole or a part of it."""
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    found: set[str] = set()
    for file in Path(checkpoint).rglob("*"):
        if file.name == sharded.METADATA:  # of torch's distributed checkpoints
            return sorted(
                name
                for name in FileSystemReader(file.parent).read_metadata().state_dict_metadata
                if name.endswith(EMBEDDING)
            )
        if file.suffix == ".safetensors":
            loaded: Any = load_file(file)
        elif file.suffix in (".pt", ".ckpt", ".bin") and "states" in file.name:
            loaded = torch.load(file, map_location="cpu", weights_only=False)
        else:
            continue
        found |= {name for name, value in _tensors(loaded) if value.numel() and name.endswith(EMBEDDING)}
    return sorted(found)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, name)
