"""What becomes of the tensors of a base: values that were trained whole, and the product of plain LoRA, which is added.

`merge` writes the result. Any other adapter is for PEFT to merge.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

from ..checkpoint import dtypes
from ..checkpoint.adapters import PEFTS_PREFIX
from ..checkpoint.format.records import Records, TensorSource, new_memory
from ..common.errors import CheckpointError, named
from .base import without_wrappers
from .tensors import OutputTensor

# What the configuration of plain LoRA may say. All else is for PEFT to merge.
_PLAIN = (
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora",
)  # fmt: skip
_INITS = ("true", "false", "none", "gaussian", "eva", "olora", "orthogonal", "loftq", "lora_ga", "pissa", "corda")
_ELEMENTS = 2**15
"""To so many a product is added at once: in the processor's cache, and by torch in one thread."""
LORA = re.compile(r"(.+?)\.(lora_[AB]\..+|lora_embedding_[AB]|lora_magnitude_vector.*)")


@dataclass(frozen=True)
class Change:
    """What becomes of a tensor: another value, and the sources of LoRA's A and B, whose product is added."""

    source: TensorSource | None = None
    lora: tuple[TensorSource, ...] = ()
    scale: float = 1.0
    layer: str = "Linear"

    @property
    def is_turned(self) -> bool:
        """Whether the layer has the transpose of the product."""
        return self.layer in ("Embedding", "Conv1D")

    def output(
        self,
        tensor: TensorSource,
        dtype: str | None,
        read_base: Callable[[TensorSource, Records], memoryview],
    ) -> OutputTensor:
        """A tensor of the base, changed."""
        to = dtypes.output_dtype(tensor.dtype, dtype)
        source = self.source or tensor

        def read(records: Records) -> memoryview:
            values = records.read(source) if self.source else read_base(tensor, records)
            values = dtypes.convert(values, source.dtype, to)
            if self.lora:
                import torch

                a, b = (_read(records, source).float() for source in self.lora)
                weight, shape = _view(values, to, tensor.shape), (len(b), a.shape[1])
                product = _view(new_memory(4 * prod(shape)), "float32", shape)
                torch.mm(b, a, out=product)
                product = product.T if self.is_turned else product
                count = max(_ELEMENTS // weight.shape[1], 1)
                for rows, added in zip(weight.split(count), product.split(count), strict=True):
                    added.mul_(self.scale)
                    # Rounded where PEFT does it.
                    rows.add_(added.to(rows.dtype) if self.layer == "Embedding" else added)
            return values

        return OutputTensor(to, tensor.shape, read, source.nbytes + sum(part.nbytes for part in self.lora))


def changes_of(
    model: Any,
    whole: Mapping[str, TensorSource],
    adapter: Mapping[str, TensorSource],
    config: Mapping[str, Any],
) -> dict[str, Change]:
    """What becomes of each parameter of a model, by its name.

    Args:
        model: the base's, on the meta device.
        whole: what replaces the base's values, by the names of the model.
        adapter: by the names in the adapter's file.
        config: the adapter's; empty if there is none.

    Raises:
        CheckpointError: the adapter is not plain LoRA.
        Exception: any other, if its configuration is damaged.
    """
    modules = dict(model.named_modules())
    changes = {name: Change(source) for name, source in whole.items()}
    lora: dict[str, dict[str, TensorSource]] = defaultdict(dict)
    for in_file, source in adapter.items():
        if match := LORA.fullmatch(in_file.removeprefix(PEFTS_PREFIX)):
            lora[match[1]][match[2]] = source
        else:
            changes[without_wrappers(in_file)] = Change(source)
    odd = {key for key, value in config.items() if value and key not in _PLAIN}
    if config and config["peft_type"] != "LORA":
        odd.add(str(config["peft_type"]))
    if config and not str(config.get("init_lora_weights")).lower().startswith(_INITS):
        odd.add("init_lora_weights")
    for module, parts in lora.items():
        layer = type(modules.get(module)).__name__
        if [*sorted(parts)] not in (["lora_A.weight", "lora_B.weight"], ["lora_embedding_A", "lora_embedding_B"]):
            odd |= parts.keys()
        elif any(len(part.shape) != 2 for part in parts.values()):  # of a convolution
            odd.add(module)
        alphas, rank = config.get("alpha_pattern") or {}, parts[min(parts)].shape[0]
        key = next((key for key in alphas if re.match(rf"(.*\.)?({key})$", module)), None)  # as PEFT does it
        changes[f"{module}.weight"] = Change(
            source=changes.get(f"{module}.weight", Change()).source,
            lora=tuple(parts[name] for name in sorted(parts)),
            scale=alphas.get(key, config["lora_alpha"]) / (sqrt(rank) if config.get("use_rslora") else rank),
            layer="Embedding" if "lora_embedding_A" in parts else layer,
        )
    if odd:
        raise CheckpointError(
            f"The adapter is not plain LoRA ({named(sorted(odd), 5)}). Export it with --format peft, and let PEFT merge"
            " it: PeftModel.from_pretrained(model, folder).merge_and_unload()."
        )
    return changes


def _read(records: Records, source: TensorSource) -> Any:
    return _view(records.read(source), source.dtype, source.shape).clone()  # aligned, as in PEFT's own merge


def _view(values: memoryview, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(values, dtype=getattr(torch, dtype)).view(shape)
