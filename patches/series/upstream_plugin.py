"""What `upstream_tests` has pytest do otherwise when it runs upstream's own tests: a plugin of pytest."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_load_initial_conftests() -> None:
    """Spare Lightning 2.0 its apps, which it always imports, with all that they need."""
    spec = find_spec("lightning")
    if spec and spec.origin and "\nimport lightning.app" in Path(spec.origin).read_text():
        sys.modules["lightning"] = package = module_from_spec(spec)
        from lightning.__version__ import version

        package.__dict__["__version__"] = version


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check which code is imported, and run tests that require DeepSpeed and nothing else.

    Lightning 2.4 and 2.5 skip them on torch 2.4 and newer.
    """
    root = Path(os.environ["UPSTREAM_ROOT"])
    package = import_module("lightning.fabric" if (root / "src").is_dir() else "deepspeed").__path__[0]
    assert Path(package).is_relative_to(root), f"{package} is not what is to be tested"
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.kwargs.get("reason") != "Requires: [Deepspeed]"]
