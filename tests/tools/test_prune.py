"""`ds-frozen-patch prune`: converts a full checkpoint into the one that `patch()` would have saved."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import fractions
import functools
import shutil
import subprocess
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from kit import runs
from kit.cell import CELL, PRECISIONS
from kit.checkpoints import (
    EMBEDDING,
    Checkpoints,
    assert_pruned,
    assert_same,
    changed,
    flip,
    loaded,
    names_of_copy,
    of_any_save,
    of_one_rank,
    precision_of,
    raw,
    record_in,
    record_of,
    records_of,
    resume,
    resume_on_another_base,
    snapshot,
    unmark,
)

from ds_frozen_patch import CheckpointError, prune, verify
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.record import KEY

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday]


@pytest.mark.short
@pytest.mark.parametrize(
    ("stage", "world_size", "precision", "module"),
    [
        *((stage, 2, precision_of(stage), "lora") for stage in (0, 1, 2, 3)),
        *((stage, world_size, precision_of(stage), "lora") for stage in (2, 3) for world_size in (1, 3)),
        *((stage, 2, PRECISIONS[-1], "lora") for stage in (2, 3)),
        *((stage, 2, precision_of(stage), "odd") for stage in (0, 1, 2, 3)),
        *((stage, 2, precision_of(stage), "wrapped") for stage in (1, 2)),  # DeepSpeed cannot train it in ZeRO-3
    ],
)
def test_it_equals_a_trainable_only_save(
    checkpoints: Checkpoints, tmp_path: Path, stage: int, world_size: int, precision: str, module: str
) -> None:
    out = checkpoints(stage, world_size, precision, module=module)
    before = snapshot(out / "full.ckpt")
    done = prune(out / "full.ckpt", tmp_path / "pruned.ckpt")
    assert_pruned(tmp_path / "pruned.ckpt", out / "small.ckpt")
    assert snapshot(out / "full.ckpt") == before
    files = (tmp_path / "pruned.ckpt" / "checkpoint").iterdir()
    assert done.size_after == sum(file.stat().st_size for file in files)
    assert done.size_before == sum(f.stat().st_size for f in (out / "full.ckpt" / "checkpoint").glob("*.pt"))
    assert done.record == replace(record_in(tmp_path / "pruned.ckpt"), files={})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_resumes_like_a_trainable_only_save(
    checkpoints: Checkpoints, ranks: Any, tmp_path: Path, stage: int
) -> None:
    out = checkpoints(stage)
    prune(out / "full.ckpt", tmp_path / "pruned.ckpt")
    options = {"world_size": 2, "stage": stage, "precision": precision_of(stage)}
    resumed = [
        ranks(2, resume, path=str(path), out=str(tmp_path / "again"), **options)
        for path in (out / "small.ckpt", tmp_path / "pruned.ckpt")
    ]
    assert resumed[0] == resumed[1]
    losses, state, steps = resumed[0][0]
    assert (len(losses), steps) == (runs.BATCHES, 2 * runs.BATCHES)
    assert state != checkpoints.trained[out]
    if stage >= 2:
        for kind, said in ranks(
            2, resume_on_another_base, path=str(tmp_path / "pruned.ckpt"), out=str(tmp_path / "again"), **options
        ):
            assert kind == "CheckpointMismatchError"
            assert "mlp.up_proj.weight: saved " in said


@pytest.mark.parametrize("stage", [2, 3])
def test_without_fingerprints_no_frozen_weight_is_read(checkpoints: Checkpoints, tmp_path: Path, stage: int) -> None:
    out = checkpoints(stage)
    shutil.copytree(out / "full.ckpt", tmp_path / "full.ckpt")
    damaged = []
    for file in sorted((tmp_path / "full.ckpt" / "checkpoint").glob("*model_states.pt")):
        flip(file, record_of(file, lambda state: state["frozen_param_fragments"][EMBEDDING]))
        damaged.append(file)
    with pytest.raises(CheckpointError, match="is damaged: record") as refused:
        prune(tmp_path / "full.ckpt", tmp_path / "pruned.ckpt")
    assert any(str(file) in str(refused.value) for file in damaged)
    assert not (tmp_path / "pruned.ckpt").exists()
    done = prune(tmp_path / "full.ckpt", tmp_path / "pruned.ckpt", fingerprints=False)
    assert {parameter.fingerprint for parameter in done.record.left_out} == {None}
    for file in sorted((tmp_path / "pruned.ckpt" / "checkpoint").glob("*.pt")):
        assert_same(of_any_save(file), of_any_save(out / "small.ckpt" / "checkpoint" / file.name), file.name)
    assert done.record.left_out == tuple(
        replace(entry, fingerprint=None) for entry in record_in(out / "small.ckpt").left_out
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_fingerprints_need_no_torch(checkpoints: Checkpoints, tmp_path: Path, stage: int) -> None:
    out = checkpoints(stage)
    program = f"""
