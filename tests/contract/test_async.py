"""Promise 20: saves that training does not wait for."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from kit import owners, processes, runs
from kit.cell import ModelCheckpoint
from kit.owners import OWNERS, PEFT, WRITE, Run, writing, writing_when
from kit.processes import RankError

import ds_frozen_patch
from ds_frozen_patch import ranks as agreeing
from ds_frozen_patch import record
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.engine.served import attached
from ds_frozen_patch.publish import in_flight, publication
from ds_frozen_patch.publish.journal import is_unfinished
from ds_frozen_patch.save.writer import Recorder

pytestmark = [pytest.mark.promise(20), pytest.mark.everyday]
by_each = pytest.mark.parametrize("by", OWNERS)


def whole_and_resumed(by: str, out: str, stage: int) -> Any:
    with owners.served(async_save=True):
        whole = Run(by, out, 2, stage, PEFT)
        first = whole.train()
        again = Run(by, f"{out}/again", 2, stage, PEFT)
        resumed = again.train(whole.at(0))
    return first, resumed


SHORT = [("deepspeed", 0), ("accelerate", 3), ("trainer", 2)]
CASES = [pytest.param(by, n, marks=pytest.mark.short if (by, n) in SHORT else ()) for by in OWNERS for n in (0, 2, 3)]


@pytest.mark.parametrize(("by", "stage"), CASES)
def test_resumed_bit_for_bit(ranks: Any, tmp_path: Path, by: str, stage: int) -> None:
    for (losses, state), resumed in ranks(2, whole_and_resumed, by=by, out=str(tmp_path), stage=stage):
        assert resumed == (losses[owners.STEPS :], state)
    assert not list(tmp_path.rglob(".ds_frozen_patch-*"))


def saved_in_both_ways(out: str, stage: int) -> Any:
    """A save that returns when its files are written, and one in flight while everything changes."""
    # Another one for each stage, since the ranks go on with the same store, where they vote under it.
    one_id = overridden([(publication, "uuid4", lambda: UUID(int=stage << 100))])
    told, read = threading.Event(), list[Path]()
    reading = overridden([(record, "hash_directory", read.append)])
    with owners.served(async_save=False), one_id, reading:
        run = Run("deepspeed", out, 2, stage, PEFT)
        run.train_epoch()
        mine: dict[str, Any] = {"list": [1, 2], "tensor": torch.ones(3)}
        run.engine.save_checkpoint(f"{out}/sync", tag="a", client_state={"mine": mine})
        ds_frozen_patch.patch(async_save=True)
        with writing_when(told):
            run.engine.save_checkpoint(f"{out}/async", tag="a", client_state={"mine": mine})
            mine["list"].append(3)
            mine["tensor"].zero_()
            run.train_epoch()
            torch.distributed.barrier()
            is_there = Path(out, "async", "latest").exists() or not is_unfinished(Path(out, "async", "a"))
            torch.distributed.barrier()
            told.set()
            in_flight.wait()
        return is_there, read


@pytest.mark.short
@pytest.mark.parametrize("stage", [2, 3])
def test_the_same_bytes(ranks: Any, tmp_path: Path, stage: int) -> None:
    """What is written later is the state at the moment of the call, and has a name once all ranks have written.

    No file is read again for the record in either kind of save.
    """
    assert ranks(2, saved_in_both_ways, out=str(tmp_path), stage=stage) == [(False, []), (False, [])]
    files = {file.relative_to(tmp_path / "sync") for file in (tmp_path / "sync").rglob("*") if file.is_file()}
    assert len([file for file in files if file.name.endswith("_states.pt")]) == (3 if stage == 2 else 4)
    for file in files:
        assert (tmp_path / "sync" / file).read_bytes() == (tmp_path / "async" / file).read_bytes(), file


def on_a_slow_disk(out: str) -> Any:
    """Rank 1 writes slowly, twice, and both ranks train meanwhile."""
    with owners.served(async_save=True), writing(seconds=1.5, rank=1):
        run = Run("deepspeed", out, 2, 2)
        found = []
        for tag in ("a", "b"):
            run.engine.save_checkpoint(out, tag=tag)
            run.train_epoch()
            torch.distributed.barrier()
            found.append(sorted(item.name for item in Path(out).glob("[ab]") if not is_unfinished(item)))
            torch.distributed.barrier()
        with runs.heard() as said:
            in_flight.wait()
        known = attached(run.engine)
        assert known is not None
        size = sum(buffer.nbytes() for buffer in known.recorder._buffers)
        return found, sorted(item.name for item in Path(out, "b").iterdir()), size, said


def test_training_goes_on_while_one_rank_writes(ranks: Any, tmp_path: Path) -> None:
    """The second save waits for the first, and one copy is in memory."""
    for found, files, size, _ in ranks(2, on_a_slow_disk, out=str(tmp_path)):
        assert found[0] == []
        assert "a" in found[1]
        assert "b" not in found[1]
        largest = max(file.stat().st_size for file in (tmp_path / "a").iterdir())
        assert size <= sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
        assert size > largest / 2
        assert len(files) == 4
    assert (tmp_path / "latest").read_text() == "b"


def failed(by: str, out: str, heard_at: str) -> Any:
    """Rank 1 cannot write the second checkpoint; where every rank hears of it, and what is there then."""
    with owners.served(async_save=True):
        options: dict[str, Any] = {"save_strategy": "no"} if by == "trainer" else {}
        run = Run(by, out, 2, 2, **options)
        if by == "trainer":
            run.trainer.train()
            run.save(run.at(0))
        else:
            run.train(epochs=1)
        in_flight.settle()
        with writing(fails=True, rank=1):
            run.save(Path(out, "bad") if by != "trainer" else run.at(1), 1)
            in_flight.settle()
        if heard_at == "save":
            said = runs.refusal(run.save, Path(out, "good"))
            run.save(Path(out, "good"))
        elif heard_at == "load":
            said = runs.refusal(run.load, run.at(0))
            run.load(run.at(0))
        else:
            said = runs.refusal(ds_frozen_patch.unpatch)
    return said


@pytest.mark.short
@pytest.mark.parametrize(
    ("by", "heard_at"), [("deepspeed", "save"), ("accelerate", "load"), ("deepspeed", "unpatch"), ("trainer", "save")]
)
def test_a_failure_is_raised_on_every_rank(ranks: Any, tmp_path: Path, by: str, heard_at: str) -> None:
    for kind, said in ranks(2, failed, by=by, out=str(tmp_path), heard_at=heard_at):
        assert kind == "CheckpointError"
        assert "was not saved. Rank 1" in said
        assert "No space left" in said
    assert not list(tmp_path.rglob(".*"))
    names = {item.name for item in tmp_path.iterdir() if list(item.rglob("*_states.pt"))}
    assert "bad" not in names
    if heard_at == "save" and by == "deepspeed":
        assert {"epoch0", "good"} <= names


def dead_while_others_write(out: str) -> Any:
    """Rank 1 dies when it should write, and rank 0 waits for that, with no collective that would notice."""

    def write(*args: Any) -> None:
        if torch.distributed.get_rank() == 1:
            os._exit(9)
        WRITE(*args)

    short = [(agreeing, "LOST_SECONDS", 1.5), (agreeing, "BEAT_SECONDS", 0.2)]
    with owners.served(async_save=True), overridden([(Recorder, "write", write), *short]):
        run = Run("deepspeed", out, 2, 2)
        run.engine.save_checkpoint(out, tag="a")
        in_flight.wait()


def test_a_rank_that_is_gone(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, dead_while_others_write, out=str(tmp_path))
    assert caught.value.raised[0] is not None
    kind, said = caught.value.raised[0]
    assert kind == "CheckpointError"
    assert "rank 1 is gone" in said
    assert is_unfinished(tmp_path / "a")
    assert not (tmp_path / "latest").exists()


def slow_but_there(out: str) -> None:
    """Rank 1 writes for longer than a rank may be silent."""
    short = [(agreeing, "LOST_SECONDS", 1.0), (agreeing, "BEAT_SECONDS", 0.1)]
    with owners.served(async_save=True), writing(seconds=3, rank=1), overridden(short):
        Run("deepspeed", out, 2, 2).engine.save_checkpoint(out, tag="a")
        in_flight.wait()


def test_a_rank_that_writes_for_long(ranks: Any, tmp_path: Path) -> None:
    ranks(2, slow_but_there, out=str(tmp_path))
    assert (tmp_path / "latest").read_text() == "a"


# What looks for a checkpoint by itself


def loaded_at_once(out: str) -> Any:
    with owners.served(async_save=True), writing(seconds=1):
        run = Run("accelerate", out, 2, 2)
        before = run.train(epochs=1)[1]
        run.accelerator.load_state(str(run.at(0)))
        return before == run.seen()[1]


def test_accelerate_loads_what_was_just_saved(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, loaded_at_once, out=str(tmp_path)) == [True, True]


def fabric_loaded_at_once(out: str) -> Any:
    with ds_frozen_patch.patched(async_save=True), ds_frozen_patch.no_wait(), writing(seconds=1):
        fabric = runs.fabric(2, 2)
        model, optimizer = runs.fabric_setup(fabric)
        fabric.save(f"{out}/a.ckpt", {"model": model, "optimizer": optimizer, "note": 1})
        state = {"model": model, "optimizer": optimizer, "note": 0}
        fabric.load(f"{out}/a.ckpt", state)
        return state["note"]


def test_fabric_loads_what_was_just_saved(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, fabric_loaded_at_once, out=str(tmp_path)) == [1, 1]


def best_at_the_end(out: str, best: int, goes_back: bool, seconds: float) -> Any:
    """Trainer removes the checkpoint that is not the best, and may load the best; the last save is still in flight."""
    options: dict[str, Any] = {"eval_strategy": "epoch", "save_total_limit": 1, "metric_for_best_model": "score"}
    scores = iter([0.0, 1.0] if best else [1.0, 0.0])
    with owners.served(async_save=True), writing(seconds=seconds):
        run = Run("trainer", out, 2, 3, PEFT, load_best_model_at_end=goes_back, greater_is_better=True, **options)
        evaluate = run.trainer.evaluate

        def scored(*args: Any, **kwargs: Any) -> Any:
            return {**evaluate(*args, **kwargs), "eval_score": next(scores)}

        run.trainer.evaluate = scored
        run.trainer.train()
        return run.seen()[1]


@pytest.mark.parametrize(("best", "goes_back"), [(0, True), (1, True), (1, False)])
def test_trainer_keeps_the_best(ranks: Any, tmp_path: Path, best: int, goes_back: bool) -> None:
    ended = [
        ranks(2, best_at_the_end, out=str(tmp_path / str(seconds)), best=best, goes_back=goes_back, seconds=seconds)
        for seconds in (0, 1)
    ]
    assert ended[0] == ended[1]
    kept = [sorted(item.name for item in (tmp_path / str(seconds)).iterdir()) for seconds in (0, 1)]
    assert kept == [[f"checkpoint-{owners.STEPS * (best + 1)}"]] * 2


# What removes older checkpoints


def kept_by_lightning(out: str, options: dict[str, Any], async_save: bool, fails: bool) -> Any:
    with ds_frozen_patch.patched(async_save=async_save):
        callback = ModelCheckpoint(dirpath=out, filename="{step}", **options)
        trainer = runs.trainer(out, 2, 2, epochs=3, callbacks=[callback])
        if not fails:
            trainer.fit(runs.LoraRun(), runs.batches(2))
            return callback.best_model_path, callback.last_model_path

        writes = []

        def fail_second(*args: Any) -> None:
            writes.append(args)
            if len(writes) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            WRITE(*args)

        with overridden([(Recorder, "write", fail_second)]):
            return runs.refusal(trainer.fit, runs.LoraRun(), runs.batches(2))


LAST = {"save_last": True, "save_top_k": 1}


@pytest.mark.parametrize(
    "options", [{"save_top_k": 1}, LAST, {**LAST, "save_last": "link"}], ids=["top", "last", "link"]
)
def test_lightning_keeps_what_it_would(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    results, names = [], []
    for way in (True, False):
        out = tmp_path / "run"
        results.append(ranks(2, kept_by_lightning, out=str(out), options=options, async_save=way, fails=False))
        names.append(sorted((str(item.relative_to(out)), item.is_symlink()) for item in out.rglob("*")))
        for item in out.glob("*.ckpt"):
            assert not ds_frozen_patch.verify(item).problems
        out.rename(tmp_path / str(way))
    assert results[0] == results[1]
    assert names[0] == names[1]


@pytest.mark.short
@pytest.mark.parametrize("counts", [True, False])
def test_what_failed_replaces_nothing(ranks: Any, tmp_path: Path, counts: bool) -> None:
    """The checkpoint before is removed only once the next has its name; the error is raised by the save after it."""
    options = {**LAST, "save_last": "link", "enable_version_counter": counts}
    for kind, said in ranks(2, kept_by_lightning, out=str(tmp_path), options=options, async_save=True, fails=True):
        assert kind == "CheckpointError"
        assert "No space left" in said
    (first,) = (item for item in tmp_path.glob("step*.ckpt"))
    assert (tmp_path / "last.ckpt").resolve() == first
    assert not ds_frozen_patch.verify(first).problems


# The end of the process


PROGRAM = """
import json, os, signal, sys, time
sys.path[:0] = {path!r}
import torch, deepspeed
from kit import owners, runs
import ds_frozen_patch
from kit.owners import writing

