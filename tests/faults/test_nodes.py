"""Several nodes: with one disk behind a cache of names on each, and with a disk each.

A save is whole, a resume uses one save on all nodes, and an error on one rank is raised on all.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import nodes, runs, saves
from kit.cell import Callback, DeepSpeedStrategy, ModelCheckpoint, pl
from kit.checkpoints import flip, model_states
from kit.nodes import Nodes
from kit.processes import KillPoint, Process, ThisProcess, outcomes
from kit.saves import Numbered

import ds_frozen_patch
from ds_frozen_patch import CheckpointError
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.publish.journal import Journal, digest, hidden

pytestmark = [
    pytest.mark.promise(18),
    pytest.mark.skipif(bool(nodes.why_unsupported()), reason=nodes.why_unsupported() or "-"),
    pytest.mark.timeout(1800),
]
needs_a_cache = pytest.mark.skipif(bool(nodes.why_no_cached_disk()), reason=nodes.why_no_cached_disk() or "-")

MIX = re.compile(r"\b(another|other|different|one|same) saves?\b|\bmix", re.IGNORECASE)
"""What an error says that names a mix of saves."""


LONG: dict[str, list[Any]] = {
    "test_local_disks": [2, 3, 1, 0],
    "test_damage_on_one_nodes_disk": [2, 3],
    "test_two_jobs_on_one_path": ["shared", pytest.param("cached", marks=needs_a_cache)],
}
"""What these are tried with in the long part; in the short one, with the first."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if tried := LONG.get(metafunc.function.__name__):
        name = "stage" if "stage" in metafunc.fixturenames else "disks"
        metafunc.parametrize(name, tried if metafunc.config.getoption("--faults") else tried[:1])


# Inside a rank. `at` is where its node's disk is.


