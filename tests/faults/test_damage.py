"""Damaged checkpoints: each raises an error that names the file, at load on every rank and in `verify`.

Damage without an effect loads the same values as the undamaged checkpoint. Changes made on purpose, with new checksums
and a new record, cannot be detected.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.checkpoints import precision_of, records_of

import ds_frozen_patch
from ds_frozen_patch import verify
from ds_frozen_patch.common.files import RECORD

RANKS = 2
OTHER_STAGE = {0: 2, 1: 2, 2: 1, 3: 2}
BY_NAME = ("CheckpointError", "CheckpointMismatchError", "FileNotFoundError")


def save(out: str, world_size: int, stage: int, seed: int) -> None:
    """One checkpoint after each of two epochs."""
    ds_frozen_patch.patch()
    fabric = runs.fabric(world_size, stage, precision_of(stage))
    model, optimizer = runs.fabric_setup(fabric, seed=seed)
    for epoch in (1, 2):
        runs.fabric_epoch(fabric, model, optimizer)
        fabric.save(f"{out}/{epoch}.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})


def load_all(world_size: int, stage: int, paths: list[str]) -> list[tuple[str, str]]:
    """Load each checkpoint; return the error, or "loaded" and a digest of the loaded state."""
    ds_frozen_patch.patch()
    fabric = runs.fabric(world_size, stage, precision_of(stage))
    model, optimizer = runs.fabric_setup(fabric)
    found = []
    for path in paths:
        try:
            fabric.load(path, {"model": model, "optimizer": optimizer})
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            kept = [leaf for leaf in leaves(optimizer.state_dict()) if isinstance(leaf, torch.Tensor)]
            found.append(("loaded", repr((runs.trained_state(model), [runs.digest(tensor) for tensor in kept]))))
    return found


def leaves(value: Any) -> Iterator[Any]:
    """Return the leaves of a tree of containers."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


@dataclass(frozen=True)
class Damage:
    """A change to a checkpoint, and what the error must name.

    It may have no effect, or `verify` may say no more than that the record is missing.
    """

    kind: str
    do: Callable[[Path], object]
    named: str
    may_mean_nothing: bool = False
    is_unverified: bool = False


class Runs:
    """The checkpoint that is damaged, and those that parts are taken from."""

    def __init__(self, ranks: Any, folder: Path, stage: int) -> None:
        def saved(name: str, world_size: int = RANKS, stage: int = stage, seed: int = 1) -> Path:
            ranks(world_size, save, out=str(folder / name), world_size=world_size, stage=stage, seed=seed)
            return folder / name / "1.ckpt"

        self.stage = stage
        self.own = saved("own")
        self.others = {
            "another step": self.own.with_name("2.ckpt"),
            "another run": saved("run", seed=2),
            "another ZeRO stage": saved("stage", stage=OTHER_STAGE[stage]),
            "another world size": saved("ranks", world_size=1),
        }
        self.files = sorted(file.relative_to(self.own) for file in self.own.rglob("*.pt"))


def damages(made: Runs, chance: random.Random) -> Iterator[Damage]:
    """Yield all damage that is tried on one run's checkpoint; without its record, that of a single file."""
    for damage in of_files(made, chance):
        yield damage
        if not damage.kind.startswith(("a file of another", "files of two ranks")):
            yield replace(damage, do=partial(without_record, damage.do), is_unverified=True)
    record = Path("checkpoint") / RECORD
    yield from of_bytes(made.own, record, chance)
    for key, more in EDITS.items():
        yield Damage("an edited record", partial(edit_record, f'"{key}": ', f'"{key}": {more}'), RECORD)
    for what, other in made.others.items():
        yield Damage(f"the record of {what}", partial(take, record, other), ".ckpt")
    for text in ("", "nowhere", "../own", "\0", "checkpoint/checkpoint"):
        # Lightning does not ask it.
        yield Damage("a wrong tag in `latest`", partial(put, Path("latest"), text), ".ckpt", may_mean_nothing=True)


def of_files(made: Runs, chance: random.Random) -> Iterator[Damage]:
    """Yield damage to DeepSpeed's files."""
    for file in made.files:
        yield from of_bytes(made.own, file, chance)
        yield Damage("a missing file", partial(remove, file), ".ckpt")
        yield Damage("a file that is no checkpoint file", partial(put, file, "nothing of the kind"), file.name)
        for what, other in made.others.items():
            if (other / file).exists() and len(made.files) > 1:
                yield Damage(f"a file of {what}", partial(take, file, other), ".ckpt")
    yield from swapped(made.files)


