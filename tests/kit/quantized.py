"""Runs over frozen bases in 4 or 8 bits, for each library that makes them, and ways to damage such a base.

Everything here runs inside a rank. `KINDS` builds the base, `QuantizedRun` trains LoRA adapters over it, and `DAMAGES`
change one property of it in place, in the layer that `layer` returns. `AVAILABLE` are the kinds whose libraries the
cell has; the libraries are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime import engine as engines
from deepspeed.runtime.engine import DeepSpeedEngine
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kit.cell import CELL
from kit.runs import LoraRun, small_llama

BITS = 4  # of GPTQ and AWQ
PER_WORD = 32 // BITS
GROUP = 64
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which output feature each of a word's eight values is of


class QuantizedRun(LoraRun):
    """A small Llama whose linear layers are quantized, except for the tied head, with LoRA adapters in bf16."""

    def __init__(self, kind: str = "nf4", seed: int = 1):
        super(LoraRun, self).__init__()
        self.save_hyperparameters()
        base = KINDS[kind](seed)
        torch.manual_seed(seed)  # the quantizers draw different amounts of random numbers
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        lora._register_custom_module(_lora_over_stand_ins())
        self.model = get_peft_model(base, lora)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.losses: list[float] = []


def layer(module: nn.Module) -> Any:
    """Return the quantized layer that `DAMAGES` change: below an adapter, if the module has adapters."""
    found = next(part for name, part in module.named_modules() if name.endswith("layers.0.self_attn.q_proj"))
    return getattr(found, "base_layer", found)


def original(seed: int) -> Any:
    """Return the model that is quantized."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 1}
    return small_llama(seed, **sizes, tie_word_embeddings=True).bfloat16()


def _replaced(seed: int, make: Callable[[nn.Linear], nn.Module]) -> Any:
    model = original(seed)
    for name, linear in list(model.named_modules()):
        if _is_quantized(linear, name):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, make(linear))
    return model


def _is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name


# bitsandbytes


def _nf4(seed: int, double: bool = False, storage: torch.dtype = torch.uint8) -> Any:
    from bitsandbytes.nn import Linear4bit

    def make(linear: nn.Linear) -> nn.Module:
        shape = (linear.in_features, linear.out_features)
        made: Any = Linear4bit(
            *shape,
            bias=False,
            compute_dtype=torch.bfloat16,
            compress_statistics=double,
            quant_type="nf4",
            quant_storage=storage,
        )
        made.weight.data = linear.weight.data
        # At the first evaluation it would repack the weights for a kernel of CPUs with AVX512-BF16: another base.
        made.support_avx512bf16_for_cpu = False
        return made.to("cpu")  # type: ignore[no-any-return]  # which quantizes

    model = _replaced(seed, make)
    model.is_loaded_in_4bit = True  # for PEFT
    return model


def _int8(seed: int) -> Any:
    from bitsandbytes.nn import Linear8bitLt

    def make(linear: nn.Linear) -> nn.Module:
        made: Any = Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
        made.weight.data = linear.weight.data
        return made.to("cpu")  # type: ignore[no-any-return]

    model = _replaced(seed, make)
    model.is_loaded_in_8bit = True
    return model


# HQQ, optimum-quanto, torchao


def _hqq(seed: int) -> Any:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=4, group_size=GROUP)
    return _replaced(seed, lambda linear: HQQLinear(linear, config, compute_dtype=torch.bfloat16, device="cpu"))


def _quanto(seed: int, weights: str) -> Any:
    from optimum import quanto
    from optimum.quanto.library.extensions import get_extension

    # Else it compiles this at the first use; if that is cut short, a file makes each later one wait for ever.
    get_extension("quanto_cpp")._lib = SimpleNamespace(unpack=lambda packed, _: torch.cat([packed & 15, packed >> 4]))
    model = original(seed)
    quanto.quantize(model, weights=getattr(quanto, weights), exclude="lm_head")
    quanto.freeze(model)
    return model


def _torchao(seed: int, config: str, **options: Any) -> Any:
    from torchao import quantization

    model = original(seed)
    quantization.quantize_(model, getattr(quantization, config)(**options), filter_fn=_is_quantized)
    return model


# GPTQ and AWQ