def trainer(at: str, stage: int, local_disks: bool = False, **options: Any) -> pl.Trainer:
    """Return a trainer for the nodes in the environment; a rank that is left alone raises within a minute."""
    config = runs.config(stage)
    if local_disks:
        config["checkpoint"] = {"use_node_local_storage": True}
    strategy = DeepSpeedStrategy(config=config, timeout=timedelta(seconds=60))
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    options.setdefault("enable_checkpointing", False)
    return runs.trainer(f"{at}/run", local, stage, strategy=strategy, num_nodes=world_size() // local, **options)


def world_size() -> int:
    """Lightning removes WORLD_SIZE from the environment at the end of a run."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ["WORLD_SIZE"])


def problems(checkpoint: Path, step: int) -> list[str]:
    """Return what is wrong with what has a checkpoint's name, unless it is a whole one of that step."""
    try:
        found = [str(problem) for problem in ds_frozen_patch.verify(checkpoint).problems]
        if not found and (saved := model_states(checkpoint)[0]["global_step"]) != step:
            found = [f"{checkpoint} is of step {saved}, not of {step}"]
    except (CheckpointError, OSError) as error:
        found = [f"{type(error).__name__}: {error}"]
    return found


# From outside.


def returned(said: list[tuple[str, Any]], cluster: Nodes) -> list[Any]:
    """Return the result of a function on each rank."""
    assert {what for what, _ in said} == {"returned"}, f"{said}\n{cluster.log()}"
    return [value for _, value in said]


def refused_on_all(said: list[tuple[str, Any]], file: str) -> None:
    """Assert that every rank has raised an error that names a file."""
    for rank, (what, why) in enumerate(said):
        assert what == "raised", (rank, said)
        assert why[0] == "CheckpointError", (rank, why[2])
        assert file in why[1], (rank, why[1])


def assert_no_leftovers(cluster: Nodes) -> None:
    for files in set(cluster.files):
        assert [str(item) for item in files.rglob(".*")] == []


# One disk for all.


def save_at_each_step(
    this: ThisProcess, at: str, files: str, stage: int, steps: int, async_save: bool
) -> dict[str, Any]:
    """In each step, save to an existing name, to a new name and as the last; rank 0 checks each on the server."""
    ds_frozen_patch.patch(async_save=async_save)
    original, saves = pl.Trainer.save_checkpoint, 0
    failed: list[str] = []
    lost: list[str] = []

    def save(trainer: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal saves
        saves += 1
        try:
            original(trainer, path, *args, **kwargs)
            ds_frozen_patch.wait()
        except CheckpointError as error:
            failed.append(str(error))
        if trainer.is_global_zero:
            lost.extend(problems(Path(files, Path(path).relative_to(at)), trainer.global_step))

    class Again(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(f"{at}/run/again.ckpt")

    pl.Trainer.save_checkpoint = save  # type: ignore[assignment,method-assign]
    kept = ModelCheckpoint(
        f"{at}/run", filename="{step}", monitor="step", mode="max", save_top_k=2, save_last=True, every_n_train_steps=1
    )
    run = trainer(at, stage, epochs=1000, max_steps=steps, enable_checkpointing=True, callbacks=[Again(), kept])
    run.fit(runs.LoraRun(), runs.batches(run.world_size))
    where = {"rank": run.global_rank, "node": run.node_rank, "local": run.local_rank}
    return {"saves": saves, "failed": failed, "lost": lost, **where}


@needs_a_cache
@pytest.mark.parametrize(("count", "async_save"), [(2, False), (2, True), (4, False)])
def test_saves_of_nodes_that_share_a_disk(
    tmp_path: Path, count: int, async_save: bool, long: bool, counted: Callable[[str, int], None]
) -> None:
    """Each node still sees the names that another has renamed or removed."""
    found: Counter[str] = Counter()
    messages: list[str] = []
    steps = 17 if long else {2: 3, 4: 2}[count]
    for number, stage in enumerate((2, 3, 2, 3) if long else (2,) if count == 2 else (3,)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with nodes.cached_disk(folder, count) as cluster:
            asked: dict[str, Any] = {
                "files": str(cluster.files[0]),
                "stage": stage,
                "steps": steps,
                "async_save": async_save,
            }
            said = cluster.run(save_at_each_step, **asked)
            ranks = returned(said, cluster)
            assert [(one["rank"], one["node"], one["local"]) for one in ranks] == [(i, i, 0) for i in range(count)]
            assert all(one["saves"] == 3 * steps for one in ranks)
            found += Counter(saves=3 * steps, failed=len(ranks[0]["failed"]), lost=len(ranks[0]["lost"]))
            messages += [*ranks[0]["failed"][:1], *ranks[0]["lost"][:1]]
            if not messages:
                assert_no_leftovers(cluster)
                there = {item.name for item in (cluster.files[0] / "run").iterdir()}
                assert there == {"again.ckpt", "last.ckpt", f"step={steps}.ckpt", f"step={steps - 1}.ckpt"}
        print(stage, dict(found), messages)
    assert (found["failed"], found["lost"]) == (0, 0), (found, messages)
    what = "saves that training does not wait for, of" if async_save else "saves of"
    counted(f"{what} {count} nodes that share a disk and cache its directory entries", found["saves"])


# Disks of their own.


def whole_life(this: ThisProcess, at: str, stage: int) -> dict[str, Any]:
    """Train; return the final state in memory, and the results of loading the checkpoints."""
    ds_frozen_patch.patch()
    kept = ModelCheckpoint(f"{at}/run", filename="{epoch}", save_top_k=-1)
    first = trainer(at, stage, True, enable_checkpointing=True, callbacks=[kept])
    module = runs.LoraRun()
    first.fit(module, runs.batches(first.world_size))
    first.save_checkpoint(f"{at}/run/weights.ckpt", weights_only=True)
    found: dict[str, Any] = {"alone": (runs.trained_state(module), module.losses[runs.BATCHES :], first.global_step)}
    (found["in memory"],) = first.test(module, runs.batches(first.world_size), verbose=False)
    again, module = trainer(at, stage, True), runs.LoraRun()
    again.fit(module, runs.batches(first.world_size), ckpt_path=f"{at}/run/epoch=0.ckpt")
    found["resumed"] = (runs.trained_state(module), module.losses, again.global_step)
    # In ZeRO-3 a test needs the optimizer's states of all ranks, with plain Lightning too.
    for name in ("weights.ckpt", "epoch=1.ckpt") if stage < 3 else ("weights.ckpt",):
        fresh = trainer(at, stage, True)
        batches = runs.batches(first.world_size)
        (found[name],) = fresh.test(runs.LoraRun(), batches, ckpt_path=f"{at}/run/{name}", verbose=False)
    return found


def test_local_disks(tmp_path: Path, stage: int) -> None:
    """What is resumed and tested is bit for bit what was saved; weights alone are on each disk."""
    cluster = nodes.own_disks(tmp_path, 2)
    ranks = returned(cluster.run(whole_life, stage=stage), cluster)
    assert len({one["alone"][1][-1] for one in ranks}) == 2, "each rank has its own batches"
    for one in ranks:
        assert one["resumed"] == one["alone"]
        assert one["weights.ckpt"] == one["in memory"]
        assert one.get("epoch=1.ckpt", one["in memory"]) == one["in memory"]
    assert_no_leftovers(cluster)
    for files in cluster.files:
        assert (files / "run" / "weights.ckpt").is_file()
        assert len(list(files.glob("run/epoch=1.ckpt/checkpoint/*optim_states.pt"))) == (stage > 0)


def save_once(this: ThisProcess, at: str, stage: int) -> None:
    ds_frozen_patch.patch()
    run = trainer(at, stage, True, epochs=1)
    run.fit(runs.LoraRun(), runs.batches(run.world_size))
    run.save_checkpoint(f"{at}/run/last.ckpt")


def resume(this: ThisProcess, at: str, stage: int) -> int:
    """Return the step from which the run resumes."""
    ds_frozen_patch.patch()
    run = trainer(at, stage, True, epochs=1)
    run.fit(runs.LoraRun(), runs.batches(run.world_size), ckpt_path=f"{at}/run/last.ckpt")
    return run.global_step


def test_damage_on_one_nodes_disk(tmp_path: Path, stage: int, long: bool, counted: Callable[[str, int], None]) -> None:
    """A changed byte, or a missing file, is an error on every rank that names the file."""
    cluster = nodes.own_disks(tmp_path, 2)
    returned(cluster.run(save_once, stage=stage), cluster)
    assert returned(cluster.run(resume, stage=stage), cluster) == [runs.BATCHES] * 2
    files = [sorted(disk.glob("run/last.ckpt/checkpoint/*_states.pt")) for disk in cluster.files]
    assert [len(found) for found in files] == [2, 2]
    model, optimizer = sorted(files[1], key=lambda file: "optim" in file.name)
    tried: list[tuple[Callable[[Path], None], Path]] = [(flip, optimizer), (Path.unlink, model)]
    if long:
        tried = [(damage, file) for damage in (flip, Path.unlink) for file in (*files[0], *files[1])]
    for damage, file in tried:
        before = file.read_bytes()
        damage(file)
        refused_on_all(cluster.run(resume, stage=stage), file.name)
        file.write_bytes(before)
    assert returned(cluster.run(resume, stage=stage), cluster) == [runs.BATCHES] * 2
    counted("damage: a file on one of two nodes with local disks", len(tried))


def save_three(this: ThisProcess, at: str, stage: int) -> None:
    ds_frozen_patch.patch()
    kept = ModelCheckpoint(f"{at}/run", filename="{epoch}", save_top_k=-1)
    run = trainer(at, stage, True, epochs=3, enable_checkpointing=True, callbacks=[kept])
    run.fit(runs.LoraRun(), runs.batches(run.world_size))


def prepare(source: Path, folder: Path) -> None:
    """Lay out a save, of which there is a copy, as one of which no file has its name yet."""
    record = json.loads((source / RECORD).read_text())
    names = [item.name for item in source.iterdir()]
    for name in names:
        shutil.copy(source / name, hidden(folder / name, record["save"]))
    Journal(record["save"], digest(folder), digest(source), tuple(names), ()).prepare(folder, sync=False)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_load_after_a_kill_between_renames(tmp_path: Path, stage: int) -> None:
    """One has given the files of a save their names, and the other has them prepared: it is loaded, or none."""
    cluster = nodes.own_disks(tmp_path, 2)
    returned(cluster.run(save_three, stage=stage), cluster)
    before, after = runs.BATCHES, 2 * runs.BATCHES
    for prepares in (True, False):
        for files, named in zip(cluster.files, (1, 0), strict=True):
            shutil.rmtree(files / "run/last.ckpt", ignore_errors=True)
            shutil.copytree(files / f"run/epoch={named}.ckpt", files / "run/last.ckpt")
        if prepares:
            prepare(cluster.files[1] / "run/epoch=1.ckpt/checkpoint", cluster.files[1] / "run/last.ckpt/checkpoint")
            assert returned(cluster.run(resume, stage=stage), cluster) == [after] * 2
    said = cluster.run(resume, stage=stage)
    refused_on_all(said, "last.ckpt")
    for _, why in said:
        assert f"rank 0: of step {after}; rank 1: of step {before}" in why[1]


# Folders that the program names after the node.


def save_and_load_own(this: ThisProcess, at: str, out: str, mode: str, stage: int, names: str) -> tuple[Any, ...]:
    """Save by a folder of the rank's own, over what is there and to a new tag; return what is loaded, and names."""
    rank = os.environ["RANK"]
    folder = Path(at, names.format(rank=rank))
    with saves.served(mode):
        local: dict[str, Any] = {"checkpoint": {"use_node_local_storage": True}}
        run = Numbered(f"{out}/{rank}", 2, stage, **local)
        found = []
        for tag in ("checkpoint", "checkpoint", "new"):
            run.save(folder, tag)
            found.append(run.load(folder, tag, strict=mode != "plain"))
        if mode != "plain":  # plain DeepSpeed writes `latest` on one node
            found.append(run.load(folder))
    return found, sorted(item.name for item in folder.rglob("*.pt"))


@pytest.mark.parametrize("mode", saves.MODES)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("disks", ["own", "shared"])
def test_folders_that_a_program_names_after_the_node(tmp_path: Path, disks: str, stage: int, mode: str) -> None:
    """Each rank saves to, and loads from, the path that the program gives it there."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    cluster = (nodes.own_disks if disks == "own" else nodes.shared_disk)(tmp_path, 2)
    asked: dict[str, Any] = {"out": str(tmp_path), "mode": mode, "stage": stage, "names": "node{rank}/run"}
    for rank, (found, names) in enumerate(returned(cluster.run(save_and_load_own, **asked), cluster)):
        assert found == [1, 2, 3, 3][: len(found)]
        assert len([name for name in names if f"pp_rank_{rank}_" in name and "optim" in name]) == 2, names
        assert not [name for name in names if f"pp_rank_{1 - rank}_" in name], names
    assert_no_leftovers(cluster)
    for files in set(cluster.files):
        assert {item.name for item in files.iterdir()} <= {"node0", "node1"}


AFTER_ALL = KillPoint(1 << 30)
"""When the save is done, where somebody else does not kill it before."""


def train(this: ThisProcess, at: str, stage: int, diary: str, epochs: int, saves: int, resumes: bool) -> dict[str, Any]:
    """Save at the ends of the first epochs; the last of these saves replaces an existing checkpoint.

    Record what each rank resumes from, the loss of each step, and each completed save.
    """
    ds_frozen_patch.patch()
    log = os.open(f"{diary}.{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seconds = 0.0

    class Diary(Callback):
        saved = 0

        def note(self, line: str) -> None:
            os.write(log, f"{line}\n".encode())

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.note(f"from {trainer.global_step}")

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.note(f"step {trainer.global_step} {module.losses[-1]!r}")

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            nonlocal seconds
            if self.saved == saves:
                return
            self.saved += 1
            last = self.saved == saves
            begun = time.perf_counter()
            if last:
                self.note("saving")
                this.arm()
            trainer.save_checkpoint(f"{at}/run/last.ckpt")
            self.note(f"saved {trainer.global_step}")
            if last:
                this.disarm()
                seconds = time.perf_counter() - begun

    run, module = trainer(at, stage, True, epochs=epochs, callbacks=[Diary()]), runs.LoraRun()
    run.fit(module, runs.batches(run.world_size), ckpt_path=f"{at}/run/last.ckpt" if resumes else None)
    return {"state": runs.trained_state(module), "calls": this.calls, "seconds": seconds}


@dataclass
class Chain:
    """One run on two nodes that is killed repeatedly, and resumed each time from what is on their disks."""

    cluster: Nodes
    stage: int
    epochs: int
    drawn: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    launches: int = 0

    def launch(
        self, points: tuple[KillPoint | None, ...], saves: int, resumes: bool, between: bool = False
    ) -> list[tuple[str, Any]]:
        """Return the outcome on each rank; with `between`, ranks with a kill point are killed between the nodes'
        renames.
        """
        self.launches += 1
        asked: dict[str, Any] = {"stage": self.stage, "diary": self._diary(), "epochs": self.epochs}
        processes = self.cluster.start(train, points, saves=saves, resumes=resumes, **asked)
        over = threading.Event()
        killer = threading.Thread(target=self._kill_between, args=(processes, over))
        if between:
            killer.start()
        try:
            return outcomes(processes)
        finally:
            over.set()
            if between:
                killer.join()

    def _kill_between(self, processes: list[Process], over: threading.Event) -> None:
        """Kill as soon as the name leads elsewhere on one of the disks."""
        while not over.is_set() and not all(self.noted(rank, "saving") for rank in (0, 1)):
            time.sleep(0.001)
        before = self._named()
        while not over.is_set() and self._named() == before:
            pass
        for process in processes:
            if process.point is not None and process.process.pid is not None and not over.is_set():
                os.kill(process.process.pid, signal.SIGKILL)

    def _named(self) -> list[int]:
        """Return what has the checkpoint's name on each disk."""
        found = []
        for disk in self.cluster.files:
            try:
                found.append((disk / "run" / "last.ckpt" / "checkpoint").stat().st_ino)
            except FileNotFoundError:
                found.append(0)
        return found

    def _diary(self) -> str:
        return str(self.cluster.at.with_name(f"diary{self.launches}"))

    def noted(self, rank: int, what: str) -> list[str]:
        """Return what a rank has recorded of the last launch: everything after a keyword."""
        file = Path(f"{self._diary()}.{rank}")
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(what)]

    def run(self, kills: int) -> None:
        alone = returned(self.launch((None, None), 2, resumes=False), self.cluster)
        losses = [self.noted(rank, "step") for rank in (0, 1)]
        assert [len(found) for found in losses] == [self.epochs * runs.BATCHES] * 2
        first = [disk / "run" for disk in self.cluster.files]
        for folder in first:
            shutil.copytree(folder, folder.with_name("first"))
        step, may_be = 2 * runs.BATCHES, {2 * runs.BATCHES}
        fresh = True
        while self.counts["kills"] < kills:
            between = self.drawn.random() < 0.5
            points = self._points(alone, AFTER_ALL if between else None)
            said = self.launch(points, 1, resumes=True, between=between)
            from_ = self._resumed(said)
            assert from_ is not None or not fresh, "what no kill has touched is refused"
            if from_ is None or from_ >= (self.epochs - 1) * runs.BATCHES:
                self.counts["refused" if from_ is None else "ends"] += 1
                for folder in first:
                    shutil.rmtree(folder)
                    shutil.copytree(folder.with_name("first"), folder)
                step, may_be, fresh = 2 * runs.BATCHES, {2 * runs.BATCHES}, True
                continue
            assert from_ in may_be, (from_, may_be, "a save is lost")
            self.counts["kills"] += 1
            self.counts["from the save before"] += from_ == step and not fresh
            self._check_ends(said)
            for rank in (0, 1):
                assert set(self.noted(rank, "step")) <= set(losses[rank]), (rank, "other losses")
            step, fresh = from_, False
            done = any(self.noted(rank, "saved") for rank in (0, 1))
            may_be = {step + runs.BATCHES} if done else {step, step + runs.BATCHES}
        said = self.launch((None, None), 0, resumes=True)
        if self._resumed(said) is not None:
            ended = returned(said, self.cluster)
            assert [one["state"] for one in ended] == [one["state"] for one in alone]

    def _points(self, alone: list[dict[str, Any]], point: KillPoint | None) -> tuple[KillPoint | None, ...]:
        """Return kill points for one rank or both: this one, or a random one."""
        drawn = [point or KillPoint.random(self.drawn, one["calls"], one["seconds"]) for one in alone]
        return self.drawn.choice([tuple(drawn), (drawn[0], None), (None, drawn[1])])

    def _resumed(self, said: list[tuple[str, Any]]) -> int | None:
        """Return the step from which all ranks have resumed, or None where all have refused a mix."""
        steps = [self.noted(rank, "from") for rank in (0, 1)]
        if not any(steps):
            for what, why in said:
                assert what == "raised", (said, self.cluster.log())
                assert why[0] == "CheckpointError", why[2]
                assert MIX.search(why[1]), why[1]
            return None
        assert steps[0] == steps[1], (f"the nodes resume from steps {steps}", said)
        return int(steps[0][0])

    def _check_ends(self, said: list[tuple[str, Any]]) -> None:
        assert "killed" in [what for what, _ in said], said
        for what, why in said:
            if what != "killed":  # it must not hang, and after its last word in a save it is Lightning that waits
                assert what == "raised", (what, why)
                assert why[0] in ("CheckpointError", "RuntimeError", "DistBackendError"), why[2]


def test_kills_between_the_renames_of_nodes(tmp_path: Path, long: bool, counted: Callable[[str, int], None]) -> None:
    """A resume uses one save on all nodes, the last or the previous one, or is refused with an error on all."""
    counts: Counter[str] = Counter()
    for number, stage in enumerate((2, 3, 1, 2) if long else (2,)):
        cluster = nodes.own_disks(tmp_path / str(number), 2)
        chain = Chain(cluster, stage, 20 if long else 6, random.Random(number))
        chain.run(25 if long else 4)
        print(stage, dict(chain.counts))
        counts += chain.counts
    assert counts["refused"] < counts["kills"], counts
    counted("`kill -9` of one or both of two nodes with local disks during a save", counts["kills"])


def save_twice(this: ThisProcess, at: str, stage: int) -> list[int]:
    """Save by a run whose configuration does not say that each node has its own disk.

    Return the number of warnings of the disk, and of an export that needs the files of all nodes.
    """
    ds_frozen_patch.patch(export="safetensors")
    run = trainer(at, stage, epochs=1)
    run.fit(runs.LoraRun(), runs.batches(run.world_size))
    with runs.heard() as said:
        for name in ("first", "second"):
            run.save_checkpoint(f"{at}/run/{name}.ckpt")
    return [
        sum(part in text for text in said) for part in ("use_node_local_storage", "patch(export='safetensors') has")
    ]


@pytest.mark.parametrize("disks", [pytest.param("own", marks=pytest.mark.short), "shared"])
def test_local_disks_that_deepspeed_is_not_configured_for(tmp_path: Path, disks: str) -> None:
    """The first save warns, once, on the node whose disk rank 0 does not see."""
    cluster = (nodes.own_disks if disks == "own" else nodes.shared_disk)(tmp_path, 2)
    said = returned(cluster.run(save_twice, stage=2), cluster)
    is_own = int(disks == "own")
    assert said == [[0, is_own], [is_own, 0]], cluster.log()
    for files in cluster.files:
        assert len([*files.glob("run/*.ckpt/trainable.safetensors")]) == (0 if is_own else 2)


# Two jobs on one path.


def job(this: ThisProcess, at: str, meetings: str, number: int, files: str, stage: int, times: int) -> dict[str, Any]:
    """Save repeatedly to the path that another run saves to; the first run checks what is there each time."""
    ds_frozen_patch.patch()
    everyone = 2 * world_size()
    lost: list[str] = []
    failed: list[str] = []
    run = trainer(at, stage, epochs=1)
    run.fit(runs.LoraRun(seed=number), runs.batches(run.world_size))
    drawn = random.Random(number)
    meet = partial(_meet, Path(meetings), f"{number} {run.global_rank}", everyone)
    with runs.heard() as said:
        for time_ in range(times):
            meet(f"before {time_}")
            time.sleep(drawn.uniform(0, 0.05))
            try:
                run.save_checkpoint(f"{at}/run/last.ckpt")
            except CheckpointError as error:
                failed.append(str(error))
            meet(f"after {time_}")
            if number == 0 and run.is_global_zero:
                lost += problems(Path(files, "run", "last.ckpt"), runs.BATCHES)
            meet(f"seen {time_}")
    meet("end")
    return {"failed": failed, "lost": lost, "said": [text for text in said if "Another" in text]}


def _meet(folder: Path, who: str, everyone: int, where: str) -> None:
    """Wait for all ranks of both jobs."""
    (folder / f"{where} {who}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob(f"{where} *"))) < everyone:
        assert time.monotonic() < deadline, f"alone at {where}"
        time.sleep(0.002)


def two_jobs(cluster: Nodes, times: int, local: int) -> None:
    """Run one job on the first of the nodes, and one on the last."""
    meetings = cluster.at.with_name("meetings")
    meetings.mkdir()
    asked: dict[str, Any] = {"meetings": str(meetings), "files": str(cluster.files[0]), "stage": 2, "times": times}
    processes = []
    for number, disk in enumerate((cluster.disks[0], cluster.disks[-1])):
        one = Nodes(cluster.at, (disk,), cluster.files[:1])
        processes += one.start(job, local=local, number=number, **asked)
    ranks = returned(outcomes(processes), cluster)
    assert [text for one in ranks for text in one["lost"]] == []
    failed = [text for one in ranks for text in one["failed"]]
    assert not failed, "\n".join(failed)
    assert [text for one in ranks for text in one["said"]], "the later job does not say that there is another"
    assert_no_leftovers(cluster)


def test_two_jobs_on_one_path(tmp_path: Path, disks: str, long: bool, counted: Callable[[str, int], None]) -> None:
    """What has the name is whole, and the later job warns about the other.

    They run on one node, or on two that cache the names of a server.
    """
    times = 25 if long else 20
    with nodes.cached_disk(tmp_path, 2) if disks == "cached" else nullcontext(nodes.shared_disk(tmp_path, 1)) as found:
        two_jobs(found, times, local=2 if long and disks == "shared" else 1)
    kind = "shared disk with cached directory entries" if disks == "cached" else "shared disk"
    counted(f"concurrent saves by two jobs to one path: {kind}", 2 * times)
