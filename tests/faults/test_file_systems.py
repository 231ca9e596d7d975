"""File systems that cannot rename some things: what saves there plain saves under `patch()`, and loads again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import nodes, runs, saves
from kit.saves import MODES, TAG, Numbered

import ds_frozen_patch

pytestmark = [pytest.mark.promise(22), pytest.mark.timeout(900)]
KINDS = ("overlay", "folders", "renames", "open")
WARNING = "rename"  # what the warning is about, where nothing can be renamed


@contextmanager
def overlaid(lower: Path, at: Path) -> Iterator[None]:
    """Mount an overlay whose lower layer has the checkpoint, as a container's image or a read-only volume does."""
    parts = {name: at.with_name(name) for name in ("upper", "work")}
    for folder in (at, *parts.values()):
        folder.mkdir()
    options = f"lowerdir={lower},upperdir={parts['upper']},workdir={parts['work']}"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(at)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no overlay can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@contextmanager
def mounted(kind: str, backing: Path, at: Path) -> Iterator[None]:
    why = nodes.why_unsupported() if kind == "overlay" else nodes.why_no_cached_disk()
    if why:
        pytest.skip(why)
    with overlaid(backing, at) if kind == "overlay" else nodes.mounted(backing, at, 0, refuses=kind):
        yield


def save_over_and_anew(out: str, at: str, mode: str, stage: int, resume: bool) -> dict[str, Any]:
    """Save over what is there and to a new name, twice each, and weights alone; return what is loaded then."""
    folder, is_plain = Path(at, "run"), mode == "plain"
    with saves.served(mode), runs.heard() as said:
        run = Numbered(out, 2, stage)
        found: dict[str, Any] = {"first": run.load(folder, TAG, strict=not is_plain)} if resume else {}
        with (folder / TAG / "train.log").open("a") as log:  # which the program keeps open
            for name, tag in (("over", TAG), ("new", "new"), ("over again", TAG), ("new again", "new")):
                log.write(f"{name}\n")
                run.save(folder, tag)
                number = run.number
                found[name] = run.load(folder, tag, strict=not is_plain) - number
        trainer = runs.trainer(at, 2, stage, epochs=1, enable_checkpointing=False)
        trainer.fit(runs.LoraRun(), runs.batches(2))
        for name in ("weights", "weights again"):
            trainer.save_checkpoint(f"{at}/weights.ckpt", weights_only=True)
            ds_frozen_patch.wait()
            if not is_plain:  # plain Lightning makes a folder
                weights = torch.load(f"{at}/weights.ckpt", weights_only=False)
                found[name] = len(weights["state_dict"]) > 0
            torch.distributed.barrier()
        for _ in range(2):
            trainer.save_checkpoint(f"{at}/last.ckpt")
        ds_frozen_patch.wait()
    found["warnings"] = [text for text in said if text.startswith("WARNING") and WARNING in text]
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_saves_where_not_all_can_be_renamed(
    ranks: Any, tmp_path: Path, long: bool, counted: Callable[[str, int], None], kind: str, mode: str
) -> None:
    for stage in (2, 3) if long else (2,):
        backing, at = tmp_path / str(stage) / "backing", tmp_path / str(stage) / "at"
        backing.mkdir(parents=True)
        asked: dict[str, Any] = {"out": str(tmp_path), "stage": stage, "mode": mode}
        ranks(2, save_once, folder=str(backing / "run"), **asked)
        with mounted(kind, backing, at):
            one, other = ranks(2, save_over_and_anew, at=str(at), resume=True, **asked)
            assert [one[name] for name in ("first", "over", "new", "over again", "new again")] == [1, 0, 0, 0, 0]
            assert (mode == "plain") or (one["weights"] is one["weights again"] is True)
            assert (at / "run" / TAG / "train.log").read_text().count("\n") == 8  # of both ranks
            assert saves.leftovers(at) == []
            if mode != "plain":
                assert not ds_frozen_patch.verify(at / "run", TAG).problems
                assert not ds_frozen_patch.verify(at / "last.ckpt").problems
        warnings = [*one["warnings"], *other["warnings"]]
        assert bool(warnings) == (kind == "renames" and mode != "plain"), warnings
        assert len({*warnings}) == len(warnings), warnings
        counted(f"saves on a file system that refuses {REFUSED[kind]}", 8)


def save_once(out: str, folder: str, mode: str, stage: int) -> None:
    with saves.served(mode):
        Numbered(out, 2, stage).save(folder)


REFUSED = {"overlay": "renames of folders of a lower layer (overlayfs)", **nodes.REFUSALS}
