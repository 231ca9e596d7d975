"""The cells of `ci/matrix.json`, for the noxfile, the tests and the compatibility table."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

MATRIX = Path(__file__).resolve().parent.with_suffix(".json")
LOCKS = MATRIX.parent / "locks"
OWNERS = ("accelerate", "transformers")  # the targets of `patch()` beside Lightning and DeepSpeed
QUANTIZERS = ("bitsandbytes", "hqq", "optimum-quanto", "torchao")


@dataclass(frozen=True)
class Need:
    """What a combination of releases asks for that has nothing to do with us: `pins`, `environment` variables."""

    why: str
    pins: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One combination of releases that is really run, and what is expected of it.

    `lightning` and `beside` are a package and its release, such as "lightning 2.5.2"; the tests use the first.
    `expect` gives a state by namespace, and by target where it is not the usual one. `cannot` gives, for a part of a
    test's id, why it cannot run here.
    `patches` is the folder of the patch series that is applied to its Lightning, which then runs without `patch()`;
    all else of it is as in the cell `like`. `with_` are requirements of its lock beside Lightning, DeepSpeed and wrapt:
    libraries that quantize, whose tests alone run there, and what else must have another release than in its base.
    """

    name: str
    python: str
    torch: str
    lightning: str
    deepspeed: str
    wrapt: str
    why: str
    needs: dict[str, Need]
    expect: dict[str, str]
    period: tuple[str, ...]
    cannot: dict[str, str]
    beside: str | None = None
    patches: str | None = None
    like: str | None = None
    with_: tuple[str, ...] = ()

    @property
    def lock(self) -> str:
        """The name of the lock that its environment is made from."""
        return self.like or self.name

    @property
    def base(self) -> str:
        """The environment that it shares with the other cells of its Python and torch."""
        return f"base-py{self.python}-torch{self.torch}"

    @property
    def package(self) -> str:
        """The namespace that the tests use: "lightning" or "pytorch_lightning"."""
        return self.lightning.split()[0].replace("-", "_")

    @property
    def pins(self) -> list[str]:
        """What its lock is made from, beside what its base is made from."""
        releases = dict(item.split() for item in (self.lightning, self.beside) if item)
        if "lightning" in releases:
            releases.setdefault("pytorch-lightning", releases["lightning"])  # else its newest comes along
        releases |= {"deepspeed": self.deepspeed, "wrapt": self.wrapt}
        own = [f"{name}=={version}" for name, version in releases.items()]
        return own + [pin for need in self.needs.values() for pin in need.pins] + [*self.with_]

    @property
    def quantizers(self) -> dict[str, str]:
        """The libraries that quantize, and their releases: where there are any, the tests of quantized bases run."""
        return {name: release for name, _, release in (pin.partition("==") for pin in self.with_) if name in QUANTIZERS}

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that it needs."""
        return {name: value for need in self.needs.values() for name, value in need.environment.items()}

    @property
    def states(self) -> dict[str, str]:
        """What `status()` must give for each target, and for deepspeed, once everything is imported."""
        by_package = {"lightning": "not installed", "pytorch_lightning": "not installed", "deepspeed": "wrapped"}
        # They are in the locks of all cells. Without a DeepSpeed that can be patched, nothing is wrapped.
        by_package |= dict.fromkeys(OWNERS, "patchable" if self.refused else "wrapped") | self.expect
        return {
            "lightning.pytorch": by_package["lightning"],
            "lightning.fabric": by_package["lightning"],
            "pytorch_lightning": by_package["pytorch_lightning"],
            "lightning_fabric": by_package["pytorch_lightning"],
            "deepspeed": by_package["deepspeed"],
            **{name: by_package[name] for name in OWNERS},
        }

    def locked(self, package: str) -> str | None:
        """The release of a package in its lock, else in that of its base; None if neither is there yet."""
        for lock in (LOCKS / f"{name}.txt" for name in (self.lock, self.base)):
            text = lock.read_text(encoding="utf-8") if lock.is_file() else ""
            if found := re.search(rf"^{package}==(\S+)", text, re.MULTILINE):
                return found[1]
        return None

    @property
    def releases(self) -> tuple[Version, Version]:
        """Lightning's and DeepSpeed's."""
        return Version(self.lightning.split()[1]), Version(self.deepspeed)

    @property
    def resumes(self) -> list[Cell]:
        """The cells whose checkpoints it must resume: the oldest, the everyday and the last one with older releases."""
        if not self.is_served_by_shim or self.quantizers:
            return []
        served = [cell for cell in read().values() if cell.is_served_by_shim and not cell.quantizers]
        older = [cell for cell in served if cell.is_no_newer_than(self.releases) and cell.releases != self.releases]
        chosen = (*older[:1], *older[-1:], *(cell for cell in older if cell.name == "everyday"))
        return list({cell.name: cell for cell in chosen}.values())

    @property
    def twin(self) -> Cell | None:
        """The cell that differs in nothing but that its Lightning has the patch series."""
        return read().get(f"{self.name}-patched")

    @property
    def takes_from(self) -> list[Cell]:
        """The cells that must have saved what its tests load."""
        return [*self.resumes, *([self.twin] if self.twin else [])]

    def is_no_newer_than(self, releases: tuple[Version, Version]) -> bool:
        """Whether neither its Lightning nor its DeepSpeed is newer than these."""
        return all(own <= other for own, other in zip(self.releases, releases, strict=True))

    @property
    def is_served_by_shim(self) -> bool:
        """Whether `patch()` does something here."""
        return not self.refused and not self.patches

    @property
    def refused(self) -> bool:
        """Whether `patch()` must refuse it."""
        return "refused" in self.expect.values()


def entries() -> dict[str, dict[str, Any]]:
    """Return the file's entry of each cell, by name, from old releases to new ones.

    A patched cell is like another one whose Lightning has our patch series, and so nothing for `patch()` to do.
    """
    matrix = _matrix()
    found = {entry["name"]: _with_newest(entry, matrix["newest"]) for entry in matrix["cells"]}
    for item in matrix["patched"]:
        like, name = found[item["like"]], f"{item['like']}-patched"
        has_flag = dict.fromkeys(like["expect"], "has the flag")
        found[name] = {**like, **item, "name": name, "why": "our patch series, without `patch()`", "expect": has_flag}
    return found


def read() -> dict[str, Cell]:
    """Return the cells by name, in the file's order."""
    return {name: cell(entry) for name, entry in entries().items()}


