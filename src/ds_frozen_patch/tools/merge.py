"""Merge a checkpoint and its base into a folder that serves: for `from_pretrained`, vLLM and the like.

The folder has the files of the base's, one for one. What the run has trained replaces the base's tensors, and plain
LoRA is added to them, one tensor after another. Any other adapter is for PEFT to merge.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoint import dtypes
from ..checkpoint.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    PEFTS_PREFIX,
    choose_adapter,
    match_adapter,
    read_config,
)
from ..checkpoint.format.records import Records, TensorSource
from ..checkpoint.zero.opening import open_checkpoint
from ..common.errors import CheckpointError, named
from ..common.text import printable_lines, progress
from ..parameters import Contents
from ..record import LeftOut, Record, unknown
from .base import Base, endings, locate_base, match_base, open_base, without_quantized, without_wrappers
from .consolidate import Consolidated
from .loaded_names import CONFIG, empty_model
from .lora import LORA, Change, changes_of
from .output import check_output, new_output
from .tensors import write_folder

_COPIED = re.compile(r"(?!.*\.index\.json|adapter_config|(.*/)?\.).*(\.(json|jinja|md|model|tiktoken|txt)|[A-Z]{3,})")


@dataclass(frozen=True)
class Merged(Consolidated):
    """What `merge` has written, or would write.

    `source`, `target`, `dtype`, `is_whole`, `tensors`, `size`, `files` and `unverified` are those of `Consolidated`.

    Attributes:
        adapter: the name of the adapter that was merged; None if there is none.
        folded: the number of weights that plain LoRA was folded into.
        outside: trained parameters that are not in the output, because the base has none of these names.
        notes: what else there is to say.
    """

    adapter: str | None
    folded: int
    outside: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"The adapter {self.adapter!r} is folded into {self.folded} of them."] if self.folded else []
        lines += self.notes
        if self.outside:
            lines.append(f"Not included, because the base has no such weights: {named(self.outside, 3)}.")
        return "\n".join([super().__str__(), *([printable_lines(lines)] if lines else [])])


def merge(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    base: str | Path,
    adapter: str | None = None,
    adapter_config: str | Path | None = None,
    dtype: str | None = None,
    dry_run: bool = False,
    quiet: bool = True,
) -> Merged:
    """Write a Hugging Face folder with the base's weights and what a run has trained; an adapter is merged.

    Args:
        source: the directory of a DeepSpeed checkpoint, or an adapter's as PEFT and `patch(export="peft")` write it.
        target: the directory to create.
        tag: the subdirectory of a DeepSpeed checkpoint to read; by default the one named in `latest`.
        base: the folder of the unquantized model, or its id on the hub; it is verified with the record's fingerprints.
        adapter: the name of the adapter, if the run had several.
        adapter_config: an `adapter_config.json`, or its directory, if the checkpoint contains none; `patch()` saves it.
        dtype: "fp32", "bf16" or "fp16", to convert the base before an adapter is added; by default it stays as it is.
        dry_run: write nothing and read no tensors.
        quiet: do not show progress on stderr.

    Raises:
        CheckpointError: something is missing, damaged, or from another run or base; the adapter cannot be merged; the
            target exists, or cannot be written. Nothing is left there.
        ValueError: the dtype is unknown.
    """
    kind, folder = dtypes.torch_dtype(dtype), locate_base(base)
    model, opened = empty_model(folder), open_base(folder)
    run = _read_run(Path(source), tag, adapter, adapter_config, model.state_dict().keys())
    files, changes, is_untied = _plan(opened, model, run)
    record = without_quantized(run.record, opened)
    compared = match_base(record, opened)
    unread: dict[TensorSource, list[LeftOut]] = defaultdict(list)
    for entry, tensor in compared.items():
        unread[tensor].append(entry)

    def read(tensor: TensorSource, records: Records) -> memoryview:
        """Read a tensor of the base, and the first time compare it with its fingerprints."""
        values = records.read(tensor)
        for entry in unread.pop(tensor, ()):
            opened.verify(values, tensor, entry, run.record, records)
        return values

    shards = {
        file: {name: changes.get(name, Change()).output(tensor, kind, read) for name, tensor in tensors.items()}
        for file, tensors in files.items()
    }
    size = sum(tensor.size for shard in shards.values() for tensor in shard.values())
    notes = {
        f"Tied weights were trained apart, so {CONFIG} has tie_word_embeddings=false.": is_untied,
        "The run had quantized its base, which is compared at load only.": record != run.record,
        "No record says what the base was, so it is not verified.": not run.record.is_trainable_only,
    }
    done = Merged(
        source=str(source),
        target=str(target),
        dtype=dtype,
        is_whole=True,
        adapter=run.name,
        folded=sum(bool(change.lora) for change in changes.values()),
        tensors=sum(map(len, shards.values())),
        size=size,
        files=tuple(shards),
        unverified=tuple(entry.name for entry in compared if entry.fingerprint is None),
        outside=tuple(run.outside),
        notes=tuple(note for note, is_so in notes.items() if is_so),
    )
    if dry_run:
        check_output(Path(target), run.root, folder)
        return done
    cost = sum(tensor.cost for shard in shards.values() for tensor in shard.values())
    cost += sum(tensor.nbytes for tensor in unread.keys() - {t for file in files.values() for t in file.values()})
    with new_output(target, run.root, folder) as output, progress("merging", cost, quiet) as progressed:
        with Records(progressed=progressed) as records:
            write_folder(output, shards, {}, records)
            for tensor in [*unread]:  # what no file of the output has
                read(tensor, records)
        _write_config(folder, output, kind, is_untied)
        _copy_other_files(folder, output)
    return done


@dataclass
class _Run:
    """What a run has trained, by the names of its model, without those of PEFT's layers. No tensor is read."""

    root: Path
    name: str | None  # of its adapter
    config: dict[str, Any]  # of the adapter
    adapter: dict[str, TensorSource]  # by the names in the adapter's file
    whole: dict[str, TensorSource] = field(default_factory=dict)  # trained, frozen ones that no base has, and buffers
    record: Record = field(default_factory=unknown)
    outside: list[str] = field(default_factory=list)


