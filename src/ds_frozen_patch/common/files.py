"""The files in the directory of a checkpoint: which names are DeepSpeed's and ours, and what each file is."""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from hashlib import sha256
from pathlib import Path
from typing import IO

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

_STATE_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states\.pt"
    r"|(?:layer_|expert_|expp_rank_)\d.*_states\.pt"
)

_END_BYTES, _END64_BYTES, _LOCATOR_BYTES = 22, 56, 20


def is_state(name: str) -> bool:
    """Whether a save has written what has this name, in the folder of a tag."""
    return is_state_file(name) or name in (OFFLOADED, RECORD)


def is_state_file(name: str) -> bool:
    """Whether DeepSpeed has written the file of this name, in the folder of a tag."""
    return _STATE_FILE.fullmatch(name) is not None


def open_regular(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a regular file, or a link to one, for reading; raises OSError for pipes and devices."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(opened, "rb", buffering=buffering)


def hash_directory(path: Path) -> str | None:
    """The SHA-256 of a file from its directory on, which has the checksum of each record; None if it is no zip archive.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        try:
            file.seek(find_directory(file))
        except ValueError:
            return None
        return sha256(file.read()).hexdigest()


def find_directory(file: IO[bytes]) -> int:
    """Where the directory of a zip archive begins, by all of its end records, since readers differ in which they use.

    Raises:
        ValueError: it is no zip archive, or they differ.
    """
    tail = _END64_BYTES + _LOCATOR_BYTES + _END_BYTES
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - tail, 0))
    end = file.read().rjust(tail, b"\0")
    mark, begin, comment = struct.unpack_from("<4s12xLH", end, tail - _END_BYTES)
    if mark != b"PK\5\6" or comment:
        raise ValueError("it does not end like an archive of torch.save")
    locator, there = struct.unpack_from("<4s4xQ", end, _END64_BYTES)
    if locator == b"PK\6\7":
        mark, large = struct.unpack_from("<4s44xQ", end)
        if mark != b"PK\6\6" or there != size - tail or begin not in (large, 0xFFFFFFFF):
            raise ValueError("its end records differ")
        begin = large
    return int(begin)
