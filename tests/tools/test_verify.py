"""`ds-frozen-patch verify` accepts what was saved, and detects and names each kind of damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.cell import PRECISIONS
from kit.checkpoints import (
    EMBEDDING,
    Checkpoints,
    base_model,
    flip,
    precision_of,
    record_of,
    rewrite_record,
    snapshot,
)
from safetensors.torch import load_file, save_file

from ds_frozen_patch import CheckpointError, prune, verify
from ds_frozen_patch.cli import main
from ds_frozen_patch.cli.commands import to_json
from ds_frozen_patch.common.files import RECORD

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]


@pytest.mark.parametrize(
    ("stage", "world_size", "precision", "module"),
    [
        *((stage, 2, precision_of(stage), "lora") for stage in (0, 1, 2, 3)),
        *((stage, 3, precision_of(stage), "lora") for stage in (1, 2, 3)),
        *((stage, 2, PRECISIONS[-1], "lora") for stage in (2, 3)),
        *((stage, 2, precision_of(stage), "odd") for stage in (0, 1, 2, 3)),
        (0, 2, precision_of(0), "half"),  # without a list of trained parameters
        *((stage, 2, precision_of(stage), "wrapped") for stage in (1, 2)),
    ],
)
def test_verify_accepts_saved_checkpoints(
    checkpoints: Checkpoints, stage: int, world_size: int, precision: str, module: str
) -> None:
    out = checkpoints(stage, world_size, precision, module=module)
    # A save keeps adapters that are frozen.
    trained, kept, left_out = {"odd": (9, 9, 21), "half": (4, 8, 20)}.get(module, (8, 8, 20))
    before = snapshot(out)
    for path, base, counts in (
        (out / "full.ckpt", None, (trained, 0, 0)),
        (out / "small.ckpt", None, (kept, left_out, 0)),
        (out / "small.ckpt", out / "full.ckpt", (kept, left_out, left_out)),
    ):
        found = verify(path, base=base)
        assert (found.problems, found.unverified) == ((), ())
        assert (found.trained, found.left_out, found.compared) == counts
        files = list((path / "checkpoint").glob("*.pt"))
        assert (found.files, found.size) == (len(files), sum(file.stat().st_size for file in files))
    assert snapshot(out) == before


def test_nothing_could_be_compared(checkpoints: Checkpoints, tmp_path: Path) -> None:
    full = checkpoints.by_deepspeed(2) / "full.ckpt"
    prune(full, tmp_path / "unread.ckpt", fingerprints=False)
    found = verify(tmp_path / "unread.ckpt", base=full)
    assert [problem for problem in found.problems if "Nothing could be compared with the base" in problem]
    assert (len(found.problems), found.compared, len(found.unverified)) == (1, 0, 20)


@pytest.fixture
def copied(checkpoints: Checkpoints, tmp_path: Path) -> Callable[..., Path]:
    def copy(stage: int, name: str = "small.ckpt", **options: Any) -> Path:
        target = tmp_path / f"{stage}-{name}"
        shutil.copytree(checkpoints(stage, **options) / name, target)
        return target

    return copy


def problem(path: Path, **options: Any) -> str:
    """Return the one problem, which the command line prints too, with exit status 1."""
    found = verify(path, **options)
    assert len(found.problems) == 1, found.problems
    return found.problems[0]


@pytest.mark.parametrize(
    ("stage", "pattern"),
    [*((stage, "*rank_1_*optim_states.pt") for stage in (1, 2, 3)), (3, "*rank_1_*model_states.pt")],
)
def test_files_of_another_save(checkpoints: Checkpoints, copied: Callable[..., Path], stage: int, pattern: str) -> None:
    path = copied(stage)
    (file,) = path.rglob(pattern)
    shutil.copy(checkpoints(stage, epochs=2) / "small.ckpt" / "checkpoint" / file.name, file)
    assert problem(path).startswith(f"{file} is of another save than {RECORD} beside it")
    (path / "checkpoint" / RECORD).unlink()
    if "model" in pattern:  # its save has another id
        assert problem(path).startswith(f"{file} is of another save than the files beside it")
    elif stage < 3:
        assert "are not from one run: the optimizer's masters differ from" in problem(path)
    else:
        assert problem(path).endswith("so it cannot be verified that its files are those that were saved.")


def test_a_wrong_record(copied: Callable[..., Path]) -> None:
    path = copied(2)
    record = path / "checkpoint" / RECORD
    content = record.read_bytes()
    record.write_bytes(content.replace(b'"world_size": 2', b'"world_size": 7'))
    assert "was edited, or is damaged (it does not match its digest)" in problem(path)
    changes: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda values: values.update(world_size=7), "is of another save than"),
        (lambda values: values.update(format=9), "has an unknown format"),
        (lambda values: values.pop("left_out"), "it lacks 'left_out'"),
    ]
    for change, said in changes:
        record.write_bytes(content)
        rewrite_record(record.parent, change)
        assert said in "\n".join(verify(path).problems)


def test_all_damaged_files_are_named(copied: Callable[..., Path]) -> None:
    path = copied(3)
    files = sorted(path.rglob("*.pt"))
    for file in files:
        flip(file)
    problems = verify(path).problems
    assert len(problems) == 4
    assert all(any(said.startswith(str(file)) for said in problems) for file in files)


@pytest.mark.short
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_base(checkpoints: Checkpoints, tmp_path: Path, base: Path, stage: int) -> None:
    small = checkpoints(stage) / "small.ckpt"
    found = verify(small, base=base)
    assert (found.problems, found.left_out, found.compared) == ((), 20, 20)
    base_model(seed=2).save_pretrained(tmp_path / "other")
    wrong = verify(small, base=tmp_path / "other")
    assert wrong.compared == 5  # norms are ones in both
    assert wrong.problems[0].startswith(f"{tmp_path / 'other'} is not the base that the run used")
    assert EMBEDDING in wrong.problems[0]
    weights = load_file(base / "model.safetensors")
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"] * 2}, tmp_path / "one.safetensors")
    wrong = verify(small, base=tmp_path / "one.safetensors")
    assert (len(wrong.problems), wrong.compared) == (1, 19)
    assert "the values differ in 'model.base_model.model.model.norm.weight'." in wrong.problems[0]
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "less.safetensors")
    assert "lacks 'model.base_model.model.model.norm.weight'" in problem(small, base=tmp_path / "less.safetensors")
    with pytest.raises(CheckpointError, match="There is no base at"):
        verify(small, base=tmp_path / "nowhere")
    assert "has no record of what was left out, so its base cannot be verified" in problem(
        checkpoints(stage) / "full.ckpt", base=base
    )


def test_a_damaged_base_that_is_a_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    out = checkpoints(2)
    shutil.copytree(out / "full.ckpt", tmp_path / "full.ckpt")
    (file,) = (tmp_path / "full.ckpt").rglob("*model_states.pt")
    flip(file, record_of(file, lambda state: state["module"][EMBEDDING]))
    with pytest.raises(CheckpointError, match="is damaged: record"):
        verify(out / "small.ckpt", base=tmp_path / "full.ckpt")


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    assert "There is no directory" in problem(tmp_path / "nowhere")
    assert "has no file `latest`" in problem(tmp_path)


@pytest.mark.short
def test_the_command_line(
    checkpoints: Checkpoints,
    copied: Callable[..., Path],
    tmp_path: Path,
    base: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = checkpoints(2) / "small.ckpt"
    assert main(["verify", str(small), "--base", str(base)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0].startswith(f"{small}: no problems in 3 files, ")
    assert lines[1:] == [
        "8 trained parameters; 20 left out.",
        "20 of them match the base.",
    ]
    assert main(["verify", str(small), "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["verify", str(small), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(to_json(verify(small))))

    path = copied(2)
    files = sorted(path.rglob("*.pt"))
    for file in files[:2]:
        flip(file)
    assert main(["verify", str(path), "-q"]) == 1
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith(f"{path}: 2 problems.\n- {files[0]} is damaged: ")
    assert main(["verify", str(path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 2
    assert main(["verify", str(tmp_path / "nowhere")]) == 1
    assert "1 problem.\n- There is no directory" in capsys.readouterr().out
    assert main(["verify", str(small), "--base", str(tmp_path / "nowhere")]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("ds-frozen-patch: There is no base at ")


def by_hand(folder: Path, stage: int, ranks: int, masters: list[int], frozen: list[int]) -> Path:
    """Create a checkpoint whose ranks have these numbers of elements of the master of `a`, and in ZeRO-3 of the frozen
    `b`.
    """
    path = folder / "made.ckpt" / "checkpoint"
    path.mkdir(parents=True)
    (path.parent / "latest").write_text("checkpoint")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank in range(ranks):
        model = {
            "module": {"a": torch.ones(0 if stage == 3 else 12), "b": torch.ones(0 if stage == 3 else 12)},
            "param_shapes": [{"a": torch.Size([12])}],
            "frozen_param_shapes": {"b": torch.Size([12])},
            "frozen_param_fragments": {"b": torch.ones(frozen[rank])},
            "dp_world_size": ranks,
            "ds_config": {"zero_optimization": {"stage": stage}},
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, path / name)
        optimizer = {"zero_stage": stage, key: [torch.ones(masters[rank])], "partition_count": ranks}
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.17.6"}, path / name)
    return path.parent


@pytest.mark.parametrize(
    ("stage", "masters", "frozen", "file", "said"),
    [
        *((s, [4, 2, 4], [4] * 3, "1_mp_rank_00_optim", "does not fit the model's states: ") for s in (2, 3)),
        (3, [4] * 3, [4, 4, 2], "2_mp_rank_00_model", "lacks elements of its shard of 'b'"),
    ],
)
def test_the_file_that_lacks_elements_is_named(
    tmp_path: Path, stage: int, masters: list[int], frozen: list[int], file: str, said: str
) -> None:
    assert verify(by_hand(tmp_path / "good", stage, 3, [4, 4, 4], [4, 4, 4])).problems == ()
    path = by_hand(tmp_path / "bad", stage, 3, masters, frozen)
    assert problem(path).startswith(f"{path}/checkpoint/zero_pp_rank_{file}_states.pt {said}")


def test_the_file_that_lacks_a_group_is_named(tmp_path: Path) -> None:
    path = by_hand(tmp_path, 2, 3, [4, 4, 4], [4, 4, 4])
    for name in ("mp_rank_00_model_states.pt", *(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 2))):
        file = path / "checkpoint" / name
        state = torch.load(file, weights_only=False)
        if "module" in state:
            state["module"]["c"] = torch.ones(6)
            state["param_shapes"].append({"c": torch.Size([6])})
        else:
            state["optimizer_state_dict"]["single_partition_of_fp32_groups"].append(torch.ones(2))
        torch.save(state, file)
    file = path / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    assert problem(path).startswith(
        f"{file} does not fit the model's states: the masters have 0 elements instead of 2."
    )
