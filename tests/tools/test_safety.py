"""What the writing tools must never do: change their source, leave partial output, or run what they read."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import (
    EMBEDDING,
    Checkpoints,
    changed,
    contents,
    flip,
    loaded,
    of_one_rank,
    record_of,
    snapshot,
    unmark,
)

from ds_frozen_patch import CheckpointError, consolidate, export, prune, reshard
from ds_frozen_patch.cli import main
from ds_frozen_patch.common.overrides import overridden

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]

Tool = Callable[[Path, Path], Any]


def merge(source: Path, target: Path) -> Any:
    """Merge `small.ckpt` beside the source with the source as its base."""
    return consolidate(source.with_name("small.ckpt"), target, base=source)


TOOLS: dict[str, tuple[Tool, str, list[str]]] = {
    "prune": (prune, "out.ckpt", ["prune"]),
    "consolidate": (consolidate, "out.ckpt", ["consolidate"]),
    "consolidate to safetensors": (consolidate, "out.safetensors", ["consolidate"]),
    "consolidate to a folder": (consolidate, "out", ["consolidate", "--max-shard-size", "10kB"]),
    "export": (export, "out.safetensors", ["export", "--format", "safetensors"]),
    "export to a folder": (
        lambda source, target: export(source.with_name("small.ckpt"), target, format="peft"),
        "out",
        ["export", "--format", "peft"],
    ),
    "reshard": (partial(reshard, ranks=3), "out.ckpt", ["reshard", "--ranks", "3"]),
}
EVERY_TOOL = pytest.mark.parametrize("tool", TOOLS)


def given(tool: str, path: Path) -> Path:
    """Return what of a pair a tool is given: a full checkpoint does not contain the configuration of its adapters."""
    return path.with_name("small.ckpt") if tool == "export to a folder" else path


@pytest.fixture
def source(checkpoints: Checkpoints, tmp_path: Path) -> Callable[..., Path]:
    """A folder with copies of `small.ckpt` and `full.ckpt` to be damaged; gives the latter's path."""

    def copy(stage: int, **options: Any) -> Path:
        shutil.copytree(checkpoints(stage, **options), tmp_path / "in")
        return tmp_path / "in" / "full.ckpt"

    return copy


def both(source: Path, damage: Callable[[Path], Any]) -> None:
    """Change both checkpoints of a pair in the same way."""
    for path in (source, source.with_name("small.ckpt")):
        damage(path)


def assert_refused(run: Callable[[], Any], target: Path, source: Path) -> str:
    """Assert one CheckpointError, an empty target folder, and an unchanged source."""
    before, others = snapshot(source.parent), set(target.parent.iterdir())
    with pytest.raises(CheckpointError) as refused:
        run()
    assert set(target.parent.iterdir()) == others
    assert snapshot(source.parent) == before
    assert refused.value.__suppress_context__ or refused.value.__context__ is None  # one sentence and no chain
    return str(refused.value)


def first(path: Path, kind: str) -> Path:
    return min(path.rglob(f"*{kind}_states.pt"))


def last(path: Path, kind: str) -> Path:
    return max(path.rglob(f"*{kind}_states.pt"))


def cut(file: Path, at: int) -> None:
    file.write_bytes(file.read_bytes()[:at])


def bit_of_a_master(path: Path) -> None:
    file = last(path, "optim")
    key = "fp32_flat_groups" if loaded(file)["optimizer_state_dict"].get("fp32_flat_groups") else None
    key = key or "single_partition_of_fp32_groups"
    flip(file, record_of(file, lambda state: state["optimizer_state_dict"][key][0]))


def a_single_file(path: Path) -> None:
    file = path.with_suffix(".single")
    first(path, "model").rename(file)
    shutil.rmtree(path)
    file.rename(path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut model": lambda path: cut(last(path, "model"), -100),
    "cut optimizer": lambda path: cut(last(path, "optim"), 1000),
    "bit of a master": bit_of_a_master,
    "bit of a pickle": lambda path: flip(first(path, "model"), "data.pkl"),
    "no optimizer of a rank": lambda path: last(path, "optim").unlink(),
    "no model": lambda path: list(map(Path.unlink, path.rglob("*model_states.pt"))),
    "no latest": lambda path: (path / "latest").unlink(),
    "no checkpoint": shutil.rmtree,
    "a text": lambda path: first(path, "model").write_text("not what it says"),
    "a single file": a_single_file,
}


