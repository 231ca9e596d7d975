"""Other processes in the folder of a checkpoint that is saved over: readers, copies, other jobs, forked children."""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import nodes, owners, processes, runs, saves
from kit.nodes import Nodes
from kit.processes import Process, ThisProcess
from kit.saves import TAG, Crew, Numbered

import ds_frozen_patch
from ds_frozen_patch import CheckpointError

pytestmark = pytest.mark.timeout(900)
MODES = {"sync": 2, "async": 3}
"""How checkpoints are saved, and in which ZeRO stage."""
MIX = re.compile("another save|being replaced|more than one save|from one checkpoint")
"""What a tool says of files that have changed while it read them."""
in_both_modes = pytest.mark.parametrize("mode", MODES)


def save_again_and_again(this: ThisProcess, folder: str, out: str, mode: str, times: int, new: int) -> int:
    """Save over one checkpoint, and each `new`-th time to a new tag; then `latest` names the former."""
    with saves.served(mode):
        run = Numbered(out, int(os.environ["WORLD_SIZE"]), MODES[mode])
        for number in range(times):
            run.save(folder, f"new{number}" if new and number % new == 1 else TAG, wait=False)
        run.save(folder)
        ds_frozen_patch.wait()
        return run.number


def returned(said: list[tuple[str, Any]]) -> list[Any]:
    assert {what for what, _ in said} == {"returned"}, said
    return [value for _, value in said]


# Readers


def read_again_and_again(this: ThisProcess, folder: str, out: str, mode: str, end: str) -> Counter[str]:
    """Load, and read by the tools, until a file exists; return how often, and what went wrong."""
    found: Counter[str] = Counter()
    is_first = os.environ["RANK"] == "0"
    with saves.served(mode):
        run, last = Numbered(out, int(os.environ["WORLD_SIZE"]), MODES[mode]), 0
        while True:
            over = [Path(end).exists()]
            torch.distributed.broadcast_object_list(over)
            if over[0]:
                return found
            try:
                number = run.load(folder, TAG)
                found["loads"] += 1
                found["of another save than the one before"] += number != last
                found["wrong: of an older save than the one before"] += number < last
                last = number
            except (CheckpointError, AssertionError) as error:
                found[f"wrong: {error}"] += 1
            if is_first:
                try:
                    for problem in ds_frozen_patch.verify(folder, TAG).problems:
                        found[f"refused: verify: {problem}"] += 1
                    ds_frozen_patch.consolidate(folder, f"{out}/{os.getpid()}.ckpt", tag=TAG)
                    found["reads by tools"] += 1
                except CheckpointError as error:  # a tool does not repeat what it has read, but says what it is
                    found[f"refused: a tool: {error}"] += 1
                Path(f"{out}/{os.getpid()}.ckpt").unlink(missing_ok=True)


@in_both_modes
def test_readers_of_a_checkpoint_that_is_saved_over(
    tmp_path: Path, long: bool, counted: Callable[[str, int], None], mode: str
) -> None:
    """Never a mixture, nor an error: at most a load repeats what it has read."""
    folder, end = str(tmp_path / "run"), tmp_path / "end"
    asked: dict[str, Any] = {"folder": folder, "out": str(tmp_path), "mode": mode}
    returned(processes.run_ranks(save_again_and_again, tmp_path / "log", (None, None), times=0, new=0, **asked))
    readers = processes.start_ranks(read_again_and_again, tmp_path / "log", (None, None), end=str(end), **asked)
    times = 300 if long else 30
    try:
        returned(processes.run_ranks(save_again_and_again, tmp_path / "log", (None, None), times=times, new=0, **asked))
    finally:
        end.touch()
        said = processes.outcomes(readers)
    found = sum(returned(said), Counter[str]())
    print(mode, found)
    assert not [what for what in found if what.startswith("wrong")], found
    assert not [what for what in found if what.startswith("refused") and not MIX.search(what)], found
    assert found["of another save than the one before"] > 2, found
    counted("load of a checkpoint that another process saves over meanwhile", found["loads"] + found["reads by tools"])


# Copies

RSYNC = ("rsync", "-a", "--modify-window=-1")  # else it takes two files of one second and size for the same


