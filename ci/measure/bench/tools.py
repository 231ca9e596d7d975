"""What the checkpoint tools cost beside the alternatives, on a large checkpoint: parts of `nox -s bench`.

A Trainer saves it after one step of a LoRA fine-tune: 2 GB of frozen bf16 weights, 4 M trainable parameters. Each way
of working on it runs in a process of its own, by turns: `python -m bench.tools TOOL WAY SOURCE TARGET`. Whether they
write the same is for `tests/tools` to say.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import training
from bench import finetune
from bench.timing import Costs, alternate, missed, ratios, spread
from memory import memory
from tables import markdown

import ds_frozen_patch
from ds_frozen_patch.publish.durable import sync_tree

SHAPE = finetune.Shape(hidden=2048, intermediate=8192, layers=13, vocabulary=32000, lora=19, tied=False)
RESHARD_TO = 4
SYNCS = ("without syncs", "synced")

Work = Callable[[Path, Path], Iterator[None]]
"""Reads a checkpoint and writes something into a folder; it yields once, when all that it needs is imported."""


@dataclass(frozen=True)
class Tool:
    """A tool, and what is expected of it.

    A way takes `seconds`, as people use it; `without syncs`, less its own calls of fsync; and `synced`, until all that
    it has written is on the disk.

    `ways`: the functions that are compared, each with what it reads in the folder of checkpoints.
    `pairs`: a way, its rival, how many times faster it should be (0: no aim), and at most what share of the memory it
    should take (infinity: no comparison).
    """

    name: str
    ways: Mapping[str, tuple[Work, str]]
    pairs: tuple[tuple[str, str, float, float], ...]
    ROUNDS = 3

    def measure(self, folder: Path, rounds: int) -> dict[str, Costs]:
        """Return the cost of each way: seconds of the work and of its process, and bytes."""
        for source in sorted({source for _, source in self.ways.values()}):
            if not (folder / source).exists():
                print(f"  making {source}", file=sys.stderr, flush=True)
                run("-m", "bench.tools", "make", source, folder / source)

        def process(name: str) -> Costs:
            target = folder / name
            target.mkdir(parents=True)
            begun = time.perf_counter()
            said = run("-m", "bench.tools", self.name, name, folder / self.ways[name][1], target)
            process_seconds = time.perf_counter() - begun
            written = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
            shutil.rmtree(target)
            return {**json.loads(said.splitlines()[-1]), "process_seconds": process_seconds, "written": written}

        return alternate(tuple(self.ways), rounds, process)

    def render(self, costs: dict[str, Costs]) -> str:
        """Return what was measured, and the ratios."""
        lines = []
        more = [figure for figure in SYNCS if all(figure in cost for cost in costs.values())]  # older results lack them
        for name, cost in costs.items():
            megabytes = (f"{median(cost[what]) / 1e6:.0f}" for what in ("peak", "added", "written"))
            synced = (spread(cost[figure]) for figure in more)
            lines.append([name, spread(cost["seconds"]), *synced, f"{median(cost['process_seconds']):.2f}", *megabytes])
        against = []
        for name, rival, faster, smaller in self.pairs:
            turns = ratios(costs, rival, name)
            peak, added = (median(costs[name][what]) / median(costs[rival][what]) for what in ("peak", "added"))
            shares = [f"{peak:.3f}", missed(f"{added:.3f}", added > smaller), f"{smaller:g}"]
            times = missed(spread(turns, ".1f"), median(turns) < faster)
            synced = (spread(ratios(costs, rival, name, figure), ".1f") for figure in more)
            aim = f"{faster:.2g}" if faster else ""
            against.append(
                [f"{name} / {rival}", times, aim, *synced, *(["", "", ""] if math.isinf(smaller) else shares)]
            )
        header = ["", "seconds", *more, "whole process, s", "peak, MB", "above imports, MB", "written, MB"]
        aims = [
            "",
            "times faster",
            "aim: at least",
            *more,
            "of its peak",
            "of its memory above imports",
            "aim: at most",
        ]
        return f"{markdown(header, lines)}\n{markdown(aims, against)}"


def make(name: str, path: Path) -> None:
    """Train, and save a checkpoint; "tuned" is a folder with the trainable-only one, its base and its adapter."""
    if name == FULL_ONE:
        finetune.fitted(SHAPE).save_checkpoint(path)
        return
    ds_frozen_patch.patch()
    trainer = finetune.fitted(SHAPE)
    if name == SMALL_ONE:
        trainer.save_checkpoint(path)
        return
    trainer.save_checkpoint(path / CHECKPOINT)
    model = trainer.lightning_module.model
    model.save_pretrained(path / ADAPTER)
    model.unload().save_pretrained(path / BASE, max_shard_size="1GB")


def run(*arguments: str | Path) -> str:
    """Run Python; returns what it prints."""
    ran = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    return ran.stdout if not ran.returncode else sys.exit(f"{ran.stdout}{arguments} failed, as it says above")


def work(tool: str, name: str, source: str, target: str) -> None:
    """In a process that measures one way: do that, and print what it cost."""
    way, _ = TOOLS[tool].ways[name]
    done = way(Path(source), Path(target))
    next(done)
    before = memory("VmHWM")
    waited, fsync = [0.0], os.fsync

    def timed(fd: Any) -> None:
        begun = time.perf_counter()
        fsync(fd)
        waited.append(time.perf_counter() - begun)

    os.fsync = timed
    begun = time.perf_counter()
    next(done, None)
    seconds = time.perf_counter() - begun
    peak = memory("VmHWM")
    without = seconds - sum(waited)
    sync_tree(target)
    synced = time.perf_counter() - begun
    figures = dict(zip(SYNCS, (without, synced), strict=True))
    print(f"\n{json.dumps({'seconds': seconds, **figures, 'peak': peak, 'added': peak - before})}")


def prune_by_hand(source: Path, target: Path) -> Iterator[None]:
    """What one would write with torch alone."""
    import torch

    yield
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*model_states.pt"))
    for file in source.glob("checkpoint/*model_states.pt"):
        state = torch.load(file, weights_only=False)
        for name in state["frozen_param_shapes"]:
            del state["module"][name]
        state["frozen_param_shapes"] = state["frozen_param_fragments"] = None
        torch.save(state, target / "checkpoint" / file.name)


def ours(name: str, target_name: str, *imports: str, **options: Any) -> Work:
    """A tool of this package; `imports` are what it would else import while it is measured."""

    def work(source: Path, target: Path) -> Iterator[None]:
        tool = getattr(ds_frozen_patch, name)
        for module in imports:
            import_module(module)
        yield
        tool(source, target / target_name, **options)

    return work


def write_and_sync(source: Path, target: Path) -> Iterator[None]:
    """Only what `prune` writes: the same bytes, from memory to the disk."""
    content = {file.name: file.read_bytes() for file in source.rglob("*.pt")}
    yield
    for name, data in content.items():
        with (target / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def zero_to_fp32(source: Path, target: Path) -> Iterator[None]:
    """DeepSpeed's converter. It leaves frozen weights in their dtype."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    yield
    convert_zero_checkpoint_to_fp32_state_dict(source, target, max_shard_size=None)