def of_bytes(own: Path, file: Path, chance: random.Random) -> Iterator[Damage]:
    """Yield truncations and flipped bits: in the middle of each record, and at random."""
    size = (own / file).stat().st_size
    for length in (0, 1, size // 2, size - 1, *(chance.randrange(size) for _ in range(4))):
        yield Damage("a truncated file", partial(cut, file, length), file.name)
    records = records_of(own / file).values() if file.suffix == ".pt" else []
    places = [place[len(place) // 2] for place in records if place]
    for place in (*places, *(chance.randrange(size) for _ in range(10))):
        # Of some no one asks: padding, a date.
        yield Damage("a flipped bit", partial(flip, file, place, chance.randrange(8)), file.name, may_mean_nothing=True)


def swapped(files: list[Path]) -> Iterator[Damage]:
    """Exchange the files of two ranks."""
    for kind in ("model_states", "optim_states", "states"):
        first, last = ([f for f in files if kind in f.name and f"rank_{rank}_mp" in f.name] for rank in (0, RANKS - 1))
        if first:
            yield Damage("files of two ranks swapped", partial(swap, first, last), ".ckpt")


def cut(file: Path, length: int, path: Path) -> None:
    (path / file).write_bytes((path / file).read_bytes()[:length])


def flip(file: Path, at: int, bit: int, path: Path) -> None:
    content = bytearray((path / file).read_bytes())
    content[at] ^= 1 << bit
    (path / file).write_bytes(content)


def remove(file: Path, path: Path) -> None:
    (path / file).unlink()


def put(file: Path, text: str, path: Path) -> None:
    (path / file).write_text(text)


def take(file: Path, other: Path, path: Path) -> None:
    shutil.copy(other / file, path / file)


def swap(some: list[Path], others: list[Path], path: Path) -> None:
    for one, other in zip(some, others, strict=True):
        (path / one).rename(path / "aside")
        (path / other).rename(path / one)
        (path / "aside").rename(path / other)


def edit_record(old: str, new: str, path: Path) -> None:
    record = path / "checkpoint" / RECORD
    text = record.read_text()
    assert old in text
    record.write_text(text.replace(old, new, 1))


def without_record(do: Callable[[Path], object], path: Path) -> None:
    """Damage a checkpoint whose record was not copied."""
    (path / "checkpoint" / RECORD).unlink()
    do(path)


EDITS = {
    **dict.fromkeys(("step", "size", "zero_stage", "world_size", "total_bytes"), "1"),
    **{"names": '["other"], "other": ', "shape": '[7], "other": ', "dtype": '"int8", "other": '},
    **{"fingerprint": 'null, "other": ', "save": '"ba9876543210", "other": ', "format": "1"},
}
"""What is written before a value of the record, by its key."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("stage", (0, 1, 2, 3) if metafunc.config.getoption("--faults") else (2, 3))


def test_damage_is_refused_by_name(
    ranks: Any, stage: int, tmp_path: Path, long: bool, counted: Callable[[str, int], None]
) -> None:
    chance = random.Random(stage)
    made = Runs(ranks, tmp_path, stage)
    tried = list(damages(made, chance))
    if not long:
        tried = chance.sample(tried, 40)
    paths = [tmp_path / f"{number}.ckpt" for number in range(len(tried) + 1)]
    for path in paths:
        shutil.copytree(made.own, path)
    for path, damage in zip(paths[1:], tried, strict=True):
        damage.do(path)
    answers = ranks(RANKS, load_all, world_size=RANKS, stage=stage, paths=[str(path) for path in paths])
    whole, *damaged = zip(*answers, strict=True)
    assert {kind for kind, _ in whole} == {"loaded"}
    assert verify(paths[0]).problems == ()
    wrong = []
    for path, damage, said in zip(paths[1:], tried, damaged, strict=True):
        if damage.may_mean_nothing and said == whole:
            continue
        found = verify(path).problems
        refused = all(kind in BY_NAME and damage.named in text for kind, text in said)
        if not refused or not (any(damage.named in problem for problem in found) or (damage.is_unverified and found)):
            wrong.append((damage, [(kind, text[:500]) for kind, text in said], found))
    assert wrong == [], "\n".join(map(repr, wrong))
    for kind, count in Counter(damage.kind for damage in tried).items():
        counted(f"damage: {kind}", count)
