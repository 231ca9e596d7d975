"""The files in the directory of a checkpoint: which names are DeepSpeed's and ours, and what each file is."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

RECORD = "ds_frozen_patch.json"
"""The name of the record beside the files of a tag (see `record`)."""

WEIGHTS_FILE = "ds_frozen_patch-weights.ckpt"
"""The name of the single file of a weights-only save to a path where a folder is."""

OFFLOADED = "offloaded_tensors"
"""The folder with the optimizer's states on NVMe."""

EXPORTS = ("trainable.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")
"""What `patch(export=)` adds to a checkpoint."""

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
"""The files of each rank, or of all; their groups are the ranks of data and of tensor parallelism."""

SCRATCH = re.compile(r"(.*/ds_frozen_patch-scratch-\w+)/([A-Za-z][A-Za-z0-9+.-]*:/.*)")
"""A path in a scratch folder of `buckets`, which ends with an address."""
_SHOWN_SCRATCH = re.compile(r"/\S*?/ds_frozen_patch-scratch-\w+/([A-Za-z][A-Za-z0-9+.-]*):/")

_STATE_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states\.pt"
    r"|(?:layer_|expert_|expp_rank_)\d.*_states\.pt"
)


def is_state(name: str) -> bool:
    """Whether a save has written what has this name, in the folder of a tag."""
    return is_state_file(name) or name in (OFFLOADED, RECORD)


def is_state_file(name: str) -> bool:
    """Whether DeepSpeed has written the file of this name, in the folder of a tag."""
    return _STATE_FILE.fullmatch(name) is not None


def shown(text: object) -> str:
    """A text with addresses in place of paths in scratch folders."""
    return _SHOWN_SCRATCH.sub(r"\1://", str(text))


def is_brought(file: Path) -> bool:
    """Whether a file in a scratch folder has its content, which else is in the bucket."""
    return bool(file.stat().st_mode & stat.S_IRUSR)


open_remote: Callable[[Path], Any] | None = None
"""Opens what a file in a scratch folder stands in for, once there is one."""


def open_regular(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a regular file, or a link to one, for reading; raises OSError for pipes and devices."""
    if open_remote is not None and path.is_file() and not is_brought(path):
        remote: IO[bytes] = open_remote(path)
        return remote
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        opened = os.open(path, flags | os.O_NONBLOCK)  # otherwise a pipe is waited for
    except BlockingIOError:  # a regular file with a lease, such as an NFS server's for the client that wrote it
        opened = os.open(path, flags)  # waits until the lease is given back
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(opened, "rb", buffering=buffering)


_reading = threading.Lock()
_NEAR_BYTES = 1 << 16


def read_into(file: Any, buffer: memoryview, offset: int) -> int:
    """Read what a file has at an offset, and return how many bytes that is; several threads may do so at once."""
    try:
        return os.preadv(file.fileno(), [buffer], offset)
    except io.UnsupportedOperation:  # it is in a bucket
        with _reading:
            file.seek(offset)
            return int(file.readinto(buffer))


def read_at(file: Any, size: int, offset: int) -> bytes:
    """Read so many bytes at an offset, or those up to the end of the file."""
    content = bytearray(size)
    return bytes(content[: read_into(file, memoryview(content), offset)])


def read_each(file: Any, size: int, offsets: Sequence[int]) -> list[bytes]:
    """Read so many bytes at each offset, in order; requests to a bucket run at the same time, one for those nearby."""
    try:
        return [os.pread(file.fileno(), size, offset) for offset in offsets]
    except io.UnsupportedOperation:
        parts: list[list[int]] = []
        for offset in offsets:
            if not parts or offset > parts[-1][-1] + _NEAR_BYTES:
                parts.append([])
            parts[-1].append(offset)
        begins, ends = [part[0] for part in parts], [min(part[-1] + size, file.size) for part in parts]
        read: list[bytes] = file.fs.cat_ranges([file.path] * len(parts), begins, ends, on_error="raise")
        places = [(content, part[0], offset) for content, part in zip(read, parts, strict=True) for offset in part]
        return [content[offset - begin :][:size] for content, begin, offset in places]


SYNCED_BYTES = 4 * 2**20
"""So much is worth a call of `begin_sync`."""


def begin_sync(file: IO[bytes], begin: int) -> int:
    """Let the disk begin with what was written from `begin` on, if it is much; returns where the next call begins.

    A sync at the end then has little left. It raises the errors.
    """
    if (end := file.tell()) - begin < SYNCED_BYTES:
        return begin
    import ctypes  # here, because most programs do not need it

    if call := getattr(ctypes.CDLL(None), "sync_file_range", None):  # Linux has it
        call(file.fileno(), ctypes.c_int64(begin), ctypes.c_int64(end - begin), 2)  # SYNC_FILE_RANGE_WRITE
    return end


@cache
def fastest_crc32() -> Callable[..., int]:
    """The fastest function that is installed; the extra `fast` installs one."""
    for name in ("zlib_ng.zlib_ng", "isal.isal_zlib"):
        with suppress(ImportError):
            crc32: Callable[..., int] = import_module(name).crc32
            return crc32
    return zlib.crc32


def hash_directory(path: Path) -> str | None:
    """The SHA-256 of a file from its directory on, which has the checksum of each record; None if it is no zip archive.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        try:
            with ZipFile(file) as archive:
                file.seek(archive.start_dir)
        except OSError:
            raise
        except Exception:  # whatever a damaged archive leads to
            return None
        return sha256(file.read()).hexdigest()
