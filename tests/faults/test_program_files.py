"""The folder that a program names is the program's: what it writes there while checkpoints are saved over each other
stays where it is, as without this package.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import saves
from kit.saves import MODES, TAG, Appended, Numbered

import ds_frozen_patch

pytestmark = pytest.mark.promise(22)


def save_beside_appender(out: str, mode: str, stage: int, times: int) -> tuple[Appended, int]:
    """Save repeatedly while another process appends in the tag's folder; return that, and what is loaded then."""
    folder = Path(out, "run")
    with saves.served(mode):
        run = Numbered(out, 2, stage)
        run.save(folder)
        with saves.appending(folder / TAG / "train.log", torch.distributed.get_rank() == 0) as appended:
            torch.distributed.barrier()
            for _ in range(times):
                run.save(folder, wait=False)
            ds_frozen_patch.wait()
            torch.distributed.barrier()
        return appended, run.load(folder, strict=mode != "plain")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [2, 3])
def test_lines_that_another_process_appends(
    ranks: Any, tmp_path: Path, long: bool, counted: Callable[[str, int], None], stage: int, mode: str
) -> None:
    times = 40 if long else 6
    asked: dict[str, Any] = {"out": str(tmp_path), "mode": mode, "stage": stage, "times": times}
    (appended, number), _ = ranks(2, save_beside_appender, **asked)
    assert appended.error == ""
    assert appended.written > times
    assert appended == Appended(appended.written, (appended.written,) * 2)
    assert number == times + 1
    assert saves.leftovers(tmp_path) == []
    if mode != "plain":
        counted("save over a checkpoint, while another process appends to files beside it", times)
