"""What a pickle may name and contain: read without running it, in little memory and time, and rewritten safely."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import json
import pathlib
import re
import subprocess
import sys
import time
import types
import uuid
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opcodes import EXPENSIVE, limited, text

from ds_frozen_patch import CheckpointError, CheckpointMismatchError
from ds_frozen_patch.checkpoint.adapters import Adapter
from ds_frozen_patch.checkpoint.format import archive
from ds_frozen_patch.checkpoint.format.records import Records
from ds_frozen_patch.checkpoint.format.safetensors import write_file as write_safetensors
from ds_frozen_patch.checkpoint.format.stored import Storage, StoredTensor, iter_tensors
from ds_frozen_patch.checkpoint.format.writing import write_archive
from ds_frozen_patch.checkpoint.zero import states, weights
from ds_frozen_patch.checkpoint.zero.layout import Layout
from ds_frozen_patch.manifest import LeftOut, Manifest
from ds_frozen_patch.tools.base import match_base, open_base

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]

SECONDS = 5
MEMORY = 100 << 20
OPEN = b"\x80\2}X\4\0\0\0mine"


def saved(file: Path, pickled: bytes, **records: bytes) -> Path:
    """Write a file of `torch.save` with this pickle."""
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("archive/data.pkl", pickled)
        opened.writestr("archive/byteorder", b"little")
        for name, content in records.items():
            opened.writestr(f"archive/data/{name}", content)
        opened.writestr("archive/version", b"3\n")
    return file


def mine(file: Path, code: bytes, **records: bytes) -> Path:
    """Write a file whose state has under "mine" what the opcodes push."""
    return saved(file, OPEN + code + b"s.", **records)


# Names.


def test_the_list_has_no_wildcards() -> None:
    from ds_frozen_patch.checkpoint.format.allowed import EXPECTED

    assert all(re.fullmatch(r"\w+(\.\w+)+", name) for name in EXPECTED)
    assert len(EXPECTED) < 200


@pytest.mark.short
@pytest.mark.parametrize(
    "name",
    [
        "lightning.pytorch.cli.LightningCLI", "pytorch_lightning.cli.LightningArgumentParser",
        "deepspeed.launcher.runner.PDSHRunner", "deepspeed.runtime.config.DeepSpeedConfig",
        "transformers.pipelines.Pipeline", "peft.config.PeftConfig", "torch.nn.parameter.torch_function_dispatch",
        "torch._utils._rebuild_device_tensor_from_numpy", "torch.storage._load_from_bytes", "collections.namedtuple",
        "collections.UserDict", "collections.ChainMap", "builtins.object", "copyreg._reconstructor",
        "numpy.dtypes.ObjectDType", "omegaconf.OmegaConf", "pathlib.Path.unlink",
        "typing.Anything",
    ],
)  # fmt: skip
def test_names_not_on_the_list_are_refused(tmp_path: Path, name: str) -> None:
    module, _, last = name.rpartition(".")
    file = mine(tmp_path / "a.pt", f"c{module}\n{last}\n".encode())
    with pytest.raises(CheckpointError, match=re.escape(f"{file} names {name}, which is not expected in a checkpoint")):
        archive.read_archive(file)
    assert archive.read_archive(file, trust=True)


# What libraries save: values, and the opcodes of what is not installed in every cell.
BENIGN: dict[str, Any] = {
    "times": [
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), datetime.date(2020, 1, 1), datetime.time(1, 2),
        datetime.timedelta(1, 2, 3), datetime.timezone(datetime.timedelta(hours=1), "CET"),
    ],
    "numbers": [decimal.Decimal("1.5"), fractions.Fraction(-1, 3), 1 + 2j, float("nan"), 1 << 200, -1, True, None],
    "paths": [pathlib.Path("a/b"), pathlib.PurePosixPath("/a"), pathlib.PureWindowsPath("c:\\a")],
    "collections": [
        collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.Counter("aab"),
        collections.deque([1, 2], 5), collections.deque([1]), {1, 2}, frozenset({3}), range(3), slice(1, None), b"",
        b"a", bytearray(b"abc"), (), {(1, "a"): 2, 0.5: 3, None: 4, b"x": 5},
    ],
    "of a program": [argparse.Namespace(a=1), types.SimpleNamespace(b=2), uuid.UUID(int=5), Any, dict, str, type(None)],
    "numpy": [
        np.float64(1.5), np.int64(3), np.str_("a"), np.bool_(True), np.arange(6).reshape(2, 3).T, np.array(["a", "bc"]),
        np.datetime64("2020-01-01"), np.dtype("f4"), np.zeros(0), np.array(1.5),
    ],
    "torch": [
        torch.device("cuda", 0), torch.float16, torch.strided, torch.Size([1, 2]), torch.ones(3).bfloat16(),
        torch.nn.Parameter(torch.ones(2)), torch.ones(2, 2).t(), torch.zeros(0), torch.tensor(3),
    ],
    "many keys": [  # more than are let through in no order
        {number: number for number in range(60_000)}, dict.fromkeys(range(1, 60000), 0), set(range(60_000)),
        {number * 7919 % 100_003: 0 for number in range(20_000)},
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", BENIGN)
@pytest.mark.parametrize("protocol", [2, 4])
def test_files_of_libraries_are_read_and_rewritten(tmp_path: Path, kind: str, protocol: int) -> None:
    torch.save({"mine": BENIGN[kind]}, tmp_path / "a.pt", pickle_protocol=protocol)
    assert_the_same(tmp_path / "a.pt", tmp_path / "b.pt")


def assert_the_same(file: Path, copy: Path) -> None:
    state = archive.read_archive(file).state
    write_archive(copy, state, lambda storage, begin, count: [bytes_of(storage)[begin : begin + count]])
    assert archive.read_archive(copy)
    found, expected = (torch.load(path, weights_only=False) for path in (copy, file))
    assert plain(found) == plain(expected)


def plain(value: Any) -> str:
    """Return the contents of a state as plain values, for comparisons."""
    out = io.StringIO()
    if isinstance(value, dict):
        return f"{type(value)}{[(plain(key), plain(item)) for key, item in value.items()]}"
    if isinstance(value, list | tuple | set | collections.deque):
        return f"{type(value)}{list(map(plain, value))}"
    print(type(value), value, value.tolist() if hasattr(value, "tolist") else "", file=out)
    return out.getvalue()


def bytes_of(storage: Storage) -> bytes:
    with zipfile.ZipFile(storage.path) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(f"/data/{storage.key}")]
        return opened.read(name)


def made(name: str, state: bytes) -> bytes:
    """Return an object as libraries save theirs: from a class, without arguments, with a dictionary as its state."""
    module, _, last = name.rpartition(".")
    return f"c{module}\n{last}\n".encode() + b")\x81" + state + b"b"


METADATA = made("omegaconf.base.Metadata", b"}" + text("ref_type") + b"ctyping\nAny\ns")
OMEGACONF = made(
    "omegaconf.dictconfig.DictConfig",
    b"}(" + text("_metadata") + METADATA + text("_parent") + b"N" + text("_content")
    + b"}" + text("lr") + made("omegaconf.nodes.AnyNode", b"}" + text("_val") + b"G?\xe0\0\0\0\0\0\0s") + b"su",
)  # fmt: skip
HOLDS_ITSELF = b"comegaconf.dictconfig\nDictConfig\n)\x81q\x10}" + text("_content") + b"}" + text("a") + made(
    "omegaconf.nodes.AnyNode", b"}" + text("_parent") + b"h\x10s"
) + b"ssb"  # fmt: skip
OF_LIBRARIES = {
    "omegaconf": OMEGACONF,
    "omegaconf's parents": HOLDS_ITSELF,
    "DeepSpeed": made("deepspeed.runtime.fp16.loss_scaler.LossScaler", b"}" + text("cur_scale") + b"K\1s")
    + b"0cdeepspeed.runtime.zero.config\nZeroStageEnum\nK\2\x85R"
    + b"0cdeepspeed.utils.tensor_fragment\nfragment_address\nK\4K\0\x86R",
    "PEFT": made(
        "peft.tuners.lora.config.LoraConfig",
        b"}" + text("peft_type") + b"cpeft.utils.peft_types\nPeftType\n" + text("LORA") + b"\x85Rs",
    ),
    "Lightning": b"clightning.fabric.utilities.data\nAttributeDict\n)\x81" + text("a") + b"K\1s",
}


@pytest.mark.parametrize("library", OF_LIBRARIES)
def test_files_of_other_libraries_are_read_and_rewritten(tmp_path: Path, library: str) -> None:
    state = archive.read_archive(mine(tmp_path / "a.pt", OF_LIBRARIES[library])).state
    write_archive(tmp_path / "b.pt", state, lambda *_: [])
    again = archive.read_archive(tmp_path / "b.pt").state
    assert repr(again) == repr(state)
    assert "mine" in again


# Enums, as Python 3.11.0 to 3.11.3 pickle them, such as the one of Debian 12.
STAGE = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
GETATTR = b"c__builtin__\ngetattr\n"


@pytest.mark.parametrize(
    ("by_name", "by_value"),
    [
        (GETATTR + STAGE + text("gradients") + b"\x86R", STAGE + b"K\2\x85R"),
        (
            GETATTR + b"cpeft.utils.peft_types\nPeftType\n" + text("LORA") + b"\x86R",
            b"cpeft.utils.peft_types\nPeftType\n" + text("LORA") + b"\x85R",
        ),
    ],
)
def test_members_of_enums_by_name(tmp_path: Path, by_name: bytes, by_value: bytes) -> None:
    """They are read, and written, as all other Pythons pickle them."""
    first, second = (
        archive.read_archive(mine(tmp_path / f"{number}.pt", code)).state
        for number, code in enumerate((by_name, by_value))
    )
    assert repr(first) == repr(second)
    write_archive(tmp_path / "b.pt", first, lambda *_: [])
    assert b"getattr" not in (tmp_path / "b.pt").read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        b"cbuiltins\nstr\n" + text("join") + b"\x86",
        STAGE + text("__class__") + b"\x86",
        STAGE + text("mro") + b"\x86",
        STAGE + b"K\1\x86",
        STAGE + b"\x85",
        text("a") + text("join") + b"\x86",
        b"ccollections\nCounter\n" + text("weights") + b"\x86",
    ],
)
def test_other_attributes_are_refused(tmp_path: Path, arguments: bytes) -> None:
    file = mine(tmp_path / "a.pt", GETATTR + arguments + b"R")
    with pytest.raises(CheckpointError, match=r"names builtins\.getattr, which is not expected in a checkpoint"):
        archive.read_archive(file)
    assert archive.read_archive(file, trust=True).unexpected == {"builtins.getattr"}


def test_getattr_alone_is_refused(tmp_path: Path) -> None:
    for trust in (False, True):
        with pytest.raises(CheckpointError):
            archive.read_archive(mine(tmp_path / "a.pt", GETATTR), trust=trust)


# What is on the list, used as no library uses it: the opcodes after which `trust` alone goes on.
MISUSED = {
    "a class of Lightning's with arguments": b"clightning.fabric.utilities.data\nAttributeDict\n}\x85R",
    "a configuration with arguments": b"cpeft.tuners.lora.config\nLoraConfig\n" + text("scipy") + b"\x85R",
    "a dictionary of omegaconf's with arguments": b"comegaconf.dictconfig\nDictConfig\n}\x85\x81",
    "a type that is called": b"cbuiltins\nstr\n" + text("_instantiator") + b"\x85R",
    "a class that is made": b"cbuiltins\ntype\n" + text("A") + b")}\x87R",
    "a dictionary of pairs": b"cbuiltins\ndict\n]\x85R",
    "a deque of something": b"ccollections\ndeque\n]\x85R",
    "a default and pairs": b"ccollections\ndefaultdict\nN]\x86R",
    "a state of attributes": b"cargparse\nNamespace\n)\x81N}\x86b",
    "a state that is a list": b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81]b",
    "items of a Namespace": b"cargparse\nNamespace\n)\x81" + text("a") + b"Ns",
    "a Namespace with elements": b"cargparse\nNamespace\n)\x81Na",
    "a dtype of objects": b"cnumpy\ndtype\n" + text("O8") + b"\x89\x88\x87R",
    "a dtype that says it holds objects": b"cnumpy\ndtype\n" + text("f8") + b"\x89\x88\x87R(K\3" + text("<")
    + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\7tb",
    "a dtype of fields": b"cnumpy\ndtype\n" + text("V8") + b"\x89\x88\x87R",
    "an array of objects": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85C\1btR(K\1K\1\x85"
    + b"cnumpy\ndtype\n" + text("f8") + b"\x89\x88\x87R\x89]tb",
    "an array with room": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nJ\0\0\0\x40\x85C\1btR",
    "a fraction that takes for ever": b"cfractions\nFraction\n" + text("1e999999999") + b"\x85R",
    "a path of something": b"cpathlib\nPosixPath\n]\x85R",
}  # fmt: skip


@pytest.mark.parametrize("misuse", MISUSED)
def test_names_on_the_list_are_used_by_libraries(tmp_path: Path, misuse: str) -> None:
    file = mine(tmp_path / "a.pt", MISUSED[misuse])
    with pytest.raises(CheckpointError, match=r"torch\.load could run it\. Nothing was run"):
        archive.read_archive(file)


def test_allowed_names_run_nothing(tmp_path: Path) -> None:
    """Load it by Python's own `pickle`, with hostile arguments and states, under an audit hook."""
    program = Path(__file__).parents[1] / "harmless.py"

    def tried(*more: str) -> Any:
        (tmp_path / "empty").mkdir(exist_ok=True)
        line = [sys.executable, str(program), str(tmp_path / "empty"), *more]
        ran = subprocess.run(line, capture_output=True, text=True, check=False, timeout=200)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    found = tried()
    assert (found["ran"], found["made"]) == ({}, [])
    assert len(found["names"]) > 40
    assert found["loaded"] > 1000
    assert list(tried("builtins.eval")["ran"]) == ["builtins.eval"]


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("kind", EXPENSIVE)
def test_small_files_take_little_memory_and_time(tmp_path: Path, kind: str, trust: bool) -> None:
    file = mine(tmp_path / "a.pt", EXPENSIVE[kind])
    with limited(SECONDS, MEMORY):
        try:
            found = archive.read_archive(file, trust=trust)
            list(iter_tensors(found.state))
            states._to_comparable_text(found.state)
        except CheckpointError as error:
            refused = str(error)
        else:
            refused = ""
    assert not refused or "do not support" in refused or "damaged" in refused or "torch.load could run it" in refused


