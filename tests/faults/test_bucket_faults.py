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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import buckets, cell, nodes, owners, processes, runs, saves
from kit.processes import KillPoint, ThisProcess
from transformers import TrainerCallback

import ds_frozen_patch
from ds_frozen_patch import ranks as agreeing

pytest.importorskip("moto")
pytest.importorskip("s3fs")
NoCredentialsError = pytest.importorskip("botocore.exceptions").NoCredentialsError

pytestmark = [pytest.mark.promise(21), pytest.mark.everyday, pytest.mark.once]


def hidden(at: str) -> list[str]:
    """The names that only a save that runs has."""
    return [name for name in buckets.objects(at) if name.rpartition("/")[2].startswith(".")]


class Saves:
    """Writes down which saves of a run have begun and ended; the run can be killed in the second one."""

    def __init__(self, this: ThisProcess, diary: str) -> None:
        self.this, self.note, self.number, self.seconds = this, Path(diary).open("a"), 0, 0.0  # noqa: SIM115
        self.resumes = "saved" in Path(diary).read_text()

    @contextmanager
    def one(self, step: int) -> Iterator[None]:
        self.number += 1
        print("begun", step, file=self.note, flush=True)
        if self.number == 2:
            self.this.arm()
        begun = time.perf_counter()
        yield
        print("saved", step, file=self.note, flush=True)
        self.seconds = time.perf_counter() - begun


def by_fabric(saves: Saves, at: str, stage: int) -> int:
    """Save twice over one checkpoint; return the number of the one that was there."""
    made = runs.fabric(2, stage, "32-true")
    model, optimizer = runs.fabric_setup(made)
    state = {"model": model, "optimizer": optimizer, "mine": {"step": 0}}
    if saves.resumes:
        made.load(f"{at}/last.ckpt", state)
        assert int(model.seen) == state["mine"]["step"]
    loaded = int(state["mine"]["step"])
    for step in (loaded + 1, loaded + 2):
        model.seen.fill_(step)
        with saves.one(step):
            made.save(f"{at}/last.ckpt", {**state, "mine": {"step": step}})
    return loaded


def by_accelerate(saves: Saves, at: str, stage: int) -> int:
    """Save two numbered checkpoints; return the number of the newest one that was whole."""
    run, counter = owners.counted(stage, project_dir=at)
    if saves.resumes:
        run.accelerator.load_state()
        assert int(run.counting.count) == counter.count
    loaded = counter.count
    run.accelerator.project_configuration.iteration = loaded + 1
    for counter.count in (loaded + 1, loaded + 2):
        run.counting.count.fill_(counter.count)
        with saves.one(counter.count):
            run.accelerator.save_state()
    return loaded


