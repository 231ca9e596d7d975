"""What the files of a checkpoint say, read together: its settings, and whether they belong together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError, CheckpointMismatchError, named
from ...manifest import KEY, Manifest, digest_of, reference
from ...parameters import is_name
from .. import hyperparameters
from ..format.archive import Contents, read
from ..format.records import Records, whole
from ..format.stored import StandIn, StoredTensor, is_shape, tensors
from ..quantization import subclass
from .labels import LABEL
from .layout import Layout, check_links, find

DEEPSPEEDS_OWN = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
    ]
)
"""What DeepSpeed puts into a file of model states; the rest is the client's."""


@dataclass(frozen=True)
class States:
    """The states of all files of a checkpoint, in the order of `layout.files`."""

    layout: Layout
    contents: tuple[Contents, ...]

    @property
    def models(self) -> list[dict[str, Any]]:
        """The states of the files of model states, by rank."""
        return [contents.state for contents in self.contents[: len(self.layout.model)]]

    @property
    def optimizers(self) -> list[dict[str, Any]]:
        """What DeepSpeed's optimizer of each rank has saved."""
        return [contents.state["optimizer_state_dict"] for contents in self.contents[len(self.layout.model) :]]

    @property
    def manifest(self) -> Manifest | None:
        """The manifest, in a checkpoint that ds_frozen_patch made trainable-only."""
        state = self.models[0]
        # Of files whose names were swapped, the first can be one that refers to another.
        return None if reference(state.get(KEY)) is not None else Manifest.from_checkpoint(state)

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return number(self.models[0].get("dp_world_size")) or len(self.layout.optimizer) or 1

    @property
    def zero_stage(self) -> int:
        """0 to 3."""
        for state in self.optimizers:
            said = state.get("zero_stage")
            said = said.arguments[0] if isinstance(said, StandIn) and said.arguments else said  # DeepSpeed's enum
            if said in (1, 2, 3):
                return int(said)
        return configured_stage(self.models[0])

    @property
    def quantizes_frozen(self) -> bool:
        """Whether ZeRO++ keeps the partitions of frozen parameters in int8, whose scales it does not save."""
        return bool(_zero(self.models[0]).get("zero_quantized_nontrainable_weights"))

    @property
    def leaves_out_frozen(self) -> bool:
        """Whether DeepSpeed was told to leave frozen parameters out; known from ZeRO-2 on."""
        return self.zero_stage >= 2 and self.models[0].get("frozen_param_shapes") is None

    @property
    def versions(self) -> dict[str, str]:
        """The releases that saved it, by package."""
        model, manifest = self.models[0], self.manifest
        said = {"deepspeed": model.get("ds_version"), "pytorch-lightning": model.get("pytorch-lightning_version")}
        found = {name: version for name, version in said.items() if isinstance(version, str)}
        return {**found, **(manifest.versions if manifest else {})}


def load(path: str | Path, tag: str | None, trust: bool) -> States:
    """Read the states of all files of a checkpoint, and no tensor.

    Args:
        path: the directory.
        tag: the folder in it; without one, what its file `latest` says.
        trust: also read files that name unexpected classes, and files that links out of the checkpoint lead to.

    Raises:
        CheckpointError: there is no checkpoint, or a file of it is missing, cut, damaged or not expected.
    """
    layout = find(path, tag)
    if not trust:
        check_links(layout)
    contents = tuple(read(file, trust=trust) for file in layout.files)
    for file, content in zip(layout.files, contents, strict=True):
        check_kind(file, content)
        if "module" in content.state:
            _check_form(file, content.state)
            _check_instantiator(file, content.state, trust)
    return States(layout, contents)


def check_kind(file: Path, contents: Contents) -> None:
    """Raise CheckpointError where a file does not hold what its name promises."""
    part = "optimizer_state_dict" if file.name.endswith("_optim_states.pt") else "module"
    if not isinstance(contents.state, dict) or not isinstance(contents.state.get(part), dict):
        raise CheckpointError(f"{file} is no file of a DeepSpeed checkpoint: it has no {part!r}. Check the path.")