@pytest.mark.short
@EVERY_TOOL
def test_an_output_is_on_disk_before_it_has_its_name(source: Callable[..., Path], tmp_path: Path, tool: str) -> None:
    run, name, _ = TOOLS[tool]
    path, target = source(2), tmp_path / "out of it" / name
    synced, sync = dict[int, bool](), os.fsync

    def noting(opened: int) -> None:
        sync(opened)
        synced[os.fstat(opened).st_ino] = target.exists()

    with overridden([(os, "fsync", noting)]):
        run(path, target)
    assert {synced[item.stat().st_ino] for item in (target, *target.rglob("*"))} == {False}
    assert synced[target.parent.stat().st_ino]  # its name


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("damage", DAMAGES)
@EVERY_TOOL
def test_a_damaged_source(source: Callable[..., Path], tmp_path: Path, tool: str, damage: str, stage: int) -> None:
    run, name, _ = TOOLS[tool]
    path = source(stage)
    both(path, DAMAGES[damage])
    (tmp_path / "out of it").mkdir()
    target = tmp_path / "out of it" / name
    said = assert_refused(lambda: run(path, target), target, path)
    assert str(given(tool, path)) in said


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "tool", ["prune", "consolidate", "consolidate to safetensors", "consolidate to a folder", "reshard"]
)
def test_a_flipped_bit_in_a_frozen_weight(source: Callable[..., Path], tmp_path: Path, tool: str, stage: int) -> None:
    run, name, _ = TOOLS[tool]
    path = source(stage)
    file = last(path, "model")
    flip(file, record_of(file, lambda state: state["frozen_param_fragments"][EMBEDDING]))
    said = assert_refused(lambda: run(path, tmp_path / name), tmp_path / name, path)
    assert said.startswith(f"{file} is damaged: record ")
    # As a base it is refused too, though its values may be found wrong before its file.
    assert str(path) in assert_refused(lambda: merge(path, tmp_path / name), tmp_path / name, path)


@pytest.mark.parametrize(
    ("other", "stage"),
    [*(({"rank": 8}, stage) for stage in (1, 2, 3)), *(({"seed": 2}, stage) for stage in (1, 2))],
)
@EVERY_TOOL
def test_a_shard_of_another_run(
    checkpoints: Checkpoints, source: Callable[..., Path], tmp_path: Path, tool: str, stage: int, other: dict[str, Any]
) -> None:
    run, name, _ = TOOLS[tool]
    path = source(stage)

    def damage(path: Path) -> None:
        shard = last(path, "optim")
        shutil.copy(checkpoints(stage, **other) / path.name / "checkpoint" / shard.name, shard)

    both(path, damage)
    assert "is of another save than" in assert_refused(lambda: run(path, tmp_path / name), tmp_path / name, path)
    both(path, unmark)
    said = assert_refused(lambda: run(path, tmp_path / name), tmp_path / name, path)
    if "seed" in other:
        assert "are not from one run: the optimizer's masters differ from" in said
        assert last(path, "optim").name in said
    else:
        assert "does not fit the model's states" in said


@pytest.mark.short
@EVERY_TOOL
def test_existing_targets_are_unchanged(source: Callable[..., Path], tmp_path: Path, tool: str) -> None:
    run, name, words = TOOLS[tool]
    path, target = source(2), tmp_path / "there" / name
    target.parent.mkdir()
    made: list[Callable[[], Any]] = [
        lambda: target.write_text("precious"),
        target.mkdir,
        lambda: target.symlink_to(tmp_path / "nowhere"),
        lambda: target.symlink_to(path),
    ]
    for make in made:
        make()
        before = snapshot(target.parent)
        said = assert_refused(lambda: run(path, target), target, path)
        assert said == f"{target} already exists. Choose another path for the output, or remove it first."
        assert main([*words, str(path.with_name("small.ckpt")), str(target), "-q"]) == 1
        assert snapshot(target.parent) == before
        if target.is_dir() and not target.is_symlink():
            target.rmdir()
        else:
            target.unlink()


