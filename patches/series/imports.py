"""Import patched releases of pytorch-lightning, one after the other in one process, as torch takes long to import.

`python patches/series/imports.py RESULT FOLDER...`: writes into RESULT what is wrong with the release in each folder.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path

PACKAGES = ("pytorch_lightning", "lightning_fabric")
STRATEGIES = [f"{package}.strategies.deepspeed" for package in PACKAGES]
ALL = (*STRATEGIES, "pytorch_lightning.utilities.deepspeed")


def import_release(folder: Path) -> str:
    """Return what is wrong with the release in a folder; "" if nothing is."""
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        modules = {name: importlib.import_module(name) for name in ALL}
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        sys.path.remove(str(folder))
    for name, module in modules.items():
        if not Path(str(module.__file__)).is_relative_to(folder):
            return f"{name} was imported from {module.__file__}"
    for name in STRATEGIES:
        if "exclude_frozen_parameters" not in inspect.signature(modules[name].DeepSpeedStrategy).parameters:
            return f"DeepSpeedStrategy of {name} takes no exclude_frozen_parameters"
    return ""


def main() -> None:
    """Import all, and write what became of each as soon as it is known: an import can end the process."""
    result, *folders = sys.argv[1:]
    found: dict[str, str] = {}
    for folder in folders:
        found[folder] = import_release(Path(folder))
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
