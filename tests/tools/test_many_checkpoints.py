"""`prune`, `verify` and `inspect` of many checkpoints: a table, one exit status, and a command to run again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kit.checkpoints import Checkpoints, contents, snapshot

from ds_frozen_patch import inspect, prune
from ds_frozen_patch.cli import main

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once, pytest.mark.short]


@pytest.fixture
def many(checkpoints: Checkpoints, tmp_path: Path) -> list[str]:
    """Two full checkpoints, with a damaged one between them."""
    paths = [tmp_path / "runs" / f"{name}.ckpt" for name in ("a", "b", "c")]
    for stage, path in zip((2, 2, 3), paths, strict=True):
        shutil.copytree(checkpoints(stage) / "full.ckpt", path)
    (paths[1] / "latest").write_text("elsewhere")
    return list(map(str, paths))


def lines(text: str) -> list[list[str]]:
    """The lines of a table, as words."""
    return [line.split() for line in text.splitlines()]


def test_prune(many: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, into = snapshot(tmp_path / "runs"), tmp_path / "small"
    command = ["prune", *many, "--into", str(into)]
    assert main([*command, "--dry-run"]) == 1
    planned = lines(capsys.readouterr().out)
    assert not into.exists()
    assert main(command) == 1
    said = capsys.readouterr()
    header, first, failed, last, total = lines(said.out)
    assert header == ["before", "after", "checkpoint"]
    assert [first[0], first[-1], last[-1]] == ["pruned", many[0], many[2]]
    assert failed == ["failed", "-", "-", many[1]]
    assert total[-4:] == ["2", "pruned,", "1", "failed"]
    assert planned[1][:3] == ["would", "be", "pruned"]
    assert planned[1][3:5] == first[1:3]  # the size before
    assert said.err.count("elsewhere") == 1
    assert {path.name for path in into.iterdir()} == {"a.ckpt", "c.ckpt"}
    prune(many[0], tmp_path / "alone.ckpt")
    assert contents(into / "a.ckpt") == contents(tmp_path / "alone.ckpt")
    assert snapshot(tmp_path / "runs") == before

    # Run again, it takes up what has failed only; without the option it fails.
    shutil.rmtree(many[1])
    shutil.copytree(many[0], many[1])
    done = snapshot(into)
    assert main(command) == 1
    assert capsys.readouterr().err.count("already exists") == 2
    shutil.rmtree(into / "b.ckpt")
    assert snapshot(into) == done
    assert main([*command, "--skip-existing", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err == ""
    assert [item.get("skipped", False) for item in found] == [True, False, True]
    assert (
        found[1]["size_after"]
        == inspect(into / "b.ckpt").size + (into / "b.ckpt/checkpoint/ds_frozen_patch.json").stat().st_size
    )
    assert main(["prune", many[0], str(into / "a.ckpt"), "--skip-existing"]) == 0
    assert main([*command, "--skip-existing", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_dry_run_tells_the_size(checkpoints: Checkpoints, tmp_path: Path, stage: int) -> None:
    full = checkpoints(stage) / "full.ckpt"
    options: dict[str, Any] = {"trainable": ["*lora_*"]} if stage == 0 else {}
    planned = prune(full, tmp_path / "small.ckpt", **options, dry_run=True)
    done = prune(full, tmp_path / "small.ckpt", **options)
    found = inspect(full)
    assert stage == 0 or planned.size_after == found.size - found.prunable
    overhead = 1000 * len(done.record.left_out) * len(found.files)  # what a zip archive and a pickle say of a tensor
    assert abs(planned.size_after - done.size_after) < overhead
    assert planned.size_after < planned.size_before - done.record.total_bytes + 1
    assert str(planned).startswith(f"{tmp_path / 'small.ckpt'}: about ")
    assert "no fingerprints" not in str(planned)


def test_verify_and_inspect(many: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *many]) == 1
    said = capsys.readouterr()
    header, first, failed, last, total = lines(said.out)
    assert header == ["size", "without", "frozen", "stage", "ranks", "step", "checkpoint"]
    assert (first[0], last[-4:]) == ("full", ["3", "2", first[-2], many[2]])
    assert failed == ["failed", *["-"] * 5, many[1]]
    assert total[-4:] == ["2", "full,", "1", "failed"]
    assert main(["inspect", many[0], many[2]]) == 0
    capsys.readouterr()

    assert main(["verify", *many, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [len(item["problems"]) for item in found] == [0, 1, 0]
    assert main(["verify", *many]) == 1
    said = capsys.readouterr()
    assert f"{many[1]}: 1 problem.\n- " in said.out
    assert [line[0] for line in lines(said.out)[-4:]] == ["verified", "failed", "verified", lines(said.out)[-1][0]]
    assert main(["verify", *many, "--quiet"]) == 1
    assert capsys.readouterr().out.count("\n") == 2  # the problem
