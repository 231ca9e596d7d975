"""Promise 7: `exclude_frozen_parameters` from YAML and the command line, with LightningCLI, on every Lightning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from kit import cell, runs
from kit.cell import PRECISION, TRAINER, LightningCLI, pl
from kit.checkpoints import model_states

pytestmark = [pytest.mark.promise(7), pytest.mark.series]

STRATEGY = f"{TRAINER}.strategies.DeepSpeedStrategy"
CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  precision: {precision}
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_checkpointing: false
  strategy:
    class_path: {strategy}
    init_args: {{stage: 2{flag}}}
"""


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return runs.batches(2)


def run_cli(out: str, flag: str, arguments: list[str]) -> None:
    cell.trainable_only()
    file = Path(out, f"config-{os.environ['RANK']}.yaml")  # a rank must not read half a file
    file.write_text(CONFIG.format(strategy=STRATEGY, precision=PRECISION, flag=flag))
    cli = LightningCLI(
        runs.LoraRun,
        Data,
        args=["fit", "--config", str(file), f"--trainer.default_root_dir={out}", *arguments],
        save_config_callback=None,
    )
    cli.trainer.save_checkpoint(f"{out}/run.ckpt")


@pytest.mark.parametrize(
    ("flag", "arguments", "left_out"),
    [
        ("", [], True),
        (", exclude_frozen_parameters: true", [], True),
        (", exclude_frozen_parameters: false", [], False),
        ("", ["--trainer.strategy.init_args.exclude_frozen_parameters=false"], False),
        (", exclude_frozen_parameters: false", ["--trainer.strategy.exclude_frozen_parameters=true"], True),
    ],
)
def test_lightning_cli(ranks: Any, tmp_path: Path, flag: str, arguments: list[str], left_out: bool) -> None:
    ranks(2, run_cli, out=str(tmp_path), flag=flag, arguments=arguments)
    (saved,) = model_states(tmp_path / "run.ckpt")
    assert any("base_layer" in name for name in saved["module"]) != left_out
