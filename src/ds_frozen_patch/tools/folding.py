"""Fold a LoRA adapter into the weights that it adapts, one weight at a time, by PEFT itself.

PEFT gets a module that has nothing but the adapted layers, on the device "meta", so that it takes no memory, and adds
its own layers. To fold one weight, its value and the adapter's tensors are put in, and PEFT merges that layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..checkpoint.adapters import PEFTS_PREFIX, PROMPTS, Adapter
from ..common.errors import CheckpointError, named

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

RECIPE = (
    "PEFT can, with the whole model in memory: run ds-frozen-patch export CKPT adapter --format peft, then"
    " PeftModel.from_pretrained(base_model, 'adapter').merge_and_unload().save_pretrained(OUT)."
)
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
_NAME = "default"
_WITH_CONV1D = ("clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt")
"""The models of transformers with layers whose weight is that of a linear layer, transposed."""
_UNSUPPORTED = ("layer_replication", "megatron_config")
# The rest of a configuration tells where the adapters are, and how they began.
_KNOWN: dict[str, Any] = {
    "auto_mapping": None,
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "init_lora_weights": False,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "modules_to_save": None,
    "trainable_token_indices": None,
}


def split_name(name: str) -> tuple[str, str] | None:
    """The adapted module and the rest of the name of an adapter's tensor; None for the name of another tensor.

    Args:
        name: as in PEFT's files, without their prefix: "model.layers.0.mlp.up_proj.lora_A.weight".
    """
    words = name.split(".")
    end = next((place for place, word in enumerate(words) if word in _PARTS), 0)
    while end > 1 and words[end - 1] == "base_layer":
        end -= 1
    return (".".join(words[:end]), ".".join(words[end:])) if end else None


def check_foldable(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an adapter that is not LoRA, or LoRA that does not change one weight at a time."""
    kind = str(config.get("peft_type"))
    if kind in PROMPTS:
        raise CheckpointError(
            f"{kind} adapters have no weights to merge. Serve the base together with the folder that ds-frozen-patch"
            " export CKPT adapter --format peft, or patch(export='peft'), writes."
        )
    if kind != "LORA":
        raise CheckpointError(f"Adapters of type {kind} cannot be merged here. {RECIPE}")
    if odd := [name for name in _UNSUPPORTED if config.get(name)]:
        raise CheckpointError(f"LoRA with {named(odd)} cannot be merged here. {RECIPE}")


@dataclass(frozen=True)
class Layer:
    """The shapes of an adapted module's own parameters, in the module's order, and of the adapter's tensors.

    The latter have the names that `split_name` returns.
    """

    parameters: Mapping[str, Shape]
    adapter: Mapping[str, Shape]


class Folding:
    """A LoRA adapter on layers without values.

    Args:
        config: the adapter's.
        layers: the adapted modules by name, as in the base model.
        model_type: of the base's configuration.

    Raises:
        CheckpointError: PEFT or torch is missing, or PEFT cannot add such an adapter to these layers.
    """

    def __init__(self, config: Mapping[str, Any], layers: Mapping[str, Layer], model_type: str) -> None:
        check_foldable(config)
        try:
            import peft  # noqa: F401
            import torch  # noqa: F401
        except ImportError as error:
            raise CheckpointError(f"Merging an adapter needs PEFT and torch: pip install peft ({error}).") from None
        self._config, self._layers = config, layers
        # PEFT sets fan_in_fan_out by the last layer that it has found. It matters for square weights alone.
        self._has_conv1d = bool(config.get("fan_in_fan_out")) or model_type in _WITH_CONV1D
        self._wrapped = _target_parameters(config, layers)
        self._adapting: dict[tuple[str, str], tuple[str, Any]] = {}
        odd = self._inject(frozenset())
        if turned := odd.keys() & self._wrapped.keys():
            odd = self._inject(frozenset(turned))
        if odd:
            raise CheckpointError(f"The adapter does not fit the base. {min(odd.items())[1]}")

    def adapts(self, module: str, parameter: str) -> bool:
        """Whether the adapter changes a parameter of a module. It changes a bias only if it has one itself."""
        _, layer = self._adapting.get((module, parameter), ("", None))
        return layer is not None and (parameter != "bias" or self._with_bias(layer))

    def fold(
        self,
        module: str,
        parameter: str,
        value: Callable[[str], torch.Tensor],
        read: Callable[[str], torch.Tensor],
    ) -> torch.Tensor:
        """Return a parameter with the adapter folded in, as PEFT's `merge_and_unload` does it.

        Args:
            module: the adapted module's name.
            parameter: its parameter's name: "weight", "bias", or that of one of several.
            value: returns the value of a parameter of this module, in the dtype of the result; it may be overwritten.
            read: returns a tensor of the adapter by its name in PEFT's files, without their prefix.
        """
        import torch

        place, layer = self._adapting[module, parameter]
        base = layer.get_base_layer()
        needed = {"weight", "bias"} if self._with_bias(layer) else {parameter}
        with torch.no_grad(), _in_peft():
            # PeftModel.from_pretrained also keeps adapters in fp32, whatever the dtype of the base.
            state = {key: read(name).float() for key, name in _names(place, layer).items()}
            layer.load_state_dict(state, strict=False, assign=True)
            for name in needed:
                setattr(base, name, torch.nn.Parameter(value(name), requires_grad=False))
            layer.merge(adapter_names=[_NAME])
            merged: torch.Tensor = getattr(base, parameter).data
            layer.merged_adapters.clear()
            layer.to("meta")
        return merged

    def _inject(self, turned: frozenset[str]) -> dict[str, str]:
        """Let PEFT add the adapter; returns what does not fit, by module.

        Args:
            turned: the modules that have the dimensions of their experts in the other order.
        """
        import peft
        import torch

        make: Any = peft.LoraConfig.from_peft_type
        with _in_peft():
            config = make(**{
                **self._config,
                **{name: value for name, value in _KNOWN.items() if name in self._config},
                "target_modules": [name for name in self._layers if name not in self._wrapped],
                "target_parameters": [f"{name}.{last}" for name, names in self._wrapped.items() for last in names],
            })  # fmt: skip
        _check_variant(config, self._config.get("init_lora_weights"))
        root = torch.nn.Module()
        with _in_peft(), torch.device("meta"):
            for name, layer in self._layers.items():
                if name in self._wrapped:
                    _put(root, name, _holder(layer, name in turned))
                else:
                    _put(root, name, _linear_or_embedding(name, layer, self._has_conv1d))
            peft.inject_adapter_in_model(config, root, _NAME, low_cpu_mem_usage=True)
        odd = {}
        for name, layer in self._layers.items():
            place, expected = name, dict[str, Shape]()
            peft_layer: Any = root.get_submodule(name)
            while hasattr(peft_layer, "base_layer"):  # PEFT has one layer around another for each of several parameters
                names = [peft_layer.parameter_name] if name in self._wrapped else layer.parameters
                self._adapting |= {(name, parameter): (place, peft_layer) for parameter in names}
                shapes = peft_layer.state_dict()
                expected |= {file: tuple(shapes[key].shape) for key, file in _names(place, peft_layer).items()}
                place, peft_layer = f"{place}.base_layer", peft_layer.base_layer
            there = {f"{name}.{rest}": shape for rest, shape in layer.adapter.items()}
            if wrong := sorted(set(expected.items()) ^ set(there.items())):
                odd[name] = f"{wrong[0][0]!r} {_compare(wrong[0][0], expected, there)}."
        return odd

    def _with_bias(self, layer: Any) -> bool:
        return bool(getattr(layer, "lora_bias", {}).get(_NAME))


