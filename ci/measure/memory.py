"""What memory and files a process has, as Linux counts them, and what gives memory back."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any


def memory(which: str) -> int:
    """Of this process, in bytes: VmRSS is what it has now, VmHWM its peak, VmSize all that it has asked for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:"))


def reset_peak_memory() -> None:
    """Reset the kernel's count of this process's peak."""
    Path("/proc/self/clear_refs").write_text("5")


def give_back_memory() -> None:
    """Give what was freed back to the kernel, else it is counted, and what comes next works in it."""
    ctypes.CDLL(None).malloc_trim(0)


def release(engine: Any) -> None:
    """Let go of a DeepSpeed engine, which in ZeRO-3 stays in memory for as long as the process lives.

    Its hooks on gradients refer to it in a way that Python's garbage collector cannot follow, and a list refers to its
    module. It is the same without this package.
    """
    from deepspeed.runtime.zero import parameter_offload

    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()


def open_files() -> int:
    """Return how many files this process has open."""
    return len([*Path("/proc/self/fd").iterdir()])
