"""The tools read a checkpoint in a bucket as one on a disk, in ranges, and leave nothing of it on the machine."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import buckets
from kit.checkpoints import Checkpoints, contents

import ds_frozen_patch
from ds_frozen_patch import CheckpointError
from ds_frozen_patch.cli import main
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.frameworks.for_lightning.checkpoints import objects_of

pytest.importorskip("moto")
pytest.importorskip("s3fs")
NoCredentialsError = pytest.importorskip("botocore.exceptions").NoCredentialsError

pytestmark = [pytest.mark.promise(21), pytest.mark.everyday]


@pytest.fixture
def copies(server: dict[str, str], checkpoints: Checkpoints, tmp_path: Path, monkeypatch: Any) -> tuple[Path, str]:
    """A folder with checkpoints of one moment, with files of the program, and a copy of it in a bucket."""
    monkeypatch.setenv("DS_FROZEN_PATCH_SCRATCH", str(tmp_path))
    local, at = tmp_path / "local", f"s3://bucket/{tmp_path.name}"
    shutil.copytree(checkpoints(2), local)
    for name in ("full.ckpt/args.json", "full.ckpt/checkpoint/notes/deep/large.bin"):
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_bytes(bytes(1 << 21))
    buckets.file_system().put(f"{local}/", at, recursive=True)
    return local, at


@pytest.mark.short
def test_what_is_printed(copies: tuple[Path, str], capsys: Any) -> None:
    printed = []
    for place in map(str, copies):
        for words in (
            ["inspect", f"{place}/small.ckpt"],
            ["verify", f"{place}/small.ckpt", f"{place}/full.ckpt"],
        ):
            assert main(words) == 0
            printed.append(re.sub(r"\d+ s\b|\s+", " ", capsys.readouterr().out.replace(place, "PLACE")))
    assert printed[:2] == printed[2:]
    assert "PLACE" in printed[1]


@pytest.mark.parametrize(
    "words",
    [
        ["prune", "full.ckpt", "pruned.ckpt"],
        ["consolidate", "small.ckpt", "a.safetensors"],
        ["export", "small.ckpt", "b.safetensors", "--format", "safetensors"],
        ["reshard", "full.ckpt", "resharded.ckpt", "--ranks", "1"],
    ],
    ids=lambda words: words[0],
)
def test_what_is_written(copies: tuple[Path, str], tmp_path: Path, words: list[str]) -> None:
    word, source, target, *options = words
    for number, place in enumerate(copies):
        (tmp_path / str(number)).mkdir()
        assert main([word, f"{place}/{source}", str(tmp_path / str(number) / target), *options, "-q"]) == 0
    assert contents(tmp_path / "0" / target) == contents(tmp_path / "1" / target)


def test_outputs_are_on_this_machine(copies: tuple[Path, str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    local, at = copies
    monkeypatch.chdir(tmp_path)
    for dry_run in (["--dry-run"], []):
        assert main(["prune", str(local / "full.ckpt"), f"{at}/new.ckpt", *dry_run]) == 1
        assert "is an address" in capsys.readouterr().err
    assert not Path("s3:").exists()


def test_what_is_not_there(copies: tuple[Path, str], capsys: Any) -> None:
    _, at = copies
    for words in (["inspect", f"{at}/none.ckpt"], ["prune", f"{at}/none.ckpt", "a"], ["verify", "s3://nowhere/a.ckpt"]):
        assert main(words) == 1
        said = capsys.readouterr()
        assert words[1] in said.out + said.err
        assert "scratch" not in said.out + said.err


def test_without_a_record(copies: tuple[Path, str]) -> None:
    _, at = copies
    before = ds_frozen_patch.inspect(f"{at}/full.ckpt")
    buckets.file_system().rm(f"{at}/full.ckpt/checkpoint/ds_frozen_patch.json")
    after = ds_frozen_patch.inspect(f"{at}/full.ckpt")
    assert before.record
    assert (after.record, after.files, after.path) == (None, before.files, f"{at}/full.ckpt")


def test_damage_is_found(copies: tuple[Path, str]) -> None:
    _, at = copies
    fs = buckets.file_system()
    (name,) = (name for name in fs.find(f"{at}/full.ckpt") if "model_states" in name)
    content = bytearray(fs.cat_file(name))
    content[len(content) // 2] ^= 1
    fs.pipe_file(name, bytes(content))
    assert ds_frozen_patch.verify(f"{at}/full.ckpt").problems


def raising(error: Exception, often: float = 1e9, words: str = ".*") -> Callable[[str], None]:
    """Let some requests fail; to be seen by `around_requests`."""
    tried = Counter[str]()

    def see(what: str) -> None:
        if re.fullmatch(words, what) and tried[words] < often:
            tried[words] += 1
            raise error

    return see


def test_requests_that_fail(copies: tuple[Path, str], monkeypatch: Any) -> None:
    """Each is made again, or is an error that names the address: no checkpoint is taken for one that is not there."""
    monkeypatch.setattr("ds_frozen_patch.buckets._SECONDS", 0.01)
    _, at = copies
    lost, names = ConnectionResetError("connection reset"), ["small.ckpt", "none.ckpt"]
    with buckets.around_requests(raising(lost, 3)):
        assert objects_of(at, names) == {f"{at}/small.ckpt/latest"}
    with buckets.around_requests(raising(lost, 3)):
        assert ds_frozen_patch.inspect(f"{at}/small.ckpt").record
    for error in (lost, NoCredentialsError(), PermissionError("Access Denied")):
        with buckets.around_requests(raising(error)), pytest.raises(CheckpointError, match=f"{at}.*{error}"):
            objects_of(at, names)
        with buckets.around_requests(raising(error)), pytest.raises(CheckpointError, match=f"{at}.*{error}"):
            ds_frozen_patch.inspect(f"{at}/small.ckpt")


def test_a_save_meanwhile(copies: tuple[Path, str], checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Another job has written the record of its save, but not named its files yet, once these were listed."""
    local, at = copies
    tag, client, new = f"{at}/small.ckpt/checkpoint", buckets.another_program(), checkpoints(2, epochs=2) / "small.ckpt"
    record = (new / "checkpoint" / RECORD).read_bytes()
    (save,) = re.findall(rb'"save": "([0-9a-f]{12})"', record)
    files = {f".{file.name}.{save.decode()}": file.read_bytes() for file in (new / "checkpoint").glob("*.pt")}
    done = list[str]()

    def see(what: str) -> None:
        if not done and what.startswith("after list_objects_v2") and what.endswith("checkpoint/"):
            done.append(what)
            for name, content in {**files, RECORD: record}.items():
                buckets.put(client, f"{tag}/{name}", content)

    with buckets.around_requests(see):
        words = ["export", f"{at}/small.ckpt", str(tmp_path / "a.safetensors"), "--format", "safetensors", "-q"]
        assert main(words) == 0
    assert done
    assert ds_frozen_patch.verify(f"{at}/small.ckpt").problems == ()
    assert ds_frozen_patch.inspect(f"{at}/small.ckpt").epoch == ds_frozen_patch.inspect(new).epoch
    assert ds_frozen_patch.inspect(new).epoch != ds_frozen_patch.inspect(local / "small.ckpt").epoch


