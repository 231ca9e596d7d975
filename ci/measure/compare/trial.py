"""One system in one ZeRO stage, and the runs that several rows of the table need."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compare import task
from compare.task import EPOCHS, STEPS, Run, Seen
from ranks import Ranks


@dataclass(frozen=True)
class System:
    """A column of an owner's table, the module that runs it, and the names of what it saves."""

    owner: str
    way: str
    module: str
    saved: str  # at an epoch's end
    weights_only: str  # how weights are saved alone
    kind: str = ""  # which of the systems that the module runs
    middle: str = ""  # in an epoch's middle, where the system saves there by itself
    states: str = ""  # the folder in it that DeepSpeed made
    asynchronous: str = "`patch(async_save=True)`"
    consolidates: str = "compare.files"  # the module whose `consolidate` makes one fp32 file of it

    @property
    def title(self) -> str:
        """Both in words."""
        return f"{self.owner}, {self.way}"


class Trial:
    """One system in one ZeRO stage, and the runs that several rows need."""

    def __init__(self, system: System, stage: int, ranks: dict[int, Ranks], folder: Path) -> None:
        self.system, self.stage, self.ranks, self.folder = system, stage, ranks, folder
        answers = self.run("train", "whole")
        if isinstance(answers, str):
            raise RuntimeError(f"{system.title} does not train in ZeRO-{stage}: {answers}")
        self.whole: list[Seen] = answers
        if any(len(seen.losses) != seen.count or seen.count != EPOCHS * STEPS for seen in answers):
            raise RuntimeError(f"{system.title} has not made {EPOCHS * STEPS} steps in ZeRO-{stage}: {answers}")

    def run(self, verb: str, out: str, world_size: int = 2, module: str = "", **changes: Any) -> Any:
        """Return each rank's result, or one rank's error text. Options that `Run` lacks go to the verb."""
        known = {name: changes.pop(name) for name in list(changes) if name in Run.__dataclass_fields__}
        run = Run(self.system.kind, self.stage, world_size, str(self.folder / out), **known)
        answers = self.ranks[world_size](
            task.attempt, module=module or self.system.module, verb=verb, run=run, **changes
        )
        failed = [said for state, said in answers if state == "failed"]
        if failed:
            said = failed[0].replace(f"{run.out}/", "").replace(f"{self.folder}/", "")
            return textwrap.shorten(said, 130, placeholder=" ...")
        return [said for _, said in answers]

    def checkpoint(self, epoch: int = EPOCHS, out: str = "whole") -> str:
        """Return where a run has left its checkpoint of an epoch's end."""
        return str(self.folder / out / self.system.saved.format(step=epoch * STEPS, epoch=epoch - 1))

    def states(self, epoch: int = EPOCHS) -> str:
        """Return the folder in it that DeepSpeed made."""
        return str(Path(self.checkpoint(epoch), self.system.states.format(step=epoch * STEPS)))

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

    def file(self, name: str) -> str:
        """Return a place for something that a row makes."""
        return str(self.folder / name)
