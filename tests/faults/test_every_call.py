"""At each system call that changes something, a save is killed, or the call fails: what is there is the old checkpoint
or the new one, the messages say which, and the program's own files in the folder are untouched.
"""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import saves, traced
from kit.saves import TAG, Crew
from kit.traced import Call

pytestmark = [
    pytest.mark.promise(22),
    pytest.mark.skipif(bool(traced.why_unsupported()), reason=traced.why_unsupported() or "-"),
    pytest.mark.timeout(3600),
]
CASES = [("sync", 2, "run"), ("async", 3, "dots/../run"), ("sync", 3, ""), ("async", 2, "")]
"""How and in which stage is saved, and by which path over a checkpoint; empty if there is none."""
ATTEMPTS = 3
"""How often more a kill is tried that has hit nothing."""


class Faulty:
    """Saves of two ranks, each into a copy of one folder, with a fault at a call of one rank.

    In the folder are files of the program and, if the saves are `over` one, a checkpoint, which is number 1.
    """

    def __init__(self, folder: Path, mode: str, stage: int, over: str) -> None:
        self.folder, self.base, self.path = folder, folder / "base", over or "run"
        self.places = folder / "places"
        (self.places / "dots").mkdir(parents=True)
        self.old = 1 if over else None
        self.crew, self.reader = Crew(folder, mode, stage, number=10), Crew(folder, mode, stage)
        self.plain = Crew(folder, "plain", stage)
        if over:
            assert self.reader("save", self.base) == [1, 1]
        saves.put_files(self.base)

    def calls(self, reads: bool = False) -> list[tuple[int, Call]]:
        """Return each rank's calls in a save that nothing happens to; with `reads`, also those that list a folder."""
        found = []
        for rank in (0, 1):
            place, said = self.save(rank, None, "")
            assert said[0] == said[1], said
            assert isinstance(said[0], int), said
            found += [(rank, call) for call in traced.calls_of(self.folder / "trace", self.places, reads)]
            shutil.rmtree(place)
        return found

    def save(self, rank: int, at: Call | None, how: str) -> tuple[Path, list[Any]]:
        """Return where a save was made, and what each rank says of it."""
        place = self.places / "run"
        shutil.copytree(self.base, place, symlinks=True)
        self.before = saves.files_of_program(place)
        self.crew("prepare")
        self.new = self.crew.saved
        with traced.tracing(self.crew.pids[rank], self.folder / "trace", at, how):
            said = self.crew("write", self.places / self.path)
        if not all(isinstance(one, int) or (one and one[0] == "CheckpointError") for one in said):
            self.crew.stop()
        return place, said

    def problems(self, place: Path, may_leave: bool = False) -> Iterator[str]:
        """Yield what is wrong in a folder: that plain DeepSpeed, or we, load something else, or cannot save there."""
        if (there := saves.files_of_program(place)) != self.before:
            yield f"of the program's files there are {there}"
        may_be = {self.old, self.new}
        plain = self.plain("load", place, TAG, False) if not saves.has_journal(place) else [*may_be][:1] * 2
        ours = self.reader("load", place, TAG)
        for who, said in (("plain DeepSpeed", plain), ("we", ours)):
            loaded = [number if isinstance(number, int) else None for number in said]
            if loaded[0] != loaded[1] or loaded[0] not in may_be or "mixture" in str(said):
                yield f"{who} load {said}, which may be {may_be}"
        self.loaded = ours[0] if isinstance(ours[0], int) else None
        again = [self.reader("save", place), self.reader("load", place), self.plain("load", place, None, False)]
        if again != [again[0]] * 3 or not isinstance(again[0][0], int):
            yield f"the next save and the loads after it say {again}"
        if (left := saves.leftovers(place)) and not may_leave:
            yield f"the next save leaves {left}"
        yield from self._lost(place, " after the next save")
        shutil.rmtree(place)

    def untrue(self, said: list[Any]) -> Iterator[str]:
        """Yield what the errors of ranks say of the folder that is not so."""
        is_old = self.loaded == self.old
        for text in {one[1] for one in said if isinstance(one, tuple)}:
            if is_old and "is the new checkpoint" in text:
                yield f"there is {self.loaded}: {text[-300:]}"
            if not is_old and ("was not saved" in text or "unchanged" in text or "no checkpoint" in text):
                yield f"there is {self.loaded}: {text[-300:]}"
            now = "previous checkpoint there is unchanged" if self.old else "no checkpoint there now"
            if "was not saved" in text and not re.search(f"{now}|Nothing has changed", text):
                yield f"it does not say what is there: {text[-300:]}"

    def _lost(self, place: Path, when: str) -> Iterator[str]:
        there = saves.files_of_program(place)
        if other := [name for name in self.before if there.get(name) != self.before[name]]:
            yield f"what the program has at {other} is not the same{when}"


