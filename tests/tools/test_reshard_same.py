"""For one commit: `resharding` makes the same files as `repartition`, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from kit.checkpoints import Checkpoints, assert_same, loaded

from ds_frozen_patch import reshard
from ds_frozen_patch.checkpoint.zero.repartition import Target, plan_repartition
from ds_frozen_patch.checkpoint.zero.states import read_states

pytestmark = [pytest.mark.promise(10), pytest.mark.everyday, pytest.mark.once]


@pytest.mark.parametrize("kind", ["small", "full"])
@pytest.mark.parametrize("module", ["lora", "uneven"])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_the_same_files(checkpoints: Checkpoints, tmp_path: Path, before: int, module: str, kind: str) -> None:
    source = checkpoints(before, module=module) / f"{kind}.ckpt"
    for stage, ranks in product((0, 1, 2, 3), (1, 3, 4)):
        if before == stage == 0:
            continue
        old, new = (tmp_path / f"{name}{stage}{ranks}" for name in ("old", "new"))
        old.mkdir()
        precision: Any = None if stage else "fp32"
        plan_repartition(read_states(source, None, False), Target(ranks, stage, precision)).write(old, quiet=True)
        reshard(source, new, ranks=ranks, stage=stage, precision=precision)
        files = sorted((new / "checkpoint").glob("*.pt"))
        assert [file.name for file in files] == sorted(file.name for file in old.glob("*.pt"))
        for file in files:
            now, before_it = (dict(sorted(loaded(path).items())) for path in (file, old / file.name))
            assert_same(now, before_it, file.name)
        assert (old / "ds_frozen_patch.json").is_file() == (new / "checkpoint" / "ds_frozen_patch.json").is_file()