import sys
from ds_frozen_patch.tools.prune import prune
prune({str(out / "full.ckpt")!r}, {str(tmp_path / "pruned.ckpt")!r})
print([name for name in ("torch", "lightning", "deepspeed") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert_pruned(tmp_path / "pruned.ckpt", out / "small.ckpt")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_from_plain_deepspeed(checkpoints: Checkpoints, tmp_path: Path, stage: int) -> None:
    out = checkpoints.by_deepspeed(stage)
    done = prune(out / "full.ckpt", tmp_path / "pruned.ckpt")
    assert (done.record.zero_stage, done.record.world_size) == (stage, 2)
    assert done.record.versions["deepspeed"] == CELL.deepspeed
    assert len(done.record.left_out) == 20
    assert (tmp_path / "pruned.ckpt" / "latest").read_text() == "step4"
    assert sorted(snapshot(tmp_path / "pruned.ckpt")) == sorted([*names_of_copy(out / "full.ckpt"), f"step4/{RECORD}"])
    for file in sorted((out / "full.ckpt" / "step4").glob("*.pt")):
        ours, theirs = loaded(tmp_path / "pruned.ckpt" / "step4" / file.name), loaded(file)
        if file.name.endswith("model_states.pt"):
            for name in done.record.names & theirs["module"].keys():
                del theirs["module"][name]
            assert all("lora_" in name for name in theirs["module"])
            if "frozen_param_shapes" in theirs:
                theirs |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
            del ours[KEY]
        assert_same(ours, theirs, file.name)


def test_stage_0_with_ambiguous_shapes(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """What is saved under `patch()` says which were trained; what DeepSpeed saves alone does not."""
    out = checkpoints(0, module="half")
    prune(out / "full.ckpt", tmp_path / "pruned.ckpt")
    assert_pruned(tmp_path / "pruned.ckpt", out / "small.ckpt")
    shutil.rmtree(tmp_path / "pruned.ckpt")
    full, pruned = tmp_path / "of_deepspeed" / "full.ckpt", tmp_path / "here" / "pruned.ckpt"
    pruned.parent.mkdir()
    shutil.copytree(out / "full.ckpt", full)
    file = "mp_rank_00_model_states.pt"
    groups = loaded(full / "checkpoint" / file)["param_shapes"]
    changed(full / "checkpoint" / file, lambda state: state.update(param_shapes=None))
    with pytest.raises(CheckpointError, match=r"cannot tell which were trained \(.*layers\.0.*Pass --trainable"):
        prune(full, pruned)
    with pytest.raises(
        CheckpointError, match=r"has trained 2 parameters that the patterns do not match, of shape '\[32, 4\]'"
    ):
        prune(full, pruned, trainable=["*.layers.0.*lora_A*"])
    with pytest.raises(CheckpointError, match="has trained 4 parameters that the patterns do not match"):
        prune(full, pruned, trainable=["nothing"])
    assert list(pruned.parent.iterdir()) == []
    prune(full, pruned, trainable=["*.layers.0.*lora_A*", "*.layers.0.*lora_B*"])
    changed(pruned / "checkpoint" / file, lambda state: state.update({"param_shapes": groups}))
    assert_pruned(pruned, out / "small.ckpt")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_named_is_kept(checkpoints: Checkpoints, tmp_path: Path, stage: int) -> None:
    full, pruned = checkpoints(stage) / "full.ckpt", tmp_path / "pruned.ckpt"
    done = prune(full, pruned, keep=["*.k_proj.weight"])
    assert not [name for name in done.record.names if "k_proj" in name]
    assert [name for name in done.record.names if "o_proj" in name]
    for file in sorted((full / "checkpoint").glob("*model_states.pt")):
        ours, theirs = loaded(pruned / "checkpoint" / file.name), loaded(file)
        for key in ("module", "frozen_param_fragments"):
            saved, before = ours.get(key) or {}, theirs.get(key) or {}
            kept = [name for name in before if name.endswith("k_proj.weight")]
            assert [name for name in saved if "base_layer" in name or "k_proj" in name] == kept
            assert all(torch.equal(saved[name], before[name]) for name in kept)
    assert verify(pruned, base=full).problems == ()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_trainable_only_checkpoint_is_copied(checkpoints: Checkpoints, tmp_path: Path, stage: int) -> None:
    """So that of a folder of checkpoints all are in the new one, before somebody removes the old one."""
    small = checkpoints(stage) / "small.ckpt"
    again = tmp_path / "again.ckpt"
    prune(small, again, keep=["*.average.*"])
    for file in small.rglob("*.pt"):
        assert_same(loaded(again / file.relative_to(small)), loaded(file))
    assert replace(record_in(again), files={}) == replace(record_in(small), files={})
    assert verify(again).problems == verify(small).problems == ()
    if stage:
        unmark(again)
        with pytest.raises(CheckpointError, match="no frozen parameters, so there is nothing to prune"):
            prune(again, tmp_path / "third.ckpt")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_has_no_effect(checkpoints: Checkpoints, tmp_path: Path, stage: int) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"trainable": ["*lora_A*"]}, r"have no effect: '\*lora_A\*'.*--keep"),
        ({"keep": ["*lora_A*", "*.k_proj.weight"]}, r"that would be left out: '\*lora_A\*'"),
    ]
    for options, said in refusals:
        with pytest.raises(CheckpointError, match=said):
            prune(checkpoints(stage) / "full.ckpt", tmp_path / "pruned.ckpt", **options)
    assert list(tmp_path.iterdir()) == []


