"""Promise 14: the time and memory of a tool are linear in the file, whatever fills it.

A checkpoint of 0.05 MB is compared with one of 0.5 MB, and a base of 0.1 MB with one of 1 MB; in the long part, one of
1 MB with one of 10 MB, and that with one of 100 MB, for the tools that read, check and write a checkpoint.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import Checkpoints, base_model, changed, commands
from memory import give_back_memory, memory, reset_peak_memory
from safetensors.torch import save_file

from ds_frozen_patch.cli import main
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.record import KEY, LeftOut, Record

pytestmark = pytest.mark.promise(14)

MB = 1_000_000
TIMES = 4
"""How many times more than in proportion a larger file may take; a quadratic cost takes 10 times more.

On a busy machine the same work takes up to three times the CPU seconds.
"""
SECONDS, BYTES = 0.5, 64 * MB
"""What does not count: a small file's cost is noise."""
REUSED = 4
"""The bytes of memory for each byte of a file that may have been there before."""
MOST_SECONDS, MOST_BYTES = 9.0, 60
"""The factors: CPU seconds for each MB, and bytes of memory for each byte."""

AT_MOST = {"inspect", "verify", "prune"}
"""The tools that get the largest files."""

ROW = "a large file of one kind of content, read by a tool: time and memory in proportion"

Fill = Callable[..., Any]


