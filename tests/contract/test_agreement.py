"""How ranks agree: if one raises in a step of a save or a load, all do; and what happens if ranks are not alike."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import owners, runs
from kit.owners import Run
from kit.processes import RankError

import ds_frozen_patch
from ds_frozen_patch import PatchError
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.engine import handshake
from ds_frozen_patch.publish.journal import is_unfinished
from ds_frozen_patch.ranks import Ranks

pytestmark = [pytest.mark.promise(18), pytest.mark.everyday]


# Each step of a save and a load


@contextmanager
def steps(happens: Callable[[int, str], None] = lambda *_: None) -> Iterator[list[str]]:
    """The names of the steps that this rank takes meanwhile; in each something happens, given its number and name."""
    names: list[str] = []
    take = Ranks.step

    def take_and_happen(ranks: Any, what: str, local: Any = None, width: int = 0) -> Any:
        happen = partial(happens, len(names), what)
        names.append(what)
        return take(ranks, what, lambda: happen() or (local and local()), width)

    with overridden([(Ranks, "step", take_and_happen)]):
        yield names


def save(run: Run, place: Path) -> None:
    run.save(place)
    ds_frozen_patch.wait()


def load_without_record(run: Run, place: Path) -> None:
    if torch.distributed.get_rank() == 0:
        (place / RECORD).unlink(missing_ok=True)
    torch.distributed.barrier()
    run.load(place)


LOCAL_DISKS = {"checkpoint": {"use_node_local_storage": True}}
KINDS: dict[str, tuple[str, int, Any, dict[str, Any], dict[str, Any]]] = {
    "a save": ("deepspeed", 2, save, {}, {}),
    "a save to local disks": ("deepspeed", 3, save, LOCAL_DISKS, {"export": "safetensors"}),
    "a save of Accelerate": ("accelerate", 2, save, {}, {}),
    "an async save": ("deepspeed", 2, save, {}, {"async_save": True}),
    "an async save to local disks": ("deepspeed", 3, save, LOCAL_DISKS, {"async_save": True}),
    "a load": ("deepspeed", 2, Run.load, {}, {}),
    "a load from local disks": ("deepspeed", 3, Run.load, LOCAL_DISKS, {}),
    "a load without a record": ("deepspeed", 3, load_without_record, {}, {}),
    "a load in another stage": ("deepspeed", 3, Run.load, {}, {"elastic": True}),
}


def fail_in_each_step(out: str, kind: str) -> list[tuple[str, int, str, str]]:
    """Raise in each step on each rank; return the step, the rank, and the error that this rank gets."""
    by, stage, act, config, settings = KINDS[kind]
    found, place = [], Path(out, "epoch0")
    with owners.served(**settings):
        run = Run(by, out, 2, 2 if "another" in kind else stage, config=config)
        run.train(epochs=1)
        ds_frozen_patch.wait()
        run = Run(by, out, 2, stage, config=config) if "another" in kind else run
        with steps() as names:
            act(run, place)
        for number, odd in product(range(len(names)), (0, 1)):

            def fail(now: int, _: str, at: int | None = number if os.environ["RANK"] == str(odd) else None) -> None:
                if now == at:
                    raise OSError("broken on purpose")

            begun = time.monotonic()
            with steps(fail):
                error, text = runs.outcome(act, run, place)
            assert time.monotonic() - begun < 20
            found.append((names[number], odd, error, text))
        act(run, place)  # the run can go on
    return found


@pytest.mark.short
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_each_step(ranks: Any, tmp_path: Path, kind: str) -> None:
    first, second = ranks(2, fail_in_each_step, out=str(tmp_path), kind=kind)
    assert first == second
    assert len(first) >= 4
    for step, odd, error, text in first:
        assert error == "CheckpointError", (step, odd, text)
        assert "broken on purpose" in text
        assert [number for number in (0, 1) if f"Rank {number}: {tmp_path}" in text] == [odd], (step, text)
        outcome = "was saved, but an error has followed" if "is the new checkpoint" in text else "was not saved"
        assert "load" in kind or f" {outcome}. Rank" in text, (step, text)
    problems = ds_frozen_patch.verify(tmp_path / ("epoch0" if "Accelerate" in kind else "")).problems
    assert not problems or (
        kind == "a load without a record" and all("lacks ds_frozen_patch.json" in p for p in problems)
    )
    assert not is_unfinished(tmp_path / "epoch0")


LATEST: list[tuple[bytes | None, int, str, str]] = [
    (b"\xff\xfe", 0, "CheckpointError", "/0 has no subdirectory"),
    (b"\xff\xfe", 1, "CheckpointError", "/1/"),
    (None, 0, "CheckpointMismatchError", "what is loaded: 'no checkpoint' on rank 0, 'the tag epoch0' on rank 1"),
    (None, 1, "", ""),  # rank 0 lists the checkpoint for all
]
"""The file `latest` of one rank, or None for a folder; which rank's; and what every rank raises."""


