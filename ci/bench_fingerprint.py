"""What fingerprints cost, against a full save and against DeepSpeed's own flag: a part of `ci/bench.py`.

A base of 400 million bf16 parameters and 4 million trainable ones, one rank, ZeRO-2, by Fabric. By itself, with
`--device cuda`, it measures the same on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_figures import judged, ratios, rows, spread
from memory import memory, reset_peak_memory

import ds_frozen_patch

ROUNDS = 7
BASE = (100, 4_030_000)  # parameters, elements of each
ADAPTERS = (100, 42_000)


FULL, NATIVE = "full save, plain Lightning", "trainable-only save by DeepSpeed's flag"
PATCHED, PASS = "the same, a later one under the shim", "fingerprints of the whole base"


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each save and of a pass over the base, in a process of their own."""
    program = [sys.executable, __file__, f"--rounds={rounds}", f"--folder={folder}"]
    said = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    """Print the tables, and what they are made of as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
        found = run(Path(folder), options.rounds, options.device)
    print(f"{render(found)}\n{json.dumps(found)}")


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


def run(folder: Path, rounds: int, device: str) -> dict[str, Any]:
    """Seconds of each, and the memory that a pass over the base adds."""
    if device == "cpu":
        from ds_frozen_patch.testing import cpu_strategy

        strategy_class = cpu_strategy("lightning.fabric")
    else:
        from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as strategy_class  # noqa: N813
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
        strategy: Any = fabric.strategy
        strategy.model.save_checkpoint(str(path), tag="checkpoint", exclude_frozen_parameters=True)

    def pass_over_base() -> None:
        fingerprints(frozen, fabric.device, Memory())

    with ds_frozen_patch.patched():
        fabric.save(path, state)  # the first one reads the base, and makes the engine known
    reset_peak_memory()
    before = memory("VmHWM")
    pass_over_base()
    added = memory("VmHWM") - before
    ways: dict[str, tuple[bool, Callable[[], None]]] = {
        FULL: (False, save_full),
        NATIVE: (False, save_trainable_only),
        PATCHED: (True, save_trainable_only),
        PASS: (False, pass_over_base),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)
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
    return {
        "seconds": seconds,
        "added": added,
        "parameters": sum(value.numel() for value in frozen),
        "device": device,
    }


def render(found: dict[str, Any]) -> str:
    """The tables in Markdown."""
    seconds = found["seconds"]
    lines = [[name, spread(values, ".3f")] for name, values in seconds.items()]
    aims = [
        ["fingerprints / full save", judged(ratios(seconds, PASS, FULL), 0.5, ".3f"), "0.5"],
        [
            "a later save under the shim / DeepSpeed's flag",
            judged(ratios(seconds, PATCHED, NATIVE), 1.02, ".3f"),
            "1.02",
        ],
        ["MiB of memory that the pass over the base adds", judged([found["added"] / 2**20], 64, ".1f"), "64"],
    ]
    about = f"{found['parameters'] / 1e6:.0f} M frozen bf16 parameters, one rank, {found['device']}"
    return f"{about}:\n\n{rows(['', 'seconds'], lines)}\n{rows(['', 'measured', 'aim: at most'], aims)}"


if __name__ == "__main__":
    main()
