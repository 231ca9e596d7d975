"""A soak: one loop of training, saves, kills and resumes, at the same and at another world size.

`nox -s faults -- tests/faults/test_soak.py --soak 120` runs it for 120 minutes. Every choice is drawn from a seed.
The seeds begin at 0, or at `--soak-seed`, so that a soak in two parts does not repeat itself.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from kit import processes, runs
from kit.cell import ModelCheckpoint, pl
from kit.checkpoints import Diary, model_states, newest
from kit.processes import KillPoint, ThisProcess
from memory import give_back_memory, memory, open_files, release
from torch.utils.data import DataLoader

import ds_frozen_patch
from ds_frozen_patch import ranks as agreeing
from ds_frozen_patch.publish import in_flight

SAMPLES = 4  # of a step, on all ranks together
STEPS = 2  # in an epoch
EPOCHS = 8
WORLD_SIZES = (1, 2, 4)
CALLS, SECONDS = 80, 0.5
"""How late in a save, or in a load, a rank is killed at most: at this call that concerns files, or after so long."""
WARM = 5
"""The runs of a process after which it has everything that is made once."""
RAISED = ("CheckpointError", "RuntimeError", "Dist")
"""How the type of what a rank raises begins, if another one is gone: ours, or torch's."""
GROWTH = 32 * 2**20
"""Bytes that a process may grow by, in all of its runs after those together."""
KEPT = 4 * 2**20
"""Bytes of tensors that may be added; an engine in ZeRO-3 has 19 MiB."""