def test_saves_all_the_time(copies: tuple[Path, str]) -> None:
    """What is replaced each time that it is read is not taken for nothing."""
    local, at = copies
    record, client, saves = (local / "small.ckpt/checkpoint" / RECORD).read_bytes(), buckets.another_program(), [0]

    def see(what: str) -> None:
        if what.startswith("get_object") and what.endswith(RECORD):
            saves[0] += 1
            content = re.sub(rb'"save": "[0-9a-f]{12}"', b'"save": "%012x"' % saves[0], record)
            buckets.put(client, f"{at}/small.ckpt/checkpoint/{RECORD}", content)

    with buckets.around_requests(see), pytest.raises(CheckpointError, match="saves replace it all the time"):
        ds_frozen_patch.inspect(f"{at}/small.ckpt")


def test_what_links_lead_to(copies: tuple[Path, str], tmp_path: Path) -> None:
    """Some of what fsspec reaches has links, as a local folder has."""
    local, _ = copies
    linked = tmp_path / "linked"
    for item in (local / "small.ckpt").rglob("*"):
        if item.is_file():
            link = linked / item.relative_to(local / "small.ckpt")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(item)
    (linked / "checkpoint" / "mp_rank_01_model_states.pt").symlink_to(tmp_path / "nowhere")
    assert ds_frozen_patch.verify(f"file://{linked}").problems == ()
    assert ds_frozen_patch.inspect(f"file://{linked}").files == ds_frozen_patch.inspect(local / "small.ckpt").files


def test_inspect_reads_little(copies: tuple[Path, str], tmp_path: Path) -> None:
    """Of large files it reads the pickles, and where the tensors are."""
    local, at = copies
    for file in (local / "full.ckpt/checkpoint").glob("*_states.pt"):
        state = torch.load(file, weights_only=False)
        large = torch.zeros(100 << 20, dtype=torch.uint8)
        if "module" in state:
            state["module"] |= {f"large{number}": large.clone() for number in range(2)}
        else:
            state["optimizer_state_dict"]["large"] = large
        torch.save(state, file)
    (local / "full.ckpt/checkpoint" / RECORD).unlink()
    buckets.file_system().rm(f"{at}/full.ckpt", recursive=True)
    buckets.file_system().put(f"{local}/full.ckpt/", f"{at}/full.ckpt", recursive=True)
    with buckets.around_requests(lambda _: None) as brought:
        found = ds_frozen_patch.inspect(f"{at}/full.ckpt")
    assert found.size > 400 << 20
    print(f"{len(brought)} requests, {sum(brought)} bytes")
    assert len(brought) < 20
    assert sum(brought) < 2_000_000
