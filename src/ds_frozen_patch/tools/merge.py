"""Merge a checkpoint and its base into a folder that serves: for `from_pretrained`, vLLM and the like.

The folder has the files of the base's, one for one. What the run has trained replaces the base's tensors, and LoRA is
folded into them. Of what changes, at most two tensors are in memory, with what they are made of: one is written while
the next is made. The others are copied in small pieces.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import dtypes
from ..checkpoint.format import safetensors as safetensors_file
from ..checkpoint.format.records import Records
from ..checkpoint.format.stored import ITEM_SIZES
from ..checkpoint.format.zip_directory import CHUNK_BYTES
from ..common.errors import named
from ..common.progress import progress
from ..common.text import human_bytes, printable_lines
from ..fingerprint import Stream
from .base import check_values, wrong_values
from .loaded_names import CONFIG
from .merge_plan import MergePlan, Part, plan_merge
from .model_folder import INDEX, ModelFolder, copy_more, open_model_folder
from .output import check_output, new_output
from .requantize import Quantized
from .tuned import Tuned, read_tuned

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Merged:
    """What `merge` has written, or would write.

    Attributes:
        source: the path of the checkpoint or adapter, as passed.
        target: the path of the output, as passed.
        dtype: "fp32", "bf16" or "fp16" if all floating-point tensors were converted, else None.
        adapter: the name of the adapter that was folded in; None if there is none.
        folded: the number of weights that the adapter was folded into.
        replaced: the number of other weights that the run has trained, at least some rows of them.
        tensors: the number of tensors.
        size: the size of these tensors, in bytes.
        files: the names of the files with weights.
        is_untied: whether weights that the base shares differ now, so that the configuration says they are not tied.
        was_quantized: whether the run had quantized the base; the output has it unquantized.
        unverified: what comes from the base and could not be verified.
        outside: trained parameters that are not in the output, because the base has none of these names.
        skipped: the names of the base's scripts, and of its links to elsewhere, which are not copied.
    """

    source: str
    target: str
    dtype: str | None
    adapter: str | None
    folded: int
    replaced: int
    tensors: int
    size: int
    files: tuple[str, ...]
    is_untied: bool
    was_quantized: bool
    unverified: tuple[str, ...]
    outside: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        lines = [f"{self.target}: {self.tensors} tensors, {human_bytes(self.size)}{files}."]
        if self.folded:
            lines.append(f"The adapter {self.adapter!r} is folded into {self.folded} of them.")
        if self.replaced:
            lines.append(
                f"{self.replaced} {'others are' if self.folded else 'of them are'} as the run has trained them."
            )
        if self.was_quantized:
            lines.append("The run had quantized its base. This is the unquantized base, with the adapter folded in.")
        if self.is_untied:
            lines.append(f"Tied weights were trained apart, so {CONFIG} has tie_word_embeddings=false.")
        if self.unverified:
            lines.append(f"Not verified, because there is no fingerprint of them: {named(self.unverified, 3)}.")
        if self.outside:
            lines.append(f"Not included, because the base has no such weights: {named(self.outside, 3)}.")
        if self.skipped:
            lines.append(
                f"Not copied, because they are scripts or links: {named(self.skipped, 3)}. If {CONFIG} names them"
                " (auto_map) and you trust them, copy them."
            )
        return printable_lines(lines)


def merge(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    base: str | Path,
    adapter: str | None = None,
    adapter_config: str | Path | None = None,
    dtype: str | None = None,
    trust: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
) -> Merged:
    """Write a Hugging Face folder with the base's weights and what a run has trained; LoRA is folded in.

    Args:
        source: the directory of a DeepSpeed checkpoint, or an adapter's as PEFT and `patch(export="peft")` write it. It
            is not changed.
        target: the directory to create.
        tag: the subdirectory of a DeepSpeed checkpoint to read; by default the one named in `latest`.
        base: the folder of the model that the run was built from. It is verified with the fingerprints in the manifest.
            If the run has quantized it, the unquantized model.
        adapter: the name of the adapter, if the run had several.
        adapter_config: an `adapter_config.json`, or its directory, if the checkpoint contains none; `patch()` saves it.
        dtype: "fp32", "bf16" or "fp16", to convert the base's floating-point tensors before anything is folded in, as
            `from_pretrained` does. By default they keep the dtype that they have in the base's files.
        trust: accept files that name unexpected classes, and links out of the checkpoint. No code of theirs is run.
        dry_run: write nothing and read no tensors.
        quiet: do not show progress on stderr.

    Returns:
        What the output contains.

    Raises:
        CheckpointError: a file is missing, damaged or from another run; the base differs from that of the run; there
            is no such adapter, or it cannot be merged; PEFT is missing; the target exists, or cannot be written.
            Nothing is left there.
        CheckpointMismatchError: the manifest is damaged, or has a format that this release does not know.
        ValueError: the dtype is unknown.
    """
    kind = dtypes.torch_dtype(dtype)
    folder = open_model_folder(base, trust)
    tuned = read_tuned(source, tag, folder.path, adapter, adapter_config, trust)
    plan = plan_merge(folder, tuned, kind)
    done = Merged(
        source=str(source),
        target=str(target),
        dtype=dtype,
        adapter=tuned.name,
        folded=sum(change.module is not None for change in plan.changes.values()),
        replaced=sum(change.module is None for change in plan.changes.values()),
        tensors=sum(map(len, plan.files.values())),
        size=plan.size,
        files=tuple(plan.files),
        is_untied=plan.is_untied,
        was_quantized=plan.was_quantized,
        unverified=plan.unverified,
        outside=tuple(plan.outside),
    )
    sources = (tuned.root, folder.path)
    if dry_run:
        check_output(Path(target), *sources)
        return done
    with new_output(target, *sources) as output, progress("merging", plan.size, quiet) as progressed:
        output.mkdir()
        scripts, links = copy_more(folder.path, output)
        (output / CONFIG).write_text(json.dumps(_config(folder, plan), indent=2) + "\n", encoding="utf-8")
        with Records() as records:
            _write_weights(output, folder, plan, _Reader(records, folder, tuned, plan), progressed)
    return replace(done, skipped=(*scripts, *links))


def _config(folder: ModelFolder, plan: MergePlan) -> dict[str, Any]:
    """The base's configuration, with what has changed."""
    config = dict(folder.config)
    if plan.dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = plan.dtype
    if plan.is_untied:
        config["tie_word_embeddings"] = False
        if isinstance(inner := config.get("text_config"), dict):
            config["text_config"] = {**inner, "tie_word_embeddings": False}
    return config


