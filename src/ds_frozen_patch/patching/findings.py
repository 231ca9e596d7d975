"""What probing finds of all targets: what is wrapped, and what the caller of `patch()` is told of it."""

from __future__ import annotations

from collections.abc import Iterator

from ..common.errors import PatchError
from ..common.probing import Finding, Target, probe
from ..frameworks.targets import BESIDE, OWNERS, may_be_left_alone
from ..internals import ENGINE
from ..settings import FLAG
from .tested import newer_than_tested


def probe_all() -> dict[str, Finding]:
    """Probe every target, by its name."""
    return {what.name: probe(what) for what in (*OWNERS, ENGINE)}


def check(findings: dict[str, Finding]) -> None:
    """Check that what must be patched can be patched.

    Raises:
        PatchError: one of the targets cannot be patched and must not be left alone, or DeepSpeed is not installed.
    """
    if findings[ENGINE.name].verdict == "not installed":
        raise PatchError("DeepSpeed is not installed. Install it: pip install 'deepspeed>=0.10.1'.")
    refused = [(name, finding) for name, finding in findings.items() if finding.verdict == "refused"]
    if not all(may_be_left_alone(name, _served(findings)) for name, _ in refused):
        raise PatchError(refusal(refused))


def _served(findings: dict[str, Finding]) -> set[str]:
    """The names of the targets that can be patched."""
    return {name for name, finding in findings.items() if finding.verdict in ("patchable", "native")}


def refusal(refused: list[tuple[str, Finding]]) -> str:
    """The message of an error that names what cannot be patched, and why."""
    return f"ds_frozen_patch cannot patch what is installed; nothing is patched.\n{_reasons(refused)}"


def _reasons(refused: list[tuple[str, Finding]]) -> str:
    return "\n".join(
        f"{name} {finding.version or ''}: {finding.reason}. To do: {finding.remedy}." for name, finding in refused
    )


def to_be_served(findings: dict[str, Finding]) -> dict[str, list[Target]]:
    """What to wrap, by the name of its module."""
    modules: dict[str, list[Target]] = {}
    for what in (*OWNERS, ENGINE, *BESIDE):
        if what.name in _served(findings) and not findings[what.name].complete:
            modules.setdefault(what.module, []).append(what)
    return modules


def notes_on(findings: dict[str, Finding]) -> Iterator[str]:
    """What the program is told of what is installed: untested releases, and what is left as it is."""
    newer = {
        f"{what.distributions[0]} {findings[what.name].version} (tested: up to {tested})"
        for what in (*OWNERS, ENGINE)
        # A program of Lightning's may have nothing to do with Accelerate and Trainer.
        if not may_be_left_alone(what.name, _served(findings))
        if (tested := newer_than_tested(what, findings[what.name].version))
    }
    if newer:
        yield (
            f"ds_frozen_patch is applied to a release that is newer than all tested ones: {', '.join(sorted(newer))}."
            " An engine of a DeepSpeed that lacks what ds_frozen_patch relies on is saved whole, with a warning when it"
            " is created. Look for a newer ds_frozen_patch."
        )
    if complete := [f"{name} {finding.version}" for name, finding in findings.items() if finding.complete]:
        yield (
            f"patch() does not touch what our patch series is applied to: {', '.join(complete)}. Its checkpoints are"
            f" full unless you pass DeepSpeedStrategy({FLAG}=True), and it does not verify the base."
        )
    if refused := [(name, finding) for name, finding in sorted(findings.items()) if finding.verdict == "refused"]:
        yield note_on_refused(refused)


def note_on_refused(refused: list[tuple[str, Finding]]) -> str:
    """What the program is told of frameworks that are left alone; any other that cannot be patched is an error."""
    return f"patch() leaves some frameworks as they are. {_reasons(refused)}"
