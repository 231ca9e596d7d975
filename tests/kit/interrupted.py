"""Runs that are killed: what one has noted down before it was, and the checkpoint to resume from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ds_frozen_patch
from ds_frozen_patch.checkpoint.names import is_not_whole
from kit.cell import Callback
from kit.checkpoints import model_states


class Diary(Callback):
    """Records what a run has done before it is killed: the loss of each step, and each completed save."""

    def __init__(self, file: str, on_step: Callable[[], None] = lambda: None) -> None:
        self.file, self.on_step = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), on_step

    def note(self, line: str) -> None:
        os.write(self.file, f"{line}\n".encode())

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.note(f"step {trainer.global_step} {module.losses[-1]!r}")
        self.on_step()

    def note_removals(self, trainer: Any) -> None:
        """Record each checkpoint that this trainer is about to remove."""
        disk: Any = trainer.strategy.checkpoint_io
        remove = disk.remove_checkpoint

        def remove_checkpoint(path: Any) -> None:
            self.note(f"removes {Path(path).name}")
            remove(path)

        disk.remove_checkpoint = remove_checkpoint


def newest(out: Path, diary: str) -> Path | None:
    """Return the newest checkpoint: all are whole, but for a new one that was being saved, and none is lost.

    One that Lightning was about to remove, because it had a newer one, may be gone in part.

    Args:
        out: the folder of the checkpoints.
        diary: the text of rank 0's.
    """
    found: dict[Path, int] = {}
    lines = re.findall(r"^(saved \d+|removes) (.*)$", diary, re.MULTILINE)
    outdated = {name for name, what in {name: what for what, name in lines}.items() if what == "removes"}
    for path in out.glob("[!.]*"):
        if path.is_symlink() and not path.exists():
            continue  # Lightning removes what its link to the last one leads to, and then links anew
        problems = ds_frozen_patch.verify(path).problems
        if problems:
            was_saved = any(name == path.name for what, name in lines if what != "removes")
            assert path.resolve().name in outdated or (is_not_whole(path) and not was_saved), problems
            continue
        found[path] = model_states(path)[0]["global_step"]
    saved = [int(what.split()[1]) for what, _ in lines if what != "removes"]
    assert max(found.values(), default=0) >= max(saved, default=0)
    return max(found, key=lambda path: (found[path], path.name), default=None)
