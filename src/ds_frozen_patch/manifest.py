"""The manifest: what a trainable-only checkpoint records about the base that it left out.

It is part of DeepSpeed's client state, under `KEY`, so that it cannot be separated from the weights, and contains only
plain Python values, so that no class is unpickled to read it. In ZeRO-3, where each rank has a file of model states,
one of them contains the manifest and the others a reference to that file.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from .common.errors import CheckpointMismatchError
from .common.probing import version_of
from .common.text import human_bytes
from .parameters import (
    BUFFER,
    PARAMETER,
    PART,
    Contents,
    ModuleTensor,
    compiled_modules,
    is_name,
    part_name,
    part_suffix,
    plain,
)

if TYPE_CHECKING:
    import torch

KEY = "ds_frozen_patch"
FORMAT = 1
REFERENCE = 2


@dataclass(frozen=True)
class LeftOut:
    """Something of the base that a checkpoint does not contain: a frozen parameter, a part of one, or a buffer.

    Attributes:
        names: all its names in the user's module (see `parameters.plain`): the one in `named_parameters()`, then its
            tied aliases.
        shape: the shape of the whole tensor, even if ZeRO-3 has partitioned it.
        dtype: torch's name of the dtype, such as "bfloat16", or the name of a tensor subclass.
        fingerprint: of its content (see `ds_frozen_patch.fingerprint`), or None if that could not be read.
        kind: "parameter", "part" (such as a scale of a quantized one) or "buffer".
        group: for a part, the first name of its parameter; else empty.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    fingerprint: str | None
    kind: str = PARAMETER
    group: str = ""

    @property
    def name(self) -> str:
        """The name in `named_parameters()`."""
        return self.names[0]