class _Packed(nn.Module):
    """A stand-in for a layer of GPTQ or AWQ: its buffers, with their names, dtypes and layouts.

    The libraries cannot be installed here: gptqmodel requires a newer torch and compiles other packages, and AutoAWQ
    has a backward pass only on GPUs. Both store `qweight` and `qzeros` (4 bits each, packed into int32), and `scales`.
    """

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group_size, self.bits = GROUP, BITS
        grouped = linear.weight.data.float().T.reshape(-1, GROUP, self.out_features)  # group, place, output feature
        lowest, highest = grouped.amin(1), grouped.amax(1)
        scales = (highest - lowest) / (2**BITS - 1)
        zeros = (-lowest / scales).round()
        values = (grouped / scales[:, None] + zeros[:, None]).round().clamp(0, 2**BITS - 1).flatten(0, 1)
        self._pack(values.int(), zeros.clamp(0, 2**BITS - 1).int())
        self.register_buffer("scales", scales.half())

    def _pack(self, values: torch.Tensor, zeros: torch.Tensor) -> None:
        raise NotImplementedError

    def _weight(self) -> torch.Tensor:
        """Return the weights in fp16, one row per input feature."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight().T.to(x.dtype))


class GptqLinear(_Packed):
    """`qweight` packs eight input features per word, `qzeros` eight output features; `g_idx` is each input's group."""

    g_idx: torch.Tensor

    def _pack(self, values: torch.Tensor, zeros: torch.Tensor) -> None:
        self.register_buffer("qweight", _words(values.T).T.contiguous())
        self.register_buffer("qzeros", _words(zeros))
        self.register_buffer("g_idx", torch.arange(self.in_features, dtype=torch.int32) // GROUP)

    def _weight(self) -> torch.Tensor:
        group = self.g_idx.long()
        values, zeros = _unpacked(self.qweight.T).T, _unpacked(self.qzeros)
        return self.scales[group] * (values - zeros[group])


class AwqLinear(_Packed):
    """Both pack eight output features per word, in AWQ's order."""

    def _pack(self, values: torch.Tensor, zeros: torch.Tensor) -> None:
        self.register_buffer("qweight", _words(values, AWQ_ORDER))
        self.register_buffer("qzeros", _words(zeros, AWQ_ORDER))

    def _weight(self) -> torch.Tensor:
        values, zeros = _unpacked(self.qweight, AWQ_ORDER), _unpacked(self.qzeros, AWQ_ORDER)
        zeros, scales = (each.repeat_interleave(GROUP, dim=0) for each in (zeros, self.scales))
        return (values - zeros) * scales


# As the libraries have them: what knows a layer by its class and not by its buffers must know these.
GptqLinear.__module__, GptqLinear.__qualname__ = "gptqmodel.nn_modules.qlinear.torch", "TorchLinear"
AwqLinear.__module__, AwqLinear.__qualname__ = "awq.modules.linear.gemm", "WQLinear_GEMM"
GptqLinear.__name__, AwqLinear.__name__ = GptqLinear.__qualname__, AwqLinear.__qualname__


def _words(values: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
    """Pack eight values of a row into 32-bit words; the first one, or the first of `order`, takes the lowest bits."""
    eights = values.long().reshape(len(values), -1, PER_WORD)
    shifted: torch.Tensor = (eights[..., order] if order else eights) << torch.arange(0, 32, BITS)
    return shifted.sum(-1).to(torch.int32)  # wraps round, as it should


def _unpacked(words: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
    eights: torch.Tensor = (words[..., None] >> torch.arange(0, 32, BITS)) & (2**BITS - 1)
    return (eights[..., torch.tensor(order).argsort()] if order else eights).flatten(1)


def _lora_over_stand_ins() -> dict[type[nn.Module], type[nn.Module]]:
    """PEFT's own layers for GPTQ and AWQ, which it selects by the libraries' classes; in them a layer has two names."""
    from peft.tuners.lora import awq, gptq

    over_gptq = getattr(gptq, "GPTQLoraLinear", None) or gptq.QuantLinear  # type: ignore[attr-defined]  # in old releases
    return {GptqLinear: over_gptq, AwqLinear: awq.AwqLoraLinear}


KINDS: dict[str, Callable[[int], Any]] = {
    "bf16": original,
    "nf4": _nf4,
    "nf4-double": partial(_nf4, double=True),
    "nf4-in-bf16": partial(_nf4, storage=torch.bfloat16),  # bnb_4bit_quant_storage: for ZeRO-3 up to DeepSpeed 0.17
    "int8": _int8,
    "hqq": _hqq,
    "quanto-int8": partial(_quanto, weights="qint8"),
    "quanto-int4": partial(_quanto, weights="qint4"),
    "torchao-int8": partial(_torchao, config="Int8WeightOnlyConfig"),
    "torchao-float8": partial(_torchao, config="Float8WeightOnlyConfig"),
    "torchao-intx": lambda seed: _torchao(seed, "IntxWeightOnlyConfig", weight_dtype=torch.int4),  # type: ignore[attr-defined]
    "gptq": partial(_replaced, make=GptqLinear),
    "awq": partial(_replaced, make=AwqLinear),
}

NEEDED = {"nf4": "bitsandbytes", "int8": "bitsandbytes", "hqq": "hqq", "quanto": "optimum-quanto", "torchao": "torchao"}
# On CPUs, it quantizes what is int8 once more whenever it is moved, and takes packed weights as bytes alone.
NOT_BY_BITSANDBYTES_046 = ("int8", "nf4-in-bf16")


def _is_available(kind: str) -> bool:
    by = NEEDED.get(kind.partition("-")[0])
    is_old = CELL.quantizers.get("bitsandbytes", "").startswith("0.46.")
    return by in (None, *CELL.quantizers) and not (is_old and kind in NOT_BY_BITSANDBYTES_046)


AVAILABLE = [kind for kind in KINDS if _is_available(kind)]


def alone(kind: str) -> bool:
    """Whether a run needs ranks of its own: after optimum-quanto was used, torchao's tensors cannot be transposed."""
    return kind.startswith("torchao")


@contextmanager
def without_broadcast() -> Iterator[None]:
    """Let DeepSpeed's engines start with torchao's and quanto's tensors, which every rank has built identically.

    They cannot be broadcast; nor can torch move them to a device once a weak reference to them exists, as DeepSpeed's
    debug names create from 0.19 on.
    """
    broadcast = DeepSpeedEngine._broadcast_model

    def broadcast_others(engine: Any) -> None:
        with ExitStack() as taken_out:
            for module in engine.module.modules():
                if any(map(is_traceable_wrapper_subclass, module._parameters.values())):
                    plain = {n: p for n, p in module._parameters.items() if not is_traceable_wrapper_subclass(p)}
                    taken_out.enter_context(mock.patch.dict(module.__dict__, _parameters=plain))
            broadcast(engine)

    with (
        mock.patch.object(DeepSpeedEngine, "_broadcast_model", broadcast_others),
        mock.patch.object(engines, "debug_extract_module_and_param_names"),
    ):
        yield


# What makes another base of one, each a single thing.


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit of a tensor's first element, in place: one that survives a cast to another floating dtype."""
    tensor.detach().as_strided((1,), (1,)).view(torch.uint8)[tensor.element_size() - 1] ^= 1


def _get(found: Any, name: str) -> Any:
    return found[name] if isinstance(found, dict) else getattr(found, name)


def _flip(path: str) -> Callable[[nn.Module], None]:
    """Return a damage: flip a bit of the tensor at this path from the layer."""
    return lambda module: flip(reduce(_get, path.split("."), layer(module)))


def _set(path: str, value: Any) -> Callable[[nn.Module], None]:
    """Return a damage: set the attribute at this path from the layer."""
    *way, last = path.split(".")

    def damage(module: nn.Module) -> None:
        found = reduce(_get, way, layer(module))
        found.__setitem__(last, value) if isinstance(found, dict) else setattr(found, last, value)

    return damage


def _without_double_quantization(module: nn.Module) -> None:
    """Quantize the layer again, with its absmax in fp32."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    found = layer(module)
    values = dequantize_4bit(found.weight.data, found.weight.quant_state).to(torch.bfloat16)
    anew = Params4bit(values, requires_grad=False, quant_type="nf4", compress_statistics=False, module=found)
    found.weight = anew.to("cpu")


Damages = list[tuple[str, Callable[[nn.Module], None]]]

_NF4: Damages = [
    ("weights", _flip("weight")),
    ("absmax", _flip("weight.quant_state.absmax")),
    ("code book", _flip("weight.quant_state.code")),
    ("block size", _set("weight.quant_state.blocksize", 128)),
    ("quant type", _set("weight.quant_state.quant_type", "fp4")),
]
_TORCHAO: Damages = [
    ("weights", _flip("weight.qdata")),
    ("scale", _flip("weight.scale")),
    ("block size", _set("weight.block_size", [1, 32])),
]
_PACKED: Damages = [(name, _flip(name)) for name in ("qweight", "qzeros", "scales")]

DAMAGES: dict[str, Damages] = {
    "bf16": [("weights", _flip("weight"))],
    "nf4": _NF4,
    "nf4-double": [
        *_NF4,
        ("nested absmax", _flip("weight.quant_state.state2.absmax")),
        ("nested code book", _flip("weight.quant_state.state2.code")),
        ("nested offset", _flip("weight.quant_state.offset")),
        ("double quantization", _without_double_quantization),
    ],
    "nf4-in-bf16": _NF4,
    "int8": [("weights", _flip("weight")), ("SCB", _flip("weight.SCB"))],
    "hqq": [
        ("weights", _flip("W_q")),
        ("scale", _flip("meta.scale")),
        ("zero", _flip("meta.zero")),
        ("group size", _set("quant_config.weight_quant_params.group_size", 32)),
    ],
    "quanto-int8": [("weights", _flip("weight._data")), ("scale", _flip("weight._scale"))],
    "quanto-int4": [
        ("weights", _flip("weight._data._data")),
        ("scale", _flip("weight._scale")),
        ("shift", _flip("weight._shift")),
    ],
    "torchao-int8": _TORCHAO,
    "torchao-float8": _TORCHAO,
    "torchao-intx": [*_TORCHAO[:2], ("zero point", _flip("weight.zero_point"))],
    "gptq": [*_PACKED, ("groups", _flip("g_idx"))],
    "awq": _PACKED,
}
