"""Files that torch reads, and a reader of the tools' own once refused: in every tool, and at a load."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.checkpoints import (
    Checkpoints,
    changed,
    loaded,
    of_one_rank,
    raw,
    refresh,
    state_of_one_rank,
    unmark,
    weights_of,
)
from kit.hostile import named, text
from safetensors.torch import load_file

from ds_frozen_patch import CheckpointError, consolidate, export, inspect, load_trainable, prune, reshard, verify
from ds_frozen_patch.checkpoint.format import archive
from ds_frozen_patch.load.listing import check_files
from ds_frozen_patch.record import read_record
from ds_frozen_patch.tools.inspect import CLIENT_STATE

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]

LARGE: dict[str, Any] = {
    "tuples as keys": {(number, str(number)): number for number in range(2000)},
    "a set of tuples": {(number, number + 1) for number in range(2000)},
    "unordered numbers": {number * 1_000_003 % (1 << 40): None for number in range(60_000)},
    "values that are nested": [[[[[[[[[[[[[[[[[[[[["deep"]]]]]]]]]]]]]]]]]]]]],
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_client_state(tmp_path: Path, kind: str) -> None:
    weights = {"trained.weight": torch.ones(2, 2), "frozen.weight": torch.ones(3)}
    path = of_one_rank(tmp_path / "in.ckpt", weights, mine=LARGE[kind])
    inspect(path)
    assert verify(path).problems == ()
    prune(path, tmp_path / "pruned.ckpt")
    consolidate(path, tmp_path / "one.ckpt")
    for file in (tmp_path / "one.ckpt", *(tmp_path / "pruned.ckpt").rglob("*_states.pt")):
        assert loaded(file)["mine"] == LARGE[kind]


STORAGE = b"(" + text("storage") + named("torch.FloatStorage") + text("0") + text("cpu") + b"K\1tQ"
CHANGES: dict[str, bytes] = {
    "a class": named("argparse.Namespace") + b"N}" + text("stands_for") + text("os.system") + b"s\x86b",
    "a function of torch": named("torch._utils._rebuild_tensor_v2") + b"N}" + text("__new__") + b"Ns\x86b",
    "a method of an OrderedDict": named("collections.OrderedDict") + b")R}" + text("items") + b"Nsb",
    "the file of a storage": STORAGE + b"(" + text("/etc/passwd") + text("0") + text("float32") + b"K\1tb",
    "the shape of a tensor": named("torch._utils._rebuild_tensor_v2")
    + b"("
    + STORAGE
    + b"K\0K\1\x85K\1\x85\x89"
    + named("collections.OrderedDict")
    + b")RtR(NNNNNNNNtb",
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_pickle_changes_only_what_it_has_created(what: str) -> None:
    with pytest.raises((pickle.UnpicklingError, TypeError), match=r"it changes |__setstate__"):
        archive.unpickle(Path("a file"), b"\x80\2" + CHANGES[what] + b".", {"data/0": archive.Record(0, 4, None)})


@pytest.mark.parametrize(
    ("storages", "said"),
    [
        (STORAGE + STORAGE.replace(b"Float", b"Int"), "has two dtypes or sizes"),
        (STORAGE.replace(b"K\1", b"K\2"), "not 8"),
    ],
)
def test_a_storage_has_one_dtype_and_the_size_of_its_record(storages: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        archive.unpickle(Path("a file"), b"\x80\2" + storages + b".", {"data/0": archive.Record(0, 4, None)})


def test_the_largest_pickle_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = of_one_rank(tmp_path / "in.ckpt", {"trained.weight": torch.ones(2, 2)})
    size = inspect(path).kinds[CLIENT_STATE]
    monkeypatch.setattr(archive, "MAX_PICKLE_BYTES", size)
    inspect(path)
    monkeypatch.setattr(archive, "MAX_PICKLE_BYTES", size - 1)
    with pytest.raises(CheckpointError, match=f"has {size} bytes, and at most {size - 1} are read"):
        inspect(path)


def test_a_record_of_a_later_torch(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """What an unknown record means is nobody's business."""
    path = tmp_path / "copy.ckpt"
    shutil.copytree(checkpoints(2) / "small.ckpt", path)
    for file in path.rglob("*_states.pt"):
        with zipfile.ZipFile(file, "a") as archive:
            folder = archive.namelist()[0].partition("/")[0]
            archive.writestr(f"{folder}/.next_version", b"7")
            archive.writestr(f"{folder}/.data/next", b"x" * 100)
        torch.load(file, weights_only=False)
    refresh(path / "checkpoint")
    record = read_record(path / "checkpoint")
    check_files(dict.fromkeys(path.rglob("*_states.pt"), slice(None)), record)  # as a load does
    assert verify(path).problems == ()
    consolidate(path, tmp_path / "one.ckpt")
    reshard(path, tmp_path / "three.ckpt", ranks=3)


