"""The module's part of the model states, as another ZeRO stage saves it.

In ZeRO-3 the module's state dict has placeholders for parameters: trained ones are with the optimizer, and each rank
has a shard of each frozen one beside the state dict. ZeRO-2 has frozen parameters there too, whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ...common.errors import CheckpointError
from ...parameters import plain
from ..format.records import Piece
from ..format.stored import Size, StoredTensor
from .masters import without_padding
from .new_tensors import NewTensors
from .partitions import parameter_shard_size
from .shard import shard_of
from .states import States, masters_key
from .trained import Group, Trained, Values, by_plain_name, require_shard, whole
from .weights import Weights


class ModelStates:
    """Computes the fields of model states.

    Args:
        states: of the checkpoint.
        weights: of the checkpoint.
        saved: its trained parameters.
        groups: the ones that are trained from now on.
        stage: the new one.
        ranks: the new world size.
        tensors: the new ones.
    """

    def __init__(
        self,
        states: States,
        weights: Weights,
        saved: Sequence[Group],
        groups: Sequence[Group],
        stage: int,
        ranks: int,
        tensors: NewTensors,
    ) -> None:
        self.states, self.weights, self.tensors = states, weights, tensors
        self.before, self.stage, self.ranks = states.zero_stage, stage, ranks
        self.crosses = (self.before == 3) != (stage == 3)
        before, now = by_plain_name(saved), by_plain_name(groups)
        self.trained = {**before, **now}
        self.frozen_since = {name: parameter for name, parameter in before.items() if name not in now}
        self.rest = self._rest()
        if stage == 3:  # below, the module's state dict has their values
            self.rest = {**self.rest, **{name: parameter.master.like for name, parameter in self.frozen_since.items()}}
        self._whole: dict[str, StoredTensor] = {}
        if self.crosses and self.rest and (weights.parts or weights.packed or weights.subclasses):
            raise CheckpointError(
                f"{states.layout.root} cannot be resharded to another kind of stage: its frozen parameters are"
                " quantized. Use a trainable-only checkpoint, or prune it."
            )

    def fields(self, model: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """The fields of a rank's file.

        Args:
            model: the model states of the same rank, or of another one if there were fewer.
            rank: the new file's.
        """
        shared = model.get("shared_params") if self.before else self.weights.aliases
        shapes = {name: Size(self._named(name, parameter).shape) for name, parameter in self.rest.items()}
        has_fragments = self.stage >= 2 and (bool(shapes) or self._is_full)
        return {
            "module": self._module(model),
            "shared_params": None if not self.stage else {} if rank else shared,  # only the first rank saves them
            "frozen_param_shapes": OrderedDict(shapes) if has_fragments else None,
            "frozen_param_fragments": self._fragments(rank) if has_fragments else None,
        }

    @property
    def _is_full(self) -> bool:
        if self.before >= 2:
            return isinstance(self.states.models[0].get("frozen_param_fragments"), dict)
        return self.states.manifest is None

    def _rest(self) -> dict[str, StoredTensor]:
        """What the checkpoint contains of other parameters, by name: frozen ones, and any that no optimizer has."""
        model = self.states.models[0]
        fragments = model.get("frozen_param_fragments")
        if self.before >= 2 and self.stage >= 2 and not self.crosses:
            return fragments if isinstance(fragments, dict) else {}
        if self.before == 3:
            return dict(fragments) if isinstance(fragments, dict) else {}
        names = {*self.weights.frozen, *self.weights.trained} - self.trained.keys()
        return {name: item for name, item in model["module"].items() if plain(name) in names}

    def _named(self, name: str, stored: StoredTensor) -> Trained:
        """A parameter that no optimizer has any more."""
        if plain(name) in self.frozen_since:
            return self.frozen_since[plain(name)]
        if self.before != 3:
            return Trained(stored.shape, whole(self.states, stored, name), {})
        shape = self.states.models[0]["frozen_param_shapes"][name]
        size = parameter_shard_size(shape, len(self.states.models))
        shards = [
            require_shard(self.states, (model.get("frozen_param_fragments") or {}).get(name), size, name)
            for model in self.states.models
        ]
        if shards[0].dtype == "int8":
            raise CheckpointError(
                f"{self.states.layout.root} cannot be resharded: its frozen parameters are quantized shard by shard."
                " Use a trainable-only checkpoint, or prune it."
            )
        pieces = [Piece(shard.storage, shard.offset, shard.numel) for shard in shards]
        return Trained(tuple(shape), Values(without_padding(pieces, prod(shape)), shards[0]), {})

    def _module(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """The module's state dict; in stage 0 in fp32 it has the masters."""
        module: dict[str, Any] = model["module"]
        if not self.crosses and (self.stage or not (self.states.optimizers or masters_key(model["optimizer"]))):
            return module
        rest = {plain(name): name for name in self.rest}
        changed = {}
        for name, item in module.items():
            first = self.weights.aliases.get(plain(name), plain(name))
            if not isinstance(item, StoredTensor) or first not in (*self.trained, *rest):
                changed[name] = item
            elif self.stage == 3:
                changed[name] = self.tensors.flat_like(item, [])
            elif first in self.trained:
                changed[name] = self._made_whole(first, self.trained[first])
            else:
                changed[name] = self._made_whole(first, self._named(rest[first], self.rest[rest[first]]))
        result = type(module)(changed)
        if hasattr(module, "__dict__"):
            vars(result).update(vars(module))
        return result

    def _made_whole(self, name: str, parameter: Trained) -> StoredTensor:
        """A whole tensor, the same one for all names."""
        if name not in self._whole:
            self._whole[name] = self.tensors.whole_like(
                parameter.master.like, parameter.master.part(0, prod(parameter.shape)), parameter.shape
            )
        return self._whole[name]

    def _fragments(self, rank: int) -> Mapping[str, Any]:
        """Frozen parameters, in ZeRO-3 the shards of a rank."""
        if self.stage == 2:
            whole_ones = {
                name: stored if self.before != 3 else self._made_whole(plain(name), self._named(name, stored))
                for name, stored in self.rest.items()
            }
            return OrderedDict(whole_ones)
        fragments = OrderedDict()
        for name, stored in self.rest.items():
            frozen = self._named(name, stored)
            part = shard_of(frozen, self.ranks, rank)
            fragments[name] = self.tensors.flat_like(frozen.master.like, part.pieces(frozen.master))
        return fragments
