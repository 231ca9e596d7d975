"""The result of `status()`."""

from __future__ import annotations

from dataclasses import dataclass


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
