"""Promise 15: wrapping a model changes the names of its parameters, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.checkpoints import model_states
from safetensors import safe_open
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ds_frozen_patch

pytestmark = [pytest.mark.promise(15), pytest.mark.everyday, pytest.mark.once]


class Wrapped(runs.LoraRun):
    """Its layers are compiled, checkpointed, or neither."""

    def __init__(self, way: str) -> None:
        super().__init__()
        inner = self.model.base_model.model.model
        layers = inner.layers
        if way == "compiled":  # nothing in it is trained
            inner.embed_tokens = torch.compile(inner.embed_tokens, backend="eager")
        for place, layer in enumerate(layers):
            if way == "compiled":
                layers[place] = torch.compile(layer, backend="eager")
            elif way == "checkpointed":
                layers[place] = checkpoint_wrapper(layer)


def from_one_to_another(out: str, stage: int, one: str, other: str) -> dict[str, Any]:
    ds_frozen_patch.patch(export="safetensors")
    found: dict[str, Any] = {}
    data = runs.batches(2)
    with runs.heard() as found["heard"]:
        whole = runs.trainer(out, 2, stage)
        module = Wrapped(one)
        whole.fit(module, data)
        with ds_frozen_patch.full_checkpoint():
            whole.save_checkpoint(f"{out}/full.ckpt")
        whole.save_checkpoint(f"{out}/weights.ckpt", weights_only=True)
        found["whole"] = module.losses[runs.BATCHES :]
        found["tested"] = whole.test(module, data, verbose=False)
        for name in ("epoch=1.ckpt", "full.ckpt", "weights.ckpt"):
            again = runs.trainer(f"{out}/again", 2, stage)
            found[name] = again.test(Wrapped(other), data, ckpt_path=f"{out}/{name}", verbose=False)
        resumed, module = runs.trainer(f"{out}/again", 2, stage), Wrapped(other)
        resumed.fit(module, data, ckpt_path=f"{out}/epoch=0.ckpt")
        found["resumed"] = module.losses
    return found


# Not in ZeRO-3: DeepSpeed cannot train such a model there, with or without us (no attribute
# '_in_forward', or 'ds_grads_remaining').
@pytest.mark.parametrize(("one", "other"), [("compiled", "plain"), ("plain", "compiled"), ("checkpointed", "compiled")])
def test_resume_under_another_wrapper(ranks: Any, tmp_path: Path, one: str, other: str) -> None:
    for found in ranks(2, from_one_to_another, out=str(tmp_path), stage=2, one=one, other=other):
        assert found["resumed"] == found["whole"]
        assert found["epoch=1.ckpt"] == found["full.ckpt"] == found["weights.ckpt"] == found["tested"]
    for saved in model_states(tmp_path / "epoch=0.ckpt"):
        assert all("lora_" in name or name == "seen" for name in saved["module"])
    exported = (tmp_path / "epoch=0.ckpt" / "trainable.safetensors").read_bytes()
    assert b"_orig_mod" not in exported
    assert b"_checkpoint_wrapped" not in exported
    ds_frozen_patch.verify(tmp_path / "epoch=0.ckpt")
    loads_strictly(tmp_path, one)


def loads_strictly(out: Path, way: str) -> None:
    """What is consolidated has the names of the module, also of compiled parts with nothing but frozen parameters."""
    module = Wrapped(way)
    expected = {name: runs.digest(value) for name, value in Wrapped(way).state_dict().items()}
    ds_frozen_patch.prune(out / "full.ckpt", out / "pruned.ckpt")
    for name, base in (("full.ckpt", None), ("epoch=1.ckpt", "full.ckpt"), ("pruned.ckpt", "full.ckpt")):
        given = out / base if base else None
        ds_frozen_patch.consolidate(out / name, out / f"of-{name}", base=given)
        found = torch.load(out / f"of-{name}", weights_only=True)["state_dict"]
        module.load_state_dict(found)
        assert found.keys() == expected.keys()
        ds_frozen_patch.consolidate(out / name, out / f"of-{name}.safetensors", base=given)
        with safe_open(out / f"of-{name}.safetensors", "pt") as file:
            assert {*file.keys(), *(file.metadata() or {})} - {"format"} == expected.keys()
    ds_frozen_patch.consolidate(out / "weights.ckpt", out / "of-weights.ckpt", base=out / "full.ckpt")
    module.load_state_dict(torch.load(out / "of-weights.ckpt", weights_only=True)["state_dict"])