@dataclass(frozen=True)
class Manifest:
    """What was left out of a checkpoint, and what wrote it.

    Attributes:
        left_out: everything that was left out.
        total_bytes: its size; tied parameters count once.
        zero_stage: 0 to 3, of the run that saved.
        world_size: the number of ranks that saved.
        versions: the release of each package that took part, by its name on the package index.
        adapters: the configuration of each PEFT adapter, as the JSON of an `adapter_config.json`: by the name of its
            module, then by the name of the adapter.
        compiled: the plain names of the modules that `torch.compile` has wrapped, as `compiled_modules` returns them.
    """

    left_out: tuple[LeftOut, ...]
    total_bytes: int
    zero_stage: int
    world_size: int
    versions: Mapping[str, str]
    adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    compiled: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All names that the checkpoint does not contain, including tied aliases."""
        return frozenset(name for parameter in self.left_out for name in parameter.names)

    @property
    def parameters(self) -> tuple[LeftOut, ...]:
        """The parameters among what was left out."""
        return tuple(entry for entry in self.left_out if entry.kind == PARAMETER)

    def __str__(self) -> str:
        """How much was left out: "56 frozen parameters, 91.6 MB"."""
        counts = Counter(entry.kind for entry in self.left_out)
        parts = f", {counts[PART]} parts of them" if counts[PART] else ""
        buffers = f", {counts[BUFFER]} buffers" if counts[BUFFER] else ""
        return f"{counts[PARAMETER]} frozen parameters{parts}{buffers}, {human_bytes(self.total_bytes)}"

    def to_state(self) -> dict[str, Any]:
        """The manifest as plain values, for a checkpoint."""
        state = {
            "format": FORMAT,
            "left_out": [_values_of(entry, entry.names) for entry in self.left_out if entry.kind == PARAMETER],
            **({"parts": parts} if (parts := self._parts_by_parameter()) else {}),
            **({"buffers": buffers} if (buffers := self._buffers()) else {}),
            "total_bytes": self.total_bytes,
            "zero_stage": self.zero_stage,
            "world_size": self.world_size,
            "versions": dict(self.versions),
            **({"adapters": {name: dict(configs) for name, configs in self.adapters.items()}} if self.adapters else {}),
            **({"compiled": sorted(self.compiled)} if self.compiled else {}),
        }
        return {**state, "digest": _digest(state)}

    def to_reference(self, file: str) -> dict[str, Any]:
        """What a file of model states contains instead of the manifest: the name of the file that has it."""
        return {"format": REFERENCE, "file": file, "digest": self.to_state()["digest"]}

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any]) -> Manifest | None:
        """The manifest in the state of a checkpoint's first file, or None if there is none.

        Raises:
            CheckpointMismatchError: its format is unknown to this release, or it is damaged.
        """
        state = checkpoint.get(KEY)
        return None if state is None else cls.from_state(state)

    @classmethod
    def from_state(cls, state: Any) -> Manifest:
        """The inverse of `to_state`; raises like `from_checkpoint`."""
        saved_format = state.get("format") if isinstance(state, dict) else None
        if saved_format != FORMAT:
            shown = str(saved_format)[:20] if isinstance(saved_format, int | str) else "unknown"
            raise CheckpointMismatchError(
                f"The checkpoint's manifest has format {shown}; this release of ds_frozen_patch reads"
                f" format {FORMAT}. Update it: pip install -U ds_frozen_patch"
            )
        try:
            if "digest" in state and state["digest"] != _digest(state):
                raise CheckpointMismatchError(
                    "The checkpoint's manifest does not match its digest: it was edited, or is damaged. Load an"
                    " undamaged copy."
                )
            return cls._from_values(state)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointMismatchError(
                f"The checkpoint's manifest is damaged ({type(error).__name__}: {error}). Load an undamaged copy."
            ) from None

    @classmethod
    def _from_values(cls, state: Mapping[str, Any]) -> Manifest:
        left_out: list[LeftOut] = []
        parts = dict(state.get("parts", {}))
        _check_number(state["left_out"], parts)
        for names, *values in state["left_out"]:
            left_out.append(_make_entry(PARAMETER, "", names, *values))
            left_out += _parts_of(names, parts.pop(names[0], ()))
        # `prune` may not find a parameter that consists of its parts.
        left_out += [part for name, values in parts.items() for part in _parts_of([name], values)]
        left_out += [_make_entry(BUFFER, "", [name], *values) for name, *values in state.get("buffers", ())]
        manifest = cls(
            left_out=tuple(left_out),
            total_bytes=state["total_bytes"],
            zero_stage=state["zero_stage"],
            world_size=state["world_size"],
            versions=state["versions"],
            adapters=state.get("adapters", {}),
            compiled=frozenset(state.get("compiled", ())),
        )
        manifest._check_values()
        return manifest

    def _check_values(self) -> None:
        """Raise ValueError if a value has the wrong type or an impossible size."""
        told = {**self.versions, **{k: v for adapters in self.adapters.values() for k, v in adapters.items()}}
        texts = [text for p in self.left_out for text in (p.dtype, p.fingerprint or "", p.group)]
        numbers = [size for p in self.left_out for size in p.shape]
        numbers += [self.total_bytes, self.zero_stage, self.world_size]
        if not all(isinstance(text, str) for text in (*texts, *told, *told.values(), *self.adapters)):
            raise ValueError("a name is no text")
        if not all(is_name(name) for p in self.left_out for name in p.names) or not all(map(is_name, self.compiled)):
            raise ValueError("a name is no text, or too long")
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
            raise ValueError("a size is no number")
        if not all(p.names and len(p.shape) <= 64 for p in self.left_out):
            raise ValueError("a parameter has no name, or no shape")

    def _parts_by_parameter(self) -> dict[str, list[tuple[Any, ...]]]:
        """The parts in `to_state`, in a short form: a quantized layer can have twenty, the same in all layers."""
        same: dict[Any, Any] = {}  # pickle writes one object once
        by_parameter: dict[str, list[tuple[Any, ...]]] = {}
        for entry in self.left_out:
            if entry.kind == PART:
                suffix = part_suffix(entry.name, entry.group)
                values = _values_of(entry, same.setdefault(suffix, suffix))
                key = (values[0], entry.shape, *values[2:])
                by_parameter.setdefault(entry.group, []).append(same.setdefault(key, values))
        return by_parameter

    def _buffers(self) -> list[tuple[Any, ...]]:
        return [_values_of(entry, entry.name) for entry in self.left_out if entry.kind == BUFFER]


def _values_of(entry: LeftOut, name: str | tuple[str, ...]) -> tuple[Any, ...]:
    return name if isinstance(name, str) else list(name), list(entry.shape), entry.dtype, entry.fingerprint


def _check_number(left_out: Sequence[Any], parts: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError for far more names than the file contains: a pickle can reference one list many times."""
    count = sum(len(names) * (1 + len(parts.get(names[0], ()))) for names, *_ in left_out if names)
    there = (
        len(left_out)
        + sum(len(names) for names, *_ in left_out)
        + sum({id(p): len(p) for p in parts.values()}.values())
    )
    if count > 100_000 + 50 * there:
        raise ValueError("it expands to far more names than it contains")


