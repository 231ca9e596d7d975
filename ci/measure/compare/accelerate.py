"""Accelerate, plain and under `patch()`, in the training loop of `compare.deepspeed`."""

from __future__ import annotations

from functools import partial
from typing import Any

import training
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration
from compare import deepspeed, task


class Loop(deepspeed.Loop):
    """What the loop asks of Accelerate, which numbers its checkpoints itself."""

    def prepare(self, config: dict[str, Any], module: Any, *parts: Any) -> Any:
        training.on_cpu_ranks()
        self.accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            project_config=ProjectConfiguration(self.run.out, automatic_checkpoint_naming=True),
            step_scheduler_with_optimizer=False,  # else the scheduler takes a step for each rank
        )
        self.accelerator.register_for_checkpointing(self)
        prepared = self.accelerator.prepare(module, *parts)
        self.parts = prepared[1:] if parts else ()
        return prepared[0] if parts else prepared

    def step(self, loss: Any) -> None:
        self.accelerator.backward(loss)
        for part in self.parts:  # the optimizer and its scheduler
            part.step()

    def save(self) -> None:
        self.accelerator.save_state(**task.flag(self.run))

    def save_weights(self) -> None:
        """Save the adapter, as PEFT's documentation says."""
        weights = self.accelerator.get_state_dict(self.engine)
        place = f"{self.run.out}/checkpoints/checkpoint_{self.epoch - 1}"
        main = self.accelerator.is_main_process
        self.accelerator.unwrap_model(self.engine).save_pretrained(place, state_dict=weights, is_main_process=main)

    def load(self, place: str | None, **options: Any) -> None:
        self.accelerator.load_state(place, **options)
        self.accelerator.project_configuration.iteration = self.epoch

    def state_dict(self) -> dict[str, int]:
        """Return what `save_state` is to save of the loop."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take what `load_state` has loaded."""
        self.epoch = state["epoch"]


train = partial(deepspeed.train, made=Loop)
evaluate = partial(deepspeed.evaluate, made=Loop)
