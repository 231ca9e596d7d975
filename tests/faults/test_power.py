"""Power cuts during and after a save lose neither what has been saved nor what was there before.

The disk that can lose power is a small image on a loop device, with a real ext4 or xfs that can be stopped instantly.
The cut is the ioctl that xfstests uses to test crash recovery: from then on nothing reaches the device, so dirty pages
and uncommitted parts of the journal are lost. The next mount replays the journal, as after a real power cut. The
simulation does not include the write cache of the device: the page cache of the image counts as the disk. Everything
here except what counts calls needs root and Linux's ext4 or xfs, and is skipped elsewhere.
"""

from __future__ import annotations

import fcntl
import gc
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.cell import Callback
from kit.checkpoints import TOOLS, Checkpoints, contents
from kit.owners import Run
from kit.processes import KillPoint
from safetensors.torch import load_file

import ds_frozen_patch
from ds_frozen_patch import CheckpointError
from ds_frozen_patch.cli import main
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.publish.journal import SINGLE, is_not_whole, is_unfinished

pytestmark = pytest.mark.promise(17)

KINDS = ("ext4", "xfs")
SIZE = 320 * 2**20  # of the image, which is sparse: xfs takes no less than 300 MiB
MAKE = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}
OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}  # a copy may be mounted while the kernel still has the original
PACKAGES = {"ext4": "e2fsprogs", "xfs": "xfsprogs"}

SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: _IOR('X', 125, __u32)
COMMIT_FIRST, COMMIT_NOTHING = 1, 2  # the journal is flushed, and no data; or not even that
BUSY_SECONDS = 0.5
BACKGROUND = "ds_frozen_patch"  # how the names of our threads begin


