"""Several nodes on one machine: ranks with a mount namespace each, in which one path leads to the disk of their node.

The nodes share one disk, have one each, or share one behind a cache of names and attributes per node, as with NFS:
`python -m kit.nodes BACKING MOUNTPOINT SECONDS SPEED REFUSES` serves one mount of it over FUSE until it is unmounted,
takes so many bytes per second, and refuses what is a key of `REFUSALS`. For that many seconds, a name that one node
renames or removes still exists for the other nodes, and a new name does not exist yet for a node that has looked it up
before. Listing a directory always asks the server. As with NFS, two names cannot be exchanged, and a file that a
program on the same node has open is hidden instead of removed.

Two things differ from NFS. A node that uses a stale name gets what has that name on the server now, not the directory
that it led to before. And listing a directory or opening a file does not refresh the node's cache.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import processes
from kit.processes import KillPoint, Process, ThisProcess

SECONDS = 30
"""How long a node keeps a name: what NFS keeps of a directory."""


def why_no_cached_disk() -> str:
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


REFUSALS = {
    "": "nothing",
    "folders": "renames of folders (EMFILE, as gcsfuse does)",
    "renames": "renames (ENOSYS, as mountpoint-s3 does)",
    "open": "renames of what is open, or has an open file in it (EACCES, as SMB does)",
    "locks": "nothing, but locks are not seen on other nodes (as Lustre with local locks)",
}


@contextmanager
def mounted(
    backing: Path, at: Path, seconds: float = SECONDS, speed: float = math.inf, refuses: str = ""
) -> Iterator[None]:
    """Mount the disk, whose files are in `backing`, at `at` for one node, as a context manager.

    Args:
        backing: a folder.
        at: the mount point.
        seconds: how long a node keeps a name.
        speed: at most so many bytes per second are written.
        refuses: a key of `REFUSALS`.
    """
    at.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "kit.nodes", str(backing), str(at), str(seconds), str(speed), refuses]
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


def kind_of(entry: os.DirEntry[str]) -> int:
    """The kind of a file, as a part of its mode."""
    if entry.is_symlink():
        return stat.S_IFLNK
    return stat.S_IFDIR if entry.is_dir() else stat.S_IFREG


def serve_mount(backing: str, at: str, seconds: float, speed: float, refuses: str) -> None:
    """Serve the mount until it is unmounted."""
    import mfusepy

    lock, free = threading.Lock(), 0.0  # when the disk has written what it has got
    in_use: dict[int, str] = {}  # the path of each file that is open

    def opened(path: str, file: int) -> int:
        in_use[file] = path
        return file

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
                return [(entry.name, {"st_ino": entry.inode(), "st_mode": kind_of(entry)}, 0) for entry in entries]

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
            if refuses == "renames":
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            if refuses == "folders" and Path(backing + old).is_dir():
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if refuses == "open" and any(f"{path}/".startswith((f"{old}/", f"{new}/")) for path in in_use.values()):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
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
            return opened(path, os.open(backing + path, flags, mode))

        def open(self, path: str, flags: int) -> int:
            return opened(path, os.open(backing + path, flags))

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
            in_use.pop(fh, None)
            os.close(fh)
            return 0

    if refuses == "locks":
        del Server.flock  # then the kernel keeps those of each mount

    kept = {"entry_timeout": seconds, "attr_timeout": seconds, "negative_timeout": seconds}
    Mount(Server(), at, foreground=True, use_ino=True, **kept)


CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18


@dataclass(frozen=True)
class Nodes:
    """Nodes whose ranks find their disk at `at`."""

    at: Path
    disks: tuple[Path, ...]
    """What is mounted there on each node."""
    files: tuple[Path, ...]
    """The same for who looks from outside: with no cache in between."""

    def run(
        self,
        function: Callable[..., Any],
        points: tuple[KillPoint | None, ...] | None = None,
        local: int = 1,
        **arguments: Any,
    ) -> list[tuple[str, Any]]:
        """Run a function on `local` ranks of each node and return the outcomes; see `processes.run_ranks`."""
        return processes.outcomes(self.start(function, points, local, **arguments))

    def start(
        self,
        function: Callable[..., Any],
        points: tuple[KillPoint | None, ...] | None = None,
        local: int = 1,
        **arguments: Any,
    ) -> list[Process]:
        """Start the processes without waiting for them."""
        self.at.mkdir(exist_ok=True)
        count = len(self.disks)
        asked = {"asked": function, "disks": [str(disk) for disk in self.disks], "at": str(self.at)}
        log = self.at.with_name("log")
        return processes.start_ranks(_enter, log, points or (None,) * (count * local), count, **asked, **arguments)

    def log(self) -> str:
        """Return the last lines that the ranks have printed."""
        return self.at.with_name("log").read_text(errors="replace")[-4000:]


def why_unsupported() -> str:
    """Return why this machine cannot simulate nodes; empty if it can."""
    if os.geteuid() != 0:
        return "only root can give a process mounts of its own"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "no mount namespace can be made here"
    return ""


def own_disks(folder: Path, count: int) -> Nodes:
    """Give each node a disk of its own."""
    disks = tuple(_made(folder / f"node{node}") for node in range(count))
    return Nodes(folder / "disk", disks, disks)


def shared_disk(folder: Path, count: int) -> Nodes:
    """Give all nodes the same mount of one disk."""
    disks = (_made(folder / "server"),) * count
    return Nodes(folder / "disk", disks, disks)


def cached_disk(folder: Path, count: int) -> AbstractContextManager[Nodes]:
    """Give all nodes one disk, with a cache of names on each."""
    return _mounted_on_each(folder, count)


def local_locks(folder: Path, count: int) -> AbstractContextManager[Nodes]:
    """Give all nodes one disk, on which a lock is not seen by other nodes."""
    return _mounted_on_each(folder, count, seconds=0, refuses="locks")


@contextmanager
def _mounted_on_each(folder: Path, count: int, **options: Any) -> Iterator[Nodes]:
    server = _made(folder / "server")
    mounts = tuple(folder / f"mount{node}" for node in range(count))
    with ExitStack() as stack:
        for mount in mounts:
            stack.enter_context(mounted(server, mount, **options))
        yield Nodes(folder / "disk", mounts, (server,) * count)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _enter(this: ThisProcess, asked: Callable[..., Any], disks: list[str], at: str, **arguments: Any) -> Any:
    """Mount the node's disk at `at`, in a rank, and call the function."""
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.unshare(CLONE_NEWNS))
    _done(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    disk = disks[int(os.environ["NODE_RANK"])]
    _done(libc.mount(os.fsencode(disk), os.fsencode(at), None, MS_BIND | MS_REC, None))
    return asked(this, at, **arguments)


def _done(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    serve_mount(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