DTYPES = [
    name
    for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex128", "bool")
    if hasattr(torch, name)
]
NOT_IN_SAFETENSORS = ("complex128", "float8_e8m0fnu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_consolidated(tmp_path: Path, dtype: str) -> None:
    values = torch.arange(6).to(torch.uint8).repeat(32).view(getattr(torch, dtype)).reshape(2, -1)
    weights = {"trained.weight": torch.ones(2, 2), "trained.other": values, "trained.empty": values[:, :0]}
    path = of_one_rank(tmp_path / "in.ckpt", weights)
    consolidate(path, tmp_path / "one.ckpt")
    for mmap in (False, True):
        found: Any = torch.load(tmp_path / "one.ckpt", weights_only=True, mmap=mmap)["state_dict"]
        assert {name: (item.dtype, item.shape, raw(item)) for name, item in found.items()} == {
            name: (item.dtype, item.shape, raw(item)) for name, item in weights.items()
        }
    consolidate(tmp_path / "one.ckpt", tmp_path / "again.ckpt")
    assert raw(weights_of(tmp_path / "again.ckpt")["trained.other"]) == raw(values)
    if dtype not in NOT_IN_SAFETENSORS:
        consolidate(path, tmp_path / "one.safetensors")
        assert raw(load_file(tmp_path / "one.safetensors")["trained.other"]) == raw(values)
    else:
        with pytest.raises(CheckpointError, match=rf"cannot have 'trained.other' in {dtype}. Write a .ckpt"):
            consolidate(path, tmp_path / "one.safetensors")
        assert not (tmp_path / "one.safetensors").exists()


def test_views_are_consolidated(tmp_path: Path) -> None:
    """Tensors of one storage, which begin anywhere in it and have any strides."""
    whole = torch.arange(240.0).reshape(2, 3, 4, 10)
    views = {"a": whole[1], "b": whole[0, 1].t(), "c": whole[:, ::2, 1, ::3], "d": torch.arange(3.0).expand(4, 3)}
    weights = {f"trained.{name}": view for name, view in views.items()}
    consolidate(of_one_rank(tmp_path / "in.ckpt", weights), tmp_path / "one.ckpt")
    assert {name: raw(value) for name, value in weights_of(tmp_path / "one.ckpt").items()} == {
        name: raw(value) for name, value in weights.items()
    }


def masters_in_stage_0(path: Path) -> dict[str, torch.Tensor]:
    """Return the fp32 masters of a checkpoint of stage 0 in 16 bits, by name."""
    (file,) = path.rglob("*model_states.pt")
    state, found = loaded(file), dict[str, torch.Tensor]()
    for group, masters in zip(state["param_shapes"], state["optimizer"]["fp32_groups"], strict=True):
        found |= dict(zip(group, masters, strict=True))
    return found


@pytest.mark.parametrize("is_flat", [False, True])
def test_the_masters_of_stage_0(checkpoints: Checkpoints, tmp_path: Path, is_flat: bool) -> None:
    """In 16 bits, the trained weights are the optimizer's fp32 ones."""
    path = tmp_path / "copy.ckpt"
    shutil.copytree(checkpoints(0, precision="bf16-true") / "small.ckpt", path)
    masters = masters_in_stage_0(path)
    (file,) = path.rglob("*model_states.pt")
    assert any(raw(value) != raw(loaded(file)["module"][name].float()) for name, value in masters.items())

    def flatten(state: dict[str, Any]) -> None:  # as with DeepSpeed's FusedAdam
        groups = state["optimizer"].pop("fp32_groups")
        state["optimizer"]["fp32_groups_flat"] = [torch.cat([master.flatten() for master in group]) for group in groups]

    if is_flat:
        changed(file, flatten)
    consolidate(path, tmp_path / "one.ckpt")
    export(path, tmp_path / "one.safetensors")
    for found in (weights_of(tmp_path / "one.ckpt"), load_file(tmp_path / "one.safetensors")):
        assert {name: raw(found[name]) for name in masters} == {name: raw(value) for name, value in masters.items()}
    module = runs.LoraRun()
    load_trainable(module, path)
    parameters = dict(module.named_parameters())
    assert {name: raw(parameters[name]) for name in masters} == {name: raw(value) for name, value in masters.items()}
    assert verify(path).problems == ()
    unmark(path)

    def shuffle(state: dict[str, Any]) -> None:
        for name, value in state["module"].items():
            if name in masters:
                value.neg_().add_(1)

    changed(file, shuffle)
    assert "the optimizer's masters differ" in "".join(verify(path).problems)


class Holes:
    """A file that large zeros do not fill."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, content: Any) -> int:
        if len(content) >= 1 << 16 and not any(content[:16]):
            self.file.truncate(self.file.seek(len(content), 1))
            return len(content)
        return int(self.file.write(content))

    def flush(self) -> None: ...


def test_a_record_of_more_than_4_gib(tmp_path: Path) -> None:
    """The sizes and offsets are in fields of 64 bits. The file is mostly a hole."""
    path, size = tmp_path / "in.ckpt", (4 << 30) + 64
    (path / "checkpoint").mkdir(parents=True)
    (path / "latest").write_text("checkpoint")
    weights = {"frozen.weight": torch.zeros(size, dtype=torch.uint8), "trained.weight": torch.ones(2)}
    with open(path / "checkpoint" / "mp_rank_00_model_states.pt", "wb", 0) as file:  # noqa: PTH123
        holes: Any = Holes(file)
        torch.save(state_of_one_rank(weights), holes)
    assert inspect(path).prunable == size
    prune(path, tmp_path / "pruned.ckpt", fingerprints=False)
    (found,) = (tmp_path / "pruned.ckpt").rglob("*_states.pt")
    assert torch.equal(torch.load(found, weights_only=False)["module"]["trained.weight"], torch.ones(2))