def _read_run(root: Path, tag: str | None, name: str | None, config: str | Path | None, known: Collection[str]) -> _Run:
    if (root / ADAPTER_CONFIG).is_file() and not (root / "latest").exists() and tag is None:
        return _Run(root, "default", read_config(config or root), open_base(root / ADAPTER_FILE).tensors)
    checkpoint = open_checkpoint(root, tag)
    weights, record = checkpoint.weights, checkpoint.record
    tensors, adapter, members, outside = weights.by_any_name, None, dict[str, str](), list[str]()
    if name or config or record.adapters or any(PEFTS_PREFIX in key for key in weights.trained):
        adapter = choose_adapter(weights, record, name, config, "Export what was trained, and use PEFT.")
        members, outside = match_adapter(weights, record, adapter)
    prefix = "" if adapter else _prefix(map(without_wrappers, weights.trained), known)

    def inside(key: str) -> str | None:
        """The name of a parameter in the model; None if it is elsewhere, or is an adapter's."""
        name = adapter.peft_name(key) if adapter else key
        if name is None or LORA.match(name) or ".trainable_tokens" in name or ".modules_to_save." in name:
            return None
        return inner.removeprefix(prefix) if (inner := without_wrappers(name)).startswith(prefix) else None

    keys = [
        *(members.values() if adapter else weights.trained),
        *(weights.frozen if record.is_trainable_only else ()),
        *(key for key in weights.buffers if inside(key) in known),
    ]
    whole = {
        inner: tensors[key] for key in keys for alias in weights.names_of(key) if (inner := inside(alias)) is not None
    }
    return _Run(
        root=checkpoint.states.layout.root,
        name=adapter.name if adapter else None,
        config=(adapter.config if adapter else None) or {},
        adapter={in_file: tensors[key] for in_file, key in members.items()},
        whole=whole,
        record=replace(record, left_out=tuple(e for e in record.left_out if any(map(inside, e.names)))),
        outside=outside if adapter else [key for key in weights.trained if inside(key) is None],
    )


def _prefix(names: Iterable[str], known: Collection[str]) -> str:
    """What a module, which may have several models, puts before the names of the one that it trains most of."""
    counts = Counter(name.removesuffix(end) for name in names for end in (name, *endings(name)) if end in known)
    return counts.most_common(1)[0][0] if counts else ""


