"""One system in one ZeRO stage, and the runs that several rows of the table need."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from compare.task import EPOCHS, STEPS, Run, Seen, attempt
from kit.processes import Ranks


@dataclass(frozen=True)
class System:
    """A column of an owner's table, and the names of what it saves."""

    owner: str
    way: str
    weights_only: str  # how weights are saved alone
    kind: str = ""  # "ours", "flag", or plain
    saved: str = "epoch{epoch}"  # at an epoch's end
    middle: str = ""  # in an epoch's middle, where the system saves there by itself
    states: str = ""  # the folder in it that DeepSpeed made
    asynchronous: str = "`patch(async_save=True)`"

    @property
    def title(self) -> str:
        """Both in words."""
        return f"{self.owner}, {self.way}"


class Trial:
    """One system in one ZeRO stage, and the runs that several rows need."""

    def __init__(self, system: System, stage: int, ranks: dict[int, Ranks], folder: Path) -> None:
        self.system, self.stage, self.ranks, self.folder = system, stage, ranks, folder
        self.whole: list[Seen] = self.must("train", "whole")
        if any(len(seen.losses) != seen.count or seen.count != EPOCHS * STEPS for seen in self.whole):
            raise RuntimeError(f"{system.title} has not made {EPOCHS * STEPS} steps in ZeRO-{stage}: {self.whole}")

    def run(self, verb: str, out: str, world_size: int = 2, module: str = "compare.systems", **changes: Any) -> Any:
        """Return each rank's result, or one rank's error text. Options that `Run` lacks go to the verb."""
        known = {field.name: changes.pop(field.name) for field in fields(Run) if field.name in changes}
        run = Run(self.system.owner, self.system.kind, self.stage, world_size, str(self.folder / out), **known)
        answers = self.ranks[world_size](attempt, module=module, verb=verb, run=run, **changes)
        failed = [said for state, said in answers if state == "failed"]
        if failed:
            said = failed[0].replace(f"{run.out}/", "").replace(f"{self.folder}/", "")
            return textwrap.shorten(said, 130, placeholder=" ...")
        return [said for _, said in answers]

    def must(self, verb: str, out: str, **changes: Any) -> Any:
        """Return each rank's result of a run that must not fail."""
        answers = self.run(verb, out, **changes)
        if isinstance(answers, str):
            raise RuntimeError(f"{self.system.title} does not {verb} in ZeRO-{self.stage}: {answers}")
        return answers

    def on_files(self, verb: str, **changes: Any) -> Any:
        """Return what is done with a checkpoint's files, or the error text."""
        answers = self.run(verb, "", 1, "compare.files", **changes)
        return answers if isinstance(answers, str) else answers[0]

    def checkpoint(self, epoch: int = EPOCHS, out: str = "whole") -> str:
        """Return where a run has left its checkpoint of an epoch's end."""
        return str(self.folder / out / self.system.saved.format(step=epoch * STEPS, epoch=epoch - 1))

    def places(self, epoch: int, target: str) -> dict[str, str]:
        """Return what a converter takes: a checkpoint, the folder in it that DeepSpeed made, and where to write."""
        place = self.checkpoint(epoch)
        folder = str(Path(place, self.system.states.format(step=epoch * STEPS)))
        return {"resume": place, "folder": folder, "target": str(self.folder / target)}

    @cached_property
    def by_default(self) -> Any:
        """The run resumed after its first epoch, by a program that sets nothing."""
        return self.run("train", "by-default", resume=self.checkpoint(1))

    @cached_property
    def strict(self) -> bool:
        """Whether the other rows load strictly: unless that fails."""
        return not isinstance(self.by_default, str)

    @cached_property
    def resumed(self) -> Any:
        """The run resumed after its first epoch, one way or the other."""
        return self.by_default if self.strict else self.resume("resumed")

    def resume(self, out: str, **changes: Any) -> Any:
        """Train from the checkpoint of the first epoch."""
        return self.run("train", out, **{"resume": self.checkpoint(1), "strict": self.strict, **changes})

    def goes_on(self, resumed: Any, steps: int = STEPS) -> bool:
        """Whether these are the uninterrupted run's losses from a step on, and its weights at the end, bit for bit."""
        return not isinstance(resumed, str) and all(
            again.losses == seen.losses[steps:] and again.trained == seen.trained
            for again, seen in zip(resumed, self.whole, strict=True)
        )