@dataclass
class Disk:
    """A mounted image. It can be pickled, for another process in the same mount namespace to cut and restore."""

    where: Path
    kind: str
    image: Path

    def _mount(self) -> None:
        _run("mount", "-t", self.kind, "-o", OPTIONS[self.kind], str(self.image), str(self.where))

    def cut(self, committed: bool = False) -> None:
        """Cut the power; if `committed`, the journal has just committed names, but not the data of the files."""
        disk = os.open(self.where, os.O_RDONLY)
        try:
            flag = COMMIT_FIRST if committed else COMMIT_NOTHING
            fcntl.ioctl(disk, SHUTDOWN, struct.pack("I", flag))
        finally:
            os.close(disk)

    def commit(self) -> None:
        """Have the journal commit its contents without the data of other files, by the fsync of an unrelated one."""
        file = os.open(self.where / "unrelated", os.O_WRONLY | os.O_CREAT)
        try:
            os.write(file, b"1")
            os.fsync(file)
        finally:
            os.close(file)

    def restore(self) -> None:
        """Restore power: mount again, with an empty page cache.

        The kernel keeps a file system that was shut down while anything uses it: a process with an open file, or
        another mount namespace made in the meantime. In that case a copy of the image is mounted, because the image
        itself would give the same file system again.
        """
        deadline = time.monotonic() + BUSY_SECONDS
        while (busy := self._busy()) or self._attached():
            if time.monotonic() > deadline:
                if busy:
                    _run("umount", "-l", str(self.where))
                copy = self.image.with_name(f"{self.kind}-{time.monotonic_ns()}.image")
                _run("cp", "--sparse=always", str(self.image), str(copy))
                self.image.unlink()
                self.image = copy
                break
            time.sleep(0.02)
        self._mount()

    def _busy(self) -> bool:
        try:
            _run("umount", str(self.where))
        except subprocess.CalledProcessError as error:
            if "not mounted" not in error.stderr:
                return True
        return False

    def _attached(self) -> bool:
        return bool(_run("losetup", "--associated", str(self.image)))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Cutter:
    """Cuts the power of a disk once, at a point in what this process does there, and records when.

    A point is a call that concerns files on the disk, or one that changes names, or a number of seconds after the
    start. Calls are those that Python reports to audit hooks, and both the start and the end of each `os.fsync` and
    `torch.save`.
    """

    def __init__(
        self, disk: Disk, point: KillPoint | None = None, committed: bool = False, is_of_names: bool = False
    ) -> None:
        self.disk, self.point, self.committed, self.is_of_names = disk, point, committed, is_of_names
        self.calls = self.renames = 0
        self.at: float | None = None
        self._lock = threading.Lock()

    def cut(self) -> None:
        """Cut now, unless it has been done."""
        with self._lock:
            if self.at is not None:
                return
            self.at = time.monotonic()
        self.disk.cut(self.committed)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Cut at the point within this block."""
        timer = None
        if self.point is not None and self.point.call is None:
            timer = threading.Timer(self.point.seconds, self.cut)
            timer.start()
        counted = [
            (owner, name, self._counted(getattr(owner, name))) for owner, name in ((os, "fsync"), (torch, "save"))
        ]
        try:
            with overridden(counted), _listening(self.disk.where, self._call):
                yield
        finally:
            if timer is not None:
                timer.cancel()
                timer.join()

    def _call(self, event: str = "") -> None:
        with self._lock:
            is_of_names = event in ("os.rename", "os.remove", "os.link")
            self.calls += 1
            self.renames += is_of_names
            count = self.renames if self.is_of_names else self.calls
            now = self.point is not None and count == self.point.call and is_of_names >= self.is_of_names
        if now:
            self.cut()

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._call()
            result = original(*args, **kwargs)
            self._call()
            return result

        return call


_listeners: list[tuple[str, Callable[[str], None]]] = []


@contextmanager
def _listening(where: Path, callback: Callable[[str], None]) -> Iterator[None]:
    """Call `callback` before each call that concerns files of a folder."""
    _add_hook()
    _listeners.append((f"{where}/", callback))
    try:
        yield
    finally:
        _listeners.clear()


@cache
def _add_hook() -> None:
    sys.addaudithook(_hook)  # it cannot be removed again


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _listeners or not (event == "open" or event.startswith(("os.", "shutil."))):
        return
    prefix, callback = _listeners[0]
    if any(isinstance(item, str | os.PathLike) and os.fspath(item).startswith(prefix) for item in args):
        callback(event)


def settle() -> None:
    """Wait for our threads in this process, and release files that stored errors keep open."""
    for thread in threading.enumerate():
        if thread.name.startswith(BACKGROUND):
            thread.join(60)
            assert not thread.is_alive(), f"the thread {thread.name} hangs"
    gc.collect()


STAGES = {"trainer": (1, 2, 3), "fabric": (2, 3), "weights": (2, 3), "export": (2, 3), "engine": (2, 3)}
STAGES["async"] = (1, 2, 3)
CASES = [(way, stage, kind) for kind in KINDS for way, stages in STAGES.items() for stage in stages]
SHORT = [("trainer", 2, "ext4"), ("fabric", 3, "xfs"), ("weights", 3, "xfs"), ("export", 2, "ext4")]
SHORT += [("engine", 3, "ext4"), ("async", 2, "xfs")]
TRIED = "power cut during or after a save: ext4 and xfs, Trainer, Fabric, DeepSpeed alone, ZeRO 1-3"
TRIED_ASYNC = "power cut during or after a save that training does not wait for: ext4 and xfs, Trainer, ZeRO 1-3"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = metafunc.config.getoption("--faults")
    if "way" in metafunc.fixturenames:
        metafunc.parametrize(("way", "stage", "kind"), CASES if everything else SHORT)
    elif "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", KINDS)


@pytest.fixture
def disk(tmp_path: Path, kind: str) -> Iterator[Disk]:
    """A disk that can lose power; skips where this machine cannot simulate one."""
    disk = Disk(tmp_path / kind, kind, tmp_path / f"{kind}.image")
    if os.geteuid():
        pytest.skip("power cuts need root, for loop devices and mounts")
    if shutil.which(MAKE[kind][0]) is None:
        pytest.skip(f"power cuts on {kind} need {MAKE[kind][0]} (apt-get install {PACKAGES[kind]})")
    disk.where.mkdir()
    disk.image.touch()
    os.truncate(disk.image, SIZE)
    try:
        _run(*MAKE[kind], str(disk.image))
        disk._mount()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"power cuts on {kind}: {error.cmd[0]} failed: {error.stderr.strip()}")
    try:
        try:
            disk.cut()
        except OSError as error:
            pytest.skip(f"power cuts on {kind}: this kernel cannot shut it down ({error})")
        disk.restore()
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk.where)], check=False, capture_output=True)
        for image in tmp_path.glob(f"{kind}*.image"):
            image.unlink()


WHENS = ("at a call", "at a time", "at a rename", "afterwards")


@dataclass(frozen=True)
class Plan:
    """One power cut: when, whether the journal has committed names before it, and whether the save replaces a file."""

    when: str
    committed: bool
    over: bool

    @classmethod
    def shuffled(cls, drawn: random.Random) -> list[Plan]:
        """Return every plan once, with the times in turn."""
        how = list(product((False, True), (True, False)))
        plans = [[cls(when, *values) for values in drawn.sample(how, len(how))] for when in WHENS]
        return [plan for turn in zip(*plans, strict=True) for plan in turn]


@dataclass
class Power:
    """One run on a rank, which saves repeatedly while its disk loses power; rank 0 cuts and checks."""

    disk: Disk
    way: str
    cuts: int
    seed: str
    number: int = 0  # of the save, and what is saved
    kept: int = 0  # the number of what `last.ckpt` must hold, or a newer one
    before: dict[str, tuple[int, int, float]] = field(default_factory=dict)  # of an undisturbed save
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drawn = random.Random(self.seed)
        self.first = os.environ["RANK"] == "0"
        self.folder = self.disk.where / "run"
        self.last = self.folder / "last.ckpt"

    def step(self, save: Callable[[Path], None]) -> None:
        """Begin with undisturbed saves, and then cut the power in each step."""
        if not self.before:
            # The first makes the fingerprints, and folders.
            for name, path in (("first", self.last), ("new", self.folder / "new.ckpt"), ("over", self.last)):
                self.before[name] = self._save_undisturbed(save, path)
            if self.first:
                self._remove_new()
            meet()
        elif sum(self.counts.values()) < self.cuts:
            self.plans = self.plans or Plan.shuffled(self.drawn)
            self._cut(save, self.plans.pop())

    def _save_undisturbed(self, save: Callable[[Path], None], path: Path) -> tuple[int, int, float]:
        """Return the calls, those that change names, and the seconds that it took."""
        self.number += 1
        cutter, begun = Cutter(self.disk), time.perf_counter()
        with cutter.watching() if self.first else nullcontext():
            save(path)
        seconds = time.perf_counter() - begun
        if path == self.last:
            self.kept = self.number
        if self.first:
            assert problem(path) is None, (path, problem(path))
            assert number_of(path) == self.number
        meet()
        return cutter.calls, cutter.renames, seconds

    def _cut(self, save: Callable[[Path], None], plan: Plan) -> None:
        self.number += 1
        target = self.last if plan.over else self.folder / self.drawn.choice(["new.ckpt", "folder/new.ckpt"])
        calls, renames, seconds = self.before["over" if plan.over else "new"]
        call, fraction, waits = self.drawn.random(), self.drawn.uniform(0, 1.1), self.drawn.random() < 0.5
        point = {
            "at a call": KillPoint(1 + int(call * calls)),
            "at a time": KillPoint(None, fraction * seconds),
            "at a rename": KillPoint(1 + int(call * renames)),
            "afterwards": None,
        }[plan.when]
        cutter = Cutter(self.disk, point, plan.committed, plan.when == "at a rename")
        returned = None
        meet()
        with cutter.watching() if self.first else nullcontext():
            try:
                save(target)
                returned = time.monotonic()
            except CheckpointError:
                pass
        if self.first and cutter.at is None:
            assert returned is not None, "the save failed, and nothing was wrong with the disk"
            if waits:
                settle()
                time.sleep(fraction / 10)
            if plan.committed:
                self.disk.commit()
                cutter.committed = False
            cutter.cut()
        settle()
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, returned)
        if self.first:
            assert cutter.at is not None
            done = any(moment is not None and moment < cutter.at for moment in every)
            self.disk.restore()
            wrong = self._look(target, done)
            self.lost += [f"{plan}, {'returned' if done else 'not returned'} before the cut: {wrong}"] if wrong else []
            self.counts["after it" if done else "in the save, which returned" if any(every) else "in the save"] += 1
            self._remove_new()
        else:
            self.counts["on rank 0"] += 1
        meet()
        self._save_undisturbed(save, self.last)

    def result(self) -> tuple[Counter[str], list[str], list[str]]:
        """Return what was tried, what was lost, and what is left beside the checkpoint."""
        settle()
        meet()
        return self.counts, self.lost, [path.name for path in self.folder.iterdir() if path != self.last]

    def _remove_new(self) -> None:
        for path in (self.folder / "new.ckpt", self.folder / "folder"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def _look(self, target: Path, done: bool) -> str:
        """Return what is wrong on the disk after a cut in a save to the target; '' if nothing is."""
        wrong = []
        for path in {*self.folder.glob("[!.]*.ckpt"), *self.folder.glob("folder/[!.]*.ckpt")}:
            found = problem(path)
            if found is not None and not (
                path == target != self.last and not done and (is_not_whole(path) or is_unfinished(path))
            ):
                wrong.append(f"{path.name} is broken: {found}")
        for note in (*self.folder.glob("latest"), *self.folder.glob("folder/latest")):
            if not (tag := note.read_text()) or not (note.parent / tag).is_dir():
                wrong.append(f"{note} names {tag!r}, which is not there")
        wanted = [(self.last, self.number if done and target == self.last else self.kept)]
        if done and target != self.last:
            wanted.append((target, self.number))
        for path, least in wanted:
            number = number_of(path) if path.exists() and problem(path) is None else 0
            if number < least:
                wrong.append(f"{path.name} must be of save {least} or newer, and is of {number}")
        return "; ".join(wrong)


def problem(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, all of which is read."""
    if path.is_file():
        try:
            with zipfile.ZipFile(path) as archive:
                return archive.testzip()
        except (zipfile.BadZipFile, OSError) as error:
            return f"{type(error).__name__}: {error}"
    is_a_tag = not (path / "latest").exists() and not (path / "checkpoint").exists()
    found = ds_frozen_patch.verify(*((path.parent, path.name) if is_a_tag else (path,))).problems
    if found:
        return found[0]
    exported = path / "trainable.safetensors"
    if exported.exists():
        try:
            empty = [name for name, value in load_file(exported).items() if not value.any() and "seen" not in name]
        except Exception as error:  # of the Rust library
            return f"{exported.name}: {error}"
        if empty:
            return f"{exported.name} has zeros in {empty}"
    return None


