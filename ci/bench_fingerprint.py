"""What fingerprints cost, in one run: `nox -f ci/noxfile.py -s "bench(fingerprint)"`.

A base of 400 million bf16 parameters and 4 million trainable ones, one rank, ZeRO-2, by Fabric. In turn, round after
round: a full save, a trainable-only save under the shim, the same by DeepSpeed's own flag, and all fingerprints anew.
Prints medians with their spread, the ratios that we aim at, and the memory that a pass over the base adds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ds_frozen_patch

BASE = (100, 4_030_000)  # parameters, elements of each
ADAPTERS = (100, 42_000)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as folder:
        run(Path(folder), options.rounds, options.device)


class Model(torch.nn.Module):
    """A frozen base and adapters, of sizes as in a small language model with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(BASE[1], dtype=torch.bfloat16), requires_grad=False) for _ in range(BASE[0])
        )
        self.adapters = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(ADAPTERS[1])) for _ in range(ADAPTERS[0]))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """Something with a gradient for each adapter."""
        return torch.stack([adapter.sum() for adapter in self.adapters]).sum() * scale


def run(folder: Path, rounds: int, device: str) -> None:
    """Measure and print."""
    if device == "cpu":
        from ds_frozen_patch.testing import cpu_strategy

        strategy_class = cpu_strategy("lightning.fabric")
    else:
        from lightning.fabric.strategies import DeepSpeedStrategy as strategy_class  # noqa: N813
    from lightning.fabric import Fabric

    from ds_frozen_patch.fingerprint import Memory, fingerprints

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    fabric = Fabric(accelerator=device, devices=1, precision="bf16-mixed", strategy=strategy_class(stage=2))
    fabric.launch()
    module = Model()
    engine, optimizer = fabric.setup(module, torch.optim.AdamW(module.adapters.parameters()))
    fabric.backward(engine(torch.ones((), device=fabric.device)))
    optimizer.step()
    frozen = [p for p in module.parameters() if not p.requires_grad]
    path = folder / "checkpoint"
    state = {"model": engine, "optimizer": optimizer}

    def save_full() -> None:
        fabric.save(path, state)

    def save_trainable_only() -> None:
        raw: Any = fabric.strategy.model
        raw.save_checkpoint(str(path), tag="checkpoint", exclude_frozen_parameters=True)

    def pass_over_base() -> None:
        fingerprints(frozen, fabric.device, Memory())

    with ds_frozen_patch.patched():
        fabric.save(path, state)  # the first one reads the base, and makes the engine known
    reset_peak_memory()
    memory_before = peak_memory()
    pass_over_base()
    added = peak_memory() - memory_before
    ways: dict[str, tuple[bool, Callable[[], None]]] = {
        "full save, plain Lightning": (False, save_full),
        "trainable-only save by DeepSpeed's flag": (False, save_trainable_only),
        "the same, a later one under the shim": (True, save_trainable_only),
        "fingerprints of the whole base": (False, pass_over_base),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for name, (under_shim, way) in ways.items():
            shutil.rmtree(path, ignore_errors=True)
            if under_shim:
                ds_frozen_patch.patch()
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            way()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
            ds_frozen_patch.unpatch()
    report(seconds, added, sum(p.numel() for p in frozen), device)


def report(seconds: dict[str, list[float]], added: int, frozen: int, device: str) -> None:
    """Print the tables in Markdown."""
    print(f"\n{frozen / 1e6:.0f} M frozen bf16 parameters, one rank, {device}, torch {torch.__version__}\n")
    print("| | median s | spread s |\n|---|---|---|")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"| {name} | {medians[name]:.3f} | {min(values):.3f}-{max(values):.3f} |")
    full, native, patched, fingerprint = medians.values()
    print("\n| ratio | measured | aim |\n|---|---|---|")
    print(f"| fingerprints / full save | {fingerprint / full:.3f} | 0.5 |")
    print(f"| later save under the shim / DeepSpeed's flag alone | {patched / native:.3f} | 1.02 |")
    print(f"\nPeak memory that the pass over the base adds: {added / 2**20:.1f} MiB (aim: 64)")


def reset_peak_memory() -> None:
    """Let the kernel count this process's peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Peak resident memory of this process since the last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