def _plan(base: Base, model: Any, run: _Run) -> tuple[dict[str, dict[str, TensorSource]], dict[str, Change], bool]:
    """The base's tensors for each file of the output, and what becomes of them.

    Also whether weights that the base ties were trained apart.
    """
    try:
        wanted = changes_of(model, run.whole, run.adapter, run.config)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a configuration says
        raise CheckpointError(f"The adapter's configuration is damaged ({error!r}).") from None
    ties, files, is_untied = list(Contents(model).names.values()), _files(base), False
    tensors = {name: tensor for file in files.values() for name, tensor in file.items()}
    found = {name: base.name_of(name) for name in {*wanted, *(name for group in ties for name in group)}}
    places = {name: place for name, place in found.items() if place in tensors or place in base.loaded}
    for group in ties:
        shared = next((places[name] for name in group if name in places), None)
        if shared is not None and len({wanted.get(name) for name in group}) > 1:
            is_untied, added = True, {name: base[shared] for name in group if name not in places}
            files[[*files][-1]] |= added
            tensors |= added
            places |= {name: name for name in added}
        elif shared is not None:
            places |= {name: places.get(name, shared) for name in group}
    changes = {places[name]: change for name, change in wanted.items() if name in places}
    if joined := changes.keys() - tensors.keys():
        raise CheckpointError(
            f"{base.path} has {named(sorted(joined), 3)} in several tensors each. Build the model as the run did, and"
            " use load_trainable and save_pretrained."
        )
    missing = [name for name in wanted if name not in places]
    if not changes or (missing and run.config):
        raise CheckpointError(f"{base.path} lacks {named(missing)}. Pass the base that the run was built from.")
    run.outside += [] if run.config else missing
    _check_shapes(base, tensors, changes)
    return files, changes, is_untied


def _check_shapes(base: Base, tensors: Mapping[str, TensorSource], changes: Mapping[str, Change]) -> None:
    wrong = []
    for name, change in changes.items():
        tensor, shapes = tensors[name], [change.source.shape] if change.source else []
        if change.lora:
            a, b = (source.shape for source in change.lora)
            shapes.append((a[1], b[0]) if change.is_turned else (b[0], a[1]))
        if {tensor.shape, *shapes} != {tensor.shape} or (change.lora and tensor.dtype not in dtypes.FLOATING):
            wrong.append(f"{name!r} has shape {[*tensor.shape]} in {tensor.dtype}, not {[*map(list, shapes)]}")
    if wrong:
        raise CheckpointError(
            f"{base.path} is not the base that the run used, or is quantized: {'; '.join(wrong[:5])}. If the run has"
            " resized its embeddings, resize the base in the same way and save it by save_pretrained."
        )


def _write_config(folder: Path, output: Path, dtype: str | None, is_untied: bool) -> None:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    for part in (config, config.get("text_config") or {}) if is_untied else ():
        part["tie_word_embeddings"] = False
    (output / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _files(base: Base) -> dict[str, dict[str, TensorSource]]:
    """The tensors of each of a base's files, by the name of the file in the output."""
    files: dict[Path, dict[str, TensorSource]] = defaultdict(dict)
    for name, tensor in base.tensors.items():
        storage = tensor.pieces[0].storage
        if storage.path.suffix != ".safetensors" or storage.key == name:  # the base has aliases, too
            files[storage.path][name] = tensor
    whole = base.path / "model.safetensors"
    if whole in files and not (base.path / f"{whole.name}.index.json").is_file():  # transformers reads no other
        files = {whole: files[whole]}
    names = {file: f"{file.stem.removeprefix('pytorch_')}.safetensors" for file in files}
    return {names[file] if len(files) > 1 else whole.name: tensors for file, tensors in files.items()}


def _copy_other_files(folder: Path, output: Path) -> None:
    """Copy tokenizer, generation config, licence and so on, but no scripts, and not what links lead to elsewhere."""
    home = folder.resolve()
    inside = {home, home.parent.parent / "blobs"} if home.parent.name == "snapshots" else {home}  # in the hub's cache
    for item in folder.rglob("*"):
        name = item.relative_to(folder)
        is_data = item.is_file() and _COPIED.fullmatch(str(name)) and not inside.isdisjoint(item.resolve().parents)
        if is_data and not (output / name).exists():
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(item, output / name)
