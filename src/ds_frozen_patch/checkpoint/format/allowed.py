"""The classes and functions that a checkpoint may name, and what a pickle may do with each.

There are no wildcards. The tools run none of them, but write their names into files that others load. So each is listed
because a library writes it into checkpoints, and because none of them runs what its arguments name. A test loads each
of them with hostile arguments. Anything that cannot be shown to be harmless needs `--trust`.
"""

from __future__ import annotations

import re
from typing import Any

from ..quantization import CLASSES
from .stored import ITEM_SIZES, StandIn

_Takes = tuple[type, ...] | None
"""The types that the arguments may have; None for names that may be neither called nor instantiated."""
ANYTHING = (object,)

_PEFT = (
    "adalora.config.AdaLoraConfig", "adaption_prompt.config.AdaptionPromptConfig", "boft.config.BOFTConfig",
    "ia3.config.IA3Config", "ln_tuning.config.LNTuningConfig", "loha.config.LoHaConfig", "lokr.config.LoKrConfig",
    "lora.config.LoraConfig", "lora.config.LoraRuntimeConfig", "oft.config.OFTConfig",
    "p_tuning.config.PromptEncoderConfig", "prefix_tuning.config.PrefixTuningConfig",
    "prompt_tuning.config.PromptTuningConfig", "vera.config.VeraConfig",
)  # fmt: skip
_OMEGACONF = (
    "base.ContainerMetadata", "base.Metadata", "base.UnionNode", "dictconfig.DictConfig", "listconfig.ListConfig",
    "nodes.AnyNode", "nodes.BooleanNode", "nodes.BytesNode", "nodes.EnumNode", "nodes.FloatNode", "nodes.IntegerNode",
    "nodes.InterpolationResultNode", "nodes.PathNode", "nodes.StringNode",
)  # fmt: skip
_ATTRIBUTE_DICTS = (
    "lightning.fabric.utilities.data.AttributeDict", "lightning.pytorch.utilities.parsing.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict", "pytorch_lightning.utilities.parsing.AttributeDict",
)  # fmt: skip
# (Who writes it, the types of its arguments, the names.)
_GROUPS: tuple[tuple[str, _Takes, tuple[str, ...]], ...] = (
    ("DeepSpeed: loss_scaler in the state of each optimizer of fp16 and ZeRO, since 0.3", (),
     tuple(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler"))),
    ("DeepSpeed: zero_stage in the state of ZeRO's optimizers, since 0.9", (int,),
     ("deepspeed.runtime.zero.config.ZeroStageEnum",)),
    ("DeepSpeed: param_slice_mappings in the state of ZeRO 1 and 2 and of bf16, since 0.7", (int,),
     ("deepspeed.utils.tensor_fragment.fragment_address",)),
    ("Lightning: hyper-parameters, as a program has them, since 0.8", (), _ATTRIBUTE_DICTS),
    ("torch: dtypes and classes of tensors", None,
     (*(f"torch.{dtype}" for dtype in ITEM_SIZES), "torch.Tensor", "torch.nn.parameter.Parameter",
      "torch.nn.parameter.Buffer")),
    ("torch: devices", (str, int), ("torch.device",)),
    ("torch: layouts", (str,), ("torch.serialization._get_layout",)),
    ("torch: tensors that are not in one storage", ANYTHING,
     tuple(f"torch._utils._rebuild_{name}" for name in (
         "meta_tensor_no_storage", "sparse_tensor", "wrapper_subclass"))),
    ("torchao, optimum-quanto: quantized weights", ANYTHING, CLASSES),
    ("numpy: scalars and arrays, such as metrics among a callback's state; before and since numpy 2", (StandIn, bytes),
     tuple(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core"))),
    ("numpy: arrays", (type, tuple, bytes),
     tuple(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core"))),
    ("numpy: dtypes of both", (str, bool), ("numpy.dtype",)),
    ("numpy: the class of arrays", None, ("numpy.ndarray",)),
    ("Python: types, that omegaconf and defaultdict name", None,
     (*(f"builtins.{name}" for name in ("bool", "dict", "float", "int", "list", "str", "tuple")), "typing.Any")),
    ("Python: the type of None, pickled as type(None)", (type(None),), ("builtins.type",)),
    ("Python: ranges and slices", (int, type(None)), ("builtins.range", "builtins.slice")),
    ("Python: collections, such as a user's own state", (type, type(None)), ("collections.defaultdict",)),
    ("Python: collections", (int, tuple), ("collections.deque",)),
    ("Python: collections", (dict,), ("collections.Counter",)),
    ("Python: paths in hyper-parameters; in Python 3.13 of a module of their own", (str,),
     tuple(f"{module}.{name}" for module in ("pathlib", "pathlib._local")
           for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"))),
    ("Python: hyper-parameters from a command line", (), ("argparse.Namespace", "types.SimpleNamespace")),
    ("Python: times", (int, bytes, str, StandIn),
     tuple(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone"))),
    ("Python: numbers", (int, str), ("decimal.Decimal", "fractions.Fraction")),
    ("Python: the name of a run", (), ("uuid.UUID",)),
    ("omegaconf: hyper-parameters of Hydra's programs", (), tuple(f"omegaconf.{name}" for name in _OMEGACONF)),
    ("PEFT: a configuration among hyper-parameters", (), tuple(f"peft.tuners.{name}" for name in _PEFT)),
    ("PEFT: what is in one", (str,), tuple(f"peft.utils.peft_types.{name}" for name in ("PeftType", "TaskType"))),
)  # fmt: skip
EXPECTED: dict[str, _Takes] = {name: takes for _, takes, names in _GROUPS for name in names}
"""The expected names, and the types that their arguments may have."""
OF_DEEPSPEED = tuple(name for name in EXPECTED if name.startswith("deepspeed."))
"""The classes of objects that DeepSpeed's optimizers save: each contains only numbers."""
LISTS = frozenset(["collections.deque"])
"""The classes whose objects may be appended to."""
MAPPINGS = frozenset([*_ATTRIBUTE_DICTS, "collections.defaultdict"])
"""The classes whose objects may have items set."""
_ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
_NUMPYS_DTYPE = re.compile(r"[biufcSUMm]\d+")
_FRACTION = re.compile(r"-?\d+(/\d+)?")
_HOLDS_OBJECTS = 7
"""The flags that make numpy treat the bytes of an array as addresses of objects, whatever the dtype is."""


def value_of_member(enum: str, member: str) -> int | str | None:
    """The value of an enum's member by their names; None if it is not an enum that a checkpoint may contain."""
    if enum == "deepspeed.runtime.zero.config.ZeroStageEnum":
        return _ZERO_STAGES.get(member)
    return member if enum.startswith("peft.utils.peft_types.") and enum in EXPECTED else None  # as PEFT names them


def may_be_called(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a checkpoint may call this with such arguments."""
    takes = EXPECTED.get(name)
    if takes is None or not all(isinstance(argument, takes) for argument in arguments):
        return False
    if name == "numpy.dtype":
        return bool(arguments) and _NUMPYS_DTYPE.fullmatch(str(arguments[0])) is not None
    if name == "collections.deque":
        return not arguments or arguments[0] == ()
    if name == "fractions.Fraction":  # Fraction("1e999999999") takes forever
        return all(isinstance(argument, int) or _FRACTION.fullmatch(argument) for argument in arguments)
    if name.endswith("multiarray._reconstruct"):  # an empty array; its state sets the elements
        return arguments[1:] == ((0,), b"b")
    return bool(takes) or not arguments


def may_have_state(name: str, state: Any) -> bool:
    """Whether a checkpoint may set this state: attributes, or the state of a numpy object."""
    if name == "numpy.dtype":
        return (
            isinstance(state, tuple)
            and len(state) >= 8
            and state[2:5] == (None, None, None)  # neither fields nor an array in each element
            and type(state[7]) is int
            and not state[7] & _HOLDS_OBJECTS
        )
    if name.startswith("numpy."):  # an array: its version, shape, dtype, order and bytes
        kinds = (int, tuple, StandIn, bool, bytes)
        return isinstance(state, tuple) and len(state) == len(kinds) and all(map(isinstance, state, kinds))
    return isinstance(state, dict) or EXPECTED.get(name) == ANYTHING
