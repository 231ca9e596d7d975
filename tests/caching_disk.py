"""A network disk that several nodes mount, each with its own cache of names and attributes, as with NFS.

`python -m caching_disk BACKING MOUNTPOINT SECONDS SPEED` serves one mount over FUSE until it is unmounted, and takes so
many bytes per second. For that many seconds, a name that one node renames or removes still exists for the other nodes,
and a new name does not exist yet for a node that has looked it up before. Listing a directory always asks the server.
As with NFS, two names cannot be exchanged, and a file that a program on the same node has open is hidden instead of
removed.

Two things differ from NFS. A node that uses a stale name gets what has that name on the server now, not the directory
that it led to before. And listing a directory or opening a file does not refresh the node's cache.
"""

from __future__ import annotations

import ctypes.util
import errno
import fcntl
import importlib.util
import math
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 30
"""How long a node keeps a name: what NFS keeps of a directory."""


def why_unsupported() -> str:
    """Return why this machine does not support such a disk; empty if it does."""
    if os.geteuid() != 0:
        return "only root can mount a disk"
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed"
    if not any(map(ctypes.util.find_library, ("fuse", "fuse3"))):
        return "libfuse is not installed (Debian's libfuse3-3 or libfuse2)"
    return ""


@contextmanager
def mounted(backing: Path, at: Path, seconds: float = SECONDS, speed: float = math.inf) -> Iterator[None]:
    """Mount the disk, whose files are in `backing`, at `at` for one node, as a context manager.

    Args:
        backing: a folder.
        at: the mount point.
        seconds: how long a node keeps a name.
        speed: at most so many bytes per second are written.
    """
    at.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "caching_disk", str(backing), str(at), str(seconds), str(speed)]
    server = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + 30
        while not os.path.ismount(at):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{at} cannot be mounted; exit code {server.poll()}")
            time.sleep(0.02)
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:  # somebody has a file open there
            server.kill()
            server.wait()


def kind(entry: os.DirEntry[str]) -> int:
    """The kind of a file, as a part of its mode."""
    if entry.is_symlink():
        return stat.S_IFLNK
    return stat.S_IFDIR if entry.is_dir() else stat.S_IFREG


def serve(backing: str, at: str, seconds: float, speed: float) -> None:
    """Serve the mount until it is unmounted."""
    import mfusepy

    lock, free = threading.Lock(), 0.0  # when the disk has written what it has got

    class Mount(mfusepy.FUSE):  # type: ignore[misc]
        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            """mfusepy ignores the flags."""
            if flags:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            result: int = super().rename_fuse_3(old, new, flags)
            return result

    class Server(mfusepy.Operations):  # type: ignore[misc]
        """Applies each request to the backing folder."""

        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = os.lstat(backing + path) if fh is None else os.fstat(fh)
            names = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
            times = {f"st_{which}time": getattr(found, f"st_{which}time_ns") for which in "amc"}
            return {**{name: getattr(found, name) for name in names}, **times}

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(backing + path)
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

        def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
            with os.scandir(backing + path) as entries:
                return [(entry.name, {"st_ino": entry.inode(), "st_mode": kind(entry)}, 0) for entry in entries]

        def readlink(self, path: str) -> str:
            return str(Path(backing + path).readlink())

        def mkdir(self, path: str, mode: int) -> int:
            Path(backing + path).mkdir(mode)
            return 0

        def rmdir(self, path: str) -> int:
            Path(backing + path).rmdir()
            return 0

        def unlink(self, path: str) -> int:
            Path(backing + path).unlink()
            return 0

        def rename(self, old: str, new: str) -> int:
            Path(backing + old).rename(backing + new)
            return 0

        def link(self, target: str, source: str) -> int:
            Path(backing + target).hardlink_to(backing + source)
            return 0

        def symlink(self, target: str, source: str) -> int:
            Path(backing + target).symlink_to(source)
            return 0

        def chmod(self, path: str, mode: int) -> int:
            Path(backing + path).chmod(mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            os.chown(backing + path, uid, gid, follow_symlinks=False)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            os.utime(backing + path, ns=times or (time.time_ns(),) * 2, follow_symlinks=False)
            return 0

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(backing + path if fh is None else fh, length)
            return 0

        def create(self, path: str, mode: int, flags: int) -> int:
            return os.open(backing + path, flags, mode)

        def open(self, path: str, flags: int) -> int:
            return os.open(backing + path, flags)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            nonlocal free
            with lock:
                free = max(free, time.monotonic()) + len(data) / speed
                wait = free - time.monotonic()
            time.sleep(max(wait, 0))
            return os.pwrite(fh, data, offset)

        def flock(self, path: str, fh: int, op: int) -> int:
            fcntl.flock(fh, op)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            os.fsync(fh)
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            folder = os.open(backing + path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    kept = {"entry_timeout": seconds, "attr_timeout": seconds, "negative_timeout": seconds}
    Mount(Server(), at, foreground=True, use_ino=True, **kept)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