def _write_weights(
    output: Path, folder: ModelFolder, plan: MergePlan, read: _Reader, progressed: Callable[[int], object]
) -> None:
    for file, parts in plan.files.items():
        # Parts of one weight one after another, so that it is made once.
        ordered = dict(sorted(parts.items(), key=lambda item: (item[1].weight, item[1].begin)))
        entries = {name: (plan.dtype_of(part.weight), part.shape) for name, part in ordered.items()}
        about = {} if plan.is_untied else folder.files[file].metadata
        contents = _prefetched(_contents(ordered, plan, read, progressed))
        safetensors_file.write_file(output / file, entries, contents, about)
    if len(plan.files) > 1:
        where = {name: file for file, parts in plan.files.items() for name in parts}
        index = {"metadata": {"total_size": plan.size}, "weight_map": where}
        (output / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _contents(
    parts: dict[str, Part], plan: MergePlan, read: _Reader, progressed: Callable[[int], object]
) -> Iterator[memoryview]:
    weight, value = "", memoryview(b"")
    for part in parts.values():
        if read.is_copied(part):
            for chunk in read.copied(part.weight):
                progressed(len(chunk))
                yield chunk
            continue
        if part.weight != weight:
            value = memoryview(b"")  # before the next is read
            _give_back_memory()
            weight, value = part.weight, memoryview(read(part.weight))
        width = ITEM_SIZES[plan.dtype_of(part.weight)]
        progressed(part.numel * width)
        yield value[part.begin * width : (part.begin + part.numel) * width]


def _prefetched(contents: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same contents; each is made in a thread while the one before is written."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, contents, None)
        while (content := coming.result()) is not None:
            coming = thread.submit(next, contents, None)
            yield content
            content.release()


def _give_back_memory() -> None:
    """Give what was freed back to the system: glibc keeps it, in pieces that are too small for the next weight."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Reader:
    """Reads a weight of the base, verifies it, and gives it the value that it has in the output."""

    def __init__(self, records: Records, folder: ModelFolder, tuned: Tuned, plan: MergePlan) -> None:
        self.records, self.base, self.tuned, self.plan = records, folder.base, tuned, plan
        self.buffers = cycle([memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)])

    def is_copied(self, part: Part) -> bool:
        """Whether a part of the output is a whole weight of the base, whose values stay as they are."""
        weight, tensor = part.weight, self.plan.base[part.weight]
        return (
            weight not in self.plan.changes
            and (part.begin, part.numel) == (0, tensor.numel)
            and tensor.view is None
            and not any(isinstance(source, Quantized) for _, source in self.plan.compared.get(weight, ()))
        )

    def copied(self, weight: str) -> Iterator[memoryview]:
        """Read and verify such a weight; each chunk is valid until the next but one."""
        tensor, manifest = self.plan.base[weight], self.plan.manifest
        entries = [entry for entry, _ in self.plan.compared.get(weight, ()) if entry.fingerprint]
        streams = [Stream(entry.dtype, tensor.numel) for entry in entries]
        for chunk in self.records.chunks(tensor, self.buffers):
            for entry, stream in zip(entries, streams, strict=True):
                stream.add(dtypes.convert(chunk, tensor.dtype, entry.dtype))
            yield memoryview(dtypes.convert(chunk, tensor.dtype, self.plan.dtype_of(weight)))
        for entry, stream in zip(entries, streams, strict=True):
            if manifest is not None and stream.digest() != entry.fingerprint:
                raise wrong_values(self.base, self.records, tensor, entry, manifest)

    def __call__(self, weight: str) -> bytearray | memoryview:
        change = self.plan.changes.get(weight)
        if change is None or change.module is None or self.plan.folding is None:
            return self._unfolded(weight)
        module = change.module
        folded = self.plan.folding.fold(
            module,
            change.parameter,
            lambda parameter: self._tensor(self._unfolded(name := self.plan.weights[module, parameter]), name),
            self._adapter,
        )
        return _bytes(folded)

    def _unfolded(self, weight: str) -> bytearray:
        change, dtype, tensor = self.plan.changes.get(weight), self.plan.dtype_of(weight), self.plan.base[weight]
        if change is not None and change.source is not None:
            values = dtypes.convert(self.records.read(change.source), change.source.dtype, dtype)
        else:
            values = self.records.read(tensor)
            self._verify(weight, values)
            values = dtypes.convert(values, tensor.dtype, dtype)
        if change is not None and change.rows is not None:
            rows = dtypes.convert(self.records.read(change.rows), change.rows.dtype, dtype)
            width = len(rows) // len(change.indices)
            for place, index in enumerate(change.indices):
                values[index * width : (index + 1) * width] = rows[place * width : (place + 1) * width]
        return values

    def _verify(self, weight: str, values: bytearray) -> None:
        stored = self.plan.base[weight]
        for entry, tensor in self.plan.compared.get(weight, ()):
            if isinstance(tensor, Quantized):
                converted = self.base.read(self.records, tensor, entry)
            else:
                converted = dtypes.convert(values, stored.dtype, entry.dtype)
            if self.plan.manifest is not None:
                check_values(self.base, self.records, tensor, entry, converted, self.plan.manifest)

    def _tensor(self, values: bytearray, weight: str) -> torch.Tensor:
        import torch

        kind = getattr(torch, self.plan.dtype_of(weight))
        return torch.frombuffer(values, dtype=kind).view(self.plan.base[weight].shape)

    def _adapter(self, name: str) -> torch.Tensor:
        import torch

        tensor = self.tuned.adapter[name]
        values = torch.frombuffer(self.records.read(tensor), dtype=getattr(torch, tensor.dtype))
        return values.view(tensor.shape).clone()  # in memory of torch's, aligned as in PEFT's own merge


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