def test_too_many_colliding_keys_are_refused(tmp_path: Path) -> None:
    """Python compares each key with others in the same slot, and an attacker can choose the keys."""
    for kind in (dict.fromkeys, set, frozenset):
        torch.save({"mine": kind(number * 7919 % 100_003 for number in range(60_000))}, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match="too many keys are unordered numbers or tuples"):
            archive.read_archive(tmp_path / "a.pt")


def test_colliding_shapes_are_compared_fast(tmp_path: Path) -> None:
    """An attacker who chooses a tuple's numbers chooses its hash."""
    storage = Storage(Path("a"), "0", "float32", 1)
    hashes = {hash(StoredTensor(storage, "float32", 0, (size, 0), (1, 1))) for size in (0, (1 << 61) - 1)}
    assert len(hashes) == 2


def test_many_aliases_take_linear_time() -> None:
    names = [f"layer{i}.weight" for i in range(30_000)]
    found = weights.Weights(
        {}, {}, {}, dict(zip([f"{n}.alias" for n in names], names, strict=True)), {}, {}, {}, {}, {}
    )
    with limited(SECONDS, MEMORY):
        assert all(len(found.names_of(name)) == 2 for name in names)


def test_a_long_name_in_a_manifest_is_refused(tmp_path: Path) -> None:
    dotted = "a." * 200_000
    said = {"format": 1, "left_out": [[[dotted], [1], "float32", None]], "total_bytes": 4, "zero_stage": 2}
    with limited(SECONDS, MEMORY), pytest.raises(CheckpointMismatchError, match="manifest is damaged"):
        Manifest.from_state({**said, "world_size": 2, "versions": {}})
    for value in (dotted, "a" * 2000):
        state = {"module": {value: torch.ones(1)}}
        torch.save(state, tmp_path / "a.pt")
        with limited(SECONDS, MEMORY), pytest.raises(CheckpointError, match="unexpected values for 'module'"):
            states._check_value_types(tmp_path / "a.pt", archive.read_archive(tmp_path / "a.pt").state)