def _compare(name: str, expected: Mapping[str, Shape], there: Mapping[str, Shape]) -> str:
    if name not in there:
        return "is missing"
    return f"has shape {list(there[name])}" + (f" instead of {list(expected[name])}" if name in expected else "")


def _target_parameters(config: Mapping[str, Any], layers: Mapping[str, Layer]) -> dict[str, list[str]]:
    """The parameters that are adapted by their own names, such as those of experts, by module."""
    suffixes = tuple(f".{target}" for target in config.get("target_parameters") or ())
    adapted = {
        name: [parameter for parameter in layer.parameters if f".{name}.{parameter}".endswith(suffixes)]
        for name, layer in layers.items()
    }
    return {name: names for name, names in adapted.items() if names}


def _names(place: str, layer: Any) -> dict[str, str]:
    """The names of the adapter's tensors: in PEFT's layer, and in PEFT's files."""
    adapter = Adapter("", _NAME, None)
    return {
        key: name.removeprefix(PEFTS_PREFIX)
        for key in layer.state_dict()
        if not key.startswith("base_layer.") and (name := adapter.peft_name(f"{place}.{key}")) is not None
    }


def _check_variant(config: Any, init: Any) -> None:
    """Raise CheckpointError for kinds of LoRA whose layers are not those that this module makes."""
    for field in fields(config):
        is_variant = field.metadata.get("is_lora_variant") and getattr(config, field.name)
        if is_variant and field.name != "use_dora":
            raise CheckpointError(f"LoRA with {field.name} cannot be merged here. {RECIPE}")
        if init in field.metadata.get("lora_variants", ()):
            raise CheckpointError(f"LoRA with {field.name}={init!r} cannot be merged here. {RECIPE}")


def _linear_or_embedding(name: str, layer: Layer, has_conv1d: bool) -> torch.nn.Module:
    """A layer with these shapes, of the class that the model has."""
    import torch
    from transformers.pytorch_utils import Conv1D

    weight, rows = layer.parameters.get("weight", ()), layer.adapter.get("lora_A.weight", (0, 0))[1:]
    if len(weight) != 2 or len(rows) > 1:
        raise CheckpointError(f"LoRA on {name!r}, which is no linear layer, cannot be merged here. {RECIPE}")
    if "lora_embedding_A" in layer.adapter:
        return torch.nn.Embedding(*weight)
    if has_conv1d if weight[0] == weight[1] else rows == weight[:1]:
        conv1d: torch.nn.Module = Conv1D(weight[1], weight[0])  # type: ignore[no-untyped-call]
        return conv1d
    return torch.nn.Linear(weight[1], weight[0], bias="bias" in layer.parameters)


def _holder(layer: Layer, is_turned: bool) -> torch.nn.Module:
    """A module with parameters of these shapes, such as the experts of a layer."""
    import torch

    module = torch.nn.Module()
    for name, shape in layer.parameters.items():
        module.register_parameter(name, torch.nn.Parameter(torch.empty(shape)))
    vars(module)["is_transposed"] = is_turned
    return module


def _put(root: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Make a module a descendant of another one by its dotted name."""
    import torch

    *path, last = name.split(".")
    for word in path:
        if word not in root._modules:
            setattr(root, word, torch.nn.Module())
        root = root.get_submodule(word)
    setattr(root, last, module)


@contextmanager
def _in_peft() -> Iterator[None]:
    """Turn what PEFT raises into a message. What it warns of was said when the run began."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointError:
        raise
    except Exception as error:  # whatever a configuration from a file leads to
        raise CheckpointError(f"PEFT cannot merge this adapter ({type(error).__name__}: {error}). {RECIPE}") from None
