"""Promise 29: what no program can build again is in the checkpoint, and no run refuses a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.cell import ModelCheckpoint
from kit.checkpoints import left_out_of, model_states, record_in
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

import ds_frozen_patch

pytestmark = [pytest.mark.promise(29), pytest.mark.everyday]


class Merging(runs.LoraRun):
    """Merges its adapters in each step and takes them out again, as GRPO does to send weights to a server."""

    def __init__(self, then: str = "") -> None:
        super().__init__(hidden=64)
        self.then = then

    def send(self) -> None:
        """Send weights to a server."""
        self.model.merge_adapter()
        self.model.unmerge_adapter()

    def on_train_start(self) -> None:
        self.send()  # before the first step

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, index)
        self.send()
        layer = self.model.base_model.model.model.layers[1].self_attn.v_proj
        if self.then == "and halving":
            layer.base_layer.weight.data.mul_(0.5)
        elif self.then == "and merging":
            layer.merge()
        return loss


Q_PROJ = "model.base_model.model.model.layers.{}.self_attn.{}_proj.base_layer.weight"


def merge_and_resume(out: str, then: str, stage: int, **options: Any) -> Any:
    """Save after each epoch, and resume from each; what was said, and how many values have drifted."""
    data = runs.batches(2)
    if options.pop("patched", True):
        ds_frozen_patch.patch(**options)
    with runs.heard() as heard:
        before = dict(Merging().to(torch.bfloat16).named_parameters())
        module = Merging(then)
        runs.trainer(out, 2, stage, epochs=3).fit(module, data)
    drifted = {name: int((p != before[name]).sum()) for name, p in module.named_parameters() if not p.requires_grad}
    outcomes = []
    for epoch in range(3):
        again = runs.trainer(f"{out}/again", 2, stage, epochs=4, enable_checkpointing=False)
        outcomes.append(runs.outcome(again.fit, Merging(then), data, ckpt_path=f"{out}/epoch={epoch}.ckpt"))
    return outcomes, heard, drifted


@pytest.mark.short
@pytest.mark.parametrize("stage", [2])
def test_merges_in_each_step_round_the_base(ranks: Any, tmp_path: Path, stage: int) -> None:
    """Plain resumes, and so do we, from every checkpoint; the fingerprints are those of the base as built."""
    (tmp_path / "plain").mkdir()
    for outcomes, _, drifted in ranks(
        2, merge_and_resume, out=f"{tmp_path}/plain", then="", stage=stage, patched=False
    ):
        assert outcomes == [("", "")] * 3
        assert sum(map(bool, drifted.values())) == 4  # two layers, with two adapters each
    (first, heard, drifted), _ = ranks(2, merge_and_resume, out=str(tmp_path), then="", stage=stage)
    assert sum(map(bool, drifted.values())) == 4
    assert first == [("", "")] * 3
    assert len([said for said in heard if "merged adapters into the base" in said]) == 1
    assert not [said for said in heard if "differ from what the program built" in said]
    assert {Q_PROJ.format(0, "q"), Q_PROJ.format(1, "v")} <= left_out_of(tmp_path / "epoch=2.ckpt")
    prints = [record_in(tmp_path / f"epoch={epoch}.ckpt").left_out for epoch in range(3)]
    assert prints[0] == prints[1] == prints[2]


@pytest.mark.parametrize("then", ["and halving", "and merging"])
def test_a_base_that_changes_by_more_than_a_rounding_is_saved(ranks: Any, tmp_path: Path, then: str) -> None:
    (outcomes, heard, _), _ = ranks(2, merge_and_resume, out=str(tmp_path), then=then, stage=2)
    assert outcomes == [("", "")] * 3
    assert [said for said in heard if "differ from what the program built" in said and "layers.1" in said]
    left_out = left_out_of(tmp_path / "epoch=2.ckpt")
    assert Q_PROJ.format(1, "v") not in left_out
    assert Q_PROJ.format(0, "q") in left_out


class MergingAround(ModelCheckpoint):
    """Merges the adapters before each save, and takes them out again after it."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        trainer.lightning_module.model.merge_adapter()
        super()._save_checkpoint(trainer, filepath)
        trainer.lightning_module.model.unmerge_adapter()


def merges_around_saves(out: str, **options: Any) -> Any:
    """What was said, the losses of the second epoch, and those after a resume from the first one."""
    ds_frozen_patch.patch(**options)
    losses = []
    with runs.heard() as heard:
        for resume_from in (None, f"{out}/epoch=0.ckpt"):
            module, files = runs.LoraRun(), MergingAround(out, filename="{epoch}", save_top_k=-1)
            trainer = runs.trainer(out, 2, 2, epochs=2, callbacks=[files], precision="32-true")
            trainer.fit(module, runs.batches(2), ckpt_path=resume_from)
            losses.append(module.losses)
    return heard, losses