def number_of(path: Path) -> int:
    """Return which save a whole checkpoint is from."""
    file = path if path.is_file() else min([*path.glob("*model_states.pt"), *path.glob("checkpoint/*model_states.pt")])
    number: int = torch.load(file, map_location="cpu", weights_only=False)["number"]
    return number


def meet() -> None:
    torch.distributed.barrier()


class Numbered(runs.LoraRun):
    """A run whose checkpoints contain the number of their save."""

    power: Power

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["number"] = self.power.number


class Cuts(Callback):
    """Cut the power after each batch; then the run continues."""

    def __init__(self, power: Power) -> None:
        self.power = power

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        def save(path: Path) -> None:
            trainer.save_checkpoint(path, weights_only=self.power.way == "weights")
            ds_frozen_patch.wait()  # only then does it last

        self.power.step(save)


def train_through(out: str, disk: Disk, way: str, stage: int, cuts: int) -> tuple[Counter[str], list[str], list[str]]:
    ds_frozen_patch.patch(export="safetensors" if way == "export" else None, async_save=way == "async")
    power = Power(disk, way, cuts, f"{way} {stage} {disk.kind}")
    epochs = -(-(cuts + 1) // runs.BATCHES)
    callbacks: Any = [Cuts(power)]
    trainer = runs.trainer(out, 2, stage, epochs=epochs, callbacks=callbacks, enable_checkpointing=False)
    module = Numbered()
    module.power = power
    trainer.fit(module, runs.batches(2))
    assert len(module.losses) == epochs * runs.BATCHES
    result = power.result()
    if way in ("trainer", "async"):
        resumed = runs.trainer(out, 2, stage, epochs=epochs + 1, enable_checkpointing=False)
        again = runs.LoraRun()
        resumed.fit(again, runs.batches(2), ckpt_path=str(power.last))
        assert len(again.losses) == (epochs + 1) * runs.BATCHES - (cuts + 1), "it went on from another step"
    return result


def fabric_through(out: str, disk: Disk, way: str, stage: int, cuts: int) -> tuple[Counter[str], list[str], list[str]]:
    ds_frozen_patch.patch()
    power = Power(disk, way, cuts, f"{way} {stage} {disk.kind}")
    fabric: Any = runs.fabric(2, stage)
    model, optimizer = runs.fabric_setup(fabric)

    def save(path: Path) -> None:
        fabric.save(path, {"model": model, "optimizer": optimizer, "number": power.number})

    while sum(power.counts.values()) < cuts:
        (tokens, *_) = fabric.setup_dataloaders(runs.batches(2))
        fabric.backward(model(tokens))
        optimizer.step()
        optimizer.zero_grad()
        power.step(save)
    return power.result()


def engine_through(out: str, disk: Disk, way: str, stage: int, cuts: int) -> tuple[Counter[str], list[str], list[str]]:
    """Save with DeepSpeed alone; each checkpoint is the folder of a tag."""
    ds_frozen_patch.patch()
    power = Power(disk, way, cuts, f"{way} {stage} {disk.kind}")
    run = Run("deepspeed", out, 2, stage)

    def save(path: Path) -> None:
        run.engine.save_checkpoint(str(path.parent), tag=path.name, client_state={"number": power.number})

    while sum(power.counts.values()) < cuts:
        run.train_epoch()
        power.step(save)
    return power.result()


@pytest.mark.timeout(900)
def test_power_cuts_during_and_after_saves(
    ranks: Any, disk: Disk, tmp_path: Path, long: bool, counted: Callable[[str, int], None], way: str, stage: int
) -> None:
    cuts = 16 if long else 8
    run = {"fabric": fabric_through, "engine": engine_through}.get(way, train_through)
    begun = time.monotonic()
    (counts, lost, left), _ = ranks(2, run, out=str(tmp_path / "out"), disk=disk, way=way, stage=stage, cuts=cuts)
    print(way, stage, disk.kind, dict(counts), f"{len(lost)} lost, {len(left)} left, {time.monotonic() - begun:.0f} s")
    assert sum(counts.values()) == cuts
    assert counts["after it"] > 0, counts
    assert counts["in the save"] + counts["in the save, which returned"] > 0, counts
    assert lost == [], "\n".join([f"{len(lost)} of {cuts} lost", *lost])
    counted(TRIED_ASYNC if way == "async" else TRIED, cuts)


def test_a_power_cut_loses_unsynced_data(disk: Disk) -> None:
    """A test of the simulation: a disk that lost nothing would let everything pass."""

    def written(name: str, sync: bool) -> Path:
        folder = disk.where / f".{name}"
        folder.mkdir()
        with (folder / "file").open("wb") as file:
            file.write(b"1" * 300_000)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        if sync:
            synced(folder)
        folder.rename(disk.where / name)
        if sync:
            synced(disk.where)
        return disk.where / name / "file"

    def synced(folder: Path) -> None:
        opened = os.open(folder, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)

    for how in ("nothing committed", "committed", "committed by another file"):
        whole = written(f"{how}, synced", True)
        torn = written(f"{how}, not synced", False)
        if how == "committed by another file":
            disk.commit()
        disk.cut(how == "committed")
        with pytest.raises(OSError, match="Input/output error"):
            (disk.where / "other").touch()
        disk.restore()
        assert whole.read_bytes() == b"1" * 300_000, how
        if how == "nothing committed":
            assert not torn.exists()
        else:
            assert torn.read_bytes() == b"", how


@pytest.mark.timeout(900)
def test_power_cuts_during_and_after_tools(
    checkpoints: Checkpoints, disk: Disk, tmp_path: Path, long: bool, counted: Callable[[str, int], None]
) -> None:
    """The output of a tool that has returned is there after a cut; otherwise it is whole, or does not exist."""
    drawn = random.Random(disk.kind)
    lost, counts = [], Counter[str]()
    for tool, (name, words, made) in TOOLS.items():
        if tool != "prune" and not long:
            continue
        source = checkpoints(2) / name
        main([*words, str(source), str(tmp_path / tool / made), "-q"])
        expected = contents(tmp_path / tool / made)
        target = disk.where / tool / made
        cutter, begun = Cutter(disk), time.perf_counter()
        with cutter.watching():
            assert main([*words, str(source), str(target), "-q"]) == 0
        calls, seconds = cutter.calls, time.perf_counter() - begun
        assert calls > 0
        for when, committed in product(("at a call", *(["at a time"] if long else []), "afterwards"), (False, True)):
            shutil.rmtree(disk.where / tool)
            point = {
                "at a call": KillPoint(drawn.randint(1, calls)),
                "at a time": KillPoint(None, drawn.uniform(0, seconds)),
                "afterwards": None,
            }[when]
            cutter = Cutter(disk, point, committed)
            with cutter.watching():
                status = main([*words, str(source), str(target), "-q"])
                done = status == 0 and cutter.at is None
            cutter.cut()
            settle()
            disk.restore()
            whole = target.exists() and contents(target) == expected
            if not whole and (done or target.exists()):
                state = "broken" if target.exists() else "gone"
                lost.append(f"{tool}, {when}, {committed=}, returned {status}, {done=}: {state}")
            counts["after it" if done else "in it"] += 1
            (disk.where / tool).mkdir(exist_ok=True)
    assert min(counts["after it"], counts["in it"]) > 0, counts
    assert lost == [], "\n".join([f"{len(lost)} of {sum(counts.values())} lost", *lost])
    counted("power cut during or after a tool: ext4 and xfs", sum(counts.values()))


SYNCED = ("small.ckpt", "weights.ckpt")


def synced_paths(out: str, stage: int, options: dict[str, Any]) -> list[list[tuple[str, bool]]]:
    """What this rank syncs in a save, of a checkpoint and of weights alone: each path, and if it was whole yet."""
    ds_frozen_patch.patch(**options)
    trainer = runs.trainer(out, 2, stage, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(2))
    called: list[tuple[str, bool]] = []
    found = []

    def recording(name: str) -> Callable[..., None]:
        original = getattr(os, name)

        def call(*args: Any) -> None:
            path = str(Path(f"/proc/self/fd/{args[0]}").readlink()) if args else "all"
            called.append((path, Path(out, saved, "latest").exists() or Path(out, saved).is_file()))
            original(*args)

        return call

    with overridden([(os, name, recording(name)) for name in ("fsync", "fdatasync", "sync")]):
        for saved in SYNCED:
            trainer.save_checkpoint(f"{out}/{saved}", weights_only=saved == "weights.ckpt")
            settle()
            meet()
            found.append(called.copy())
            called.clear()
    return found


def final(path: str) -> Path:
    """The path that is to have what is written under a hidden name."""
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{12}", Path(path).name)
    name = match[1] if match else Path(path).name
    return Path(path).with_name("weights.ckpt" if name == SINGLE else name)


@pytest.mark.short
@pytest.mark.parametrize("stage", [2, 3])
def test_a_save_is_synced(ranks: Any, tmp_path: Path, stage: int) -> None:
    """Every file and folder before `latest` names it, or weights get their name, and then the folder of that name."""
    one, other = ranks(2, synced_paths, out=str(tmp_path), stage=stage, options={})
    for name, own, others in zip(SYNCED, one, other, strict=True):
        before = {final(path).name for path, is_whole in (*own, *others) if not is_whole}
        assert {item.name for item in ((tmp_path / name), *(tmp_path / name).rglob("*"))} <= before
        folder = (tmp_path / name) if (tmp_path / name).is_dir() else tmp_path
        assert (str(folder.resolve()), True) in own
    written = [path for path, _ in other[0] if final(path).name.endswith("optim_states.pt")]
    assert written, "rank 1 writes files too, and on another node rank 0 could not sync them"


@pytest.mark.parametrize("stage", [2, 3])
def test_sync_can_be_turned_off(ranks: Any, tmp_path: Path, stage: int) -> None:
    for found in ranks(2, synced_paths, out=str(tmp_path), stage=stage, options={"fsync": False}):
        assert found == [[], []]
    assert len(list(tmp_path.rglob("*.pt"))) > 1