@in_both_modes
@pytest.mark.parametrize("copier", ["cp", "rsync"])
def test_copies_taken_while_checkpoints_are_saved(
    tmp_path: Path, long: bool, counted: Callable[[str, int], None], mode: str, copier: str
) -> None:
    """A copy that is complete loads, whatever else it has caught; one that is not is never loaded as a mixture.

    `rsync -a` does not remove what is gone from its source, so its copy keeps all that it has ever seen.
    """
    if shutil.which(copier) is None:
        pytest.skip(f"{copier} is not installed")
    folder, kept = tmp_path / "run", tmp_path / "kept"
    asked: dict[str, Any] = {"folder": str(folder), "out": str(tmp_path), "mode": mode}
    asked |= {"times": 60 if long else 12, "new": 4}
    writers = processes.start_ranks(save_again_and_again, tmp_path / "log", (None, None), **asked)
    while not folder.exists():
        time.sleep(0.01)
    taken: list[Path] = []
    while any(writer.process.is_alive() for writer in writers) and not all(w.pipe.poll() for w in writers):
        if copier == "rsync":
            subprocess.run([*RSYNC, f"{folder}/", f"{kept}/"], check=False, capture_output=True)
        copy = tmp_path / f"copy{len(taken)}"
        subprocess.run(["cp", "-a", str(folder), str(copy)], check=False, capture_output=True)
        taken.append(copy)
    (last, _) = returned(processes.outcomes(writers))
    subprocess.run(
        [*RSYNC, f"{folder}/", f"{kept}/"] if copier == "rsync" else ["cp", "-a", f"{folder}/.", f"{kept}/"], check=True
    )
    names = [item.name for item in folder.iterdir() if item.is_dir()]
    reader = Crew(tmp_path, mode, MODES[mode], number=last)
    counts: Counter[str] = Counter()
    try:
        for copy in random.Random(0).sample(taken, min(len(taken), 100 if long else 10)):
            for tag in [item.name for item in copy.iterdir() if item.is_dir()]:
                said = reader("load", copy, tag)
                counts["loaded" if isinstance(said[0], int) else said[0][0]] += 1
                assert "mixture" not in str(said), (copy, tag, said)
                assert isinstance(said[0], int) or said[0][0] in ("CheckpointError", "AssertionError"), said
        for tag in names:
            said = reader("load", kept, tag)
            assert said[0] == said[1] == (last if tag == TAG else int(tag.removeprefix("new")) + 1), (tag, said)
            assert not ds_frozen_patch.verify(kept, tag).problems
        assert reader("save", kept) == [last + 1] * 2
        assert reader("load", kept) == [last + 1] * 2
        assert saves.leftovers(kept / TAG) == []
    finally:
        reader.stop()
    print(mode, copier, len(taken), dict(counts))
    counted(f"`{copier} -a` of a folder that checkpoints are saved to", len(taken))


# Other jobs


def job(this: ThisProcess, at: str, out: str, number: int, tag: str, times: int) -> dict[str, Any]:
    """Save again and again to a tag in a folder that other jobs save to; return what has failed."""
    failed: list[str] = []
    with saves.served("sync"), runs.heard() as said:
        run = Numbered(out, int(os.environ["WORLD_SIZE"]), 2)
        drawn = random.Random(number)
        for _ in range(times):
            time.sleep(drawn.uniform(0, 0.03))
            try:
                run.save(f"{at}/run", tag)
                if tag != "shared" and (seen := run.load(f"{at}/run", tag)) != run.number:
                    failed.append(f"{seen} is loaded after save {run.number}")
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")
    return {"failed": failed, "said": said, "number": run.number}


