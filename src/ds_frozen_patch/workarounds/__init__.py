"""Faults of other projects that this package works around: one module per project, and each fault once.

A fault is declared above the functions that cure it, or alone if what we do instead has no such fault. `status()` and a
page of the documentation are made of the declarations.
"""

from __future__ import annotations

from types import ModuleType

from . import for_deepspeed, for_fabric, for_transformers
from .fault import Fault


def _declared_in(module: ModuleType) -> tuple[Fault, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, Fault))


FAULTS = {
    "deepspeed": _declared_in(for_deepspeed),
    "fabric": _declared_in(for_fabric),
    "transformers": _declared_in(for_transformers),
}
"""The faults by the package that has them; "fabric" is that of every Lightning."""


def worked_around(target: str, version: str | None) -> tuple[str, ...]:
    """The names of the faults of an installed package that this package works around.

    Args:
        target: the package, by the name that `status()` has.
        version: the release that is installed; None, if it is unknown, has the faults of all releases.
    """
    faults = FAULTS.get("fabric" if target in ("lightning.fabric", "lightning_fabric") else target, ())
    return tuple(fault.name for fault in faults if fault.is_of(version) and fault.is_installed(target))