def test_base_names_are_matched_in_linear_time(tmp_path: Path) -> None:
    torch.save({f"model.layers.{i}.weight": torch.ones(1) for i in range(3000)}, tmp_path / "base.bin")
    deep = [LeftOut((".".join(["a"] * 90 + [f"x{i}.y{i}"]),), (1,), "float32", None) for i in range(2000)]
    base = open_base(tmp_path / "base.bin")
    with limited(SECONDS, MEMORY), pytest.raises(CheckpointError, match="lacks"):
        match_base(Manifest(tuple(deep), 4, 2, 2, {}), base)
    assert (
        base.find(LeftOut(("wrapped.model.layers.5.weight",), (1,), "float32", None))
        == base.tensors["model.layers.5.weight"]
    )
    assert base.find(LeftOut(("layers.5.weight",), (1,), "float32", None)) == base.tensors["model.layers.5.weight"]
    assert base.find(LeftOut(("weight",), (1,), "float32", None)) is None


def test_partitions_of_many_parameters_take_linear_time() -> None:
    parts = [(f".part{i}", [1], "float32", None) for i in range(1000)]
    said = {"format": 1, "left_out": [[[f"a{i}"], [1], "float32", None] for i in range(1000)], "total_bytes": 4}
    said |= {"parts": {f"a{i}": parts for i in range(1000)}, "zero_stage": 2, "world_size": 2, "versions": {}}
    refused = pytest.raises(CheckpointMismatchError, match="expands to far more names than it contains")
    with limited(SECONDS, MEMORY), refused:
        Manifest.from_state(said)


