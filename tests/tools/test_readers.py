"""For one commit: the new reader reads what the old one does, in every file that a test of the tools reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import Checkpoints

from ds_frozen_patch.checkpoint.format import archive, reading, records, zip_directory
from ds_frozen_patch.checkpoint.format.stored import ITEM_SIZES, StandIn, StoredTensor

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]


def described(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Return a value in a form that can be compared."""
    if id(value) in inside:
        return "itself"
    inside = (*inside, id(value))
    if isinstance(value, StoredTensor):
        about = (value.storage, value.dtype, value.offset, value.shape, value.stride, value.maker)
        return *about, described(value.more, inside), described(value.wrapper, inside)
    if isinstance(value, StandIn):
        fields = value.stands_for, value.is_called, value.arguments, value.state, value.items, value.pairs
        return [described(field, inside) for field in fields]
    if isinstance(value, dict):
        pairs = [(described(key, inside), described(item, inside)) for key, item in value.items()]
        return pairs, described(vars(value), inside) if getattr(value, "__dict__", None) else ""
    if isinstance(value, list | tuple):
        return type(value).__name__.lower(), [described(item, inside) for item in value]
    return getattr(value, "stands_for", value)


def agree(path: Path) -> None:
    """Assert that both readers find the same in a file."""
    old, new = archive.read_archive(path, trust=True), reading.read_archive(path)
    assert described(old.state) == described(new.state)
    assert old.pickle_bytes == new.pickle_bytes
    assert zip_directory.hash_directory(path) == reading.hash_directory(path)
    with path.open("rb") as file:
        places = {name: (item.begin, item.size, item.checksum) for name, item in reading.read_directory(file).items()}
        assert places == {
            name: (item.begin, item.size, item.checksum) for name, item in zip_directory.read_directory(file).items()
        }
    records.check_file(path)
    reading.check_file(path)


@pytest.mark.parametrize("module", ["lora", "odd", "half", "uneven", "wrapped"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_both_readers_agree(checkpoints: Checkpoints, stage: int, module: str) -> None:
    if (stage, module) == (3, "wrapped"):
        pytest.skip("DeepSpeed cannot train it")
    files = list(checkpoints(stage, module=module).rglob("*.pt"))
    assert files
    for file in files:
        agree(file)


def test_both_readers_agree_on_every_dtype(tmp_path: Path) -> None:
    dtypes = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    kinds = [name for name in dtypes if name.removeprefix("torch.") in ITEM_SIZES]
    file = tmp_path / "dtypes.pt"
    torch.save({name: torch.zeros(3, dtype=torch.uint8).repeat(16).view(dtypes[name]) for name in kinds}, file)
    agree(file)