def ds_to_universal(source: Path, target: Path) -> Iterator[None]:
    """DeepSpeed's converter, in one process, as its worker processes would take more memory."""
    from deepspeed.checkpoint import ds_to_universal

    yield
    training.convert_to_universal(ds_to_universal, source / "checkpoint", target / "out.ckpt" / "checkpoint")


def merge(source: Path, target: Path) -> Iterator[None]:
    """Ours, which also compares the base with its fingerprints, and syncs what it writes."""
    import peft  # noqa: F401
    import transformers  # noqa: F401

    merging = ds_frozen_patch.merge
    yield
    merging(source / CHECKPOINT, target / "served", base=source / BASE)


def merge_by_peft(source: Path, target: Path) -> Iterator[None]:
    """As PEFT's documentation says."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    yield
    base = AutoModelForCausalLM.from_pretrained(source / BASE, dtype="auto")
    PeftModel.from_pretrained(base, source / ADAPTER).merge_and_unload().save_pretrained(target / "served")


def merge_by_axolotl(source: Path, target: Path) -> Iterator[None]:
    """Shard by shard, as its command `merge-lora` does by default."""
    merging = import_module("axolotl.cli.utils.lora_merge").merge_lora_sharded_efficient
    yield
    merging(source / BASE, source / ADAPTER, target / "served")


def copy_and_sync(source: Path, target: Path) -> Iterator[None]:
    """Only read and write the base's bytes, to the disk."""
    yield
    for path in (source / BASE).iterdir():
        with path.open("rb") as original, (target / path.name).open("wb") as file:
            shutil.copyfileobj(original, file, 8 << 20)
            file.flush()
            os.fsync(file.fileno())


