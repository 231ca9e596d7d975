"""What the benchmarks of the checkpoint tools share: a large checkpoint, and ways to work on it, measured in turn.

`python ci/bench_checkpoint.py CHECKPOINT` makes the checkpoint, by a Trainer that takes one step of a LoRA fine-tune.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def make(checkpoint: Path) -> None:
    """Save a full checkpoint of `train`."""
    train().save_checkpoint(checkpoint)


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

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values + self.base(values) + self.lora_B(self.lora_A(values))

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
            self.register_buffer("steps", torch.zeros(4))

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layers(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([value for value in self.parameters() if value.requires_grad], lr=1e-4)

    torch.set_default_dtype(torch.bfloat16)
    strategy = strategy_class(stage=2)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, precision="bf16-true", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(1, WIDTH)))
    return trainer


@contextmanager
def checkpoint(about: str | None) -> Iterator[tuple[Path, int]]:
    """The checkpoint in a folder that is removed in the end, and how many rounds are asked for."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="for 10 GB of files (default: the current one)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=given.folder) as scratch:
        made = Path(scratch, "full.ckpt")
        print("making the checkpoint", file=sys.stderr)
        _run(__file__, made)
        yield made, given.rounds


def measured(
    turns: Sequence[tuple[str, Path]], rounds: int, check: Callable[[Mapping[str, Path]], None]
) -> dict[str, list[Cost]]:
    """The cost of each way in each round, by turns of a name and the checkpoint that it is given.

    All write to the same folder, which is removed between rounds. What the first round has written is checked.
    """
    folder = turns[0][1].parent / "out"
    costs: dict[str, list[Cost]] = {name: [] for name, _ in turns}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for name, source in turns:
            target = folder / name
            target.mkdir(parents=True)
            os.sync()  # so that nobody waits for what others have written
            begun = time.perf_counter()
            said = _run(sys.argv[0], "--way", name, source, target)
            process_seconds = time.perf_counter() - begun
            own = json.loads(next(line for line in said.splitlines() if line.startswith(MARK)).removeprefix(MARK))
            costs[name].append(Cost(process_seconds=process_seconds, written=size(target), **own))
            if number:
                shutil.rmtree(target)
        if not number:
            check({name: folder / name for name, _ in turns})
            shutil.rmtree(folder)
    return costs


def work_if_told(ways: Ways) -> None:
    """In a process that measures one way: do that, say what it cost, and end."""
    if sys.argv[1:2] != ["--way"]:
        return
    name, source, target = sys.argv[2:]
    work = ways[name]()
    before = _peak_memory()
    begun = time.perf_counter()
    work(Path(source), Path(target))
    seconds = time.perf_counter() - begun
    peak = _peak_memory()
    print(f"\n{MARK}{json.dumps({'seconds': seconds, 'peak': peak, 'added': peak - before})}")
    sys.exit()


def without_fsync(way: Callable[[], Work]) -> Callable[[], Work]:
    """The same, but what it writes may still be on its way to the disk when it ends."""

    def prepared() -> Work:
        os.fsync = lambda _: None
        return way()

    return prepared


def report(costs: Mapping[str, list[Cost]], pairs: Sequence[tuple[str, str, float, float]]) -> None:
    """Print what was measured, and the ratios.

    Args:
        costs: as `measured` gives them.
        pairs: a way, the one that it is compared with, how many times faster it should be, and its share of memory.
    """
    best = {name: min(found, key=lambda cost: cost.seconds) for name, found in costs.items()}
    print("\nOne rank, ZeRO-2, 1 G frozen bf16 parameters, 4 M trainable ones. What is read is in the page cache.")
    print("Ours calls fsync before its output gets its name, the others do not.\n")
    print(
        "| | s | spread s | whole process s | peak MB | above imports MB | written MB |\n|---|---|---|---|---|---|---|"
    )
    for name, cost in best.items():
        slowest = max(costs[name], key=lambda cost: cost.seconds).seconds
        peak, added, written = (f"{size / 1e6:.0f}" for size in (cost.peak, cost.added, cost.written))
        process = min(cost.process_seconds for cost in costs[name])
        times = f"{cost.seconds:.2f} | {cost.seconds:.2f}-{slowest:.2f} | {process:.2f}"
        print(f"| {name} | {times} | {peak} | {added} | {written} |")
    print("\n| against | times faster | aim | peak | above imports | aim |\n|---|---|---|---|---|---|")
    for name, rival, faster, smaller in pairs:
        own, other = best[name], best[rival]
        memory = f"{own.peak / other.peak:.3f} | {own.added / other.added:.3f} | {smaller}"
        print(f"| {name} / {rival} | {other.seconds / own.seconds:.1f} | {faster:g} | {memory} |")


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


def _run(program: str, *arguments: str | Path) -> str:
    """Run one of these programs; gives what it prints."""
    ran = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{ran.stdout}{ran.stderr}{program} {arguments} has failed")
    return ran.stdout


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _peak_memory() -> int:
    """This process's, in bytes. `ru_maxrss` would be its parent's where that was larger."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