def of_buffers(file: Path, buffers: dict[str, torch.Tensor]) -> states.States:
    state = {"module": {"a": torch.ones(1), **buffers}, "buffer_names": list(buffers), "param_shapes": []}
    torch.save({**state, "frozen_param_fragments": {}, "frozen_param_shapes": {}, "dp_world_size": 1}, file)
    return states.States(Layout(file.parent, "", (file,), ()), (archive.read_archive(file),))


def test_shared_buffers_take_linear_space(tmp_path: Path) -> None:
    repeated = torch.ones(1).expand(1 << 20)
    found = of_buffers(tmp_path / "a.pt", {f"b{i}": repeated for i in range(300)})
    with pytest.raises(CheckpointError, match=r"its tensors would take 12\d+ bytes, far more than the checkpoint has"):
        weights.locate_weights(found)
    shared = torch.ones(1 << 16)  # such as a mask that each layer has
    assert (
        len(weights.locate_weights(of_buffers(tmp_path / "b.pt", {f"b{i}": shared for i in range(80)})).buffers) == 80
    )


def test_many_adapters_take_linear_time() -> None:
    trained = [f"layer{i}.lora_A.a{i}.weight" for i in range(5000)]
    with limited(SECONDS, MEMORY):
        members = Adapter("", "a7", None).members(trained, (), (), [f"a{i}" for i in range(5000)])
    assert list(members.values()) == ["layer7.lora_A.a7.weight"]