@pytest.fixture
def faulty(tmp_path: Path, mode: str, stage: int, over: str) -> Iterator[Faulty]:
    made = Faulty(tmp_path, mode, stage, over)
    yield made
    for crew in (made.crew, made.plain, made.reader):
        crew.stop()


def drawn(points: list[tuple[int, Call]], long: bool) -> list[tuple[int, Call]]:
    return points if long else random.Random(0).sample(points, 5)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each case with a kill and with two errors; in the short part, half of these."""
    is_short = not metafunc.config.getoption("--faults")
    if "error" in metafunc.fixturenames:
        cases = [(error, *case) for case in CASES for error in ("EIO", "ENOSPC")]
        cases = [*cases[::4], *cases[3::4]] if is_short else cases
        metafunc.parametrize(("error", "mode", "stage", "over"), cases)
    else:
        metafunc.parametrize(("mode", "stage", "over"), CASES[1:3] if is_short else CASES)


def test_kills_at_each_call(
    faulty: Faulty, long: bool, counted: Callable[[str, int], None], mode: str, stage: int, over: str
) -> None:
    wrong, counts, points = [], Counter[str](), drawn(faulty.calls(), long)
    for rank, call in points:
        place, said = faulty.save(rank, call, "signal=SIGKILL")
        for _ in range(ATTEMPTS):
            if said[rank] is None:
                break
            faulty.crew.stop()  # this save has made fewer calls of that name than the one that was listed
            shutil.rmtree(place)
            place, said = faulty.save(rank, call, "signal=SIGKILL")
        problems = [*faulty.problems(place), *faulty.untrue(said)]
        counts["killed" if said[rank] is None else "not killed"] += 1
        counts[f"we load {'the old one' if faulty.loaded == faulty.old else 'the new one'}"] += 1
        wrong += [f"rank {rank}, {call}: {problem}" for problem in problems]
    print(mode, stage, over, len(points), dict(counts))
    assert not wrong, "\n".join([f"{len(wrong)} of {len(points)}", *wrong])
    assert counts["killed"] > 0.9 * len(points), counts
    what = "over a checkpoint" if over else "to a new name"
    counted(f"`kill -9` at a system call of a save {what}, with the program's files beside it", len(points))


def test_errors_at_each_call(
    faulty: Faulty, long: bool, counted: Callable[[str, int], None], mode: str, stage: int, over: str, error: str
) -> None:
    """Every rank raises, and what the error says is there is there."""
    wrong, counts, points = [], Counter[str](), drawn(faulty.calls(reads=error == "EIO"), long)
    for rank, call in points:
        place, said = faulty.save(rank, call, f"error={error}")
        if not traced.hit(faulty.folder / "trace", faulty.places):
            counts["another file"] += 1  # or a connection, to which another thread has written
            faulty.crew.stop()
            shutil.rmtree(place)
            continue
        # What cannot be removed is there for others as long as this process runs.
        problems = [*faulty.problems(place, may_leave=call.name.startswith("unlink")), *faulty.untrue(said)]
        raised = [one for one in said if not isinstance(one, int)]
        counts[f"raised by {len(raised)}, and loaded the {'old' if faulty.loaded == faulty.old else 'new'} one"] += 1
        problems += [f"raises {one}" for one in raised if one is None or one[0] != "CheckpointError"]
        if len(raised) == 1 or (not raised and faulty.loaded != faulty.new):
            problems.append(f"raises {raised}, and there is {faulty.loaded}")
        wrong += [f"rank {rank}, {call}: {problem}" for problem in problems]
    print(mode, stage, over, error, len(points), dict(counts))
    assert not wrong, "\n".join([f"{len(wrong)} of {len(points)}", *wrong])
    assert counts["another file"] < len(points), counts
    counted(f"{error} at a system call of a save", len(points) - counts["another file"])
