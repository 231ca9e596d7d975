"""`kill -9` at random points of a save and of the tools: what has its final name is whole, and the run continues."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit import processes, runs
from kit.cell import ModelCheckpoint, pl
from kit.checkpoints import TOOLS, Checkpoints, Diary, contents, newest, snapshot
from kit.processes import KillPoint, ThisProcess

import ds_frozen_patch
from ds_frozen_patch import ranks as agreeing
from ds_frozen_patch.cli import main
from ds_frozen_patch.publish import in_flight

EPOCHS = 8
STEPS_BESIDE = 3


def train(
    this: ThisProcess, out: str, stage: int, save_last: Any, at: int, resume: str | None, async_save: bool
) -> dict[str, Any]:
    """Train, and keep the two best checkpoints and the last.

    The run can be killed in its `at`-th save, or, if training does not wait for that, until it is over. Without a kill,
    return how many calls that concern files each save makes, and how many there are in that time.
    """
    ds_frozen_patch.patch(async_save=async_save)
    agreeing.GRACE_SECONDS = 3
    agreeing.LOST_SECONDS, agreeing.BEAT_SECONDS = 10, 1
    saves, steps, begun, ended = list[int](), 0, (0, 0.0), (0, 0.0)

    def now() -> tuple[int, float]:
        return this.calls, time.perf_counter()

    def disarm() -> None:
        nonlocal ended
        if begun[1] and not ended[1]:
            ended = now()
            if this.point is not None:  # else the calls of the next saves count too
                this.disarm()

    def on_step() -> None:
        nonlocal steps
        steps += bool(begun[1])
        if steps == STEPS_BESIDE:
            disarm()

    diary = Diary(f"{out}.rank{os.environ['RANK']}", on_step)
    original = pl.Trainer.save_checkpoint

    def note_end(number: int, before: int, line: str) -> None:
        saves[number] = this.calls - before
        diary.note(line)

    def save(trainer: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal begun
        saves.append(0)
        in_flight.settle()  # as this save does, so that all calls from here on are of this one
        if len(saves) == at:
            begun = now()
        if len(saves) == at or this.point is None:
            this.arm()
        diary.note("saving")
        before = this.calls
        original(trainer, path, *args, **kwargs)
        line = f"saved {trainer.global_step} {Path(path).name}"
        in_flight.afterwards(partial(note_end, len(saves) - 1, before, line))
        if not async_save:
            disarm()

    pl.Trainer.save_checkpoint = save  # type: ignore[assignment,method-assign]
    kept = ModelCheckpoint(out, filename="{epoch}", save_top_k=2, monitor="epoch", mode="max", save_last=save_last)
    trainer = runs.trainer(out, 2, stage, epochs=EPOCHS, callbacks=[kept, diary])
    diary.note_removals(trainer)
    module = runs.LoraRun()
    with ds_frozen_patch.no_wait():  # the save above is not Lightning's own any more
        trainer.fit(module, runs.batches(2), ckpt_path=resume)
    disarm()
    in_flight.settle()
    calls, seconds = (last - first for first, last in zip(begun, ended, strict=True))
    return {"state": runs.trained_state(module), "saves": saves, "calls": calls, "seconds": seconds}


@dataclass
class Chain:
    """One run that is killed repeatedly and resumed each time, until it ends."""

    out: Path
    stage: int
    save_last: Any
    async_save: bool
    long: bool
    drawn: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    saves_at_end: int = 0
    in_a_save: list[bool] = field(default_factory=list)
    """Whether each rank was in a save when the last process of it ended."""

    def whole(self, at: int = 3) -> list[dict[str, Any]]:
        """Run it without a kill; return what its `at`-th save was like, on each rank."""
        said = self._train((None, None), at, None)
        assert [what for what, _ in said] == ["returned", "returned"], said
        return [dict(value) for _, value in said]

    def _train(self, points: tuple[KillPoint | None, ...], at: int, resume: Path | None) -> list[tuple[str, Any]]:
        arguments = {"out": str(self.out), "stage": self.stage, "save_last": self.save_last, "at": at}
        arguments["async_save"] = self.async_save
        log = self.out.with_name(f"{self.out.name}.log")
        before = [len(self._diary(rank)) for rank in (0, 1)]
        said = processes.run_ranks(train, log, points, **arguments, resume=str(resume) if resume else None)
        noted = [self._diary(rank)[begin:] for rank, begin in enumerate(before)]
        self.saves_at_end = noted[0].count("saved ")
        self.in_a_save = [text.count("saving") > text.count("saved ") for text in noted]
        return said

    def run(self, alone: list[dict[str, Any]], kills: int) -> dict[str, Any]:
        """Kill it at most this many times, and then run to the end."""
        while self.counts["kills"] < kills:
            points = self._points(alone)
            said = self._train(points, self.drawn.randint(1, 3), self._newest())
            if said[0][0] == "returned":  # there were not that many saves to come
                return dict(said[0][1])
            self.counts["kills"] += 1
            killed = [rank for rank, (what, _) in enumerate(said) if what == "killed"]
            assert killed, said
            self.counts["in the midst"] += any(self.in_a_save[rank] for rank in killed)
            for point, (what, why) in zip(points, said, strict=True):
                if what == "killed":
                    assert point is not None
                elif what == "returned":
                    assert self.async_save  # the other was killed when the run had ended
                else:
                    # It must not hang, and knows what it could not save; after its last word in a save, it is Lightning
                    # that waits for the other.
                    assert what == "raised", (what, why)
                    assert why[0] in ("CheckpointError", "RuntimeError"), why[2]
                    self.counts[why[0]] += 1
                    if why[0] == "CheckpointError":
                        assert re.search("was not saved|[Nn]ot every rank has confirmed", why[1]), why[1]
                        assert str(self.out) in why[1], why[1]
        said = self._train((None, None), 0, self._newest())
        assert [what for what, _ in said] == ["returned", "returned"], said
        return dict(said[0][1])

    def _points(self, alone: list[dict[str, Any]]) -> tuple[KillPoint | None, ...]:
        """Draw points for one rank or both: in the short part, calls that every save makes."""
        drawn = tuple(
            KillPoint.random(self.drawn, one["calls"], one["seconds"])
            if self.long
            else KillPoint(self.drawn.randint(1, min(one["saves"])))
            for one in alone
        )
        return self.drawn.choice([drawn, (drawn[0], None), (None, drawn[1])])

    def _newest(self) -> Path | None:
        return newest(self.out, self._diary(0))

    def _diary(self, rank: int) -> str:
        file = self.out.with_name(f"{self.out.name}.rank{rank}")
        return file.read_text() if file.exists() else ""

    def losses(self, rank: int) -> set[tuple[str, str]]:
        """Return each step's loss; a step repeated after a kill counts once if its loss was the same."""
        return set(re.findall(r"^step (\d+) (.*)$", self._diary(rank), re.MULTILINE))


