"""The manifest: what a trainable-only checkpoint says of the parameters that it left out.

It travels in DeepSpeed's client state under `KEY`, so it cannot be parted from the weights,
and holds plain Python values only, so that it can be read without unpickling a class. In ZeRO-3, where each rank has a
file of model states, one of them holds the manifest and the others a reference to that file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ._errors import CheckpointMismatchError
from .fingerprint import fingerprints, numel_of, process_memory

if TYPE_CHECKING:
    import torch

KEY = "ds_frozen_patch"
FORMAT = 1
REFERENCE = 2
PREFIX = "_forward_module."
"""What Lightning before 2.1 puts before the names of a LightningModule's parameters, in its checkpoints too."""


@dataclass(frozen=True)
class LeftOut:
    """One frozen parameter that a checkpoint does not hold.

    `names` are all its names in the user's module, without `PREFIX` in every release of Lightning:
    the one that `named_parameters()` gives, then its tied aliases. `shape` is that of the whole
    parameter, also where ZeRO-3 has partitioned it. `dtype` is torch's name for it, such as
    "bfloat16". `fingerprint` is of its content (see `ds_frozen_patch.fingerprint`), or None where
    that could not be read.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    fingerprint: str | None

    @property
    def name(self) -> str:
        """The name that `named_parameters()` gives."""
        return self.names[0]


@dataclass(frozen=True)
class Manifest:
    """What was left out of a checkpoint, and what wrote it.

    `total_bytes` counts each left-out parameter once, in its own dtype. `versions` gives the
    release of each package that took part, by its name on the package index. `adapters` gives the
    configuration of each of PEFT's adapters, as the JSON of an `adapter_config.json`: by the name of
    the module that has it, then by the adapter's.
    """

    left_out: tuple[LeftOut, ...]
    total_bytes: int
    zero_stage: int
    world_size: int
    versions: Mapping[str, str]
    adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Every name that the checkpoint does not hold, with or without `PREFIX`, tied aliases included."""
        return frozenset(name for parameter in self.left_out for name in parameter.names)

    def to_state(self) -> dict[str, Any]:
        """The manifest as plain values, to go into a checkpoint."""
        state = {
            "format": FORMAT,
            "left_out": [(list(p.names), list(p.shape), p.dtype, p.fingerprint) for p in self.left_out],
            "total_bytes": self.total_bytes,
            "zero_stage": self.zero_stage,
            "world_size": self.world_size,
            "versions": dict(self.versions),
            **({"adapters": {name: dict(said) for name, said in self.adapters.items()}} if self.adapters else {}),
        }
        return {**state, "digest": _digest(state)}

    def to_reference(self, file: str) -> dict[str, Any]:
        """What goes into a file of model states in place of the manifest: the name of the file that has it."""
        return {"format": REFERENCE, "file": file, "digest": self.to_state()["digest"]}

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any]) -> Manifest | None:
        """The manifest in the state of a checkpoint's first file, or None where there is none.

        Raises:
            CheckpointMismatchError: it is of a format that this release does not know, or damaged.
        """
        state = checkpoint.get(KEY)
        return None if state is None else cls.from_state(state)

    @classmethod
    def from_state(cls, state: Any) -> Manifest:
        """The manifest that `to_state` has made these values of; raises as `from_checkpoint`."""
        found = state.get("format") if isinstance(state, dict) else None
        if found != FORMAT:
            raise CheckpointMismatchError(
                f"The checkpoint's manifest has format {str(found)[:20]}; this release of ds_frozen_patch reads format"
                f" {FORMAT}. Update it: pip install -U ds_frozen_patch"
            )
        try:
            if "digest" in state and state["digest"] != _digest(state):
                raise CheckpointMismatchError(
                    "The checkpoint's manifest is not as it was written: it has been edited, or is damaged. Load a copy"
                    " that is whole."
                )
            return cls._from_values(state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointMismatchError(
                f"The checkpoint's manifest is damaged ({type(error).__name__}: {error}). Load a copy that is whole."
            ) from None

    @classmethod
    def _from_values(cls, state: Mapping[str, Any]) -> Manifest:
        found = cls(
            left_out=tuple(
                LeftOut(tuple(names), tuple(shape), dtype, print_) for names, shape, dtype, print_ in state["left_out"]
            ),
            total_bytes=state["total_bytes"],
            zero_stage=state["zero_stage"],
            world_size=state["world_size"],
            versions=state["versions"],
            adapters=state.get("adapters", {}),
        )
        found._check()
        return found

    def _check(self) -> None:
        """Raise ValueError where it says something of another kind than is said there."""
        told = {**self.versions, **{k: v for adapters in self.adapters.values() for k, v in adapters.items()}}
        texts = [text for p in self.left_out for text in (*p.names, p.dtype, p.fingerprint or "")]
        numbers = [size for p in self.left_out for size in p.shape]
        numbers += [self.total_bytes, self.zero_stage, self.world_size]
        if not all(isinstance(text, str) for text in (*texts, *told, *told.values(), *self.adapters)):
            raise ValueError("a name is no text")
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
            raise ValueError("a size is no number")
        if not all(p.names and len(p.shape) <= 64 for p in self.left_out):
            raise ValueError("a parameter has no name, or no shape")


def reference(state: Any) -> tuple[str, str] | None:
    """The file that has the manifest and the manifest's digest, if that is what a state says; else None.

    Raises:
        CheckpointMismatchError: it is damaged.
    """
    if not isinstance(state, dict) or state.get("format") != REFERENCE:
        return None
    file, digest = state.get("file"), state.get("digest")
    if not isinstance(file, str) or not isinstance(digest, str):
        raise CheckpointMismatchError("The checkpoint's manifest is damaged: a file does not say where it is.")
    return file, digest


def digest_of(state: Any) -> Any:
    """What is the same in a manifest and in the references to it."""
    return state["digest"] if isinstance(state, dict) and "digest" in state else state


def _digest(state: Mapping[str, Any]) -> str:
    said = {key: value for key, value in state.items() if key != "digest"}
    return sha256(json.dumps(said, sort_keys=True, default=repr).encode()).hexdigest()


def plain(name: str) -> str:
    """A name as the user's module has it."""
    return name.removeprefix(PREFIX)


def prefix_of(names: Iterable[str]) -> str:
    """`PREFIX` if these names of one module have it, which all or none do, else nothing."""
    return PREFIX if next(iter(names), "").startswith(PREFIX) else ""


def parameters_by_name(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of a module by their plain names, tied aliases included, in the module's order."""
    return {plain(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}


def names_by_parameter(module: torch.nn.Module) -> dict[torch.nn.Parameter, tuple[str, ...]]:
    """Each parameter of a module with all its plain names, tied aliases included, in the module's order."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in parameters_by_name(module).items():
        names.setdefault(parameter, []).append(name)
    return {parameter: tuple(all_names) for parameter, all_names in names.items()}


def frozen_names(module: torch.nn.Module) -> dict[torch.nn.Parameter, tuple[str, ...]]:
    """Each frozen parameter of a module with all its plain names, in the module's order."""
    return {p: names for p, names in names_by_parameter(module).items() if not p.requires_grad}


def shape_of(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The shape of a whole parameter, also where ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def dtype_of(parameter: torch.nn.Parameter) -> str:
    """torch's name for a parameter's dtype, such as "bfloat16"."""
    return str(parameter.dtype).removeprefix("torch.")


def adapters_of(module: torch.nn.Module) -> dict[str, dict[str, str]]:
    """What `Manifest.adapters` says of a module."""
    found: dict[str, dict[str, str]] = {}
    seen: set[torch.nn.Module] = set()

    def look(inner: torch.nn.Module, name: str) -> None:
        if inner in seen:
            return
        seen.add(inner)
        # A module looks for an attribute that it has not got in three dictionaries, and then raises: that is slow.
        has = "peft_config" in vars(inner) or hasattr(type(inner), "peft_config")
        configs = getattr(inner, "peft_config", None) if has else None
        if not isinstance(configs, dict):
            for child, its_module in inner.named_children():
                look(its_module, f"{name}.{child}" if name else child)
            return
        found[plain(name)] = {  # PEFT's modules inside have the same ones
            adapter: json.dumps(config.to_dict(), default=_plain_value, sort_keys=True)
            for adapter, config in configs.items()
            if hasattr(config, "to_dict")
        }

    look(module, "")
    return found


def _plain_value(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def describe(
    left_out: Mapping[torch.nn.Parameter, tuple[str, ...]],
    *,
    module: torch.nn.Module,
    device: Any,
    zero_stage: int,
    world_size: int,
    all_known: bool = False,
) -> Manifest:
    """The manifest of a checkpoint that leaves out these parameters; every rank must call it.

    Args:
        left_out: each parameter with all its names.
        module: they are of.
        device: where the ranks' parts of the fingerprints are added up.
        all_known: whether every rank remembers the fingerprints.
    """
    found = fingerprints(list(left_out), device, process_memory(), all_known=all_known)
    return Manifest(
        left_out=tuple(
            LeftOut(names, shape_of(parameter), dtype_of(parameter), fingerprint)
            for (parameter, names), fingerprint in zip(left_out.items(), found, strict=True)
        ),
        total_bytes=sum(numel_of(p) * p.element_size() for p in left_out),
        zero_stage=zero_stage,
        world_size=world_size,
        versions=_versions(),
        adapters=adapters_of(module),
    )


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in ("ds_frozen_patch", "lightning", "pytorch-lightning", "lightning-fabric", "deepspeed", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
