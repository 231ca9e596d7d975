"""What the benchmarks of the checkpoint tools share: a large checkpoint, and ways to work on it, measured in turn.

It is saved by a Trainer that takes one step of a LoRA fine-tune.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_figures import rows, spread
from memory import memory

LAYERS, WIDTH, RANK = 128, 2816, 6
"""2.03 GB of frozen bf16 weights, 4 M trainable parameters."""
MARK = "measured: "

Work = Callable[[Path, Path], object]
"""Reads a checkpoint and writes something into a folder."""
Ways = Mapping[str, Callable[[], Work]]
"""By its name, what imports all that a way needs, and gives its work."""


@dataclass(frozen=True)
class Cost:
    """What a way has cost: seconds of the work, and of the whole process; bytes at the peak, and above the imports."""

    seconds: float
    process_seconds: float
    peak: int
    added: int
    written: int


def train() -> Any:
    """Train one step on one rank with ZeRO-2; gives the trainer."""
    import torch

    from ds_frozen_patch.testing import cpu_strategy

    strategy_class = cpu_strategy("lightning.pytorch")
    from lightning.pytorch import LightningModule, Trainer

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
            self.lora_A = torch.nn.Linear(WIDTH, RANK, bias=False)
            self.lora_B = torch.nn.Linear(RANK, WIDTH, bias=False)

        def forward(self, values: torch.Tensor) -> Any:
            return values + self.base(values) + self.lora_B(self.lora_A(values))

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
            self.register_buffer("steps", torch.zeros(4))

        def training_step(self, batch: torch.Tensor, _: int) -> Any:
            return self.layers(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([value for value in self.parameters() if value.requires_grad], lr=1e-4)

    torch.set_default_dtype(torch.bfloat16)
    strategy = strategy_class(stage=2)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, precision="bf16-true", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    samples: Any = torch.randn(1, WIDTH)
    trainer.fit(Module(), torch.utils.data.DataLoader(samples))
    return trainer


def full(folder: Path) -> Path:
    """The checkpoint in this folder, made if it is not there."""
    checkpoint = folder / "full.ckpt"
    if not checkpoint.exists():
        print("  making the checkpoint", file=sys.stderr, flush=True)
        _run("make", checkpoint)
    return checkpoint


def small(folder: Path) -> Path:
    """The same, trainable-only."""
    checkpoint = folder / "small.ckpt"
    if not checkpoint.exists():
        program: list[str | Path] = [
            sys.executable,
            "-m",
            "ds_frozen_patch.cli",
            "prune",
            full(folder),
            checkpoint,
            "-q",
        ]
        subprocess.run(program, check=True)
    return checkpoint


def measured(
    module: str, turns: Mapping[str, Path], rounds: int, check: Callable[[Mapping[str, Path]], None]
) -> dict[str, list[dict[str, Any]]]:
    """The cost of each way in each round, as of `Cost`, by turns of a name and the checkpoint that it is given.

    Each is one of the module's `WAYS`, in a process of its own. All write to the same folder, which is removed between
    rounds. What the first round has written is checked.
    """
    folder = next(iter(turns.values())).parent / "out"
    costs: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for name, source in turns.items():
            target = folder / name
            target.mkdir(parents=True)
            os.sync()  # so that nobody waits for what others have written
            begun = time.perf_counter()
            said = _run("work", module, name, source, target)
            process_seconds = time.perf_counter() - begun
            own = json.loads(next(line for line in said.splitlines() if line.startswith(MARK)).removeprefix(MARK))
            costs[name].append(asdict(Cost(process_seconds=process_seconds, written=size(target), **own)))
            if number:
                shutil.rmtree(target)
        if not number:
            check({name: folder / name for name in turns})
            shutil.rmtree(folder)
    return costs


def work(module: str, name: str, source: str, target: str) -> None:
    """In a process that measures one way: do that, and say what it cost."""
    ways: Ways = importlib.import_module(module).WAYS
    do = ways[name]()
    before = memory("VmHWM")
    begun = time.perf_counter()
    do(Path(source), Path(target))
    seconds = time.perf_counter() - begun
    peak = memory("VmHWM")
    print(f"\n{MARK}{json.dumps({'seconds': seconds, 'peak': peak, 'added': peak - before})}")


def without_fsync(way: Callable[[], Work]) -> Callable[[], Work]:
    """The same, but what it writes may still be on its way to the disk when it ends."""

    def prepared() -> Work:
        os.fsync = lambda fd: None
        return way()

    return prepared


def report(costs: Mapping[str, list[dict[str, Any]]], pairs: Sequence[tuple[str, str, float, float]]) -> str:
    """What was measured, and the ratios.

    Args:
        costs: as `measured` gives them.
        pairs: a way, the one that it is compared with, how many times faster it should be, and its share of memory.
    """

    def median(name: str, what: str) -> float:
        return float(statistics.median(cost[what] for cost in costs[name]))

    lines = []
    for name, found in costs.items():
        bytes_ = (f"{median(name, what) / 1e6:.0f}" for what in ("peak", "added", "written"))
        lines.append(
            [name, spread([cost["seconds"] for cost in found]), f"{median(name, 'process_seconds'):.2f}", *bytes_]
        )
    against = []
    for name, rival, faster, smaller in pairs:
        turns = [(other["seconds"] / own["seconds"]) for own, other in zip(costs[name], costs[rival], strict=True)]
        peak, added = (median(name, what) / median(rival, what) for what in ("peak", "added"))
        times, shares = spread(turns, ".1f"), f"{added:.3f}"
        against.append(
            [
                f"{name} / {rival}",
                times if statistics.median(turns) >= faster else f"**{times} missed**",
                f"{faster:g}",
                f"{peak:.3f}",
                shares if added <= smaller else f"**{shares} missed**",
                f"{smaller:g}",
            ]
        )
    header = ["", "seconds", "whole process, s", "peak, MB", "above imports, MB", "written, MB"]
    aims = ["", "times faster", "aim: at least", "of its peak", "of its memory above imports", "aim: at most"]
    return f"{rows(header, lines)}\n{rows(aims, against)}"


def same(one: Any, other: Any) -> bool:
    """Whether two values that `torch.load` gave are the same, tensors to the bit."""
    import torch

    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, dict):
        return isinstance(other, dict) and [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def _run(*arguments: str | Path) -> str:
    """Run this program; gives what it prints."""
    ran = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{ran.stdout}{ran.stderr}{arguments} has failed")
    return ran.stdout


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    if sys.argv[1] == "make":
        train().save_checkpoint(sys.argv[2])
    else:
        work(*sys.argv[2:])