def _check_form(file: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError where DeepSpeed's own part of a model's states is not made up as DeepSpeed does it."""

    def are_shapes(value: Any) -> bool:
        return _is_mapping(value, lambda shape: is_shape(tuple(shape) if isinstance(shape, list) else shape))

    groups = state.get("param_shapes")
    sound = {
        "module": _is_mapping(state["module"]),
        "param_shapes": not isinstance(groups, list) or all(are_shapes(group) for group in groups),
        "shared_params": _is_mapping(state.get("shared_params"), is_name),
        "frozen_param_shapes": are_shapes(state.get("frozen_param_shapes")),
        "frozen_param_fragments": _is_mapping(
            state.get("frozen_param_fragments"), lambda part: isinstance(part, StoredTensor) or subclass(part)
        ),
        "dp_world_size": is_shape((state.get("dp_world_size", 0),)),
    }
    if wrong := [name for name, is_sound in sound.items() if not is_sound]:
        raise CheckpointError(f"{file} is damaged: it has something else as {named(wrong)}. Take a whole copy of it.")


def _is_mapping(value: Any, holds: Callable[[Any], object] = lambda _: True) -> bool:
    """Whether it gives values of a kind by names, if it is there at all."""
    return value is None or (
        isinstance(value, dict) and all(is_name(name) and holds(item) for name, item in value.items())
    )


def _check_instantiator(file: Path, state: Mapping[str, Any], trust: bool) -> None:
    """Raise CheckpointError for what Lightning would run by its name, at a load of weights."""
    if trust:
        return
    for what, said in hyperparameters.would_run(state):
        said = said if isinstance(said, str) else type(said).__name__
        raise CheckpointError(
            f"{file} names {said!r:.100} as the `{what}`, which is not Lightning's own: load_from_checkpoint could run"
            " it. Nothing was run. If you know where the file is from, go on with --trust (here it is not run then"
            " either)."
        )


def check_together(states: States) -> None:
    """Raise CheckpointError where files are missing or are not of one and the same save."""
    check_number_of_parts(states.layout, states.models[0], states.zero_stage)
    _check_references(states)
    check_alike([said_by(file, contents) for file, contents in zip(states.layout.files, states.contents, strict=True)])


def _check_references(states: States) -> None:
    """Raise CheckpointError where a file names another for the manifest that has none."""
    have, named_by = set(), {}
    for file, state in zip(states.layout.model, states.models, strict=True):
        try:
            said = reference(state.get(KEY))
            found = Manifest.from_checkpoint(state) if said is None else None
        except CheckpointMismatchError as error:
            raise CheckpointError(f"{file}: {error}") from None
        if said is not None:
            named_by[said[0]] = file
        elif found is not None:
            have.add(file.name)
    for name, file in named_by.items():
        if name not in have:
            raise CheckpointError(f"{file} says that the manifest is in {name!r}, which has none. Take a whole copy.")


def check_number_of_parts(layout: Layout, model: Mapping[str, Any], stage: int) -> None:
    """Raise CheckpointError where there are not as many optimizer states as ranks have saved."""
    count, ranks = len(layout.optimizer), number(model.get("dp_world_size"))
    # DeepSpeed makes a plain optimizer for some stage 1, whose state is among the model's.
    if stage and model.get("optimizer") is None and ranks and count != ranks and names_of_groups(model):
        raise CheckpointError(
            f"{layout.root} was saved by {ranks} ranks and has the optimizer states of {count}."
            " Take a whole copy of it, without files of another save."
        )


@dataclass(frozen=True)
class Said:
    """What a file says that all of its kind say in one save, as digests, and what `LABEL` says of it."""

    file: Path
    kind: str
    alike: dict[str, str]
    save: str | None
    name: str | None


def said_by(file: Path, contents: Contents) -> Said:
    """What a file says of the save that it is of."""
    is_model = "module" in contents.state
    alike = _model_says(contents.state) if is_model else _optimizer_says(contents)
    digests = {key: sha256(value.encode()).hexdigest() for key, value in alike.items()}
    label = contents.state.get(LABEL)
    save, name = (label.get("save"), label.get("file")) if isinstance(label, dict) else (None, None)
    return Said(file, "model" if is_model else "optimizer", digests, save, name)


def check_alike(found: Sequence[Said]) -> None:
    """Raise CheckpointError where one file is of another save than the others, or has another file's name."""
    first: dict[str, Said] = {}
    for one in found:
        if one.name not in (None, one.file.name):
            raise CheckpointError(
                f"{one.file} was saved as {one.name}: files of the checkpoint were swapped or renamed. Give each the"
                " name that it was saved under, or take a whole copy."
            )
        if one.save != found[0].save:
            raise CheckpointError(
                f"{one.file} is of another save than {found[0].file.name}. Take all files from one checkpoint."
            )
        other = first.setdefault(one.kind, one)
        if differ := [key for key in one.alike if one.alike[key] != other.alike[key]]:
            raise CheckpointError(
                f"{one.file} is of another save than {other.file.name}: they differ in {differ[0]}. Take all"
                f" {one.kind} states from one checkpoint."
            )


def _model_says(state: Mapping[str, Any]) -> dict[str, str]:
    keys = ("global_steps", "global_step", "epoch", "ds_version", "dp_world_size", "ds_config", "param_shapes")
    said = {key: _comparable(state.get(key)) for key in keys}
    return {**said, "the manifest": _comparable(digest_of(state.get(KEY)))}


def _optimizer_says(contents: Contents) -> dict[str, str]:
    """What ranks share of their optimizers: the settings, and how many steps were taken."""
    own = contents.state["optimizer_state_dict"]
    inner = own.get("base_optimizer_state", own.get("optimizer_state_dict"))
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    with Records() as records:
        steps = [
            bytes(records.read(whole(tensor))).hex()
            for path, tensor in tensors(own)
            if path[-1:] == ("step",) and tensor.numel == 1
        ]
    return {
        "ds_version": _comparable(contents.state.get("ds_version")),
        "ds_config": _comparable(contents.state.get("ds_config")),
        "partition_count": _comparable(own.get("partition_count")),
        "the optimizer's settings": _comparable(groups),
        "the number of steps": _comparable(sorted(steps)),
    }


def _comparable(value: Any) -> str:
    def said(item: Any) -> str:
        return "tensor" if isinstance(item, StoredTensor) else repr(item)

    try:
        return json.dumps(value, default=said, skipkeys=True)
    except (ValueError, RecursionError) as error:  # it holds itself, or a number too large
        raise CheckpointError(f"A file of the checkpoint is damaged: it holds what it should not ({error}).") from None


def configured_stage(model: Mapping[str, Any]) -> int:
    """The ZeRO stage that the configuration in a model's state says."""
    stage = _zero(model).get("stage")
    return stage if stage in (1, 2, 3) else 0


def _zero(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the configuration in a model's state says of ZeRO."""
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero if isinstance(zero, Mapping) else {}


def names_of_groups(model: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """The shape of each trained parameter by its name, for each of the optimizer's groups."""
    groups = model.get("param_shapes")
    return [dict(group) for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def names(value: Any) -> set[str]:
    """The names in a list, or among the keys of a mapping; none of what a checkpoint has otherwise."""
    return {item for item in value if isinstance(item, str)} if isinstance(value, list | tuple | Mapping) else set()


def number(value: Any) -> int | None:
    """An integer, or None where a checkpoint has something else."""
    return value if isinstance(value, int) else None
