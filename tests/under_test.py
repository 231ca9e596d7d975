"""The cell of `ci/matrix.json` that the tests run in, and the Lightning that they use there.

The environment variable CELL names it; without it, it is the everyday one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from matrix import cells

CELL = cells.read()[os.environ.get("CELL", "everyday")]
BF16 = "fp32" not in CELL.needs
PRECISIONS = ("bf16-mixed", "32-true") if BF16 else ("32-true",)
PRECISION = PRECISIONS[0]

if TYPE_CHECKING or CELL.package == "lightning":
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeed
    from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.strategies import DeepSpeedStrategy

    FABRIC = "lightning.fabric"
else:
    import pytorch_lightning as pl
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeed
    from pytorch_lightning.callbacks import Callback, LambdaCallback, ModelCheckpoint
    from pytorch_lightning.cli import LightningCLI
    from pytorch_lightning.strategies import DeepSpeedStrategy

    FABRIC = "lightning_fabric"

TRAINER = pl.__name__

__all__ = [
    "BF16",
    "CELL",
    "FABRIC",
    "PRECISION",
    "PRECISIONS",
    "TRAINER",
    "Callback",
    "DeepSpeedStrategy",
    "Fabric",
    "FabricDeepSpeed",
    "LambdaCallback",
    "LightningCLI",
    "ModelCheckpoint",
    "pl",
]