@pytest.mark.parametrize("leave_out", [[], ["*base_layer*"]], ids=["by default", "leave_out"])
def test_merges_around_saves_are_told(ranks: Any, tmp_path: Path, leave_out: list[str]) -> None:
    """The merged values are saved, as they are plain, so a resume adds the adapters twice; `leave_out` avoids it."""
    (heard, (whole, resumed)), _ = ranks(2, merges_around_saves, out=str(tmp_path), leave_out=leave_out)
    assert (whole[-len(resumed) :] == pytest.approx(resumed, 1e-5)) is bool(leave_out)
    assert (Q_PROJ.format(0, "q") in left_out_of(tmp_path / "epoch=0.ckpt")) is bool(leave_out)
    said = "record these weights as the program built them" if leave_out else "adds the adapters a second time"
    assert len([line for line in heard if said in line]) == 2  # of each of the two runs


class ChangesOne(runs.LoraRun):
    """Changes one value of its base through `.data`, before the first save or later."""

    def __init__(self, at: int) -> None:
        super().__init__(hidden=64, vocabulary=4096)
        self.at = at

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, index)
        if self.global_step == self.at:
            self.model.get_input_embeddings().weight.data[1234, 5] += 1
        return loss


def changes_one(out: str, at: int, **options: Any) -> Any:
    """What a run of 20 epochs has at the end, what one that is resumed from its last checkpoint has, what was said."""
    ds_frozen_patch.patch(**options)
    ended = []
    with runs.heard() as heard:
        for resume_from in (None, f"{out}/epoch=18.ckpt"):
            module = ChangesOne(at)
            files = [ModelCheckpoint(f"{out}/again" if resume_from else out, filename="{epoch}", save_top_k=-1)]
            runs.trainer(out, 2, 2, epochs=20, callbacks=files).fit(module, runs.batches(2), ckpt_path=resume_from)
            ended.append(runs.trained_state(module))
    return ended, heard


@pytest.mark.parametrize(("at", "first"), [(1, 0), (3, 16)])
def test_one_value_that_changes_is_saved(ranks: Any, tmp_path: Path, at: int, first: int) -> None:
    """At once before the first save, which compares everything; afterwards within sixteen saves."""
    for rank, ((whole, resumed), heard) in enumerate(ranks(2, changes_one, out=str(tmp_path), at=at)):
        assert resumed == whole
        assert len([said for said in heard if "embed_tokens" in said and "differ from what" in said]) == (rank == 0) * 2
    left_out = [left_out_of(tmp_path / f"epoch={epoch}.ckpt") for epoch in range(20)]
    kept = [epoch for epoch, names in enumerate(left_out) if not any("embed_tokens" in name for name in names)]
    assert kept == list(range(kept[0], 20))
    assert kept[0] <= first


def test_what_leave_out_overrules_is_recorded_as_built(ranks: Any, tmp_path: Path) -> None:
    """The run's own checkpoint loads, with the value as built."""
    first, _ = ranks(2, changes_one, out=str(tmp_path), at=1, leave_out=["*embed_tokens*"])
    assert not [said for said in first[1] if "differ from what" in said]
    assert any("embed_tokens" in name for name in left_out_of(tmp_path / "epoch=18.ckpt"))