def by_trainer(saves: Saves, at: str, stage: int) -> int:
    """Train two steps, each of which is saved; return the number of the first."""
    each_step: Any = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "num_train_epochs": 999}
    run, loaded = owners.Run("trainer", at, 2, stage, **each_step), list[int]()
    save = run.trainer._save_checkpoint

    def noted(*args: Any, **kwargs: Any) -> None:
        with saves.one(run.trainer.state.global_step):
            save(*args, **kwargs)

    class Stopping(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert int(run.counting.count) == state.global_step
            loaded.append(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = saves.number == 2

    run.trainer._save_checkpoint = noted
    run.trainer.add_callback(Stopping())
    run.train(saves.resumes)
    return loaded[0]


def save_twice(
    this: ThisProcess, at: str, variables: dict[str, str], diary: str, stage: int, program: Callable[..., int]
) -> dict[str, Any]:
    """Load what is there, and save twice; the run can be killed in the second save."""
    os.environ.update(variables)
    cell.trainable_only()
    agreeing.GRACE_SECONDS = 3
    saves = Saves(this, diary)
    with buckets.around_requests(lambda what: this._count(f"os.{what}", ())):
        loaded = program(saves, at, stage)
    this.disarm()
    return {"loaded": loaded, "calls": this.calls, "seconds": saves.seconds}


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("program", "many", "last"),
    [(by_fabric, 200, ""), (by_trainer, 100, "trainer_state.json"), (by_accelerate, 100, "random_states_0.pkl")],
)
def test_kills(
    server: dict[str, str],
    tmp_path: Path,
    long: bool,
    counted: Callable[[str, int], None],
    request: Any,
    program: Callable[..., int],
    many: int,
    last: str,
) -> None:
    drawn, counts, kills = random.Random(0), Counter[str](), many * request.config.getoption("rounds") if long else 4
    for stage in (2, 3) if long else (2,):
        at, diary = f"s3://bucket/{tmp_path.name}{stage}", tmp_path / f"diary{stage}"
        variables = {**server, "DS_FROZEN_PATCH_SCRATCH": str(tmp_path)}
        arguments: dict[str, Any] = {"at": at, "variables": variables, "stage": stage, "diary": str(diary)}
        arguments["program"] = program
        alone = processes.run_ranks(save_twice, tmp_path / "log", (None, None), **arguments)
        assert [what for what, _ in alone] == ["returned", "returned"], alone
        for _ in range(kills // (2 if long else 1)):
            points: list[KillPoint | None] = [
                KillPoint.random(drawn, value["calls"], value["seconds"])
                if long
                else KillPoint(drawn.randrange(1, value["calls"] + 1))  # surely in a save
                for _, value in alone
            ]
            points[drawn.randrange(2)] = None if drawn.random() < 0.7 else points[0]
            said = processes.run_ranks(save_twice, tmp_path / "log", tuple(points), **arguments)
            assert all(what != "raised" or value[0] in ("CheckpointError", "RuntimeError") for what, value in said), (
                said
            )
            counts["kills"] += 1
            names = buckets.objects(at)
            folders = {match[1] for name in names if (match := re.match(r"(.*checkpoint[-_]\d+)/", name))}
            half = [folder for folder in folders if not {f"{folder}/latest", f"{folder}/{last}"} <= names.keys()]
            counts["left"] += bool(half) or any("ds_frozen_patch-" in name for name in names)
            begun, saved = (int(re.findall(rf"{word} (\d+)", diary.read_text())[-1]) for word in ("begun", "saved"))
            diary.write_text(f"saved {saved}\nbegun {begun}\n")
        said = processes.run_ranks(save_twice, tmp_path / "log", (None, None), **arguments)
        assert [what for what, _ in said] == ["returned", "returned"], said
        assert saved <= said[0][1]["loaded"] <= begun
        assert not hidden(at)
    assert counts["left"] > counts["kills"] / 8, counts
    of = (
        f"a save by {program.__name__[3:].title()}, or the removal of old checkpoints,"
        if last
        else "a save over a checkpoint"
    )
    counted(f"`kill -9` of one or both of two ranks during {of} in a bucket", counts["kills"])


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
        ("twice", 2, lost, 1, 2, "put_object .*"),
        ("answer lost", 3, lost, 0, 1, "after put_object .*"),
        ("throttled", 4, throttled, 0, 3, "list_objects_v2 .*"),
        ("cut off", 5, lost, 1, 1e9, "put_objec[t] .*"),
        ("cut off at the end", 6, lost, 0, 1e9, "list_objects_v[2] .*"),
        ("forbidden", 7, forbidden, 1, 1e9, "pu[t]_object .*"),
        ("no credentials", 8, NoCredentialsError(), 1, 1e9, "p[u]t_object .*"),
        ("cut off in the middle", 9, lost, 0, 1e9, "(put_object .*json|delete_.*)"),
    ):
        with buckets.around_requests(see(error, rank, often, words)):
            said[name] = save(step)
        said[name] += (load(), tried[words])
    with runs.heard() as messages:
        said["after that"] = (*save(10), load(), sum("Another job" in message for message in messages))
    said["no bucket"] = save(11, "s3://nowhere/last.ckpt")
    said["no implementation"] = save(11, "gs://bucket/last.ckpt")
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
    lasting = ("cut off", "cut off at the end", "forbidden", "no credentials", "cut off in the middle")
    for name in (*lasting, "no bucket", "no implementation"):
        assert first[name][:2] == second[name][:2]
        assert first[name][0] == "CheckpointError"
    for name in lasting:
        assert first[name][2] == second[name][2] == 4
        assert "The previous checkpoint there is unchanged." in first[name][1]
        assert f"{at}/last.ckpt" in first[name][1]
    assert "Access Denied" in first["forbidden"][1]
    assert second["forbidden"][3] == second["no credentials"][3] == 1  # not tried again
    assert "Unable to locate credentials" in first["no credentials"][1]
    assert first["after that"] == second["after that"] == ("", "", 10, 0)  # what this process has left is no other job
    assert "bucket does not exist" in first["no bucket"][1]
    assert "install gcsfs" in first["no implementation"][1]
    assert first["a load"] == second["a load"]
    assert "s3://nowhere/last.ckpt" in first["a load"][1]
    assert not hidden(at)


def exporting(at: str, variables: dict[str, str], out: str) -> dict[str, Any]:
    """Save with an export: to a new place, where a request fails, and twice over a checkpoint, where others fail."""
    os.environ.update(variables)
    ds_frozen_patch.patch(export="safetensors")
    made = runs.fabric(2, 2, "32-true")
    model, optimizer = runs.fabric_setup(made)
    path, said = f"{at}/last.ckpt", dict[str, Any]()

    def save(words: str = "") -> tuple[Any, ...]:
        runs.fabric_epoch(made, model, optimizer)
        fail = buckets.failing(words, ConnectionResetError("connection reset"))
        with buckets.around_requests(fail if made.global_rank == 0 else lambda _: None):
            outcome = runs.outcome(made.save, path, {"model": model, "optimizer": optimizer})
        torch.distributed.barrier()
        found = {name: size for name, size in buckets.objects(at).items() if not name.endswith(".py")}
        content = buckets.file_system().cat(exported)[:] if "last.ckpt/trainable.safetensors" in found else b""
        torch.distributed.barrier()
        return (*outcome, found, content)

    exported = f"{path}/trainable.safetensors"
    said["new"] = save("put_object .*json")
    said["first"] = save()
    said["record fails"] = save("put_object .*json")
    said["copy fails"] = save("copy_object .*safetensors")
    said["last"] = save()
    return said


def test_exports_when_requests_fail(ranks: Any, server: dict[str, str], tmp_path: Path) -> None:
    """An export has its name only with its checkpoint; if it does not get it, the save says so."""
    at, variables = f"s3://bucket/{tmp_path.name}", {**server, "DS_FROZEN_PATCH_SCRATCH": str(tmp_path)}
    said, other = ranks(2, exporting, at=at, variables=variables, out=str(tmp_path), alone=True)
    for name in said:
        assert said[name][:2] == other[name][:2]
    assert said["new"][0] == "CheckpointError"
    assert not said["new"][2]
    assert said["first"][0] == said["last"][0] == ""
    assert said["record fails"][2:] == said["first"][2:]
    assert "The previous checkpoint there is unchanged." in said["record fails"][1]
    assert "was saved, but an error has followed" in said["copy fails"][1]
    assert said["last"][2].keys() == said["first"][2].keys()
    assert said["last"][3] not in (said["first"][3], b"")


def without_a_scratch_folder(at: str, variables: dict[str, str], out: str) -> dict[str, Any]:
    """Save and load while one rank cannot make its scratch folder."""
    os.environ.update(variables)
    cell.trainable_only()
    made = runs.fabric(2, 2, "32-true")
    model, optimizer = runs.fabric_setup(made)
    state = {"model": model, "optimizer": optimizer, "mine": {"step": 1}}
    made.save(f"{at}/last.ckpt", state)
    if made.global_rank:
        os.environ["DS_FROZEN_PATCH_SCRATCH"] = f"{out}/file/scratch"
    said = {"save": runs.outcome(made.save, f"{at}/last.ckpt", {**state, "mine": {"step": 2}})}
    said["load"] = runs.outcome(made.load, f"{at}/last.ckpt", state)
    os.environ["DS_FROZEN_PATCH_SCRATCH"] = f"{out}/new/scratch"
    made.load(f"{at}/last.ckpt", state)
    return {**said, "step": state["mine"]["step"]}


def test_a_rank_that_cannot_make_its_scratch_folder(ranks: Any, server: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    at, variables = f"s3://bucket/{tmp_path.name}", {**server, "DS_FROZEN_PATCH_SCRATCH": str(tmp_path)}
    first, second = ranks(2, without_a_scratch_folder, at=at, variables=variables, out=str(tmp_path), alone=True)
    assert first == second
    for what in ("save", "load"):
        assert first[what][0] == "CheckpointError"
        assert "Rank 1" in first[what][1]
        assert "Not a directory" in first[what][1]
    assert first["step"] == 1
    assert not hidden(at)


def with_an_optimizer_on_nvme(at: str, variables: dict[str, str], out: str) -> tuple[str, str, list[str]]:
    """Save an engine that says so, of which DeepSpeed would copy these files."""
    os.environ.update(variables)
    cell.trainable_only()
    made = runs.fabric(1, 3, "32-true")
    model, optimizer = runs.fabric_setup(made)
    engine, folder = model._forward_module, Path(out, "swapped")
    folder.mkdir()
    (folder / "file").write_text("its states")
    engine.zero_nvme_offload_optimizer = lambda: True
    engine.optimizer.optimizer_swapper = SimpleNamespace(swap_folder=str(folder))
    requests: list[str] = []
    with buckets.around_requests(requests.append):
        said = runs.outcome(made.save, f"{at}/last.ckpt", {"model": model, "optimizer": optimizer})
    return *said, requests


def test_what_a_bucket_cannot_have_is_refused_first(ranks: Any, server: dict[str, str], tmp_path: Path) -> None:
    at, variables = f"s3://bucket/{tmp_path.name}", {**server, "DS_FROZEN_PATCH_SCRATCH": str(tmp_path)}
    ((kind, text, requests),) = ranks(
        1, with_an_optimizer_on_nvme, at=at, variables=variables, out=str(tmp_path), alone=True
    )
    assert kind == "CheckpointError"
    assert "NVMe" in text
    assert not requests


needs_nodes = pytest.mark.skipif(bool(nodes.why_unsupported()), reason=nodes.why_unsupported() or "-")


def on_a_node(
    this: ThisProcess, disk: str, address: str, variables: dict[str, str], stage: int, lost: bool = False
) -> dict[str, Any]:
    """Save twice to an address, with a scratch folder on this node's disk, and load; the third save can lose a file."""
    os.environ.update({**variables, "DS_FROZEN_PATCH_SCRATCH": f"{disk}/scratch"})
    rank, client = int(os.environ["RANK"]), buckets.another_program()
    mine = rf"after put_object (.*zero_pp_rank_{rank}_.*optim_states\.pt\.[0-9a-f]+)"

    def lose(what: str) -> None:
        if rank and lost and (match := re.fullmatch(mine, what)):
            client.delete_object(Bucket="bucket", Key=match[1])

    with owners.served():
        run = saves.Numbered(disk, 2, stage)
        run.save(address)
        run.save(address)
        with buckets.around_requests(lose):
            third = runs.outcome(run.save, address)
        loaded = saves.Numbered(disk, 2, stage).load(address)
    return {"third": third, "loaded": loaded, "scratch": [*Path(disk, "scratch").iterdir()]}


@needs_nodes
@pytest.mark.parametrize("stage", [1, 3])
def test_two_nodes(server: dict[str, str], tmp_path: Path, stage: int) -> None:
    """Ranks on nodes that share no disk save to one address, and load from it."""
    cluster, at = nodes.own_disks(tmp_path, 2), f"s3://bucket/{tmp_path.name}"
    said = cluster.run(on_a_node, address=at, variables=server, stage=stage)
    assert said == [("returned", {"third": ("", ""), "loaded": 3, "scratch": []})] * 2, cluster.log()
    names = [name.rpartition("/")[2] for name in buckets.objects(f"{at}/checkpoint")]
    assert len([name for name in names if name.endswith("optim_states.pt")]) == 2
    assert not hidden(at)


@needs_nodes
def test_a_file_of_another_node_that_is_lost(server: dict[str, str], tmp_path: Path) -> None:
    """No record is written of a checkpoint that lacks it."""
    cluster, at = nodes.own_disks(tmp_path, 2), f"s3://bucket/{tmp_path.name}"
    for what, value in cluster.run(on_a_node, address=at, variables=server, stage=1, lost=True):
        assert what == "returned", (value, cluster.log())
        assert "another program has removed files" in value["third"][1]
        assert value["loaded"] == 2
    assert not hidden(at)
