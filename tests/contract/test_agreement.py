"""Ranks agree before a save and before a load: what happens if they differ. `test_scale` counts the collectives."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import owners, runs
from kit.checkpoints import model_states
from kit.processes import RankError

import ds_frozen_patch
from ds_frozen_patch import PatchError
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.engine import handshake
from ds_frozen_patch.publish.journal import is_unfinished
from ds_frozen_patch.save import agreement

pytestmark = [pytest.mark.promise(18), pytest.mark.everyday]


# Ranks that are unlike: what rank 1 does otherwise, and what is said of it on each rank.


def set_up_unlike(out: str, how: str) -> tuple[str, str, float]:
    """Give rank 1 a different setting; return what this rank raises before the first step, and when."""
    odd = os.environ["RANK"] == "1"
    told: dict[str, Any] = {"verify_base": "off", "keep": ["*.x"], "fsync": False}
    ds_frozen_patch.patch(**{how: told[how]} if odd else {})
    module = runs.LoraRun()
    trainer = runs.trainer(out, 2, 2, epochs=1, enable_checkpointing=False)
    begun = time.monotonic()
    try:
        trainer.fit(module, runs.batches(2))
    except Exception as error:
        assert not module.losses
        return type(error).__name__, str(error), time.monotonic() - begun
    raise AssertionError("nothing was raised")


@pytest.mark.short
@pytest.mark.once
@pytest.mark.parametrize("how", ["verify_base", "keep", "fsync"])
def test_different_settings_on_one_rank(ranks: Any, tmp_path: Path, how: str) -> None:
    for name, text, seconds in ranks(2, set_up_unlike, alone=True, out=str(tmp_path), how=how):
        assert name == "PatchError"
        assert f"- rank 1: {how}=" in text
        assert seconds < 30


@pytest.mark.once
@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.short)])
def test_an_unpatched_rank(ranks: Any, tmp_path: Path, odd: int) -> None:
    """The patched rank raises; the other, which waits for it in its first step, loses the connection."""
    with pytest.raises(AssertionError) as raised:
        ranks(2, set_up_and_end, alone=True, grace=1, out=str(tmp_path), odd=odd)
    one = raised.value.raised[1 - odd]  # type: ignore[attr-defined]
    assert one is not None
    assert one[0] == PatchError.__name__
    assert f"patch() was called on this rank, but not on rank {odd}:" in one[1]


@pytest.mark.once
def test_a_rank_that_was_killed_is_not_taken_for_unpatched(ranks: Any) -> None:
    """Rank 0 serves the store. If it is gone, the others get torch's error, and not the advice to call patch()."""
    with pytest.raises(AssertionError) as raised:
        ranks(2, die_in_the_handshake, alone=True)
    other = raised.value.raised[1]  # type: ignore[attr-defined]
    assert other is not None
    assert other[0].startswith("Dist"), other


def two_process_groups_of_one_store(out: str) -> str:
    """Return the error of the second one, in which rank 1 is not patched.

    Ours has the same keys in both; gloo has its own, since a rank that reads the other's old address cannot connect.
    """
    number, store = int(os.environ["RANK"]), torch.distributed.FileStore(f"{out}/store", 2)  # type: ignore[attr-defined]
    said = ""
    for attempt, is_patched in enumerate((True, number == 0)):
        for_gloo = torch.distributed.PrefixStore(f"gloo/{attempt}", store)  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=for_gloo, rank=number, world_size=2)
        handshake.default_store = partial(torch.distributed.PrefixStore, "ours", store)  # type: ignore[attr-defined]
        if is_patched:
            ds_frozen_patch.patch()
            try:
                handshake.check(wait_seconds=2)
            except PatchError as error:
                said = str(error)
            ds_frozen_patch.unpatch()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return said


@pytest.mark.once
def test_the_handshake_is_renewed_for_another_process_group(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, two_process_groups_of_one_store, alone=True, out=str(tmp_path))
    assert "was called on this rank, but not on rank 1" in first
    assert second == ""


def die_in_the_handshake() -> None:
    torch.distributed.init_process_group("gloo")
    ds_frozen_patch.patch()
    if os.environ["RANK"] == "0":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    handshake.check(wait_seconds=10)


def set_up_and_end(out: str, odd: int) -> None:
    handshake.WAIT_SECONDS = 1
    if os.environ["RANK"] != str(odd):
        ds_frozen_patch.patch()
    trainer = runs.trainer(out, 2, 2, epochs=1, enable_checkpointing=False)
    begun = time.monotonic()
    try:
        trainer.fit(runs.LoraRun(), runs.batches(2))
    finally:
        assert time.monotonic() - begun < 30


def slow_set_up(out: str, stage: int) -> int:
    """Let one rank set up much later than the others; all are patched nevertheless."""
    handshake.WAIT_SECONDS = 0.5
    ds_frozen_patch.patch()
    if os.environ["RANK"] == "1":
        time.sleep(2)
    trainer = runs.trainer(out, 2, stage, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(2))
    return int(trainer.global_step)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_late_rank(ranks: Any, tmp_path: Path, stage: int) -> None:
    assert ranks(2, slow_set_up, alone=True, out=str(tmp_path), stage=stage) == [runs.BATCHES] * 2