class SecondPhase(runs.LoraRun):
    """Trains a head on top of adapters that the first phase has trained."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        head: torch.Tensor = self.head(torch.ones(4, dtype=self.head.weight.dtype))
        return super().forward(tokens) + head.square().sum()

    def begin(self) -> SecondPhase:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith("head"))
        return self


def leaves_out_what_it_has_trained(out: str) -> Any:
    ds_frozen_patch.patch(leave_out=["*lora_*"])
    module, data = SecondPhase(), runs.batches(2)
    runs.trainer(out, 2, 2, epochs=1, enable_checkpointing=False).fit(module, data)
    with runs.heard() as heard:
        runs.trainer(out, 2, 2, epochs=1).fit(module.begin(), data)
    again = runs.trainer(out, 2, 2, enable_checkpointing=False)
    return runs.outcome(again.fit, SecondPhase().begin(), data, ckpt_path=f"{out}/epoch=0.ckpt"), heard


def test_what_leave_out_overrules_and_was_never_read_is_not_recorded(ranks: Any, tmp_path: Path) -> None:
    for rank, (outcome, heard) in enumerate(ranks(2, leaves_out_what_it_has_trained, out=str(tmp_path))):
        assert outcome == ("", "")
        assert len([said for said in heard if "were not read before training" in said]) == (rank == 0)
    prints = {entry.name: entry.fingerprint for entry in record_in(tmp_path / "epoch=0.ckpt").left_out}
    assert {print_ for name, print_ in prints.items() if "lora_" in name} == {None}
    assert all(print_ for name, print_ in prints.items() if "lora_" not in name)


class Drawn(runs.LoraRun):
    """A base from a seed, as if from a file, and what the program makes of it without one."""

    def __init__(self, kind: str, seed: int | None = None) -> None:
        super().__init__(hidden=64)
        self.kind = kind
        llama = runs.small_llama(1, hidden_size=64, intermediate_size=128)
        torch.seed() if seed is None else torch.manual_seed(seed)
        if kind == "head":
            self.model = llama.requires_grad_(False)
            self.model.lm_head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, runs.VOCABULARY))
            self.model.lm_head[0].requires_grad_(False)
        elif kind == "bias":
            self.model = llama.requires_grad_(False)
            for layer in self.model.model.layers:
                layer.self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(64))
        elif kind == "by hand":
            self.model = llama.requires_grad_(False)
            for layer in self.model.model.layers:
                add_by_hand(layer.self_attn.q_proj)
        else:
            init: Any = True if kind == "fa" else kind
            lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init)
            self.model = get_peft_model(llama, lora)
            for name, parameter in self.model.named_parameters():
                if kind == "fa" and "lora_A" in name:
                    parameter.requires_grad_(False)


def add_by_hand(layer: Any) -> None:
    """Add a LoRA to a linear layer as loralib does, with a frozen part."""
    layer.lora_A = torch.nn.Parameter(torch.randn(4, 64), requires_grad=False)
    layer.lora_B = torch.nn.Parameter(torch.zeros(64, 4))
    forward = layer.forward
    layer.forward = lambda x: forward(x) + x @ layer.lora_A.T @ layer.lora_B.T


def draw_and_resume(
    out: str, kind: str, stage: int, world_size: int, seed: int | None = None, patched: bool = True
) -> Any:
    """What a run has at its end, what one that is resumed from its first epoch has, and what was said."""
    if patched:
        ds_frozen_patch.patch()
    ended, data = [], runs.batches(world_size)
    with runs.heard() as heard:
        for folder, resume_from in ((out, None), (f"{out}/again", f"{out}/epoch=0.ckpt")):
            module = Drawn(kind, seed)
            runs.trainer(folder, world_size, stage).fit(module, data, ckpt_path=resume_from)
            ended.append((runs.trained_state(module), module.losses[-runs.BATCHES :]))
    return ended, [said for said in heard if "at random" in said or "differ from" in said]


KEPT = {
    "fa": ".lora_A.",
    "by hand": ".lora_A",
    "head": "lm_head.0",
    "pissa_niter_2": "base_layer.weight",
}
"""What is saved though it is frozen, by what the program does without a seed."""
CASES = [(kind, stage, world_size) for kind in KEPT for stage, world_size in ((2, 2), (3, 2), (2, 1))]
CASES.remove(("head", 2, 1))  # on one rank, nothing shows it


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize(("kind", "stage", "world_size"), CASES)
def test_a_run_without_a_seed_resumes(
    ranks: Any, tmp_path: Path, kind: str, stage: int, world_size: int, patched: bool
) -> None:
    """As it does plain."""
    if not patched and (stage, world_size) != (2, 2):
        pytest.skip("plain is the same in all")
    arguments = {"out": str(tmp_path), "kind": kind, "stage": stage, "world_size": world_size, "patched": patched}
    (whole, resumed), said = ranks(world_size, draw_and_resume, **arguments)[0]
    assert resumed == whole
    if not patched:
        return
    assert bool(said) == (kind in ("head", "pissa_niter_2"))
    left_out = left_out_of(tmp_path / "epoch=0.ckpt")
    assert not [name for name in left_out if KEPT[kind] in name]
    assert [name for name in left_out if "k_proj.weight" in name]
    assert [name for name in left_out if "embed_tokens" in name]


@pytest.mark.parametrize("kind", ["bias", "pissa_niter_2", "head"])
@pytest.mark.parametrize(("stage", "world_size"), [(2, 2), (2, 1)])
def test_with_a_seed_the_base_is_left_out(ranks: Any, tmp_path: Path, kind: str, stage: int, world_size: int) -> None:
    arguments = {"out": str(tmp_path), "kind": kind, "stage": stage, "world_size": world_size}
    (whole, resumed), said = ranks(world_size, draw_and_resume, seed=7, **arguments)[0]
    assert (resumed, said) == (whole, [])
    left_out = left_out_of(tmp_path / "epoch=0.ckpt")
    assert {name for name in whole[0] if name.endswith("weight") and "lora_" not in name} - left_out <= {
        "model.lm_head.1.weight"
    }


def test_training_biases_without_a_seed_stays_small(ranks: Any, tmp_path: Path) -> None:
    (whole, resumed), said = ranks(2, draw_and_resume, out=str(tmp_path), kind="bias", stage=2, world_size=2)[0]
    assert (resumed, said) == (whole, [])
    module = model_states(tmp_path / "epoch=0.ckpt")[0]["module"]
    assert [name for name in module if name != "seen" and not name.endswith("q_proj.bias")] == []


def trains_and_counts(out: str, kind: str) -> Any:
    """Train, save, and return the logits of the trained model in fp32."""
    ds_frozen_patch.patch()
    module, data = Drawn(kind), runs.batches(2)
    runs.trainer(out, 2, 2, epochs=1, precision="32-true").fit(module, data)
    if torch.distributed.get_rank() == 0:
        runs.small_llama(1, hidden_size=64, intermediate_size=128).save_pretrained(f"{out}/base")
    torch.distributed.barrier()
    with torch.no_grad():
        return module.model.eval()(input_ids=torch.arange(8)[None]).logits


@pytest.mark.parametrize("kind", ["fa", "pissa_niter_2", "pissa"])
def test_what_was_drawn_is_exported_and_merged(ranks: Any, tmp_path: Path, kind: str) -> None:
    """As PEFT's files; and into a base that has never seen PEFT."""
    logits = ranks(2, trains_and_counts, out=str(tmp_path), kind=kind)[0]
    checkpoint, base, tokens = tmp_path / "epoch=0.ckpt", tmp_path / "base", torch.arange(8)[None]
    ds_frozen_patch.export(checkpoint, tmp_path / "adapter", format="peft")
    if kind != "pissa_niter_2":  # PEFT rewrites the base once more when it loads these, at random
        loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), tmp_path / "adapter")
        assert torch.allclose(loaded(input_ids=tokens).logits, logits, atol=1e-5)
    if kind != "pissa":  # whose rewritten base is left out: it is made of the original one
        ds_frozen_patch.merge(checkpoint, tmp_path / "merged", base=base)
        merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(merged(input_ids=tokens).logits, logits, atol=1e-5)


