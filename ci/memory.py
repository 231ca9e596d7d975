"""What memory a process takes, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def memory(which: str) -> int:
    """Of this process, in bytes: VmRSS is what it has now, VmHWM its peak, VmSize all that it has asked for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:"))


def reset_peak_memory() -> None:
    """Reset the kernel's count of this process's peak."""
    Path("/proc/self/clear_refs").write_text("5")