def save_unlike(out: str, how: str) -> tuple[str, str, float, int]:
    """Ask rank 1 for a different save within a run; the run goes on."""
    ds_frozen_patch.patch()
    odd = os.environ["RANK"] == "1"
    trainer = runs.trainer(out, 2, 2, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(2))
    trainer.save_checkpoint(f"{out}/a.ckpt")
    settings = {"export": {"export": "safetensors"}, "keep": {"keep": ["*"]}}
    if odd:
        ds_frozen_patch.patch(**settings.get(how, {}))  # type: ignore[arg-type]
    begun, before = time.monotonic(), {*Path(out).rglob("*")}
    try:
        with ds_frozen_patch.full_checkpoint() if odd and how == "full_checkpoint" else nullcontext():
            trainer.save_checkpoint(f"{out}/a.ckpt", weights_only=odd and how == "weights_only")
    except Exception as error:
        said = type(error).__name__, str(error), time.monotonic() - begun
    assert odd or {*Path(out).rglob("*")} == before
    if odd:
        ds_frozen_patch.unpatch()
        ds_frozen_patch.patch()
    trainer.save_checkpoint(f"{out}/a.ckpt")
    assert not ds_frozen_patch.verify(f"{out}/a.ckpt").problems
    return *said, len(model_states(f"{out}/a.ckpt"))


UNLIKE = {
    "full_checkpoint": "exclude_frozen_parameters: True on rank 0, False on rank 1",
    "export": "export: None on rank 0, 'safetensors' on rank 1",
    "keep": "keep: () on rank 0, ('*',) on rank 1",
    "weights_only": "what is saved: 'a checkpoint' on rank 0, 'the weights alone' on rank 1",
}


@pytest.mark.short
@pytest.mark.parametrize("how", UNLIKE)
def test_a_different_save_on_one_rank(ranks: Any, tmp_path: Path, how: str) -> None:
    for name, text, seconds, _ in ranks(2, save_unlike, out=str(tmp_path), how=how):
        assert name == "CheckpointMismatchError"
        assert f"{tmp_path}/a.ckpt was not saved" in text
        assert UNLIKE[how] in text
        assert seconds < 10


def load_unlike(out: str) -> tuple[str, str]:
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, 2, 2, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(2))
    trainer.save_checkpoint(f"{out}/a.ckpt")
    if os.environ["RANK"] == "1":
        ds_frozen_patch.patch(verify_base="off")
    return runs.refusal(trainer.strategy.load_checkpoint, f"{out}/a.ckpt")


@pytest.mark.short
def test_a_different_load_on_one_rank(ranks: Any, tmp_path: Path) -> None:
    for name, text in ranks(2, load_unlike, out=str(tmp_path)):
        assert name == "CheckpointMismatchError"
        assert "rank 1: a checkpoint, verify_base='off'" in text


def load_what_one_has(out: str, odd: int) -> tuple[str, str]:
    """Give one rank a path at which there is nothing."""
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, 2, 2, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(2))
    trainer.save_checkpoint(f"{out}/a.ckpt")
    name = "b" if os.environ["RANK"] == str(odd) else "a"
    return runs.refusal(trainer.strategy.load_checkpoint, f"{out}/{name}.ckpt")


@pytest.mark.short
@pytest.mark.parametrize("odd", [0, 1])
def test_a_checkpoint_missing_on_one_rank(ranks: Any, tmp_path: Path, odd: int) -> None:
    said = ranks(2, load_what_one_has, out=str(tmp_path), odd=odd)
    (name, text), (other, own) = said[1 - odd], said[odd]
    assert (name, other) == ("CheckpointError", "FileNotFoundError")
    assert f"Rank {odd}: {own}" in text
    assert f"There is no checkpoint at {tmp_path}/b.ckpt" in own


def die_in_an_agreement(out: str, number: int) -> None:
    """Rank 1 is gone when a save agrees: that all is written, or that it has its name."""
    agree, calls = agreement.agree_on_end, count(1)

    def agree_or_die(save: Any, *args: Any) -> Any:
        if next(calls) == number and os.environ["RANK"] == "1":
            os._exit(9)
        return agree(save, *args)

    with owners.served(), overridden([(agreement, "agree_on_end", agree_or_die)]):
        owners.Run("deepspeed", out, 2, 2).train(epochs=1)


@pytest.mark.short
@pytest.mark.parametrize(("number", "said"), [(1, "was not saved"), (2, "was saved, but not every rank has confirmed")])
def test_a_rank_that_is_gone_at_the_end_of_a_save(ranks: Any, tmp_path: Path, number: int, said: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, die_in_an_agreement, out=str(tmp_path), number=number)
    assert caught.value.raised[0] is not None
    kind, text = caught.value.raised[0]
    assert kind == "CheckpointError"
    assert f"{tmp_path}/epoch0 {said}" in text
    assert text.endswith(
        "There is no checkpoint there now." if number == 1 else "is the new checkpoint, and complete."
    ), text
    assert is_unfinished(tmp_path / "epoch0") == (number == 1)
