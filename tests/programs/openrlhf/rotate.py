"""Saves with OpenRLHF's `save_ckpt` until it has removed checkpoints for each of its reasons, and loads one.

Rank 0 writes `rotated.json`: what was in the folder after each save, and whether the load gave back what was trained.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import on_cpu  # type: ignore[import-not-found]  # noqa: F401
import torch
from openrlhf.models import Actor  # type: ignore[import-not-found]
from openrlhf.utils.deepspeed import DeepspeedStrategy  # type: ignore[import-not-found]

GIB = 1024**3
FOLDER = Path("rotated")

settings = SimpleNamespace(
    local_rank=-1, ds=SimpleNamespace(param_dtype="bf16"), train=SimpleNamespace(dynamic_batch_enable=False)
)
strategy = DeepspeedStrategy(micro_train_batch_size=1, train_batch_size=2, zero_stage=2, args=settings)
strategy.setup_distributed()
actor = Actor("base", attn_implementation="eager", lora_rank=4, ds_config=strategy.get_ds_train_config())
adam = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
adjusted: dict[str, Any] = {"optim": "adam", "adam": adam, "lr_scheduler": "constant", "scheduler_steps": 9}
model, optimizer, scheduler = strategy.prepare((actor, adjusted))
engine = model.model
after: list[tuple[str, list[str]]] = []


def trained() -> list[torch.Tensor]:
    return [one.detach().clone() for one in engine.module.parameters() if one.requires_grad]


def step() -> None:
    tokens = torch.arange(5, 15).unsqueeze(0)
    strategy.backward(engine(input_ids=tokens, labels=tokens).loss, model, optimizer)
    strategy.optimizer_step(optimizer, model, scheduler)


def save(tag: str, metric: float | None, max_num: int = 2, max_mem: float = 1.0) -> None:
    step()
    state = {"tag": tag}
    strategy.save_ckpt(engine, str(FOLDER), tag, max_num, max_mem, state, metric_value=metric, metric_key="reward")
    torch.distributed.barrier()
    after.append((tag, sorted(item.name for item in FOLDER.iterdir())))


def size() -> int:
    files = [Path(place, name) for place, _, names in os.walk(FOLDER) for name in names if place != str(FOLDER)]
    return sum(file.stat().st_size for file in files)


save("global_step1", 0.5)
save("best_global_step1", 0.5)
save("global_step2", 0.9)
save("global_step3", 0.7)  # instead of 1, with the lowest metric
save("best_global_step3", 0.7)  # instead of the other best
save("global_step3", 0.8)  # the same once more: the lowest metric is its own
save("global_step4", None)  # instead of 3
save("global_step5", 0.6)  # instead of 4, which has no metric
save("global_step6", 0.1, max_num=9)
save("global_step7", 0.2, max_num=9, max_mem=(size() - 1) / GIB)  # instead of 6
kept = trained()
step()
moved = [not torch.equal(one, other) for one, other in zip(trained(), kept, strict=True)]
_, state = strategy.load_ckpt(engine, str(FOLDER))
same = [torch.equal(one, other) for one, other in zip(trained(), kept, strict=True)]
if strategy.is_rank_0():
    found = {"after": after, "moved": any(moved), "same": all(same), "state": state["tag"]}
    Path("rotated.json").write_text(json.dumps(found))