@pytest.mark.short
@EVERY_TOOL
def test_nothing_is_written_into_a_source(source: Callable[..., Path], tmp_path: Path, tool: str) -> None:
    run, name, _ = TOOLS[tool]
    path = source(2)
    own = given(tool, path)
    (tmp_path / "link").symlink_to(own)
    for folder in (own, own / "checkpoint", own / "new" / "folder", tmp_path / "link", own / "checkpoint" / ".."):
        said = assert_refused(lambda folder=folder: run(path, folder / name), own / name, path)  # type: ignore[misc]
        assert f"is inside {own}, which must not be changed" in said
        assert not (own / "new").exists()
    merge_into = path / name
    if tool.startswith("consolidate"):
        said = assert_refused(lambda: merge(path, merge_into), merge_into, path)
        assert f"is inside {path}, which must not be changed" in said


def line_after(program: str, *arguments: object) -> list[str]:
    """Run the command line in a process of its own, after another program in it."""
    program = f"import sys\n{program}\nfrom ds_frozen_patch.cli import main\nsys.exit(main())"
    return [sys.executable, "-B", "-c", program, *map(str, arguments)]


@EVERY_TOOL
def test_an_uncreatable_folder(source: Callable[..., Path], tmp_path: Path, tool: str) -> None:
    run, name, _ = TOOLS[tool]
    (tmp_path / "a file").write_text("not a folder")
    path = source(2)
    said = assert_refused(lambda: run(path, tmp_path / "a file" / name), tmp_path / name, path)
    assert f"{tmp_path / 'a file' / name} cannot be written (" in said
    run(path, tmp_path / "new" / "folder" / name)  # but this is made
    assert (tmp_path / "new" / "folder" / name).exists()


