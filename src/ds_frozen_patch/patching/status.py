"""What is installed: the targets of `patch()`, what probing finds of them, and what `status()` says."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import process
from ..common.errors import PatchError
from ..common.probing import Finding, Target, modules_of, probe
from ..settings import FLAG
from .tested import newer_than_tested
from .wrapping import ENGINE, TARGETS

if TYPE_CHECKING:
    from .patch import Patch


def probe_all() -> dict[str, Finding]:
    """Probe every target, by its name."""
    return {what.name: probe(what) for what in TARGETS}


def check(findings: Mapping[str, Finding]) -> None:
    """Check that what must be patched can be patched.

    Raises:
        PatchError: one of the targets cannot be patched and must not be left alone, or DeepSpeed is not installed.
    """
    if findings[ENGINE.name].verdict == "not installed":
        raise PatchError("DeepSpeed is not installed. Install it: pip install 'deepspeed>=0.10.1'.")
    found = {what: findings[what.name] for what in TARGETS if findings[what.name].verdict == "refused"}
    if not all(what.is_optional for what in found):
        raise PatchError(refusal([(what.name, finding) for what, finding in found.items()]))


def refusal(refused: Sequence[tuple[str, Finding]]) -> str:
    """The message of an error that names what cannot be patched, and why."""
    reasons = [f"{name} {found.version or ''}: {found.reason}. To do: {found.remedy}." for name, found in refused]
    return "\n".join(["ds_frozen_patch cannot patch what is installed; nothing is patched.", *reasons])


def to_be_wrapped(findings: Mapping[str, Finding]) -> dict[str, list[Target]]:
    """What to wrap, by the name of its module."""
    modules: dict[str, list[Target]] = {}
    for what in TARGETS:
        if findings[what.name].verdict in ("patchable", "has the flag") and not findings[what.name].complete:
            for module in modules_of(what):
                modules.setdefault(module, []).append(what)
    return modules


def notes_on(findings: Mapping[str, Finding]) -> Iterator[str]:
    """What the program is told of what is installed: untested releases, and what is left as it is."""
    there = [what for what in TARGETS if findings[what.name].verdict in ("patchable", "has the flag")]
    # A program of Lightning's may have nothing to do with Accelerate and Trainer.
    needed = [what for what in there if not what.is_optional or "lightning" not in "".join(one.name for one in there)]
    newer = {
        f"{what.distributions[0]} {findings[what.name].version} (tested: up to {tested})"
        for what in needed
        if (tested := newer_than_tested(what, findings[what.name].version))
    }
    if newer:
        yield (
            f"ds_frozen_patch is applied to a release that is newer than all tested ones: {', '.join(sorted(newer))}."
            " Nothing has to be done: a warning follows if an engine, or what makes it, lacks what the package"
            " relies on."
        )
    if complete := [f"{name} {finding.version}" for name, finding in findings.items() if finding.complete]:
        yield (
            f"patch() does not touch what our patch series is applied to: {', '.join(complete)}. Its checkpoints are"
            f" full unless you pass DeepSpeedStrategy({FLAG}=True), and it does not verify the base."
        )


@dataclass(frozen=True)
class TargetStatus:
    """The state of one framework, or of DeepSpeed.

    `state` is "wrapped", "waiting for import" (will be wrapped when it is imported), "can be wrapped" (`patch()` is not
    in force, or something has undone it), "has it itself" (a Lightning with the flag, before `patch()`, or with our
    patch series), "cannot be wrapped" or "not installed". `version` is that of its distribution, or None. `found` and
    `remedy` are sentences for a person.
    """

    state: str
    version: str | None
    found: str
    remedy: str


class Status(dict[str, TargetStatus]):
    """A `TargetStatus` per framework, by its package's name, and one for "deepspeed". Prints as a table.

    Attributes:
        in_force: whether the program has called `patch()`, or `ds-frozen-patch run` has started it.
        problem: why `patch()` raises here; empty if it does not.
    """

    def __init__(self, items: dict[str, TargetStatus], in_force: bool, problem: str) -> None:
        super().__init__(items)
        self.in_force, self.problem = in_force, problem

    def __str__(self) -> str:
        rows = [("framework", "version", "state", "found")]
        for name, item in self.items():
            reason = f"{item.found}: {item.remedy}" if item.remedy else item.found
            rows.append((name, item.version or "-", item.state, reason))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        ]
        return "\n".join([f"In force: {'yes' if self.in_force else 'no'}", *lines, *filter(None, [self.problem])])


def status() -> Status:
    """What is installed, and what `patch()` has done or would do with it.

    A target that is not imported yet is judged by the text of its source; its import may show more.

    Returns:
        The frameworks by name, including those that are not installed. They are the four packages of Lightning,
        "accelerate", "transformers" and "deepspeed".
    """
    patch, problem = process.state.patch, ""
    findings = patch.findings if patch is not None else probe_all()
    if patch is None:
        try:
            check(findings)
        except PatchError as error:
            problem = str(error)
    in_force = patch is not None or (not problem and bool(waiting()))
    states = {what.name: _status_of(what, findings[what.name], patch, in_force, problem) for what in TARGETS}
    return Status(states, in_force, problem)


def waiting() -> list[Any]:
    """The bootstrap's finder, under `ds-frozen-patch run` and until it has patched."""
    return [finder for finder in sys.meta_path if hasattr(finder, "leave_unpatched")]


def _status_of(what: Target, finding: Finding, patch: Patch | None, in_force: bool, problem: str) -> TargetStatus:
    state, reason, remedy = finding.verdict, finding.reason, finding.remedy
    left = process.state.left.get(what.name, "").partition(": ")[2]
    if state == "refused" or left:
        state, reason, remedy = "cannot be wrapped", left or reason, what.remedy
    elif problem and state != "not installed":
        state, reason = "cannot be wrapped", "patch() raises here, and patches nothing"
    elif finding.complete or (state == "has the flag" and not in_force):
        state = "has it itself"
    elif state != "not installed":
        state = "waiting for import" if in_force else "can be wrapped"
    if patch is not None and not remedy and what.module in patch.specs:
        state = "wrapped"
        if not patch.has_wrapped(what.module):
            state, reason, remedy = "can be wrapped", f"{what.module} has been reloaded since patch()", "call it again"
        elif replaced := patch.replaced(what):
            state, reason = "can be wrapped", f"{what.class_name}.{', '.join(replaced)} has been replaced since patch()"
            remedy = "call patch() after whatever replaces it, or let that call the method which it replaces"
    return TargetStatus(state, finding.version, reason, remedy)