def job_in_container(this: ThisProcess, host: str, **asked: Any) -> dict[str, Any]:
    """A job in PID and UTS namespaces of its own, whose host may be called as that of another one."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.unshare(0x20000000 | 0x4000000 | nodes.CLONE_NEWNS), os.strerror(ctypes.get_errno())
    assert not libc.sethostname(host.encode(), len(host))
    ours, theirs = os.pipe()
    if not (child := os.fork()):  # the first process of the new PID namespace
        try:
            assert not libc.mount(b"none", b"/", None, nodes.MS_REC | nodes.MS_PRIVATE, None)
            assert not libc.mount(b"proc", b"/proc", b"proc", 0, None)
            os.write(theirs, repr(job(this, **asked)).encode())
        except BaseException as error:
            os.write(theirs, repr({"failed": [repr(error)], "said": []}).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        found: dict[str, Any] = eval(pipe.read())
    os.waitpid(child, 0)
    return found


@pytest.mark.parametrize("tag", ["its own", "shared"])
@pytest.mark.parametrize("seen", ["hosts of other names", "containers on one host", "local locks"])
def test_jobs_that_do_not_see_each_other(
    tmp_path: Path, long: bool, counted: Callable[[str, int], None], seen: str, tag: str
) -> None:
    """Three jobs in one folder, to a tag each or to one: no save fails since another job took its files for dead."""
    times, count = 40 if long else 12, 3
    if why := nodes.why_no_cached_disk() if seen == "local locks" else nodes.why_unsupported():
        pytest.skip(why)
    (tmp_path / "disk").mkdir()
    with nodes.local_locks(tmp_path, count) if seen == "local locks" else nullcontext() as cluster:
        started: list[Process] = []
        for number in range(count):
            asked: dict[str, Any] = {"out": str(tmp_path), "number": number, "times": times}
            asked["tag"] = f"job{number}" if tag == "its own" else "shared"
            if cluster is not None:
                one = Nodes(cluster.at, cluster.disks[number : number + 1], cluster.files[:1])
                started += one.start(job, **asked)
                continue
            asked |= {"host": "host" if "one host" in seen else f"host{number}", "at": str(tmp_path / "disk")}
            started += processes.start_ranks(job_in_container, tmp_path / "log", (None,), **asked)
        found = returned(processes.outcomes(started))
        failed = [text for one in found for text in one["failed"]]
        assert not failed, "\n".join([f"{len(failed)} of {count * times}", *failed])
        files = tmp_path / ("disk" if cluster is None else "server")
        for item in {f"job{number}" for number in range(count)} if tag == "its own" else {"shared"}:
            assert not ds_frozen_patch.verify(files / "run", item).problems
        assert (files / "run" / "latest").read_text() in ("job0", "job1", "job2", "shared")
    counted(f"saves of jobs in one folder that do not see each other ({seen})", count * times)


# A child of the process that is killed


def killed_with_child(this: ThisProcess, folder: str, out: str) -> None:
    """Be killed in an asynchronous save over a checkpoint, while a forked child lives on."""
    with saves.served("async"), owners.writing(seconds=600):
        run = Numbered(out, 1, 2, number=1)
        run.save(folder, wait=False)
        time.sleep(0.5)
        child = os.fork()
        if not child:
            this.pipe.close()  # else the test waits for it
            time.sleep(600)
        Path(out, "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)


def timed_save(this: ThisProcess, folder: str, out: str) -> float:
    with saves.served("sync"):
        run = Numbered(out, 1, 2, number=5)
        assert run.load(folder) == 1
        begun = time.monotonic()
        run.save(folder)
        seconds = time.monotonic() - begun
        assert run.load(folder) == run.number
        return seconds


def test_a_kill_in_an_asynchronous_save_whose_child_lives_on(tmp_path: Path) -> None:
    """The next run does not wait for a child, such as a pool's worker, which has all that was open in the save."""
    folder = tmp_path / "run"
    asked: dict[str, Any] = {"folder": str(folder), "out": str(tmp_path)}
    returned(processes.run_ranks(save_again_and_again, tmp_path / "log", (None,), times=0, new=0, mode="sync", **asked))
    # The mode's stage is that of the others here.
    assert processes.run_ranks(killed_with_child, tmp_path / "log", (None,), **asked)[0][0] == "killed"
    child = int((tmp_path / "child").read_text())
    try:
        (seconds,) = returned(processes.run_ranks(timed_save, tmp_path / "log", (None,), **asked))
        os.kill(child, 0)  # it does live
    finally:
        os.kill(child, signal.SIGKILL)
    assert seconds < 10
    assert saves.leftovers(folder) == []