@pytest.mark.short
@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool not in ("export to a folder", "reshard")])
def test_tensors_are_streamed(tmp_path: Path, tool: str) -> None:
    """Memory holds a few of 32 tensors of 1 MiB at a time."""
    run, name, _ = TOOLS[tool]
    weights = {f"{kind}.{number}": torch.ones(512, 512) for kind in ("trained", "frozen") for number in range(16)}
    path = of_one_rank(tmp_path / "in.ckpt", weights)
    tracemalloc.start()
    try:
        run(path, tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 6 * 2**20
    finally:
        tracemalloc.stop()


SLOWLY = """
import time
from ds_frozen_patch.checkpoint.format import records
real = records.Records._read_into
def read_into(self, storage, begin, chunk):
    time.sleep(0.15)
    real(self, storage, begin, chunk)
records.Records._read_into = read_into
"""


@pytest.mark.short
def test_interrupted_writes(source: Callable[..., Path], tmp_path: Path) -> None:
    """`tests/faults/test_kill.py` kills the tools."""
    run, name, words = TOOLS["prune"]
    path, folder = source(2), tmp_path / "interrupted"
    before = snapshot(path)
    line = line_after(SLOWLY, *words, path, folder / name)
    # What a shell starts in the background ignores SIGINT, and so would this.
    callback = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, preexec_fn=callback)
    deadline = time.monotonic() + 60
    while not any(item.is_file() and item.stat().st_size for item in folder.rglob("*")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert snapshot(path) == before
    assert (process.returncode, [*folder.iterdir()]) == (130, [])
    assert said == "ds-frozen-patch: interrupted; nothing was left at the target\n"
    run(path, folder / name)
    assert (folder / name).exists()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_user_class_is_preserved(
    source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """A pruned or consolidated checkpoint names it again, and only torch imports it."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "users_own.py").write_text("""
import dataclasses, enum
class Kind(enum.Enum):
    ONE = 1
@dataclasses.dataclass
class Options:
    rate: float
    kind: Kind
    more: dict
class Listed(list):
    pass
""")
    path = source(stage)
    with monkeypatch.context() as context:
        context.syspath_prepend(tmp_path / "code")
        code: Any = importlib.import_module("users_own")
        for file in path.rglob("*model_states.pt"):
            listed = code.Listed([1, {"two": torch.arange(2)}])
            listed.note = "an attribute"
            options = code.Options(0.5, code.Kind.ONE, {"listed": listed})
            changed(file, lambda state, options=options: state["hyper_parameters"].update(options=options))  # type: ignore[misc]
    del sys.modules["users_own"]
    importlib.invalidate_caches()
    prune(path, tmp_path / "pruned.ckpt")
    consolidate(path, tmp_path / "one.ckpt")
    export(path, tmp_path / "one.safetensors")
    assert "users_own" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("users_own")
    monkeypatch.syspath_prepend(tmp_path / "code")
    code = importlib.import_module("users_own")
    for file in (*(tmp_path / "pruned.ckpt").rglob("*model_states.pt"), tmp_path / "one.ckpt"):
        found = loaded(file)["hyper_parameters"]["options"]
        assert isinstance(found, code.Options)
        assert (found.rate, found.kind) == (0.5, code.Kind.ONE)
        listed = found.more["listed"]
        assert isinstance(listed, code.Listed)
        assert (listed[0], listed[1]["two"].tolist(), listed.note) == (1, [0, 1], "an attribute")
    del sys.modules["users_own"]


@EVERY_TOOL
def test_a_dry_run_writes_nothing(
    source: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    _, name, words = TOOLS[tool]
    path = source(3)
    own = given(tool, path)
    both(path, bit_of_a_master)  # no tensor is read
    before, target = snapshot(tmp_path), tmp_path / "to" / name
    line = [*words, str(own), str(target), "--dry-run"]
    assert main(line) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"Would write {target}: ")
    assert said.err == ""
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dry_run"], found["target"]) == (True, str(target))
    assert not (tmp_path / "to").exists()
    assert snapshot(tmp_path) == before
    # What would not be done is refused as it would be.
    assert main([*words, str(own), str(own / "checkpoint"), "--dry-run"]) == 1
    assert "already exists" in capsys.readouterr().err
    assert main([*words, str(own), str(own / name), "--dry-run"]) == 1
    assert "is inside" in capsys.readouterr().err


@EVERY_TOOL
def test_the_summary_of_a_tool(
    source: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    _, name, words = TOOLS[tool]
    path = source(2)
    own = given(tool, path)
    assert main([*words, str(own), str(tmp_path / "aloud" / name)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"Wrote {tmp_path / 'aloud' / name}: ")
    assert said.err == ""
    assert main([*words, str(own), str(tmp_path / "quiet" / name), "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*words, str(own), str(tmp_path / "json" / name), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dry_run"], found["source"]) == (False, str(own))
    written = [contents(tmp_path / folder) for folder in ("aloud", "quiet", "json")]
    assert written[0] == written[1] == written[2]  # it is the same each time
    assert written[0]


@pytest.mark.short
@pytest.mark.parametrize(
    "arguments",
    [
        ["verify"],
        ["prune", "a"],
        ["prune", "a", "b", "c"],
        ["prune", "1/a", "2/a", "--into", "small"],
        ["prune", "small/a", "--into", "small"],
        ["consolidate", "a", "b", "--dtype", "fp8"],
        *(["consolidate", "a", "b", "--max-shard-size", size] for size in ("big", "0", "-1GB")),
        ["merge", "a", "b"],
        ["merge", "a", "b.ckpt", "--base", "c"],
        ["export", "a", "b"],
        ["reshard", "a", "b"],
        *(["reshard", "a", "b", "--ranks", number] for number in ("0", "2.5")),
    ],
)
def test_invalid_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("usage: ds-frozen-patch ")
