"""The result of `status()`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TargetStatus:
    """The state of one target.

    `state` is "native" (this Lightning has the flag itself; see `wrapped` and `found`), "patchable" (`patch()` can
    wrap it), "armed" (will be wrapped when it is imported), "applied" (wrapped), "refused" (cannot be wrapped) or
    "not installed". `version` is that of its distribution, or None. `wrapped` says whether it is wrapped now. `found`
    and `remedy` are sentences for a person.
    """

    state: str
    version: str | None
    wrapped: bool
    found: str
    remedy: str


class Status(dict[str, TargetStatus]):
    """A `TargetStatus` per target, by its package's name, and one for "deepspeed". Prints as a table."""

    def __str__(self) -> str:
        rows = [("target", "version", "state", "wrapped", "found")]
        for name, item in self.items():
            reason = f"{item.found}: {item.remedy}" if item.remedy else item.found
            rows.append((name, item.version or "-", item.state, "yes" if item.wrapped else "no", reason))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
            for row in rows
        ]
        return "\n".join(lines)
