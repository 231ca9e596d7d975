"""What the checkpoint tools cost beside the alternatives, on a large checkpoint: parts of `nox -s bench`.

A Trainer saves it after one step of a LoRA fine-tune: 2 GB of frozen bf16 weights, 4 M trainable parameters. Each way
of working on it runs in a process of its own, by turns: `python -m bench.tools TOOL WAY SOURCE TARGET`. Whether they
write the same is for `tests/tools` to say.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import engine
from bench.words import spread
from memory import memory
from tables import markdown

SHAPE = engine.Shape(hidden=2048, intermediate=8192, layers=13, vocabulary=32000, lora=19, tied=False)
RESHARD_TO = 4

Work = Callable[[Path, Path], object]
"""Reads a checkpoint and writes something into a folder."""


@dataclass(frozen=True)
class Way:
    """A way of doing something with a checkpoint. `prepare` imports all that it needs, and returns the work."""

    prepare: Callable[[], Work]
    source: str = "full"  # or "small", the trainable-only checkpoint


@dataclass(frozen=True)
class Tool:
    """A tool: the ways that are compared, and what is expected of them.

    `pairs`: a way, its rival, how many times faster it should be, and at most what share of the memory it should take.
    """

    name: str
    ways: dict[str, Way]
    pairs: tuple[tuple[str, str, float, float], ...]
    ROUNDS = 3

    def measure(self, folder: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
        """Return the cost of each way in each round: seconds of the work and of its process, and bytes."""
        sources = make_checkpoints(folder)
        costs: dict[str, list[dict[str, Any]]] = {name: [] for name in self.ways}
        for number in range(rounds):
            print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            for name, way in self.ways.items():
                target = folder / name
                target.mkdir(parents=True)
                os.sync()  # so that nobody waits for what others have written
                begun = time.perf_counter()
                said = run("-m", "bench.tools", self.name, name, sources[way.source], target)
                process_seconds = time.perf_counter() - begun
                written = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
                own = json.loads(said.splitlines()[-1])
                costs[name].append({**own, "process_seconds": process_seconds, "written": written})
                shutil.rmtree(target)
        return costs

    def render(self, costs: dict[str, list[dict[str, Any]]]) -> str:
        """Return what was measured, and the ratios."""

        def median(name: str, what: str) -> float:
            return float(statistics.median(cost[what] for cost in costs[name]))

        lines = []
        for name, found in costs.items():
            megabytes = (f"{median(name, what) / 1e6:.0f}" for what in ("peak", "added", "written"))
            seconds = spread([cost["seconds"] for cost in found])
            lines.append([name, seconds, f"{median(name, 'process_seconds'):.2f}", *megabytes])
        against = []
        for name, rival, faster, smaller in self.pairs:
            turns = [other["seconds"] / own["seconds"] for own, other in zip(costs[name], costs[rival], strict=True)]
            peak, added = (median(name, what) / median(rival, what) for what in ("peak", "added"))
            times = spread(turns, ".1f") if statistics.median(turns) >= faster else f"**{spread(turns, '.1f')} missed**"
            share = f"{added:.3f}" if added <= smaller else f"**{added:.3f} missed**"
            against.append([f"{name} / {rival}", times, f"{faster:g}", f"{peak:.3f}", share, f"{smaller:g}"])
        header = ["", "seconds", "whole process, s", "peak, MB", "above imports, MB", "written, MB"]
        aims = ["", "times faster", "aim: at least", "of its peak", "of its memory above imports", "aim: at most"]
        return f"{markdown(header, lines)}\n{markdown(aims, against)}"


def make_checkpoints(folder: Path) -> dict[str, Path]:
    """Return the full checkpoint and the trainable-only one, made if they are not there."""
    made = {name: folder / f"{name}.ckpt" for name in ("full", "small")}
    if not made["full"].exists():
        print("  making the checkpoints", file=sys.stderr, flush=True)
        run("-m", "bench.tools", "make", made["full"])
        run("-m", "ds_frozen_patch.cli", "prune", made["full"], made["small"], "-q")
    return made


def run(*arguments: str | Path) -> str:
    """Run Python; returns what it prints."""
    ran = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    return ran.stdout if not ran.returncode else sys.exit(f"{ran.stdout}{arguments} failed, as it says above")


def train_and_save(path: str) -> None:
    """Train one step on one rank with ZeRO-2."""
    from ds_frozen_patch.testing import cpu_strategy

    strategy = cpu_strategy("lightning.pytorch")(stage=2)
    trainer = engine.trainer(strategy, "bf16-true", ranks=1)
    trainer.fit(engine.module(SHAPE, "bf16-true"), engine.data())
    trainer.save_checkpoint(path)


def work(tool: str, name: str, source: str, target: str) -> None:
    """In a process that measures one way: do that, and print what it cost."""
    way = TOOLS[tool].ways[name]
    do = way.prepare()
    before = memory("VmHWM")
    begun = time.perf_counter()
    do(Path(source), Path(target))
    seconds = time.perf_counter() - begun
    peak = memory("VmHWM")
    print(f"\n{json.dumps({'seconds': seconds, 'peak': peak, 'added': peak - before})}")


def prune_by_hand() -> Work:
    """What one would write with torch alone."""
    import torch

    def work(source: Path, target: Path) -> None:
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*model_states.pt"))
        for file in source.glob("checkpoint/*model_states.pt"):
            state = torch.load(file, weights_only=False)
            for name in state["frozen_param_shapes"]:
                del state["module"][name]
            state["frozen_param_shapes"] = state["frozen_param_fragments"] = None
            torch.save(state, target / "checkpoint" / file.name)

    return work


def prune_without_fingerprints() -> Work:
    """The tool, which then needs no torch."""
    from ds_frozen_patch.checkpoint.tools.prune import prune

    return lambda source, target: prune(source, target / "pruned", fingerprints=False)


def prune() -> Work:
    """The tool."""
    import torch  # noqa: F401

    from ds_frozen_patch.checkpoint.tools.prune import prune

    return lambda source, target: prune(source, target / "pruned")


def zero_to_fp32() -> Work:
    """Return deepSpeed's. It leaves frozen weights in their dtype."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    return lambda source, target: convert_zero_checkpoint_to_fp32_state_dict(source, target, max_shard_size=None)


