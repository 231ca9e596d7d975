"""Real trackers, W&B offline and MLflow, that upload each checkpoint while `async_save` is on: they get finished ones.

Lightning's loggers upload no folders, and so none of DeepSpeed's checkpoints.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest
from kit.programs import start

import ds_frozen_patch

pytestmark = [pytest.mark.programs]

TESTS = Path(__file__).resolve().parents[1]
UPLOADS = ("wandb-data", "mlruns")
"""Where W&B stages what it will upload, and where MLflow has its artifacts."""


def digests(folder: Path) -> Counter[str]:
    return Counter(sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["trackers"])
def test_trackers_upload_finished_checkpoints(name: str, tmp_path: Path) -> None:
    for kind in ("lightning", "trainer"):
        (tmp_path / kind).mkdir()
        check(kind, tmp_path / kind)


def check(kind: str, folder: Path) -> None:
    environment = {
        "WANDB_MODE": "offline",
        "WANDB_LOG_MODEL": "checkpoint",
        "WANDB_DATA_DIR": str(folder / "wandb-data"),
        "WANDB_CACHE_DIR": str(folder / "wandb-cache"),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file:{folder / 'mlruns'}",
        "HF_MLFLOW_LOG_ARTIFACTS": "1",
    }
    places = (TESTS, TESTS.parent / "ci", TESTS.parent / "ci" / "measure")
    path = Path(os.pathsep.join(map(str, places)))
    program = str(TESTS / "programs" / "trackers" / "train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", program, kind]
    start(command, folder, "--async-save", ranks=[environment], path=path)

    uploaded = {where: digests(folder / where) for where in UPLOADS}
    checkpoints = [item for item in (folder / "out").iterdir() if list(item.rglob("*_states.pt"))]
    assert len(checkpoints) == 2
    for checkpoint in checkpoints:
        assert not ds_frozen_patch.verify(checkpoint).problems
        for file in (*checkpoint.rglob("*_states.pt"), *checkpoint.rglob("ds_frozen_patch.json")):
            for where, found in uploaded.items():
                is_there = sha256(file.read_bytes()).hexdigest() in found
                assert is_there == (kind == "trainer"), (where, file)