def tensors(state: dict[str, Any], size: int) -> None:
    state["mine"] = [torch.ones(1) for _ in range(size // 350)]


def views(state: dict[str, Any], size: int) -> None:
    values = torch.ones(size // 70)
    state["mine"] = {f"view.{i}": values[i : i + 1] for i in range(size // 70)}


def in_the_module(state: dict[str, Any], size: int) -> None:
    state["module"].update({f"lora_more.{i}": torch.ones(1) for i in range(size // 370)})


def shapes(state: dict[str, Any], size: int) -> None:
    state["param_shapes"][0].update({f"more.{i}": torch.Size([1]) for i in range(size // 50)})


def in_the_record(state: dict[str, Any], size: int) -> None:
    left_out = tuple(LeftOut((f"more.{i}",), (1,), "float32", f"{i:032x}") for i in range(size // 130))
    state[KEY] = Record("mine", 2, 2, 1, {}, "trainable-only", left_out, 4 * len(left_out)).to_json()


def buffers(state: dict[str, Any], size: int) -> None:
    state["buffer_names"] = [*state["buffer_names"], *(f"buffer.{i}" for i in range(size // 20))]


FILLINGS: dict[str, Fill] = {
    "a tensor": lambda state, size: state.update(mine=torch.ones(size // 4)),
    "small tensors": tensors,
    "views of a tensor": views,
    "entries of the module": in_the_module,
    "shapes of parameters": shapes,
    "parameters left out": in_the_record,
    "buffers": buffers,
    "numbers": lambda state, size: state.update(mine=list(range(size // 5))),
    "a text": lambda state, size: state.update(mine="x" * size),
    "texts": lambda state, size: state.update(mine=[str(i) for i in range(size // 14)]),
    "keys": lambda state, size: state.update(mine={str(i): i for i in range(size // 19)}),
    "lists of lists": lambda state, size: state.update(mine=[[[i]] for i in range(size // 12)]),
}

SHORT = ["small tensors", "parameters left out", "keys", "entries of the module"]
"""Those that are tried in the short part."""

# Each returns more tensors and metadata of a base.
BASES: dict[str, Callable[[int], tuple[dict[str, torch.Tensor], dict[str, str]]]] = {
    "metadata": lambda size: ({}, {f"key.{i}": "x" for i in range(size // 18)}),
    "empty tensors": lambda size: (
        {f"more.{i}": torch.ones(0) for i in range(size // 110)},
        {f"alias.{i}": f"more.{i}" for i in range(size // 110)},
    ),
    "a tensor": lambda size: ({"more": torch.ones(size // 4)}, {}),
}


def cost(command: list[str], out: Path) -> tuple[float, int]:
    """The CPU seconds of a command, whether it works or refuses, and by how much memory rises."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    give_back_memory()
    reset_peak_memory()
    before, begun = memory("VmRSS"), time.process_time()
    assert main(command) in (0, 1)
    return time.process_time() - begun, memory("VmHWM") - before


def grows(costs: dict[float, tuple[float, int]], sizes: dict[float, int]) -> list[str]:
    """What is worse than linear, or beyond the factors."""
    found = []
    for (small, (seconds, rise)), (large, (more_seconds, more_rise)) in zip(
        list(costs.items())[:-1], list(costs.items())[1:], strict=True
    ):
        times = TIMES * sizes[large] / sizes[small]
        if more_seconds > times * max(seconds, SECONDS / 10) + SECONDS:
            found.append(f"{large} MB: {more_seconds:.1f} s, and {seconds:.1f} s for {small} MB")
        # A rise may be small because Python had memory left from the command before.
        if more_rise > times * max(rise, BYTES / 10, REUSED * sizes[small]) + BYTES:
            found.append(f"{large} MB: {more_rise >> 20} MiB, and {rise >> 20} MiB for {small} MB")
        if more_seconds > MOST_SECONDS * sizes[large] / MB + SECONDS:
            found.append(f"{large} MB: {more_seconds:.1f} s")
        if more_rise > MOST_BYTES * sizes[large] + BYTES:
            found.append(f"{large} MB: {more_rise >> 20} MiB")
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    fillings: list[str] = list(FILLINGS if metafunc.function is test_a_checkpoint else BASES)
    if metafunc.function is test_a_checkpoint and not metafunc.config.getoption("--faults"):
        fillings = SHORT
    metafunc.parametrize("filling", fillings)


@pytest.mark.timeout(3000)
def test_a_checkpoint(
    checkpoints: Checkpoints, tmp_path: Path, filling: str, long: bool, counted: Callable[[str, int], None]
) -> None:
    costs: dict[str, dict[float, tuple[float, int]]] = {}
    sizes: dict[float, int] = {}
    for megabytes in (1, 10, 100) if long else (0.05, 0.5):
        folder = tmp_path / str(megabytes)
        shutil.copytree(checkpoints(2), folder / "filled")
        shutil.copytree(checkpoints(2) / "small.ckpt", folder / "good" / "small.ckpt")
        for path in (folder / "filled").iterdir():
            if filling != "parameters left out" or path.name == "small.ckpt":
                file = min(path.rglob("*model_states.pt"))
                changed(file, partial(FILLINGS[filling], size=int(megabytes * MB)))
                if filling == "parameters left out":  # in the file
                    (file.parent / RECORD).unlink()
                sizes[megabytes] = file.stat().st_size
        run = commands(folder / "filled" / "small.ckpt", folder / "filled" / "full.ckpt", tmp_path / "out")
        for name, command in run.items():
            if megabytes > 10 and name not in AT_MOST:
                continue
            costs.setdefault(name, {})[megabytes] = cost(command, tmp_path / "out")
        shutil.rmtree(folder)
    assert {name: grows(costs[name], sizes) for name in costs if grows(costs[name], sizes)} == {}
    assert all(size > 0.5 * MB * megabytes for megabytes, size in sizes.items()), sizes
    counted(ROW, sum(map(len, costs.values())))


@pytest.mark.timeout(3000)
def test_a_base(
    checkpoints: Checkpoints, tmp_path: Path, filling: str, long: bool, counted: Callable[[str, int], None]
) -> None:
    costs: dict[str, dict[float, tuple[float, int]]] = {}
    sizes: dict[float, int] = {}
    small = checkpoints(2) / "small.ckpt"
    for megabytes in (1, 10, 100) if long else (0.1, 1):
        more, about = BASES[filling](int(megabytes * MB))
        own = {name: value.clone() for name, value in base_model().state_dict().items()}
        save_file({**own, **more}, tmp_path / "base.safetensors", about)
        sizes[megabytes] = (tmp_path / "base.safetensors").stat().st_size
        for command in (["verify", str(small)], ["consolidate", str(small), str(tmp_path / "out" / "merged.ckpt")]):
            whole = [*command, "--base", str(tmp_path / "base.safetensors")]
            costs.setdefault(command[0], {})[megabytes] = cost(whole, tmp_path / "out")
    assert {name: grows(costs[name], sizes) for name in costs if grows(costs[name], sizes)} == {}
    assert all(math.isclose(size, MB * megabytes, rel_tol=0.6) for megabytes, size in sizes.items()), sizes
    counted(ROW, sum(map(len, costs.values())))