children = {{}}
for name, (end, fails) in json.loads(sys.argv[1]).items():
    out = os.path.join({out!r}, name)
    os.mkdir(out)
    pid = os.fork()
    if not pid:
        break
    children[name] = pid
else:
    statuses = {{name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in children.items()}}
    print(json.dumps(statuses), flush=True)
    os._exit(0)
os.dup2(os.open(os.path.join(out, "stderr"), os.O_WRONLY | os.O_CREAT), 2)
os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
ds_frozen_patch.patch(async_save=True)
(unread := ds_frozen_patch.no_wait()).__enter__()
run = owners.Run("deepspeed", out, 1, 2)
before = signal.signal(signal.SIGTERM, lambda *_: None)  # as Lightning does while it trains
run.engine.save_checkpoint(out, tag="first")
signal.signal(signal.SIGTERM, before)
run.train_epoch()
ds_frozen_patch.wait()  # so that what follows slows the next save alone
slow = writing(seconds=1.5, fails=fails)
slow.__enter__()
run.engine.save_checkpoint(out, tag="second")
exec(end)
"""
ENDS: dict[str, tuple[str, bool, int, str]] = {
    "normal": ("", False, 0, "second"),
    "failed": ("", True, 1, "first"),
    "exception": ("raise KeyError('mine')", False, 1, "second"),
    "interrupt": ("raise KeyboardInterrupt", False, -signal.SIGINT, "second"),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", False, -signal.SIGTERM, "second"),
    "their handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
        False,
        3,
        "second",
    ),
    "failed, exception": ("raise KeyError('mine')", True, 1, "first"),
    "kill -9": ("os.kill(os.getpid(), signal.SIGKILL)", False, -signal.SIGKILL, "first"),
    "destroyed": ("torch.distributed.destroy_process_group(); os._exit(0)", False, 0, "second"),
    "failed, destroyed": ("torch.distributed.destroy_process_group()", True, 1, "first"),
    "destroyed by c10d": ("torch.distributed.distributed_c10d.destroy_process_group()", False, 0, "second"),
    "comm": ("deepspeed.comm.destroy_process_group(); os._exit(0)", False, 0, "second"),
}
"""What a program does at its end, whether its last save fails, its exit status, and the tag that `latest` names."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The folders of all of them, and their exit statuses; one process imports everything, and forks them."""
    out = tmp_path_factory.mktemp("ended")
    program = PROGRAM.format(path=sys.path, out=str(out))
    cases = json.dumps({name: case[:2] for name, case in ENDS.items()})
    done = subprocess.run([sys.executable, "-c", program, cases], capture_output=True, text=True, timeout=300)
    return out, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_the_process(ended: tuple[Path, dict[str, int]], name: str) -> None:
    (end, fails, status, newest), (out, statuses) = ENDS[name], ended
    said = (out / name / "stderr").read_text()
    assert statuses[name] == status, said[-3000:]
    assert (out / name / "latest").read_text() == newest
    assert not ds_frozen_patch.verify(out / name).problems
    assert is_unfinished(out / name / "second") == ("SIGKILL" in end)
    assert ("No space left" in said) == fails


FORKED = """
import sys, os
sys.path[:0] = {path!r}
import torch.multiprocessing
from kit import owners
import ds_frozen_patch
from kit.owners import writing
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}", WORLD_SIZE="2")

def train(rank):
    global slow, unread  # as long as the process lives
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank))
    ds_frozen_patch.patch(async_save=True)
    unread = ds_frozen_patch.no_wait()
    unread.__enter__()
    run = owners.Run("deepspeed", {out!r}, 2, 2)
    slow = writing(seconds=1, fails={fails!r} and rank == 1)
    slow.__enter__()
    run.engine.save_checkpoint({out!r}, tag="only")

torch.multiprocessing.start_processes(train, nprocs=2, start_method="fork")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_forked_ranks(tmp_path: Path, fails: bool) -> None:
    """Processes that `multiprocessing` starts, as Accelerate's `notebook_launcher` does, run no `atexit`."""
    port = processes.free_port()
    program = FORKED.format(path=sys.path, out=str(tmp_path), fails=fails, port=port)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    assert (tmp_path / "latest").exists() == (not fails)
    assert ("No space left" in done.stderr) == fails
