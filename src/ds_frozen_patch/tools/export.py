"""Export the trained weights for others to use: as a PEFT adapter folder, or a plain safetensors file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import dtypes
from ..checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_FILE, Adapter, choose_adapter, match_adapter
from ..checkpoint.format.records import Records
from ..checkpoint.zero.opening import Checkpoint, open_checkpoint
from ..common.errors import CheckpointError, named
from ..common.text import human_bytes, printable_lines, progress
from .output import check_output, new_output
from .tensors import TORCH_SUFFIXES, OutputTensor, converted, write_shard

FORMATS = ("peft", "safetensors")


@dataclass(frozen=True)
class Exported:
    """What `export` has written, or would write.

    Attributes:
        source: the path of the checkpoint, as passed.
        target: the path of the output, as passed.
        format: "peft" or "safetensors".
        tensors: the names of the tensors in the output.
        size: the size of these tensors, in bytes.
        outside: the names of trained parameters that do not fit into an adapter.
    """

    source: str
    target: str
    format: str
    tensors: tuple[str, ...]
    size: int
    outside: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.target}: {len(self.tensors)} tensors, {human_bytes(self.size)}."]
        if self.outside:
            lines.append(f"Not included, because they are outside the adapter's model: {named(self.outside, 3)}.")
        return printable_lines(lines)


def export(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    format: str = "safetensors",
    dtype: str | None = None,
    adapter: str | None = None,
    adapter_config: str | Path | None = None,
    trainable: Sequence[str] = (),
    dry_run: bool = False,
    quiet: bool = True,
) -> Exported:
    """Write the trained weights of a checkpoint, without the optimizer's state.

    Args:
        source: the directory of a DeepSpeed checkpoint, full or trainable-only. It is not changed.
        target: for "peft" a directory to create, which `PeftModel.from_pretrained` loads; for "safetensors" a file to
            create, with the names of the module and its buffers, which `load_trainable` loads.
        tag: the subdirectory to read; by default the one named in `latest`.
        format: "peft" or "safetensors".
        dtype: "fp32", "bf16" or "fp16", to convert all floating-point tensors. By default trained weights are in fp32,
            like the optimizer's masters, and others in the dtype that they were saved in.
        adapter: the name of the adapter, for "peft"; by default the only one, or "default".
        adapter_config: an `adapter_config.json`, or its directory, if the checkpoint contains none; `patch()` saves it.
        trainable: as for `prune`.
        dry_run: write nothing and read no tensors.
        quiet: do not show progress on stderr.

    Returns:
        What the output contains.

    Raises:
        CheckpointError: a file of the source is missing, damaged or from another run; there is no such adapter or no
            configuration for it, or a part of it was frozen and left out; the target exists, cannot be written, or for
            "safetensors" has the suffix of another format.
            Nothing is left there.
        ValueError: the format or the dtype is unknown.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    kind = dtypes.torch_dtype(dtype)
    if format == "safetensors" and Path(target).suffix in TORCH_SUFFIXES and not os.path.lexists(target):
        better = Path(target).with_suffix(".safetensors")
        raise CheckpointError(
            f"{target} would be a safetensors file, and programs would take it for one of torch.save. Call it {better}."
        )
    checkpoint = open_checkpoint(source, tag, trainable=trainable)
    plan = plan_export(checkpoint, format, kind, adapter, adapter_config)
    path, root, size = Path(target), checkpoint.states.layout.root, sum(item.size for item in plan.tensors.values())
    done = Exported(str(source), str(target), format, tuple(plan.tensors), size, tuple(plan.outside))
    if dry_run:
        check_output(path, root)
        return done
    cost = sum(item.cost for item in plan.tensors.values())
    with new_output(path, root) as output, progress("writing", cost, quiet) as progressed:
        file = output
        if plan.adapter is not None:
            output.mkdir()
            file = output / ADAPTER_FILE
            (output / ADAPTER_CONFIG).write_text(plan.adapter.config_json, encoding="utf-8")
        plan.write(file, progressed)
    return done


@dataclass(frozen=True)
class ExportPlan:
    """What an export contains.

    Attributes:
        tensors: by their names in the output.
        aliases: the name of the tensor that each tied alias is.
        adapter: for "peft", the adapter; else None.
        outside: the names of trained parameters that do not fit into the adapter.
    """

    tensors: dict[str, OutputTensor]
    aliases: dict[str, str]
    adapter: Adapter | None
    outside: list[str]

    def write(self, file: Path, progressed: Callable[[int], object] = lambda _: None) -> None:
        """Write the file with the tensors."""
        with Records(progressed=progressed) as records:
            write_shard(file, self.tensors, self.aliases, records)


def plan_export(
    checkpoint: Checkpoint,
    format: str,
    dtype: str | None = None,
    adapter: str | None = None,
    adapter_config: str | Path | None = None,
) -> ExportPlan:
    """Choose the tensors of an export; see `export` for the arguments and errors.

    Args:
        checkpoint: that is exported.
        format: "peft" or "safetensors".
        dtype: torch's name of the dtype.
        adapter, adapter_config: for "peft".
    """
    weights, record, chosen = checkpoint.weights, checkpoint.record, None
    if format == "peft":
        chosen = choose_adapter(weights, record, adapter, adapter_config)
        chosen.check_exportable()
        named_, outside = match_adapter(weights, record, chosen)
    else:
        # A frozen parameter in a trainable-only checkpoint was kept on purpose: the base lacks its value.
        kept = weights.frozen if record.is_trainable_only else {}
        named_, outside = {name: name for name in (*weights.trained, *kept, *weights.buffers)}, []
    by_name = weights.by_any_name
    tensors = {name: converted(by_name[key], dtype) for name, key in named_.items()}
    return ExportPlan(tensors, weights.aliases if format == "safetensors" else {}, chosen, outside)