def consolidate() -> Work:
    """The tool. It makes all of them fp32."""
    import torch  # noqa: F401

    from ds_frozen_patch.checkpoint.tools.consolidate import consolidate

    return lambda source, target: consolidate(source, target / "made.ckpt")


def reshard() -> Work:
    """The tool."""
    from ds_frozen_patch.checkpoint.tools.reshard import reshard

    return lambda source, target: reshard(source, target / "out.ckpt", ranks=RESHARD_TO)


def ds_to_universal() -> Work:
    """Return deepSpeed's, in one process, as its worker processes would take more memory."""
    from deepspeed.checkpoint.ds_to_universal import main

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    return lambda source, target: main(
        Namespace(
            **options,
            inject_missing_state=True,
            input_folder=str(source / "checkpoint"),
            output_folder=str(target / "out.ckpt" / "checkpoint"),
        )
    )


BY_HAND, FAST = "load, delete, save", "prune --no-fingerprints"
THEIRS, SMALL, FULL = "zero_to_fp32, full", "consolidate, trainable-only", "consolidate, full"
RESHARD, RESHARD_FULL = "reshard, trainable-only", "reshard, full"
CONVERT, CONVERT_FULL = "ds_to_universal, trainable-only", "ds_to_universal, full"
TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "prune",
            {
                BY_HAND: Way(prune_by_hand),
                FAST: Way(prune_without_fingerprints),
                "prune": Way(prune),
            },
            tuple((way, BY_HAND, 20, 0.1) for way in (FAST, "prune")),
        ),
        Tool(
            "consolidate",
            {
                THEIRS: Way(zero_to_fp32),
                SMALL: Way(consolidate, "small"),
                FULL: Way(consolidate),
            },
            (
                (SMALL, THEIRS, 10, 0.1),
                (FULL, THEIRS, 1, 0.5),
            ),
        ),
        Tool(
            "reshard",
            {
                RESHARD: Way(reshard, "small"),
                RESHARD_FULL: Way(reshard),
                CONVERT: Way(ds_to_universal, "small"),
                CONVERT_FULL: Way(ds_to_universal),
            },
            ((RESHARD, RESHARD_FULL, 5, 1), (RESHARD, CONVERT, 1, 0.5), (RESHARD_FULL, CONVERT_FULL, 1, 0.5)),
        ),
    )
}


if __name__ == "__main__":
    if sys.argv[1] == "make":
        train_and_save(sys.argv[2])
    else:
        work(*sys.argv[1:])