class OfAll(runs.LoraRun):
    """Makes its optimizer of all parameters, as many programs do."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def optimizes_all(out: str, precision: Any) -> Any:
    ds_frozen_patch.patch()
    ended, data = [], runs.batches(2)
    with runs.heard() as heard:
        for folder, resume_from in ((out, None), (f"{out}/again", f"{out}/epoch=0.ckpt")):
            module = OfAll()
            runs.trainer(folder, 2, 0, precision=precision).fit(module, data, ckpt_path=resume_from)
            ended.append((runs.trained_state(module), module.losses[-runs.BATCHES :]))
    return ended, heard


@pytest.mark.promise(14)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_tools_read_a_checkpoint_whose_optimizer_has_all_parameters(
    ranks: Any, tmp_path: Path, precision: str
) -> None:
    (whole, resumed), heard = ranks(2, optimizes_all, out=str(tmp_path), precision=precision)[0]
    assert resumed == whole
    checkpoint = tmp_path / "epoch=1.ckpt"
    assert ds_frozen_patch.verify(checkpoint).problems == ()
    ds_frozen_patch.consolidate(checkpoint, tmp_path / "small.ckpt")
    ds_frozen_patch.export(checkpoint, tmp_path / "adapter", format="peft")
    weights = torch.load(tmp_path / "small.ckpt", weights_only=False)["state_dict"]
    assert {name for name in weights if name != "seen"} == {name for name in whole[0] if "lora_" in name}
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    is_told = [said for said in heard if "saves a copy of each in fp32" in said]
    frozen = sum(parameter.numel() for parameter in OfAll().parameters() if not parameter.requires_grad)
    assert bool(is_told) == (size > 4 * frozen)
    if precision == "32-true":
        ds_frozen_patch.reshard(checkpoint, tmp_path / "sharded.ckpt", stage=2, ranks=2)
        assert ds_frozen_patch.verify(tmp_path / "sharded.ckpt").problems == ()
