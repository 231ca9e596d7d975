"""A fine-tune as users write it: a frozen body, a trained head, DeepSpeed by its alias. It does not import us.

It resumes from the checkpoint in its folder, for one epoch.
"""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader, Dataset


class Data(Dataset[torch.Tensor]):
    """Random data; each worker prints whether the class that saves is ours."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        Path(f"worker-{index}").write_text(str(hasattr(DeepSpeedStrategy.save_checkpoint, "__wrapped__")))
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(16, 64).requires_grad_(False)
        self.head = torch.nn.Linear(64, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.body(batch).relu()).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2)


if __name__ == "__main__":
    done = len(list(Path().glob("*.ckpt")))
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=2,
        strategy="deepspeed_stage_3",
        max_epochs=done + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    workers: Any = {} if done else {"num_workers": 1, "multiprocessing_context": "spawn"}
    trainer.fit(Module(), DataLoader(Data(), batch_size=2, **workers), ckpt_path=f"{done}.ckpt" if done else None)
    trainer.save_checkpoint(f"{done + 1}.ckpt")
    torch.distributed.destroy_process_group()
    # Without it the process can abort at its exit, where threads of gloo's may still run.
    os._exit(0)
