"""The rows of the table: each a feature, and how its outcome is measured for a system in a ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import task
from compare.task import EPOCHS, MIDDLE, STEPS
from compare.trial import Trial

TOLERANCE = 1e-5  # of a loss, where other ranks add up other sums


@dataclass(frozen=True)
class Outcome:
    """What a cell of the table says in one ZeRO stage, and a footnote."""

    value: str
    note: str = ""


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


def _size(place: str) -> int:
    file = Path(place)
    return file.stat().st_size if file.is_file() else sum(f.stat().st_size for f in file.rglob("*") if f.is_file())


def _yes(good: bool, note: str = "") -> Outcome:
    return Outcome("yes" if good else "no", note)


def _said(answers: Any) -> str:
    return answers if isinstance(answers, str) else ""


@feature("size in MB (times the floor)", [[2], [3]])
def size(trial: Trial) -> Outcome:
    found = _size(trial.checkpoint()) / 1e6
    # A value and two moments for each element, of four bytes.
    least = trial.whole[0].trainable * 12 / 1e6
    return Outcome(f"{found:.2f} ({found / least:.1f})")


@feature("the tied embedding is left out")
def tied(trial: Trial) -> Outcome:
    (found,) = trial.run("embeddings", "", 1, "compare.files", checkpoint=trial.checkpoint())
    return _yes(not found)


@feature("a run resumes without extra settings")
def resumes(trial: Trial) -> Outcome:
    return _yes(trial.strict, _said(trial.by_default))


@feature("the resumed run equals the uninterrupted run bit for bit")
def bit_for_bit(trial: Trial) -> Outcome:
    return _yes(trial.goes_on(trial.resumed), _said(trial.resumed))


@feature("a buffer changed by training is restored")
def buffers(trial: Trial) -> Outcome:
    return _yes(all(seen.count == EPOCHS * STEPS for seen in trial.resumed), _said(trial.resumed))


@feature("a run saved within an epoch resumes with the remaining batches, bit for bit")
def mid_epoch(trial: Trial) -> Outcome:
    if not trial.system.middle:
        return Outcome("-", "the loop is the program's own, which skips the batches that were trained on")
    saved = trial.file(f"whole/{trial.system.middle.format(step=MIDDLE)}")
    again = trial.resume("from-the-middle", resume=saved)
    note = _said(again)
    if not note and again[0].batches[0] == trial.whole[0].batches[0]:
        note = "it starts again at the first batch of the epoch"
    return _yes(trial.goes_on(again, MIDDLE), note)


@feature("evaluation from a checkpoint equals evaluation of the model in memory", [[2], [3]])
def evaluates(trial: Trial) -> Outcome:
    def same(found: Any) -> bool:
        return not isinstance(found, str) and abs(found[0] / trial.whole[0].evaluated - 1) < TOLERANCE

    def evaluate(**options: Any) -> Any:
        return trial.run("evaluate", "evaluated", resume=trial.checkpoint(), strict=trial.strict, **options)

    found = evaluate()
    own_loop = trial.system.module in ("compare.deepspeed", "compare.accelerate")
    if own_loop and not same(bare := evaluate(optimizer=False)):
        return _yes(same(found), f"only with an optimizer; without one: {_said(bare) or 'a different loss'}")
    if trial.system.module == "compare.huggingface" and not same(found) and same(evaluate(with_deepspeed=False)):
        return Outcome("no", f"{_said(found) or 'a different loss'}; it works without its DeepSpeed config")
    return _yes(same(found), _said(found))


@feature("loading onto a different base raises an error")
def wrong_base(trial: Trial) -> Outcome:
    again = trial.resume("wrong-base", seed=2)
    if trial.goes_on(again):
        return Outcome("-", "the checkpoint contains the base, which is loaded")
    return _refused(trial, again)


@feature("loading into LoRA on other modules of the same shapes raises an error")
def wrong_modules(trial: Trial) -> Outcome:
    return _refused(trial, trial.resume("wrong-modules", targets=("k_proj", "v_proj")))


def _refused(trial: Trial, again: Any) -> Outcome:
    if isinstance(trial.resumed, str):
        raise RuntimeError(f"{trial.system.title} cannot resume at all: {trial.resumed}")
    return _yes(isinstance(again, str), _said(again))


@feature("a run saved on two ranks resumes on one")
def other_ranks(trial: Trial) -> Outcome:
    def follows(again: Any) -> bool:
        expected = [sum(pair) / 2 for pair in zip(*(seen.losses[STEPS:] for seen in trial.whole), strict=True)]
        return not isinstance(again, str) and all(
            abs(loss / mean - 1) < TOLERANCE for loss, mean in zip(again[0].losses, expected, strict=True)
        )

    ours = trial.system.kind == task.OURS
    again = trial.resume("one-rank", world_size=1)
    if follows(again):
        return Outcome("yes", "with `patch(elastic=True)`" if ours else "")
    if ours:
        return Outcome("no", _said(again))
    target = trial.file(f"universal/{Path(trial.checkpoint(1)).name}")
    converted = trial.run(
        "universal", "", 1, "compare.files", resume=trial.checkpoint(1), folder=trial.states(1), target=target
    )
    universal = converted
    if not isinstance(converted, str):
        universal = trial.resume("universal-one-rank", world_size=1, resume=target, universal=True)
    note = f"{_said(again) or 'different losses'}; after DeepSpeed's conversion to a universal checkpoint"
    if follows(universal):
        restored = universal[0].count == EPOCHS * STEPS
        return Outcome("converted", f"{note} it resumes" + ("" if restored else ", but the buffer is not restored"))
    return Outcome("no", f"{note}: {_said(universal) or 'different losses'}")


@feature("the converter writes one fp32 file")
def fp32_file(trial: Trial) -> Outcome:
    def convert(name: str, **options: Any) -> Any:
        places = {"resume": trial.checkpoint(), "folder": trial.states(), "target": trial.file(name)}
        return trial.run("consolidate", "", 1, trial.system.consolidates, **places, **options)

    def whole(found: Any) -> bool:
        return not isinstance(found, str) and trial.whole[0].trained.items() <= found[0].items()

    found = convert("fp32")
    if whole(found) or trial.system.consolidates != "compare.files":
        return _yes(whole(found), _said(found))
    again = convert("fp32-trainable", exclude_frozen_parameters=True)
    return Outcome("yes", "with `exclude_frozen_parameters=True`") if whole(again) else Outcome("no", _said(found))


@feature("each checkpoint contains an adapter that PEFT can load")
def peft_adapter(trial: Trial) -> Outcome:
    def adapters(out: str) -> list[Path]:
        return [file.parent for file in Path(trial.checkpoint(out=out)).rglob("adapter_config.json")]

    folders, note = adapters("whole"), ""
    if not folders and trial.system.kind == task.OURS:
        trial.run("train", "export", export=True)
        folders, note = adapters("export"), 'with `patch(export="peft")`'
    if not folders:
        return Outcome("no")
    found = trial.run("adapter", "", 1, "compare.files", folder=str(folders[0]))
    good = not isinstance(found, str) and found[0] == trial.whole[0].trained
    return _yes(good, note if good else _said(found))


@feature("size in MB of the weights alone, without optimizer state", [[2], [3]])
def weights_only(trial: Trial) -> Outcome:
    saved = trial.run("train", "weights", weights_only=True)
    if isinstance(saved, str):
        raise RuntimeError(f"{trial.system.title} does not train: {saved}")
    place = Path(trial.checkpoint(out="weights"))
    files = [place] if place.is_file() else [f for f in place.rglob("*") if f.is_file() and f.suffix != ".py"]
    if any(b"exp_avg" in file.read_bytes() for file in files):
        return Outcome("no", f"{trial.system.weights_only} still writes optimizer state")
    found = _size(str(place)) / 1e6
    return Outcome(f"{found:.2f}", trial.system.weights_only)


@feature("after a kill during a save, the same program resumes from the previous save", [[2]])
def killed(trial: Trial) -> Outcome:
    saved = trial.run("train", "killed", halt=True)
    if isinstance(saved, str) or not Path(trial.file("killed-left")).exists():
        raise RuntimeError(f"{trial.system.title} has not saved twice: {saved}")
    again = trial.run("train", "killed-left", last=True, strict=trial.strict)
    before = trial.checkpoint(1, "killed-left")
    if not trial.goes_on(again) and Path(before).exists():
        named = trial.run("train", "killed-named", resume=before, strict=trial.strict)
        if trial.goes_on(named):
            return Outcome("no", f"{_said(again) or 'a different run'}; it resumes if given the previous folder")
    return _yes(trial.goes_on(again), _said(again))


@feature("training goes on while a checkpoint is written to a slow disk", [[2]])
def does_not_wait(trial: Trial) -> Outcome:
    saved = trial.run("train", "slow", slow=True)
    if isinstance(saved, str):
        raise RuntimeError(f"{trial.system.title} does not train: {saved}")
    if not all(seen.beside for seen in saved):
        return Outcome("no")
    again = trial.run("train", "slow-again", resume=trial.checkpoint(1, "slow"), strict=trial.strict)
    return _yes(trial.goes_on(again), _said(again) or f"with {trial.system.asynchronous}")