CHAINS = [(stage, save_last) for stage in (2, 3, 1, 2, 3, 0, 1) for save_last in (True, "link")]
SAVES = {False: "a save", True: "a save that training does not wait for"}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("async_save", SAVES)
def test_kills_in_saves(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    long: bool,
    counted: Callable[[str, int], None],
    async_save: bool,
) -> None:
    """Kill one rank or both, in a save over an existing checkpoint or to a new name."""
    counts: Counter[str] = Counter()
    alone: dict[Any, tuple[list[dict[str, Any]], Chain]] = {}
    for number, (stage, save_last) in enumerate(CHAINS * request.config.getoption("rounds") if long else CHAINS[:1]):
        key = (stage, save_last)
        if key not in alone:
            chain = Chain(tmp_path / f"alone{number}", stage, save_last, async_save, long, random.Random(0))
            alone[key] = chain.whole(), chain
        expected, one = alone[key]
        killed = Chain(tmp_path / f"killed{number}", stage, save_last, async_save, long, random.Random(number))
        ended = killed.run(expected, 10 if long else 4)
        assert ended["state"] == expected[0]["state"]
        for rank in (0, 1):
            assert killed.losses(rank) == one.losses(rank)
            assert len(one.losses(rank)) == EPOCHS * runs.BATCHES
        # Lightning removes its link before it makes the new one. After a kill in between, a run that has nothing left
        # to save makes none.
        assert (killed.out / "last.ckpt").exists() or (save_last == "link" and not killed.saves_at_end)
        counts += killed.counts
        print(key, dict(killed.counts), [(one["saves"], one["calls"], round(one["seconds"], 3)) for one in expected])
        shutil.rmtree(killed.out)
    assert counts["kills"]
    assert counts["in the midst"] > counts["kills"] / 4 if long else counts["in the midst"] == counts["kills"], counts
    counted(f"`kill -9` of one or both of two ranks during {SAVES[async_save]}: Trainer, ZeRO 0-3", counts["kills"])


def work(this: ThisProcess, words: list[str], source: str, target: str) -> dict[str, Any]:
    """Run a tool's command line."""
    begun = time.perf_counter()
    this.arm()
    assert main([*words, source, target, "-q"]) == 0
    this.disarm()
    return {"calls": this.calls, "seconds": time.perf_counter() - begun}


@pytest.mark.timeout(1800)
def test_kills_in_tools(
    checkpoints: Checkpoints, tmp_path: Path, long: bool, counted: Callable[[str, int], None]
) -> None:
    log = tmp_path / "log"
    for number, (tool, (name, words, made)) in enumerate(TOOLS.items()):
        times = 15 if long else 3
        for stage in (2, 3) if long else (2,):
            drawn = random.Random(f"{number} {stage}")
            source, target = checkpoints(stage) / name, tmp_path / f"{number}-{stage}" / made
            before = snapshot(source)
            alone = tmp_path / f"alone-{number}-{stage}" / made
            what, said = processes.Process(work, log, words=words, source=str(source), target=str(alone)).outcome()
            assert what == "returned", said
            expected = contents(alone)
            for _ in range(times):
                point = KillPoint.random(drawn, said["calls"], 1.2 * said["seconds"])
                asked: dict[str, Any] = {"words": words, "source": str(source), "target": str(target)}
                assert processes.Process(work, log, point, **asked).outcome() == ("killed", None)
                assert snapshot(source) == before
                if target.exists():  # killed after all was done
                    assert contents(target) == expected, (tool, stage, point)
                    shutil.rmtree(target) if target.is_dir() else target.unlink()
            assert main([*words, str(source), str(target), "-q"]) == 0
            assert contents(target) == expected
            counted(f"`kill -9` during {tool.split()[0]}", times)
            shutil.rmtree(target.parent)