def cell(entry: dict[str, Any]) -> Cell:
    """Return the cell of an entry, which need not be in the file."""
    matrix, name = _matrix(), entry["name"]
    own = {key: value for key, value in entry.items() if key not in ("needs", "with")}
    return Cell(
        **own,
        needs={need: Need(**matrix["needs"][need]) for need in entry["needs"]},
        period=tuple(matrix["period"].get(entry["torch"], ())),
        cannot={test: item["why"] for item in matrix["cannot"] if name in item["cells"] for test in item["tests"]},
        with_=tuple(entry.get("with", ())),
    )


def nearest(lightning: str, deepspeed: str) -> Cell:
    """Return the cell with the newest releases of those that have no newer ones than these."""
    wanted = Version(lightning), Version(deepspeed)
    usual = [cell for cell in read().values() if not cell.patches and not cell.quantizers]
    plain = [cell for cell in usual if cell.lightning.startswith("lightning ")]
    older = [cell for cell in plain if cell.is_no_newer_than(wanted)]
    return max(older, key=lambda cell: cell.releases, default=plain[0])


def propose(lightning: str, deepspeed: str) -> dict[str, Any]:
    """Return an entry for two more releases, like that of the nearest cell."""
    like = nearest(lightning, deepspeed).name
    name = f"lightning-{lightning}-deepspeed-{deepspeed}"
    changed = {"name": name, "lightning": f"lightning {lightning}", "deepspeed": deepspeed}
    return {**entries()[like], **changed, "why": f"proposed after {like}"}


def add(entry: dict[str, Any], after: str) -> None:
    """Write one more cell into the file, below another one."""
    above = next(formatted(other) for other in _matrix()["cells"] if other["name"] == after)
    text = MATRIX.read_text(encoding="utf-8")
    MATRIX.write_text(text.replace(above, f"{above},\n{formatted(entry)}"), encoding="utf-8")


def formatted(entry: dict[str, Any]) -> str:
    """Return a cell as the file has it: its releases, why it is there, what it needs and what is expected."""
    last = ("why", "with", "needs", "expect")
    lines = [{key: entry[key] for key in entry if key not in last}, {"why": entry["why"]}]
    lines += [{"with": entry["with"]}] if "with" in entry else []
    lines.append({key: entry[key] for key in last[2:]})
    return "    {" + ",\n     ".join(json.dumps(line)[1:-1] for line in lines) + "}"


def _with_newest(entry: dict[str, Any], newest: dict[str, str]) -> dict[str, Any]:
    """Return an entry with the newest releases, which the file names once, in place of that word."""
    return {**entry, **{package: entry[package].replace("newest", newest[package]) for package in newest}}


def _matrix() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MATRIX.read_text(encoding="utf-8"))
    return found