FULL_ONE, SMALL_ONE, TUNED = "full.ckpt", "small.ckpt", "tuned"
CHECKPOINT, BASE, ADAPTER = "tuned.ckpt", "base", "adapter"
BY_HAND, FAST, FLOOR = "load, delete, save", "prune --no-fingerprints", "floor: one `write` and fsync of each file"
THEIRS, SMALL, FULL = "zero_to_fp32, full", "consolidate, trainable-only", "consolidate, full"
RESHARD, RESHARD_FULL = "reshard, trainable-only", "reshard, full"
CONVERT, CONVERT_FULL = "ds_to_universal, trainable-only", "ds_to_universal, full"
PRUNES = {
    BY_HAND: (prune_by_hand, FULL_ONE),
    FAST: (ours("prune", "pruned", fingerprints=False), FULL_ONE),
    "prune": (ours("prune", "pruned", "numpy"), FULL_ONE),
    FLOOR: (write_and_sync, SMALL_ONE),
}
CONSOLIDATE = ours("consolidate", "made.ckpt", "torch")  # makes all of them fp32
CONSOLIDATES = {THEIRS: (zero_to_fp32, FULL_ONE), SMALL: (CONSOLIDATE, SMALL_ONE), FULL: (CONSOLIDATE, FULL_ONE)}
RESHARD_OURS = ours("reshard", "out.ckpt", ranks=RESHARD_TO)
RESHARDS = {RESHARD: (RESHARD_OURS, SMALL_ONE), RESHARD_FULL: (RESHARD_OURS, FULL_ONE)}
MERGE, PEFT, AXOLOTL = "merge", "PEFT's merge_and_unload", "axolotl's merge, shard by shard"
COPY = "floor: the base read, written and synced once"
MERGES = {MERGE: merge, PEFT: merge_by_peft, AXOLOTL: merge_by_axolotl, COPY: copy_and_sync}
RESHARDS |= {CONVERT: (ds_to_universal, SMALL_ONE), CONVERT_FULL: (ds_to_universal, FULL_ONE)}
TOOLS = {
    "prune": Tool(
        "prune",
        PRUNES,
        ((FAST, BY_HAND, 10, 0.1), ("prune", BY_HAND, 2, 0.1), (FAST, FLOOR, 1 / 1.5, math.inf)),
    ),
    "consolidate": Tool("consolidate", CONSOLIDATES, ((SMALL, THEIRS, 10, 0.1), (FULL, THEIRS, 1, 0.5))),
    "reshard": Tool(
        "reshard",
        RESHARDS,
        ((RESHARD, RESHARD_FULL, 5, 1), (RESHARD, CONVERT, 1, 0.5), (RESHARD_FULL, CONVERT_FULL, 1, 0.5)),
    ),
    "merge": Tool(
        "merge",
        {name: (way, TUNED) for name, way in MERGES.items()},
        ((MERGE, COPY, 1 / 1.5, math.inf), (MERGE, PEFT, 1, 0.5), (MERGE, AXOLOTL, 0, 1)),
    ),
}


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], Path(sys.argv[3]))
    else:
        work(*sys.argv[1:])