def _parts_of(names: Sequence[str], parts: Iterable[tuple[Any, ...]]) -> Iterator[LeftOut]:
    for suffix, *values in parts:
        if not is_name(suffix) or not all(map(is_name, names)):
            raise ValueError("a name is no text, or too long")
        part_names = dict.fromkeys(part_name(name, suffix) for name in names)
        yield _make_entry(PART, names[0], part_names, *values)


def _make_entry(
    kind: str, group: str, names: Iterable[str], shape: Iterable[int], dtype: str, print_: str | None
) -> LeftOut:
    return LeftOut(tuple(names), tuple(shape), dtype, print_, kind, group)


def reference(state: Any) -> tuple[str, str] | None:
    """The name of the file that has the manifest, and the manifest's digest, if the state is a reference; else None.

    Raises:
        CheckpointMismatchError: it is damaged.
    """
    if not isinstance(state, dict) or state.get("format") != REFERENCE:
        return None
    file, digest = state.get("file"), state.get("digest")
    if not isinstance(file, str) or not isinstance(digest, str):
        raise CheckpointMismatchError("The checkpoint's manifest is damaged: a reference to it has no file name.")
    return file, digest


def digest_of(state: Any) -> Any:
    """The digest of a manifest or of a reference to it."""
    return state["digest"] if isinstance(state, dict) and "digest" in state else state


def _digest(state: Mapping[str, Any]) -> str:
    content = {key: value for key, value in state.items() if key != "digest"}
    return sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()


def adapters_of(module: torch.nn.Module) -> dict[str, dict[str, str]]:
    """The configurations of a module's PEFT adapters, for `Manifest.adapters`."""
    configurations: dict[str, dict[str, str]] = {}
    seen: set[torch.nn.Module] = set()

    def look(inner: torch.nn.Module, name: str) -> None:
        if inner in seen:
            return
        seen.add(inner)
        # Accessing a missing attribute of a module is slow: it searches three dictionaries and raises.
        has = "peft_config" in vars(inner) or hasattr(type(inner), "peft_config")
        configs = getattr(inner, "peft_config", None) if has else None
        if not isinstance(configs, dict):
            for child, its_module in inner.named_children():
                look(its_module, f"{name}.{child}" if name else child)
            return
        configurations[plain(name)] = {  # PEFT's inner modules have the same configurations
            adapter: json.dumps(config.to_dict(), default=_plain_value, sort_keys=True)
            for adapter, config in configs.items()
            if hasattr(config, "to_dict")
        }

    look(module, "")
    return configurations


def _plain_value(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def describe(
    left_out: Sequence[ModuleTensor],
    prints: Sequence[str | None],
    *,
    contents: Contents,
    zero_stage: int,
    world_size: int,
) -> Manifest:
    """Create the manifest of a checkpoint.

    Args:
        left_out: what the checkpoint leaves out, the same on every rank.
        prints: the fingerprint of each.
        contents: of the module that it belongs to.
        zero_stage: of the run.
        world_size: of the run.
    """
    entries = (
        LeftOut(entry.names, entry.shape, entry.dtype, print_, entry.kind, entry.group if entry.kind == PART else "")
        for entry, print_ in zip(left_out, prints, strict=True)
    )
    return Manifest(
        left_out=tuple(entries),
        total_bytes=sum(entry.nbytes for entry in left_out),
        zero_stage=zero_stage,
        world_size=world_size,
        versions=versions(),
        adapters=adapters_of(contents.module),
        compiled=compiled_modules(contents.raw_names),
    )


@cache
def versions() -> dict[str, str]:
    """The release of each package that this process has imported, by its name on the package index."""
    releases = {name: version_of(name) for name, module in _PACKAGES.items() if module in sys.modules}
    return {name: version for name, version in releases.items() if version}


_PACKAGES = {
    "ds_frozen_patch": "ds_frozen_patch",
    "lightning": "lightning",
    "pytorch-lightning": "pytorch_lightning",
    "lightning-fabric": "lightning_fabric",
    "deepspeed": "deepspeed",
    "torch": "torch",
}
"""The name of the module of each package that can take part in a save."""