def load_by_own_path(out: str) -> list[tuple[str, str]]:
    """Load by paths of each rank's own, one of which has a `latest` that cannot be read."""
    found = []
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        run.train(epochs=1)
        for number, (latest, odd, *_) in enumerate(LATEST):
            own = Path(out, str(number), os.environ["RANK"])
            own.mkdir(parents=True)
            (own / "epoch0").symlink_to(Path(out, "epoch0"))
            content = latest if own.name == str(odd) else b"epoch0"
            (own / "latest").mkdir() if content is None else (own / "latest").write_bytes(content)
            found.append(runs.outcome(run.engine.load_checkpoint, str(own)))
    return found


@pytest.mark.short
@pytest.mark.timeout(60)
def test_a_latest_that_one_rank_cannot_read(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2, load_by_own_path, out=str(tmp_path)):
        for (error, text), (*_, kind, said) in zip(found, LATEST, strict=True):
            assert error == kind, text
            assert said in text


def die_in_a_step(out: str, step: str) -> None:
    """Rank 1 is gone when a save agrees that all is written, or that it has its name."""

    def die(_: int, what: str) -> None:
        if what == step and os.environ["RANK"] == "1":
            os._exit(9)

    with owners.served(), steps(die):
        Run("deepspeed", out, 2, 2).train(epochs=1)


@pytest.mark.short
@pytest.mark.parametrize(
    ("step", "said"), [("write its files", "was not saved"), ("name its files", "was saved, but not every rank has")]
)
def test_a_rank_that_is_gone_at_the_end_of_a_save(ranks: Any, tmp_path: Path, step: str, said: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, die_in_a_step, out=str(tmp_path), step=step)
    assert caught.value.raised[0] is not None
    kind, text = caught.value.raised[0]
    assert kind == "CheckpointError"
    assert f"{tmp_path}/epoch0 {said}" in text
    is_saved = step == "name its files"
    assert text.endswith("is the new checkpoint, and complete." if is_saved else "There is no checkpoint there now.")
    assert is_unfinished(tmp_path / "epoch0") != is_saved


def lose_a_file(out: str, odd: int) -> tuple[str, str]:
    """Once every file is written, another program removes a rank's partition of the optimizer."""

    def remove(_: int, what: str) -> None:
        if what == "write its files" and os.environ["RANK"] == str(odd):
            (mine,) = Path(out, "epoch0").glob(f".*zero_pp_rank_{odd}_*")
            mine.unlink()

    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        with steps(remove):
            return runs.refusal(run.save, run.at(0))


@pytest.mark.short
@pytest.mark.parametrize("odd", [0, 1])
def test_a_file_that_is_removed_before_it_has_its_name(ranks: Any, tmp_path: Path, odd: int) -> None:
    for kind, said in ranks(2, lose_a_file, out=str(tmp_path), odd=odd):
        assert kind == "CheckpointError"
        assert f"another program has removed files from {tmp_path}/epoch0 during the save" in said


