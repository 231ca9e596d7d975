"""Saves to a bucket that are killed, or whose requests fail: there is never half a checkpoint that can be loaded."""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import buckets, cell, processes, runs
from kit.processes import KillPoint, ThisProcess

from ds_frozen_patch import ranks as agreeing

pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

pytestmark = [pytest.mark.promise(21), pytest.mark.everyday, pytest.mark.once]


@contextmanager
def around_requests(see: Callable[[str], None]) -> Iterator[None]:
    """Call something before and after each request of this process, with what is requested."""
    original = s3fs.S3FileSystem._call_s3

    async def call_s3(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        see(method)
        result = await original(self, method, *args, **kwargs)
        see(f"after {method}")
        return result

    s3fs.S3FileSystem._call_s3 = call_s3
    try:
        yield
    finally:
        s3fs.S3FileSystem._call_s3 = original


def save_twice(this: ThisProcess, at: str, variables: dict[str, str], diary: str, stage: int) -> dict[str, Any]:
    """Load what is there, and save twice over it; the run can be killed in the second save."""
    os.environ.update(variables)
    cell.trainable_only()
    agreeing.GRACE_SECONDS = 3
    path, note = f"{at}/last.ckpt", Path(diary).open("a")  # noqa: SIM115
    made = runs.fabric(2, stage, "32-true")
    model, optimizer = runs.fabric_setup(made)
    state = {"model": model, "optimizer": optimizer, "mine": {"step": 0}}
    if buckets.file_system().isfile(f"{path}/latest"):
        made.load(path, state)
        assert int(model.seen) == state["mine"]["step"]
    step = loaded = int(state["mine"]["step"])
    with around_requests(lambda what: this._count(f"os.{what}", ())):
        for is_armed in (False, True):
            step += 1
            model.seen.fill_(step)
            print("begun", step, file=note, flush=True)
            if is_armed:
                this.arm()
                armed = time.perf_counter()
            made.save(path, {"model": model, "optimizer": optimizer, "mine": {"step": step}})
            print("saved", step, file=note, flush=True)
    seconds = time.perf_counter() - armed
    this.disarm()
    return {"loaded": loaded, "calls": this.calls, "seconds": seconds}


@pytest.mark.timeout(0)
def test_kills(
    server: dict[str, str], tmp_path: Path, long: bool, counted: Callable[[str, int], None], request: Any
) -> None:
    drawn, counts, kills = random.Random(0), Counter[str](), 200 * request.config.getoption("rounds") if long else 4
    for stage in (2, 3) if long else (2,):
        at, diary = f"s3://bucket/{tmp_path.name}{stage}", tmp_path / f"diary{stage}"
        variables = {**server, "DS_FROZEN_PATCH_SCRATCH": str(tmp_path)}
        arguments: dict[str, Any] = {"at": at, "variables": variables, "stage": stage, "diary": str(diary)}
        alone = processes.run_ranks(save_twice, tmp_path / "log", (None, None), **arguments)
        assert [what for what, _ in alone] == ["returned", "returned"], alone
        for _ in range(kills // (2 if long else 1)):
            points: list[KillPoint | None] = [
                KillPoint.random(drawn, value["calls"], value["seconds"]) for _, value in alone
            ]
            points[drawn.randrange(2)] = None if drawn.random() < 0.7 else points[0]
            said = processes.run_ranks(save_twice, tmp_path / "log", tuple(points), **arguments)
            assert all(what != "raised" or value[0] in ("CheckpointError", "RuntimeError") for what, value in said), (
                said
            )
            counts["kills"] += 1
            counts["left"] += any("ds_frozen_patch-" in name for name in buckets.objects(at))
            begun, saved = (int(re.findall(rf"{word} (\d+)", diary.read_text())[-1]) for word in ("begun", "saved"))
            diary.write_text(f"saved {saved}\nbegun {begun}\n")
        said = processes.run_ranks(save_twice, tmp_path / "log", (None, None), **arguments)
        assert [what for what, _ in said] == ["returned", "returned"], said
        assert saved <= said[0][1]["loaded"] <= begun
        names = buckets.objects(f"{at}/last.ckpt")
        assert not [name for name in names if name.rpartition("/")[2].startswith(".")]
    assert counts["left"] > counts["kills"] / 8, counts
    counted("`kill -9` of one or both of two ranks during a save over a checkpoint in a bucket", counts["kills"])


def failing(at: str, variables: dict[str, str], out: str) -> dict[str, Any]:
    """Save, and save again over it while requests fail in several ways; say what each save raises."""
    os.environ.update(variables)
    cell.trainable_only()
    made = runs.fabric(2, 2, "32-true")
    model, optimizer = runs.fabric_setup(made)
    runs.fabric_epoch(made, model, optimizer)
    path, said, tried = f"{at}/last.ckpt", dict[str, Any](), Counter[str]()

    def save(step: int, to: str = path) -> tuple[str, str]:
        return runs.outcome(made.save, to, {"model": model, "optimizer": optimizer, "mine": {"step": step}})

    def see(error: Exception, rank: int, often: float, words: str) -> Callable[[str], None]:
        def fail(what: str) -> None:
            if made.global_rank == rank and re.fullmatch(words, what) and tried[words] < often:
                tried[words] += 1
                raise error

        return fail

    def load() -> int:
        state = {"model": model, "optimizer": optimizer, "mine": {"step": 0}}
        made.load(path, state)
        return int(state["mine"]["step"])

    said["first"] = save(1)
    lost, throttled = ConnectionResetError("connection reset"), OSError(16, "Please reduce your request rate.")
    forbidden = PermissionError("Access Denied")
    for name, step, error, rank, often, words in (
        ("twice", 2, lost, 1, 2, "put_object"),
        ("answer lost", 3, lost, 0, 1, "after put_object"),
        ("throttled", 4, throttled, 0, 3, "list_objects_v2"),
        ("cut off", 5, lost, 1, 1e9, "put_objec[t]"),
        ("cut off at the end", 6, lost, 0, 1e9, "list_objects_v[2]"),
        ("forbidden", 7, forbidden, 1, 1e9, "pu[t]_object"),
    ):
        with around_requests(see(error, rank, often, words)):
            said[name] = save(step)
        said[name] += (load(), tried[words])
    said["no bucket"] = save(8, "s3://nowhere/last.ckpt")
    said["no implementation"] = save(8, "gs://bucket/last.ckpt")
    said["a load"] = runs.outcome(made.load, "s3://nowhere/last.ckpt", {"model": model})
    torch.distributed.barrier()  # the other rank has released its own
    return {**said, "scratch": [*Path(out).iterdir()]}


@pytest.mark.short
def test_requests_that_fail(ranks: Any, server: dict[str, str], tmp_path: Path) -> None:
    at, variables = f"s3://bucket/{tmp_path.name}", {**server, "DS_FROZEN_PATCH_SCRATCH": str(tmp_path)}
    first, second = ranks(2, failing, at=at, variables=variables, out=str(tmp_path), alone=True)
    assert not first.pop("scratch")
    assert not second.pop("scratch")
    for name, step in (("twice", 2), ("answer lost", 3), ("throttled", 4)):  # tried again
        assert first[name][:3] == second[name][:3] == ("", "", step)
    for name in ("cut off", "cut off at the end", "forbidden", "no bucket", "no implementation"):
        assert first[name][:2] == second[name][:2]
        assert first[name][0] == "CheckpointError"
    for name in ("cut off", "cut off at the end", "forbidden"):
        assert first[name][2] == second[name][2] == 4
        assert "The previous checkpoint there is unchanged." in first[name][1]
        assert f"{at}/last.ckpt" in first[name][1]
    assert "Access Denied" in first["forbidden"][1]
    assert second["forbidden"][3] == 1  # not tried again
    assert "bucket does not exist" in first["no bucket"][1]
    assert "install gcsfs" in first["no implementation"][1]
    assert first["a load"] == second["a load"]
    assert "s3://nowhere/last.ckpt" in first["a load"][1]
    assert not [name for name in buckets.objects(at) if name.rpartition("/")[2].startswith(".")]
