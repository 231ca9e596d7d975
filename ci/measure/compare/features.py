"""The rows of the table: each a feature, and how its outcome is measured for a system in a ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare.task import EPOCHS, MIDDLE, OURS, STEPS
from compare.trial import Trial
from kit import nodes

TOLERANCE = 1e-5  # of a loss, where other ranks add up other sums
SPEED = 2e6  # bytes a second of the slow disk

Outcome = tuple[str, str]
"""What a cell of the table says in one ZeRO stage, and a footnote."""
Measure = Callable[[Trial], Outcome]
STAGES = (2, 3)
FEATURES: dict[str, Measure] = {}
ROWS: dict[str, list[list[int]]] = {}  # by feature, the ZeRO stages that a row of the table is about


def feature(title: str, rows: list[list[int]] | None = None) -> Callable[[Measure], Measure]:
    """Make a function a row of the table, or one for each list of ZeRO stages."""

    def add(measure: Measure) -> Measure:
        FEATURES[title], ROWS[title] = measure, rows or [list(STAGES)]
        return measure

    return add


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _yes(good: bool, answers: Any = "") -> Outcome:
    """Return yes or no, with the error text if the answers are one."""
    return "yes" if good else "no", answers if isinstance(answers, str) else ""


@feature("size in MB (times the floor)", [[2], [3]])
def size(trial: Trial) -> Outcome:
    megabytes = _size(Path(trial.checkpoint())) / 1e6
    # A value and two moments for each element, of four bytes.
    least = trial.whole[0].trainable * 12 / 1e6
    return f"{megabytes:.2f} ({megabytes / least:.1f})", ""


@feature("the tied embedding is left out")
def tied(trial: Trial) -> Outcome:
    return _yes(not trial.on_files("embeddings", checkpoint=trial.checkpoint()))


@feature("a run resumes without extra settings")
def resumes(trial: Trial) -> Outcome:
    return _yes(trial.strict, trial.by_default)


@feature("the resumed run equals the uninterrupted run bit for bit")
def bit_for_bit(trial: Trial) -> Outcome:
    return _yes(trial.goes_on(trial.resumed), trial.resumed)


@feature("a buffer changed by training is restored")
def buffers(trial: Trial) -> Outcome:
    return _yes(all(seen.count == EPOCHS * STEPS for seen in trial.resumed), trial.resumed)


@feature("a run saved within an epoch resumes with the remaining batches, bit for bit")
def mid_epoch(trial: Trial) -> Outcome:
    if not trial.system.middle:
        return "-", "the loop is the program's own, which skips the batches that were trained on"
    saved = str(trial.folder / "whole" / trial.system.middle.format(step=MIDDLE))
    again = trial.resume("from-the-middle", resume=saved)
    return _yes(trial.goes_on(again, MIDDLE), again)


@feature("evaluation from a checkpoint equals evaluation of the model in memory", [[2], [3]])
def evaluates(trial: Trial) -> Outcome:
    losses = trial.run("evaluate", "evaluated", resume=trial.checkpoint(), strict=trial.strict)
    same = not isinstance(losses, str) and abs(losses[0] / trial.whole[0].evaluated - 1) < TOLERANCE
    return _yes(same, losses)


@feature("loading onto a different base raises an error")
def wrong_base(trial: Trial) -> Outcome:
    again = trial.resume("wrong-base", seed=2)
    if trial.goes_on(again):
        return "-", "the checkpoint contains the base, which is loaded"
    return _yes(isinstance(again, str), again)


@feature("loading into LoRA on other modules of the same shapes raises an error")
def wrong_modules(trial: Trial) -> Outcome:
    again = trial.resume("wrong-modules", targets=("k_proj", "v_proj"))
    return _yes(isinstance(again, str), again)


@feature("a run saved on two ranks resumes on one")
def other_ranks(trial: Trial) -> Outcome:
    def follows(again: Any) -> bool:
        expected = [sum(pair) / 2 for pair in zip(*(seen.losses[STEPS:] for seen in trial.whole), strict=True)]
        return not isinstance(again, str) and all(
            abs(loss / mean - 1) < TOLERANCE for loss, mean in zip(again[0].losses, expected, strict=True)
        )

    ours = trial.system.kind == OURS
    again = trial.resume("one-rank", world_size=1)
    if follows(again):
        return "yes", "with `patch(elastic=True)`" if ours else ""
    if ours:
        return _yes(False, again)
    places = trial.places(1, f"universal/{Path(trial.checkpoint(1)).name}")
    universal = trial.on_files("universal", **places)
    if not isinstance(universal, str):
        universal = trial.resume("universal-one-rank", world_size=1, resume=places["target"], universal=True)
    why = again if isinstance(again, str) else "different losses"
    note = f"{why}; after DeepSpeed's conversion to a universal checkpoint"
    if follows(universal):
        restored = universal[0].count == EPOCHS * STEPS
        return "converted", f"{note} it resumes" + ("" if restored else ", but the buffer is not restored")
    return "no", f"{note}: {universal if isinstance(universal, str) else 'different losses'}"


@feature("the converter writes one fp32 file")
def fp32_file(trial: Trial) -> Outcome:
    def whole(tensors: Any) -> bool:
        return not isinstance(tensors, str) and trial.whole[0].trained.items() <= tensors.items()

    tensors = trial.on_files("consolidate", **trial.places(EPOCHS, "fp32"))
    if whole(tensors) or trial.system.owner in ("Lightning", "FSDP2 and DCP"):
        return _yes(whole(tensors), tensors)
    option = {"exclude_frozen_parameters": True}
    if whole(trial.on_files("consolidate", **trial.places(EPOCHS, "fp32-trainable"), **option)):
        return "yes", "with `exclude_frozen_parameters=True`"
    return _yes(False, tensors)


@feature("each checkpoint contains an adapter that PEFT can load")
def peft_adapter(trial: Trial) -> Outcome:
    def adapters(out: str) -> list[Path]:
        return [file.parent for file in Path(trial.checkpoint(out=out)).rglob("adapter_config.json")]

    folders, note = adapters("whole"), ""
    if not folders and trial.system.kind == OURS:
        trial.run("train", "export", export=True)
        folders, note = adapters("export"), 'with `patch(export="peft")`'
    if not folders:
        return _yes(False)
    loaded = trial.on_files("adapter", folder=str(folders[0]))
    return _yes(True, note) if loaded == trial.whole[0].trained else _yes(False, loaded)


@feature("size in MB of the weights alone, without optimizer state", [[2], [3]])
def weights_only(trial: Trial) -> Outcome:
    trial.must("train", "weights", weights_only=True)
    place = Path(trial.checkpoint(out="weights"))
    files = [place] if place.is_file() else [f for f in place.rglob("*") if f.is_file() and f.suffix != ".py"]
    if any(b"exp_avg" in file.read_bytes() for file in files):
        return "no", f"{trial.system.weights_only} still writes optimizer state"
    return f"{_size(place) / 1e6:.2f}", trial.system.weights_only


@feature("after a kill during a save, the same program resumes from the previous save", [[2]])
def killed(trial: Trial) -> Outcome:
    trial.must("train", "killed", halt=True)
    if not (trial.folder / "killed-left").exists():
        raise RuntimeError(f"{trial.system.title} has not saved twice")
    again = trial.run("train", "killed-left", last=True, strict=trial.strict)
    before = trial.checkpoint(1, "killed-left")
    if not trial.goes_on(again) and Path(before).exists():
        named = trial.run("train", "killed-named", resume=before, strict=trial.strict)
        if trial.goes_on(named):
            why = again if isinstance(again, str) else "a different run"
            return "no", f"{why}; it resumes if given the previous folder"
    return _yes(trial.goes_on(again), again)


@feature("training goes on while a checkpoint is written to a slow disk", [[2]])
def does_not_wait(trial: Trial) -> Outcome:
    backing, slow = trial.folder / "backing", trial.folder / "slow"
    backing.mkdir()
    with nodes.mounted(backing, slow, speed=SPEED):
        ranks = trial.must("train", "slow/run", asynchronous=True)
        # Between the last step of the first epoch and the next one it has saved, as long as the disk takes if it waits.
        taken = _size(Path(trial.checkpoint(1, "slow/run"))) / SPEED
        if any(seen.times[STEPS] - seen.times[STEPS - 1] > taken for seen in ranks):
            return _yes(False)
        again = trial.run("train", "slow-again", resume=trial.checkpoint(1, "slow/run"), strict=trial.strict)
    good = trial.goes_on(again)
    return _yes(good, f"with {trial.system.asynchronous}" if good else again)