def load_two_saves(out: str) -> tuple[str, str]:
    """Load by paths of each rank's own, which lead to two saves."""
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        run.train(epochs=2)
        own = Path(out, os.environ["RANK"])
        own.mkdir()
        (own / "epoch0").symlink_to(Path(out, f"epoch{own.name}"))
        return runs.outcome(run.engine.load_checkpoint, str(own), tag="epoch0")


@pytest.mark.short
@pytest.mark.timeout(60)
def test_a_load_of_two_saves_ends(ranks: Any, tmp_path: Path) -> None:
    """It begins again, since another process may be replacing the files, but not for ever."""
    for rank, (error, text) in enumerate(ranks(2, load_two_saves, out=str(tmp_path))):
        assert error == "ReplacedError"
        assert text == f"{tmp_path}/{rank} has files of more than one save. Take all files from one checkpoint."


# Set-up: ranks that are not alike, or not there


def run_of(out: str, stage: int = 2) -> Any:
    """Return a trainer whose run is over."""
    trainer = runs.trainer(out, 2, stage, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(2))
    return trainer


def set_up_unlike(out: str, how: str) -> tuple[str, str]:
    told: dict[str, Any] = {"verify_base": "off", "keep": ["*.x"], "fsync": False}
    ds_frozen_patch.patch(**{how: told[how]} if os.environ["RANK"] == "1" else {})
    return runs.refusal(run_of, out)


@pytest.mark.short
@pytest.mark.once
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["verify_base", "keep", "fsync"])
def test_different_settings_on_one_rank(ranks: Any, tmp_path: Path, how: str) -> None:
    for name, text in ranks(2, set_up_unlike, alone=True, out=str(tmp_path), how=how):
        assert name == "PatchError"
        assert f"- {how}: " in text
        assert " on rank 1" in text


def set_up_and_end(out: str, odd: int) -> None:
    handshake.WAIT_SECONDS = 1
    if os.environ["RANK"] != str(odd):
        ds_frozen_patch.patch()
    run_of(out)


@pytest.mark.once
@pytest.mark.timeout(60)
@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.short)])
def test_an_unpatched_rank(ranks: Any, tmp_path: Path, odd: int) -> None:
    """The patched rank raises; the other, which waits for it in its first step, loses the connection."""
    with pytest.raises(RankError) as caught:
        ranks(2, set_up_and_end, alone=True, grace=1, out=str(tmp_path), odd=odd)
    patched = caught.value.raised[1 - odd]
    assert patched is not None
    assert patched[0] == PatchError.__name__
    assert f"patch() was called on this rank, but not on rank {odd}:" in patched[1]


def die_in_the_handshake() -> None:
    torch.distributed.init_process_group("gloo")
    ds_frozen_patch.patch()
    if os.environ["RANK"] == "0":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    handshake.check(wait_seconds=10)


@pytest.mark.once
def test_a_rank_that_was_killed_is_not_taken_for_unpatched(ranks: Any) -> None:
    """Rank 0 serves the store. If it is gone, the others get torch's error, and not the advice to call patch()."""
    with pytest.raises(RankError) as caught:
        ranks(2, die_in_the_handshake, alone=True)
    other = caught.value.raised[1]
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
        ours = torch.distributed.PrefixStore("ours", store)  # type: ignore[attr-defined]
        with overridden([(handshake, "default_store", lambda ours=ours: ours)]):
            if is_patched:
                ds_frozen_patch.patch()
                _, said = runs.outcome(partial(handshake.check, wait_seconds=2))
                ds_frozen_patch.unpatch()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return said


@pytest.mark.once
def test_the_handshake_is_renewed_for_another_process_group(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, two_process_groups_of_one_store, alone=True, out=str(tmp_path))
    assert "was called on this rank, but not on rank 1" in first
    assert second == ""


