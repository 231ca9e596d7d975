"""A disk that can lose power: a small image on a loop device, with a real ext4 or xfs that can be stopped instantly.

The cut is the ioctl that xfstests uses to test crash recovery: from then on nothing reaches the device, so dirty pages
and uncommitted parts of the journal are lost. The next mount replays the journal, as after a real power cut. The
simulation does not include the write cache of the device: the page cache of the image counts as the disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.processes import KillPoint

KINDS = ("ext4", "xfs")
SIZE = 320 * 2**20  # of the image, which is sparse: xfs takes no less than 300 MiB
MAKE = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}
OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}  # a copy may be mounted while the kernel still has the original
PACKAGES = {"ext4": "e2fsprogs", "xfs": "xfsprogs"}

SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: _IOR('X', 125, __u32)
COMMIT_FIRST, COMMIT_NOTHING = 1, 2  # the journal is flushed, and no data; or not even that
RENAME_EXCHANGE = 2
AT_FDCWD = -100
BUSY_SECONDS = 0.5
BACKGROUND = "ds_frozen_patch"  # how the names of our threads begin


class NoPowerCutsError(Exception):
    """This machine cannot simulate power cuts; the message says why."""


@dataclass
class Disk:
    """A mounted image. It can be pickled, for another process in the same mount namespace to cut and restore."""

    where: Path
    kind: str
    image: Path

    @classmethod
    @contextmanager
    def made(cls, folder: Path, kind: str) -> Iterator[Disk]:
        """Create and mount an image, as a context manager.

        Raises:
            NoPowerCutsError: this machine does not allow it.
        """
        disk = cls(folder / kind, kind, folder / f"{kind}.image")
        if os.geteuid():
            raise NoPowerCutsError("power cuts need root, for loop devices and mounts")
        if shutil.which(MAKE[kind][0]) is None:
            raise NoPowerCutsError(f"power cuts on {kind} need {MAKE[kind][0]} (apt-get install {PACKAGES[kind]})")
        disk.where.mkdir(parents=True)
        with disk.image.open("wb") as file:
            file.truncate(SIZE)
        try:
            _run(*MAKE[kind], str(disk.image))
            disk._mount()
        except subprocess.CalledProcessError as error:
            raise NoPowerCutsError(f"power cuts on {kind}: {error.cmd[0]} failed: {error.stderr.strip()}") from error
        try:
            disk._check()
            yield disk
        finally:
            subprocess.run(["umount", "-l", str(disk.where)], check=False, capture_output=True)
            for image in folder.glob(f"{kind}*.image"):
                image.unlink()

    def _check(self) -> None:
        try:
            self.cut()
        except OSError as error:
            raise NoPowerCutsError(f"power cuts on {self.kind}: this kernel cannot shut it down ({error})") from error
        self.restore()

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

    @property
    def exchanges(self) -> bool:
        """Whether the kernel can exchange two names there atomically, so that a name never lacks its file."""
        names = [self.where / f".exchanged-{number}" for number in (1, 2)]
        for name in names:
            name.touch()
        try:
            rename = ctypes.CDLL(None, use_errno=True).renameat2
        except AttributeError:
            return False
        try:
            done = rename(AT_FDCWD, bytes(names[0]), AT_FDCWD, bytes(names[1]), RENAME_EXCHANGE)
            if done and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            return not done
        finally:
            for name in names:
                name.unlink()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Cutter:
    """Cuts the power of a disk once, at a point in what this process does there, and records when.

    A point is a call that concerns files on the disk, or a number of seconds after the start. Calls are those that
    Python reports to audit hooks, and both the start and the end of each `os.fsync` and `torch.save`.
    """

    def __init__(self, disk: Disk, point: KillPoint | None = None, committed: bool = False) -> None:
        self.disk, self.point, self.committed = disk, point, committed
        self.calls = 0
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
        import torch

        timer = None
        if self.point is not None and self.point.call is None:
            timer = threading.Timer(self.point.seconds, self.cut)
            timer.start()
        originals: list[tuple[Any, str, Any]] = [(os, "fsync", os.fsync), (torch, "save", torch.save)]
        for owner, name, original in originals:
            setattr(owner, name, self._counted(original))
        with _listening(self.disk.where, self._call):
            try:
                yield
            finally:
                for owner, name, original in originals:
                    setattr(owner, name, original)
                if timer is not None:
                    timer.cancel()
                    timer.join()

    def _call(self) -> None:
        with self._lock:
            self.calls += 1
            now = self.point is not None and self.calls == self.point.call
        if now:
            self.cut()

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._call()
            result = original(*args, **kwargs)
            self._call()
            return result

        return call


_listeners: list[tuple[str, Callable[[], None]]] = []
_hooked = False


@contextmanager
def _listening(where: Path, callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` before each call that concerns files of a folder. Audit hooks cannot be removed."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    _listeners.append((f"{where}/", callback))
    try:
        yield
    finally:
        _listeners.clear()


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _listeners or not (event == "open" or event.startswith(("os.", "shutil."))):
        return
    prefix, callback = _listeners[0]
    if any(isinstance(item, str | os.PathLike) and os.fspath(item).startswith(prefix) for item in args):
        callback()


def settle() -> None:
    """Wait for our threads in this process, and release files that stored errors keep open."""
    for thread in threading.enumerate():
        if thread.name.startswith(BACKGROUND):
            thread.join(60)
            assert not thread.is_alive(), f"the thread {thread.name} hangs"
    gc.collect()
