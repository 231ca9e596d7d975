"""`ds-frozen-patch run` puts this on PYTHONPATH: every Python that starts below it imports it first.

It waits for the import of Lightning or Accelerate, so that it costs other programs nothing. It also runs in Pythons
that lack ds_frozen_patch, or are older than the ones we support.
"""

import os
import sys

FRAMEWORKS = ("lightning", "lightning_fabric", "pytorch_lightning", "accelerate")  # Trainer imports Accelerate


class BeforeFramework:
    """A finder that finds nothing, but notices the first import of a framework."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Call `patch()` after this import, if it is a framework's."""
        if name not in FRAMEWORKS:
            return None
        self.before_framework(name)
        from importlib.util import find_spec

        # Not None: Python iterates over the list that this finder has just left, and would skip the next one.
        return find_spec(name)

    def before_framework(self, name: str = "") -> None:
        """Leave, and patch after the import of `name`, or now if it is empty, as for `unpatch()`."""
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        try:
            from ds_frozen_patch.patching import automatic as _automatic
        except ImportError as error:
            refuse(f"{sys.executable} cannot import ds_frozen_patch ({error}): install it there")
        else:
            _automatic.begin(name, refuse)


def refuse(why: str) -> None:
    """End the program if it is to be strict; otherwise let it go on, with one warning on each machine."""
    if os.environ.get("DS_FROZEN_PATCH_STRICT", "0") not in ("", "0"):
        raise SystemExit(f"ds-frozen-patch: {why}")
    first = [os.environ.get(name, "0") for name in ("LOCAL_RANK", "SLURM_LOCALID", "DS_FROZEN_PATCH_WARNED")]
    if first == ["0", "0", "0"]:
        import logging

        os.environ["DS_FROZEN_PATCH_WARNED"] = "1"  # for workers, and for ranks that this process starts
        logging.getLogger("ds_frozen_patch").warning(
            "%s\nThe program continues without it: its checkpoints are full.", why
        )


def leave_the_path() -> None:
    """Hide this folder and this module from the program."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  -- to import pathlib is slow
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]  # noqa: PTH100
    del sys.modules[__name__]


if os.environ.get("DS_FROZEN_PATCH", "0") not in ("", "0"):
    if os.environ.get("DS_FROZEN_PATCH_CPU", "0") not in ("", "0"):
        os.environ["DS_ACCELERATOR"] = "cpu"  # before anything imports DeepSpeed, which reads it then
    sys.meta_path.insert(0, BeforeFramework())  # type: ignore[arg-type]
leave_the_path()
# The user's own, or the ImportError that Python expects if there is none.
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