def slow_set_up(out: str, stage: int) -> int:
    """Let one rank set up much later than the others; all are patched nevertheless."""
    handshake.WAIT_SECONDS = 0.5
    ds_frozen_patch.patch()
    if os.environ["RANK"] == "1":
        time.sleep(2)
    return int(run_of(out, stage).global_step)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_late_rank(ranks: Any, tmp_path: Path, stage: int) -> None:
    assert ranks(2, slow_set_up, alone=True, out=str(tmp_path), stage=stage) == [runs.BATCHES] * 2


# Saves and loads that are not alike


UNLIKE = {
    "full_checkpoint": "exclude_frozen_parameters: True on rank 0, False on rank 1",
    "export": "export: None on rank 0, 'safetensors' on rank 1",
    "keep": "keep: () on rank 0, ('*',) on rank 1",
    "weights_only": "what is saved: 'a checkpoint' on rank 0, 'the weights alone' on rank 1",
}


def save_unlike(out: str) -> dict[str, tuple[str, str]]:
    """Ask rank 1 for different saves within a run; the run goes on after each."""
    ds_frozen_patch.patch()
    odd, found = os.environ["RANK"] == "1", {}
    trainer = run_of(out)
    trainer.save_checkpoint(f"{out}/a.ckpt")
    settings = {"export": {"export": "safetensors"}, "keep": {"keep": ["*"]}}
    for how in UNLIKE:
        if odd:
            ds_frozen_patch.patch(**settings.get(how, {}))  # type: ignore[arg-type]
        before = {*Path(out).rglob("*")}
        with ds_frozen_patch.full_checkpoint() if odd and how == "full_checkpoint" else nullcontext():
            save, alone = trainer.save_checkpoint, odd and how == "weights_only"
            found[how] = runs.refusal(save, f"{out}/a.ckpt", weights_only=alone)
        assert odd or {*Path(out).rglob("*")} == before
        if odd:
            ds_frozen_patch.unpatch()
            ds_frozen_patch.patch()
        trainer.save_checkpoint(f"{out}/a.ckpt")
        assert not ds_frozen_patch.verify(f"{out}/a.ckpt").problems
        torch.distributed.barrier()
    return found


@pytest.mark.short
@pytest.mark.timeout(60)
def test_a_different_save_on_one_rank(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2, save_unlike, out=str(tmp_path)):
        assert found.keys() == UNLIKE.keys()
        for how, (name, text) in found.items():
            assert name == "CheckpointMismatchError"
            assert f"{tmp_path}/a.ckpt was not saved" in text
            assert UNLIKE[how] in text


def load_unlike(out: str) -> list[tuple[str, str]]:
    """Load on rank 1 with different settings; from a path at which there is nothing on rank 0, and on rank 1."""
    ds_frozen_patch.patch()
    rank, found = int(os.environ["RANK"]), []
    trainer = run_of(out)
    trainer.save_checkpoint(f"{out}/a.ckpt")
    for odd, name, verify_base in ((1, "a", "off"), (0, "b", "error"), (1, "b", "error")):
        ds_frozen_patch.patch(verify_base=verify_base if rank == odd else "error")  # type: ignore[arg-type]
        path = f"{out}/{name if rank == odd else 'a'}.ckpt"
        found.append(runs.refusal(trainer.strategy.load_checkpoint, path))
    return found


@pytest.mark.short
def test_a_different_load_and_a_checkpoint_missing_on_one_rank(ranks: Any, tmp_path: Path) -> None:
    settings, *missing = zip(*ranks(2, load_unlike, out=str(tmp_path)), strict=True)
    for name, text in settings:
        assert name == "CheckpointMismatchError"
        assert "verify_base: 'error' on rank 0, 'off' on rank 1" in text
    for odd, said in enumerate(missing):
        (name, text), (other, own) = said[1 - odd], said[odd]
        assert (name, other) == ("CheckpointError", "FileNotFoundError")
        assert f"Rank {odd}: {own}" in text
        assert f"There is no checkpoint at {tmp_path}/b.ckpt" in own
