"""A demo of DeepSpeed alone, by one of those who asked for this package: its run goes on with 2 ranks, and then with 1.

The demo converts its checkpoints to universal ones for that; here `elastic` reshards them, and not its converter.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest
from kit.programs import start

import ds_frozen_patch

pytestmark = [pytest.mark.programs]

EDITS = {
    # For CPU ranks.
    "local_batch.to(local_rank)": 'local_batch.to("cpu")',
    "torch.tensor(loss_per_step, device=local_rank)": 'torch.tensor(loss_per_step, device="cpu")',
    # Without dropout, whose masks depend on the number of ranks, the losses can be compared.
    "GPT2Config(\n": "GPT2Config(\n        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,\n",
    # Its data ends one step earlier, and transformers' GPT-2 takes no empty batch.
    "range(start_step, args.steps+1)": "range(start_step, args.steps)",
}
OPTIONS = "--train_batch_size 4 --train_micro_batch_size_per_gpu 1 --checkpoint_dir saved"


def train(folder: Path, name: str, ranks: int, stop: int, save_at: int, *resume: str) -> dict[int, float]:
    """Train up to step `stop`, and return the loss of each step, by the number that the demo gives it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    port = f"--master_port={random.randint(20000, 30000)}"
    launcher = ["-m", "deepspeed.launcher.runner", f"--num_accelerators={ranks}", port, "train.py"]
    steps = [f"--run_name={name}", f"--steps={stop}", f"--checkpoint_interval={save_at}"]
    start([sys.executable, *launcher, *OPTIONS.split(), *steps, *resume], folder, "--elastic")
    events = EventAccumulator(str(folder / "logs" / name))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("loss")}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["dsuc"])
def test_the_demo_goes_on_with_fewer_ranks(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(request.config.getoption("--programs") / name, folder, ignore=shutil.ignore_patterns(".git"))
    program = (folder / "train.py").read_text()
    for old, new in EDITS.items():
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    (folder / "train.py").write_text(program)

    baseline = train(folder, "baseline", 4, 15, 4)
    for later in ("global_step8", "global_step12"):
        shutil.rmtree(folder / "saved" / later)
    on_2 = train(folder, "on-2", 2, 9, 8, "--resume", "--checkpoint_tag=global_step4")
    on_1 = train(folder, "on-1", 1, 13, 100, "--resume", "--checkpoint_tag=global_step8")
    print(name, baseline, on_2, on_1)

    # Each resume takes the number of the last step once more.
    assert list(on_2) == [4, 5, 6, 7, 8]
    assert list(on_1) == [8, 9, 10, 11, 12]
    assert min(baseline[step] - baseline[step + 1] for step in range(1, 14)) > 0.03
    for step, loss in on_2.items():
        assert loss == pytest.approx(baseline[step + 1], abs=1e-5)
    for step, loss in on_1.items():
        assert loss == pytest.approx(baseline[step + 2], abs=1e-5)
    for tag, ranks in (("global_step4", 4), ("global_step8", 2)):
        assert ds_frozen_patch.inspect(folder / "saved", tag).world_size == ranks
