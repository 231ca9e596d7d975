"""A module for Lightning IR's configuration files, which may name a user's own."""

from typing import Any

from lightning_ir import BiEncoderModule


class Module(BiEncoderModule):  # type: ignore[misc]
    """It saves no second copy of the model beside each checkpoint.

    For that, Lightning IR 0.0.6 asks for `trainer.log_dir` on rank 0 alone. But all ranks must: from then on, each
    answers another's question, and the save hangs, whatever saves it.
    """

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save nothing."""
