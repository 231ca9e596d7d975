"""`ds-frozen-patch run` puts this on PYTHONPATH: every Python that starts below it imports it first.

It waits for the import of a framework or of DeepSpeed, so that it costs other programs nothing. It also runs in Pythons
that lack ds_frozen_patch, or are older than the ones we support.
"""

import os
import sys

FRAMEWORKS = ("lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "deepspeed")
"""The packages to wait for; Trainer imports Accelerate."""
ENGINE = "deepspeed.runtime.engine"


class BeforeFramework:
    """A finder that finds nothing itself, but notices the first search for a framework.

    It stays on the path until it has patched: programs search for packages that they never import.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.problem = ""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Prepare to patch at the end of an import, if this is a framework."""
        if self.problem and name == ENGINE:
            why, self.problem = self.problem, ""
            refuse(why)
        if self.has_begun or name not in FRAMEWORKS:
            return None
        self.begin()
        from importlib.util import find_spec

        # Python would pass over the finders that this has just put onto the path.
        return find_spec(name)

    def begin(self) -> None:
        """Let each framework call `patch_after` at the end of its import."""
        self.has_begun = True
        try:
            from ds_frozen_patch.patching import run as _run
        except ImportError as error:
            self.problem = f"{sys.executable} cannot import ds_frozen_patch ({error}): install it there"
        else:
            _run.begin(FRAMEWORKS, self.patch_after)

    def patch_after(self, module: object) -> None:
        """Patch, once, when a framework has been imported, but not while another one is being imported."""
        others = [sys.modules.get(name) for name in FRAMEWORKS]
        specs = [getattr(other, "__spec__", None) for other in others if other is not module]
        is_waiting = self in sys.meta_path  # type: ignore[comparison-overlap]
        if is_waiting and not any(getattr(spec, "_initializing", False) for spec in specs):
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            from ds_frozen_patch.patching.patch import patch_quietly as _patch_quietly

            _patch_quietly(refuse)

    def leave_unpatched(self) -> None:
        """Patch nothing later, for `unpatch()`."""
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        if not self.has_begun:
            self.begin()  # which also adapts the program to CPU ranks


def refuse(why: str) -> None:
    """End the program if it is to be strict; otherwise let it continue, with one warning on each machine."""
    if os.environ.get("DS_FROZEN_PATCH_STRICT", "0") not in ("", "0"):
        raise SystemExit(f"ds-frozen-patch: {why}")
    first = [os.environ.get(name, "0") for name in ("LOCAL_RANK", "SLURM_LOCALID", "DS_FROZEN_PATCH_WARNED")]
    if first == ["0", "0", "0"]:
        import logging

        os.environ["DS_FROZEN_PATCH_WARNED"] = "1"  # for workers, and for ranks that this process starts
        logging.getLogger("ds_frozen_patch").warning(
            "%s\nThe program continues without it: its DeepSpeed checkpoints contain frozen parameters too.", why
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