def test_another_tag_and_other_files(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = tmp_path / "full.ckpt"
    shutil.copytree(checkpoints(2) / "full.ckpt", source)
    (source / "checkpoint").rename(source / "best")
    (source / "latest").unlink()
    (source / "notes.txt").write_text("of a trainer")
    (source / "best" / "inner").mkdir()
    (source / "best" / "inner" / "more.txt").write_text("too")
    (source / "other").mkdir()
    with pytest.raises(CheckpointError, match="no file `latest`"):
        prune(source, tmp_path / "pruned.ckpt")
    prune(source, tmp_path / "pruned.ckpt", "best")
    found = snapshot(tmp_path / "pruned.ckpt")
    assert found.keys() == {*names_of_copy(source), "latest"}
    assert (tmp_path / "pruned.ckpt" / "latest").read_text() == "best"
    for name in ("notes.txt", "best/inner/more.txt"):
        assert found[name][0] == snapshot(source)[name][0]


def test_ties_are_named_in_the_order_of_the_module(tmp_path: Path) -> None:
    """As a save names them, also where DeepSpeed lists but one of them, which is not the second."""
    tied = torch.ones(7)
    weights = {"frozen.a": tied, "frozen.b": tied, "frozen.c": tied, "trained.weight": torch.ones(2, 2)}
    of_one_rank(tmp_path / "full.ckpt", weights, shared_params={"frozen.c": "frozen.a"})
    done = prune(tmp_path / "full.ckpt", tmp_path / "pruned.ckpt")
    assert [entry.names for entry in done.record.left_out] == [("frozen.a", "frozen.b", "frozen.c")]


# A user's own state: what `torch.save` writes, through `prune`, and back by `torch.load`.


STATES = "checkpoint/mp_rank_00_model_states.pt"


def pruned(state: Any, folder: Path, protocol: int = 2) -> Path:
    """Return the file of a pruned checkpoint whose file of states has this under "mine"."""
    weights = {"trained.weight": torch.ones(2, 2), "frozen.weight": torch.ones(3)}
    of_one_rank(folder / "full.ckpt", weights, protocol=protocol, mine=state)
    prune(folder / "full.ckpt", folder / "pruned.ckpt")
    for name, place in records_of(folder / "pruned.ckpt" / STATES).items():
        assert place.start % 64 == 0, name
    return folder / "pruned.ckpt" / STATES


def mine(file: Path, **options: Any) -> Any:
    return torch.load(file, **{"weights_only": False, **options})["mine"]


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(240, dtype=torch.float32).reshape(2, 3, 4, 10)
    attributed = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    attributed.ds_id = 7  # type: ignore[attr-defined]
    return {
        "offset": base[1],
        "transposed": base[0, 1].t(),
        "strided": base[:, ::2, 1, ::3],
        "expanded": torch.arange(3.0).expand(4, 3),
        "0-dim": torch.tensor(2.5),
        "empty": torch.empty(0, 5),
        "empty, of some": base[:, :, 4:],
        "NaN": torch.tensor([float("nan"), float("inf"), -0.0]),
        "needs a gradient": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "frozen parameter with an attribute": attributed,
        "seen as another dtype": torch.arange(4, dtype=torch.int32).view(torch.float32),
    }


@pytest.mark.parametrize("mmap", [False, True])
def test_tensors_are_written_as_torch_does(tmp_path: Path, mmap: bool) -> None:
    state = odd_tensors()
    assert_same(mine(pruned(state, tmp_path / "all"), mmap=mmap), state)
    del state["frozen parameter with an attribute"]
    assert_same(mine(pruned(state, tmp_path / "safe"), weights_only=True, mmap=mmap), state)


def test_recursive_states_and_those_of_modules(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).state_dict()
    state: dict[str, Any] = {"more": torch.ones(8), "of a module": module}
    state["itself"] = [state]
    found = mine(pruned(state, tmp_path))
    assert found["itself"][0] is found
    assert raw(found["more"]) == raw(torch.ones(8))
    assert_same(found["of a module"], module)
    assert found["of a module"]._metadata == module._metadata  # type: ignore[attr-defined]


def test_tensors_share_their_storage_as_before_and_no_more_of_it_is_written(tmp_path: Path) -> None:
    large = torch.arange(1_000_000, dtype=torch.float32)
    state = {"a": large[500_000:500_010], "b": large[500_005:500_020].view(3, 5).t(), "c": large[:3].clone()}
    state["alias"] = state["a"]
    file = pruned(state, tmp_path)
    assert file.stat().st_size < 10_000 < (tmp_path / "full.ckpt" / STATES).stat().st_size
    for mmap in (False, True):
        found = mine(file, weights_only=True, mmap=mmap)
        assert_same(found, state)
        assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()
        assert found["a"].untyped_storage().nbytes() == 4 * 20
        assert found["alias"].data_ptr() == found["a"].data_ptr() != found["c"].data_ptr()
        assert found["b"].storage_offset() == 5
    found = mine(file, weights_only=True)
    found["a"][5] = -1
    assert found["b"][0, 0] == -1


class Scheduler(enum.Enum):
    LINEAR = "linear"


@dataclass(frozen=True)
class Optimizer:
    rate: float
    scheduler: Scheduler


class Config(dict[str, Any]):
    """As the configurations of transformers and others: a class of its own, with attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.origin = "a file"

    def __repr__(self) -> str:
        return f"{dict(self)} from {self.origin}"


# What libraries and programs save.
BENIGN: dict[str, Any] = {
    "times": [
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), datetime.date(2020, 1, 1), datetime.time(1, 2),
        datetime.timedelta(1, 2, 3), datetime.timezone(datetime.timedelta(hours=1), "CET"),
    ],
    "values with names of Python 2": [range(3), int, str, bytes, complex, list, type(None)],
    "numbers": [decimal.Decimal("1.5"), fractions.Fraction(-1, 3), 1 << 200, -1, False, 1 + 2j, slice(1, None, 2)],
    "paths": [Path("a/b"), PurePosixPath("a/b"), PureWindowsPath("c:\\a")],
    "plain": [
        OrderedDict(b=1, a=[2, (3,), None, True, 1.5, -(2**70), float("inf")]), b"", b"\x00\xff" * 300,
        bytearray(b"abc"), "", "ü€\n\\", "x" * 70000, set(), {1}, frozenset({3}), {5: ("keys", {("a", 1): 2, None: 3})},
        defaultdict(list, a=[1]), Counter("aab"), deque([1, 2], maxlen=3),
    ],
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)],
    "of a program": [
        argparse.Namespace(a=1), types.SimpleNamespace(b=2), uuid.UUID(int=5), Any, dict, Scheduler, Scheduler.LINEAR,
        Optimizer(1e-3, Scheduler.LINEAR), Config(hidden=8, optimizer=Optimizer(1e-3, Scheduler.LINEAR)), runs.batches,
        functools.partial(torch.optim.AdamW, lr=1e-3), Scheduler.LINEAR.__repr__, ValueError("wrong"),
    ],
    "numpy": [
        np.float64(1.5), np.int64(3), np.str_("a"), np.bool_(True), np.arange(6).reshape(2, 3).T, np.array(["a", "bc"]),
        np.datetime64("2020-01-01"), np.dtype("f4"), np.zeros(0), np.array(1.5),
    ],
    "many keys": [{number: number for number in range(60_000)}, set(range(60_000))],
}  # fmt: skip


@pytest.mark.parametrize("kind", BENIGN)
@pytest.mark.parametrize("protocol", [2, 4])
def test_values_of_libraries(tmp_path: Path, kind: str, protocol: int) -> None:
    found = mine(pruned(BENIGN[kind], tmp_path, protocol=protocol))
    assert [(type(item), repr(item)) for item in found] == [(type(item), repr(item)) for item in BENIGN[kind]]
