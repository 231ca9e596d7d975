"""A checkpoint that exists is whole: what callbacks keep and overwrite. `tests/faults/test_kill.py` kills saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import runs
from kit.cell import CELL, Fabric, FabricDeepSpeed, ModelCheckpoint, pl
from kit.checkpoints import record_in

import ds_frozen_patch
from ds_frozen_patch.publish.journal import Journal, digest, hidden

pytestmark = pytest.mark.promise(2)


def save_at(out: str, world_size: int, stage: int, epochs: int = 1) -> None:
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, world_size, stage, epochs=epochs, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(world_size))
    trainer.save_checkpoint(f"{out}/last.ckpt")


def resume(out: str, world_size: int, stage: int, name: str = "last.ckpt") -> int:
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, world_size, stage, epochs=2, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(world_size), ckpt_path=f"{out}/{name}")
    return int(trainer.global_step)


def files(checkpoint: Path) -> dict[str, bytes]:
    return {str(f.relative_to(checkpoint)): f.read_bytes() for f in sorted(checkpoint.rglob("*")) if f.is_file()}


def test_a_save_at_a_smaller_world_size_leaves_no_old_shards(ranks: Any, tmp_path: Path) -> None:
    stage = 3
    ranks(3, save_at, out=str(tmp_path), world_size=3, stage=stage)
    before = set(files(tmp_path / "last.ckpt"))
    ranks(2, save_at, out=str(tmp_path), world_size=2, stage=stage)
    after = set(files(tmp_path / "last.ckpt"))
    assert {name for name in before - after if "rank_2" in name}
    assert not {name for name in after if "rank_2" in name}
    assert [item.name for item in tmp_path.iterdir()] == ["last.ckpt"]
    assert ranks(2, resume, out=str(tmp_path), world_size=2, stage=stage) == [2 * runs.BATCHES] * 2


def resume_from_last(out: str) -> list[int]:
    """Return how far a run gets that resumes from the path of a checkpoint that a killed save has moved away.

    Also return the steps of "last".
    """
    steps = [resume(out, 2, 2)]
    if LINKS:  # before, Lightning takes for "last" whatever has that in its name
        callback = ModelCheckpoint(out, filename="{epoch}", save_last=True)
        trainer = runs.trainer(out, 2, 2, epochs=3, callbacks=[callback])
        module = runs.LoraRun()
        trainer.fit(module, runs.batches(2), ckpt_path="last")
        steps.append(len(module.losses))
    return steps


def test_a_kill_in_the_renames(ranks: Any, tmp_path: Path) -> None:
    ranks(2, save_at, out=str(tmp_path), world_size=2, stage=2)
    folder, save = tmp_path / "last.ckpt" / "checkpoint", "0123456789ab"
    names = [item.name for item in folder.iterdir()]
    after = digest(folder)
    for name in names:
        (folder / name).rename(hidden(folder / name, save))
    Journal(save, "none", after, tuple(names), ()).prepare(folder, sync=False)
    hidden(folder / "ds_frozen_patch-journal", save).rename(folder / ".ds_frozen_patch-journal-none")
    expected = [2 * runs.BATCHES, *([2 * runs.BATCHES] if LINKS else [])]  # "last" goes on from the first of 3 epochs
    assert ranks(2, resume_from_last, out=str(tmp_path)) == [expected] * 2
    if LINKS:  # Lightning does not save over what is there
        assert sorted(item.name for item in tmp_path.iterdir()) == ["epoch=2.ckpt", "last-v1.ckpt", "last.ckpt"]
    ranks(2, save_at, out=str(tmp_path), world_size=2, stage=2)
    assert sorted(item.name for item in (tmp_path / "last.ckpt").glob("[!z]*")) == ["checkpoint", "latest"]


LIGHTNING = CELL.lightning.split()[-1]
LINKS = LIGHTNING >= "2.2"  # before, save_last is True or not
LINKS_LAST = ("link", True) if LIGHTNING.startswith("2.1.") else ("link",)  # 2.1 makes a link of each last.ckpt


def keep_some(out: str, save_last: Any) -> list[int]:
    ds_frozen_patch.patch()
    callback = ModelCheckpoint(out, filename="{epoch}", save_top_k=2, monitor="epoch", mode="max", save_last=save_last)
    module = runs.LoraRun()
    runs.trainer(out, 2, 2, epochs=4, callbacks=[callback]).fit(module, runs.batches(2))
    steps = []
    for path in (callback.best_model_path, callback.last_model_path):
        again = runs.trainer(out, 2, 2, epochs=5, enable_checkpointing=False)
        again.fit(runs.LoraRun(), runs.batches(2), ckpt_path=path)
        steps.append(int(again.global_step))
    return steps


@pytest.mark.parametrize("save_last", [True, *(["link"] if LINKS else [])])
def test_what_a_callback_keeps(ranks: Any, tmp_path: Path, save_last: Any) -> None:
    assert ranks(2, keep_some, out=str(tmp_path), save_last=save_last) == [[5 * runs.BATCHES] * 2] * 2
    assert {item.name for item in tmp_path.iterdir()} == {"epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"}
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last in LINKS_LAST)


def requeued(out: str) -> tuple[str, str]:
    """What Slurm's requeue resumes from, and what the next save before one is to."""
    ds_frozen_patch.patch()
    connector: Any = pl.Trainer(default_root_dir=out, accelerator="cpu", logger=False)._checkpoint_connector
    return connector._hpc_resume_path, connector.hpc_save_path(out)


def test_a_killed_requeue_save_is_not_resumed(ranks: Any, tmp_path: Path) -> None:
    """Slurm's requeue resumes from the highest `hpc_ckpt_N` that is whole."""
    (tmp_path / "hpc_ckpt_9.ckpt" / "checkpoint").mkdir(parents=True)
    (tmp_path / "hpc_ckpt_9.ckpt" / "latest").write_text("checkpoint")
    (tmp_path / "hpc_ckpt_10.ckpt" / "checkpoint").mkdir(parents=True)
    (tmp_path / "hpc_ckpt_10.ckpt" / "checkpoint" / ".mp_rank_00_model_states.pt.0123456789ab").touch()
    expected = str(tmp_path / "hpc_ckpt_9.ckpt"), str(tmp_path / "hpc_ckpt_11.ckpt")
    assert ranks(1, requeued, out=str(tmp_path)) == [expected]


def fabric_over(out: str) -> None:
    ds_frozen_patch.patch()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricDeepSpeed(config=runs.config(2)))
    fabric.launch()
    module = runs.LoraRun()
    wrapped, optimizer = fabric.setup(module, torch_optimizer(module))
    for _ in range(2):
        fabric.save(f"{out}/fabric.ckpt", {"model": wrapped, "optimizer": optimizer})


def torch_optimizer(module: Any) -> Any:
    import torch

    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)


def test_fabric_saves_over_a_checkpoint(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("of before")
    (tmp_path / "fabric.ckpt").symlink_to("elsewhere")
    ranks(2, fabric_over, out=str(tmp_path))
    assert (tmp_path / "fabric.ckpt").is_symlink()
    assert (tmp_path / "elsewhere" / "mine").read_text() == "of before"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["elsewhere", "fabric.ckpt"]
    assert len(record_in(tmp_path / "fabric.ckpt").left_out) == 20