def data(world_size: int) -> DataLoader[Any]:
    tokens = torch.randint(runs.VOCABULARY, (SAMPLES * STEPS, 8), generator=torch.Generator().manual_seed(0))
    return DataLoader(tokens, batch_size=SAMPLES // world_size)  # type: ignore[arg-type]


def train(
    this: ThisProcess | None,
    diary: str,
    out: str,
    world_size: int,
    stage: int,
    epochs: int,
    resume: str | None,
    async_save: bool,
    at: int,
) -> dict[str, Any]:
    """Resume a run, and train it up to an epoch; save after each.

    If the process can be killed, that is in the load (`at` is 0), or in the save of that number.
    """
    gc.unfreeze()  # the pool freezes what the run before has left, and that would stay for ever
    gc.collect()
    ds_frozen_patch.patch(elastic=True, async_save=async_save)
    agreeing.GRACE_SECONDS = 3
    agreeing.LOST_SECONDS, agreeing.BEAT_SECONDS = 10, 1
    noted = Diary(f"{diary}.rank{os.environ['RANK']}")
    original, saves = pl.Trainer.save_checkpoint, 0

    def save(trainer: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal saves
        saves += 1
        if this is not None and saves == at:
            this.arm()
        original(trainer, path, *args, **kwargs)
        if this is not None and saves == at and not async_save:
            this.disarm()
        in_flight.afterwards(partial(noted.note, f"saved {trainer.global_step} {Path(path).name}"))

    pl.Trainer.save_checkpoint = save  # type: ignore[assignment,method-assign]
    try:
        kept = ModelCheckpoint(out, filename="{epoch}", save_top_k=2, monitor="epoch", mode="max", save_last=True)
        trainer = runs.trainer(out, world_size, stage, epochs=epochs, callbacks=[kept, noted], precision="32-true")
        noted.note_removals(trainer)
        module = runs.LoraRun()
        if this is not None and not at:
            _armed_in_load(this, trainer.strategy)
        with ds_frozen_patch.no_wait():  # its saves are wrapped, and so not Lightning's own any more
            trainer.fit(module, data(world_size), ckpt_path=resume)
        if this is not None:
            this.disarm()
        ds_frozen_patch.unpatch()
    finally:
        pl.Trainer.save_checkpoint = original  # type: ignore[method-assign]
        os.close(noted.file)
    state = runs.trained_state(module)
    release(trainer.strategy.model)  # how much of it is resident varies too much to notice anything smaller beside it
    del trainer, module
    give_back_memory()
    return {"state": state, "files": open_files(), "bytes": memory("VmRSS"), **_alive()}


def _alive() -> dict[str, int]:
    """How many engines there are in this process, and the bytes of all tensors."""
    gc.collect()
    objects = gc.get_objects()
    engines = sum(type(one).__name__ == "DeepSpeedEngine" for one in objects)
    tensors = (one for one in objects if isinstance(one, torch.Tensor) and one.layout == torch.strided)
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return {"engines": engines, "tensors": sum(storages.values())}


def _armed_in_load(this: ThisProcess, strategy: Any) -> None:
    load = strategy.load_checkpoint

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        this.arm()
        return load(*args, **kwargs)

    strategy.load_checkpoint = load_checkpoint


class Soak:
    """The loop, what it has counted, and what each process that is never killed has held after each of its runs."""

    def __init__(self, ranks: Any, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.counts: Counter[str] = Counter()
        self.held: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        self.whole: dict[int, tuple[Any, dict[int, list[float]]]] = {}

    def train_whole(self, stage: int) -> None:
        """Train without an interruption, for comparison."""
        folder = self.folder / f"whole{stage}"
        folder.mkdir()
        state = self._lasting(folder, 2, stage=stage, epochs=EPOCHS, resume=None, async_save=False)
        self.whole[stage] = state, losses(folder)

    def train_in_turns(self, seed: int) -> None:
        """Train from the beginning to the end by processes that take turns: some are killed, others never are."""
        drawn = Random(seed)
        stage, sizes = drawn.choice((1, 2, 3)), drawn.choice((WORLD_SIZES, (2,)))
        if stage not in self.whole:
            self.train_whole(stage)
        folder = self.folder / f"{seed}"
        folder.mkdir()
        resume, done, before = None, 0, 0
        while done < EPOCHS:
            world_size = drawn.choice(sizes)
            epochs = min(EPOCHS, done + drawn.randint(1, 4))
            asked = {"stage": stage, "epochs": epochs, "resume": resume, "async_save": drawn.random() < 0.5}
            self.counts["resumes at another world size"] += resume is not None and world_size != before
            if drawn.random() < 0.5:
                self._killed(folder, world_size, drawn, epochs - done, **asked)
            else:
                self._lasting(folder, world_size, **asked)
            last = newest(folder / "out", diaries(folder, 0))
            before = world_size
            resume, done = (str(last), model_states(last)[0]["global_step"] // STEPS) if last else (None, 0)
        state = self._lasting(folder, 2, stage=stage, epochs=EPOCHS, resume=resume, async_save=False)
        expected = self.whole[stage]
        found = losses(folder)
        assert found.keys() == expected[1].keys()
        for step, means in found.items():
            assert means == pytest.approx(expected[1][step] * len(means), rel=1e-4), (seed, step)
            if len(sizes) == 1:
                assert set(means) == set(expected[1][step]), (seed, step)
        assert len(sizes) > 1 or state == expected[0], seed
        self.counts["runs to the end"] += 1
        self.counts["saves"] += diaries(folder, 0).count("saved ")
        shutil.rmtree(folder)

    def _lasting(self, folder: Path, world_size: int, **asked: Any) -> Any:
        """Train in processes that go on afterwards; return what they have trained."""
        diary = str(self._diary(folder, world_size))
        asked |= {"this": None, "diary": diary, "out": f"{folder}/out", "world_size": world_size, "at": 0}
        found = self.ranks(world_size, train, **asked)
        for rank, one in enumerate(found):
            self.held[world_size, rank].append(one)
        return found[0]["state"]

    def _killed(self, folder: Path, world_size: int, drawn: Random, saves: int, **asked: Any) -> None:
        """Train in processes of which at least one is killed."""
        points: list[KillPoint | None] = [KillPoint.random(drawn, CALLS, SECONDS) for _ in range(world_size)]
        if world_size > 1 and drawn.random() < 0.5:
            points = [point if rank == 0 else None for rank, point in enumerate(points)]
            drawn.shuffle(points)
        at = drawn.randint(0 if asked["resume"] else 1, saves)
        asked |= {"diary": str(self._diary(folder, world_size)), "out": f"{folder}/out", "world_size": world_size}
        said = processes.run_ranks(train, self.folder / "log", tuple(points), **asked, at=at)
        assert "killed" in [what for what, _ in said], said
        for what, why in said:
            ended = what in ("killed", "returned") or (what == "raised" and why[0].startswith(RAISED))
            assert ended, (points, at, asked, said)
        self.counts["kills in a save" if at else "kills in a load"] += 1

    def _diary(self, folder: Path, world_size: int) -> Path:
        """A new file; each rank has one of its own, with its number."""
        self.counts["starts"] += 1
        return folder / f"{self.counts['starts']}.{world_size}"

    def grown(self) -> dict[tuple[int, int], dict[str, int]]:
        """By how much each process has grown since its first runs."""
        return {
            process: {what: found[-1][what] - found[WARM][what] for what in ("files", "bytes", "engines", "tensors")}
            for process, found in self.held.items()
            if len(found) > WARM
        }


def diaries(folder: Path, rank: int) -> str:
    """What a rank of each run has noted, in the order of the runs."""
    files = sorted(folder.glob(f"*.rank{rank}"), key=lambda file: int(file.name.partition(".")[0]))
    return "".join(file.read_text() for file in files)


def losses(folder: Path) -> dict[int, list[float]]:
    """The mean loss of all ranks in each step, as often as it was made and noted by all of them."""
    found: dict[int, list[float]] = defaultdict(list)
    for first in folder.glob("*.rank0"):
        files = [first.with_suffix(f".rank{rank}") for rank in range(int(first.suffixes[0][1:]))]
        steps = [
            dict(re.findall(r"^step (\d+) (.*)$", file.read_text(), re.MULTILINE)) for file in files if file.exists()
        ]
        for step in set.intersection(*map(set, steps)) if len(steps) == len(files) else ():
            found[int(step)].append(statistics.fmean(float(one[step]) for one in steps))
    return found


@pytest.mark.timeout(0)
def test_a_soak(
    request: pytest.FixtureRequest,
    ranks: Any,
    tmp_path: Path,
    counted: Callable[[str, int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    minutes, first = request.config.getoption("soak"), request.config.getoption("soak_seed")
    begun, seed = time.monotonic(), first
    soak = Soak(ranks, tmp_path)
    while seed == first or time.monotonic() < begun + 60 * minutes:
        soak.train_in_turns(seed)
        seed += 1
        with capsys.disabled():
            past = (time.monotonic() - begun) / 60
            print(f"\nsoak: {past:.0f} of {minutes} minutes: {dict(soak.counts)}", file=sys.stderr, flush=True)
    grown = soak.grown()
    with capsys.disabled():
        print(f"seeds {first} to {seed - 1}, and by process (world size, rank) what it has more of: {grown}")
    for process, more in grown.items():
        assert more["files"] <= 0, process
        assert more["bytes"] < GROWTH, process
        assert more["engines"] <= 0, process
        assert more["tensors"] < KEPT, process
    counted("`kill -9` during a save, in a soak", soak.counts["kills in a save"])
    counted("`kill -9` during a load, in a soak", soak.counts["kills in a load"])
