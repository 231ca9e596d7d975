"""Small Llamas, for bases that `runs.LoraRun` does not have."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(seed: int = 1, **changes: Any) -> Any:
    """Return a model with the sizes of `runs.LoraRun`'s, except for these values of its configuration."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **layers, **changes}))