def test_an_unsaved_storage_has_no_file(tmp_path: Path) -> None:
    """A file at the empty path would be the current directory."""
    storage = Storage(None, "0", "float32", 1)
    with pytest.raises(ValueError, match="storage '0' is in no file yet"), Records() as records:
        records.check(storage)


# What torch makes of a tensor.


class _Forged:
    """Pickles as a call of a function of torch's with these arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _forged(kind: str) -> Any:
    ones, other = torch.ones(4), torch.full((4,), 9.0)
    hooks: Any = collections.OrderedDict()
    return {
        "state of a parameter": lambda: _Forged(
            torch._utils._rebuild_parameter_with_state, ones, False, hooks, {"data": other}
        ),
        "slots of a parameter": lambda: _Forged(
            torch._utils._rebuild_parameter_with_state, ones, False, hooks, ({}, {"data": other})
        ),
        "state of a subclass": lambda: _Forged(
            torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2,
            torch.nn.Parameter, (ones.storage(), 0, (4,), (1,), False, hooks), {"data": other},  # type: ignore[no-untyped-call]
        ),
        "hooks": lambda: _Forged(torch._utils._rebuild_parameter, ones, False, collections.OrderedDict(a=other)),
        "a flag": lambda: _Forged(torch._utils._rebuild_parameter, ones, [other, other], hooks),
    }[kind]()  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["state of a parameter", "slots of a parameter", "state of a subclass", "hooks", "a flag"]
)
def test_a_tensor_is_what_torch_loads(tmp_path: Path, kind: str) -> None:
    """A verified tensor has no second value, which torch would set."""
    file = tmp_path / "a.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"weight": _forged(kind)}, file)
    with pytest.raises(CheckpointError, match=r"arguments than those that torch writes|change its values"):
        archive.read_archive(file)


def test_ordinary_attributes_of_parameters_are_read(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.ds_id = 3  # type: ignore[attr-defined]
    torch.save({"weight": parameter, "complex": torch.ones(2, dtype=torch.complex64)}, tmp_path / "a.pt")
    state = archive.read_archive(tmp_path / "a.pt").state
    assert state["weight"].wrapper[1][2] == {"ds_id": 3}


def test_a_storage_has_one_dtype(tmp_path: Path) -> None:
    """torch takes that of the first tensor for all."""
    file = tmp_path / "a.pt"
    torch.save({"a": torch.ones(4), "b": torch.ones(4, dtype=torch.int32)}, file)
    with zipfile.ZipFile(file) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in files.items():
            opened.writestr(name, content.replace(b"\x01\x00\x00\x001", b"\x01\x00\x00\x000"))
    with pytest.raises(CheckpointError, match="has two dtypes"):
        archive.read_archive(file)
    assert torch.load(file, weights_only=True)["b"].dtype == torch.float32


def test_texts_of_tensors_are_short(tmp_path: Path) -> None:
    """Tensors that hold others, each twice, would take forever to print."""
    tensor: Any = torch.ones(2)
    file = tmp_path / "a.pt"
    torch.save({"weight": tensor}, file)
    stored: Any = archive.read_archive(file).state["weight"]
    for _ in range(40):
        stored = types.SimpleNamespace(tensor=StoredTensor(
            stored.tensor.storage if hasattr(stored, "tensor") else stored.storage, "float32", 0, (2,), (1,),
            more=(stored, stored),
        ))  # fmt: skip
    begun = time.monotonic()
    assert len(repr(stored.tensor)) < 100
    assert time.monotonic() - begun < 1


def test_bases_with_much_metadata_take_linear_time(tmp_path: Path) -> None:
    """Metadata name torchao's tensors, whose inner tensors have names of their own."""
    count = 8000
    tensors = {f"x{i}._weight_scale": ("float32", (0,)) for i in range(count)}
    write_safetensors(
        tmp_path / "base.safetensors", tensors, [b""] * count, {f"y{i}.weight": "{}" for i in range(count)}
    )
    with limited(SECONDS, 2 * MEMORY):
        assert len(open_base(tmp_path / "base.safetensors").tensors) == count
    some = {f"x._{inner}": ("float32", (0,)) for inner in ("weight_scale", "in_proj_weight_zero_point")}
    about = {"x.weight": "{}", "x.in_proj_weight": "{}"}
    write_safetensors(tmp_path / "some.safetensors", some, [b""] * 2, about)
    assert open_base(tmp_path / "some.safetensors").tensors.keys() >= {"x.weight.scale", "x.in_proj_weight.zero_point"}
