"""`export` and `load_trainable`: adapters in PEFT's format, plain safetensors files, and loading them into modules."""

from __future__ import annotations

import json
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from kit import cell, runs
from kit.cell import DeepSpeedStrategy, ModelCheckpoint, pl
from kit.checkpoints import changed
from kit.runs import small_llama
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ds_frozen_patch
from ds_frozen_patch import CheckpointError, CheckpointMismatchError, consolidate, export, load_trainable
from ds_frozen_patch.checkpoint.zero.labels import PLAIN_GROUPS
from ds_frozen_patch.cli import main
from ds_frozen_patch.manifest import KEY

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]

QV = ["q_proj", "v_proj"]
CONFIGS: dict[str, Callable[[int], Any]] = {
    "lora": lambda r: peft.LoraConfig(r=r, target_modules=QV, init_lora_weights=False),
    "modules_to_save": lambda r: peft.LoraConfig(r=r, target_modules=QV, modules_to_save=["lm_head"]),
    "dora": lambda r: peft.LoraConfig(r=r, target_modules=QV, use_dora=True),
    "embedding": lambda r: peft.LoraConfig(r=r, target_modules=[*QV, "embed_tokens"], init_lora_weights=False),
    "bias=lora_only": lambda r: peft.LoraConfig(r=r, target_modules=QV, bias="lora_only"),
    "bias=all": lambda r: peft.LoraConfig(r=r, target_modules=QV, bias="all"),
    "tokens": lambda r: peft.LoraConfig(r=r, target_modules=QV, trainable_token_indices=[1, 5]),
    "ia3": lambda r: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda r: peft.LoHaConfig(r=r, target_modules=QV, init_weights=False),
    "vera": lambda r: peft.VeraConfig(r=r, target_modules=QV),
    "vera by seed": lambda r: peft.VeraConfig(r=r, target_modules=QV, save_projection=False),
    "adalora": lambda r: peft.AdaLoraConfig(init_r=r, target_r=2, target_modules=QV, total_step=10),
    "vblora": lambda r: peft.VBLoRAConfig(r=r, num_vectors=8, vector_length=4, target_modules=QV),
    "tied modules_to_save": lambda r: peft.LoraConfig(
        r=r, target_modules=QV, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "tied tokens": lambda r: peft.LoraConfig(r=r, target_modules=QV, trainable_token_indices=[1, 5]),
    "prompt": lambda r: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "shira": lambda r: peft.ShiraConfig(r=r, target_modules=QV),
    "vblora, top k": lambda r: peft.VBLoRAConfig(
        r=r, num_vectors=8, vector_length=4, target_modules=QV, save_only_topk_weights=True
    ),
    "adalora, fewer ranks": lambda r: peft.AdaLoraConfig(
        init_r=r, target_r=2, target_modules=QV, total_step=10, rank_pattern={"any": [True]}
    ),
}
REFUSED = {
    "prompt": "it computes the content of PROMPT_TUNING files",
    "shira": "its SHIRA files contain shira_indices",
    "vblora, top k": "with save_only_topk_weights",
    "adalora, fewer ranks": "its ADALORA files omit the ranks",
}
"""Adapters that no folder can be made of, and why."""
NAMES = {"mine": "mine", "model": "model", "two": "first", "both": "first"}
"""The adapter that is meant, where it is not "default"."""
ADAPTED = [*CONFIGS, *NAMES, "norm", "tied", "injected"]
KINDS = {
    0: ["lora", "embed"],
    1: ["lora"],
    2: [*ADAPTED, "head", "half frozen", "kept", "pair", "no adapter"],
    # Not modules_to_save: DeepSpeed 0.16 to 0.18 cannot train it here.
    3: ["lora", "dora", "embedding", "bias=all", "ia3", "vera", "two", "tied", "head", "kept"],
}
"""What is trained, by ZeRO stage."""
FULL = ("lora", "mine", "tied", "embed", "half frozen", "no adapter")
"""What a full checkpoint is saved of too."""


def base(kind: str) -> Any:
    """Return the model before it gets an adapter."""
    return small_llama(tie_word_embeddings=kind.startswith("tied"), attention_bias=kind.startswith("bias"))


class Run(runs.LoraRun):
    """A small Llama with one kind of adapter, and other trained parameters."""

    def __init__(self, kind: str, rank: int = 4) -> None:
        super(runs.LoraRun, self).__init__()
        name = NAMES.get(kind, "default")
        self.model = base(kind)
        if kind == "no adapter":
            self.model.requires_grad_(False).model.norm.requires_grad_(True)
        elif kind == "injected":  # as the model's own `add_adapter` does, which may want a newer PEFT than there is
            peft.inject_adapter_in_model(CONFIGS["lora"](rank), self.model)
        else:
            self.model = peft.get_peft_model(self.model, CONFIGS.get(kind, CONFIGS["lora"])(rank), adapter_name=name)
            inner = self.model.base_model.model
        if kind in ("two", "both"):
            self.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        if kind == "both":
            self.model.base_model.set_adapter(["first", "second"])
        if kind == "norm":
            inner.model.norm.requires_grad_(True)
        if kind in ("tied", "embed"):
            inner.model.embed_tokens.requires_grad_(True)
        if kind in ("half frozen", "kept"):
            inner.model.layers[0].self_attn.q_proj.lora_B.requires_grad_(False)
        if kind == "pair":
            self.other = peft.get_peft_model(base(kind), CONFIGS["lora"](rank))
        if kind == "head":
            self.head = torch.nn.Linear(runs.VOCABULARY, 3)
        self.kind = kind
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.losses: list[float] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.model(input_ids=tokens, labels=tokens)
        loss: torch.Tensor = found.loss
        if self.kind == "head":
            loss = loss + self.head(found.logits).square().mean()
        if self.kind == "pair":
            loss = loss + self.other(input_ids=tokens, labels=tokens).loss
        return loss


def train(out: str, stage: int, kinds: list[str]) -> None:
    """Take one step with each kind; save both kinds of checkpoint, and what DeepSpeed itself reports as trained."""
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    for kind in kinds:
        cell.trainable_only()
        if kind == "kept":
            ds_frozen_patch.patch(keep=["*.lora_B.*"])
        strategy = DeepSpeedStrategy(config=runs.config(stage, **zero))
        # VeRA's projections are buffers, which DeepSpeed leaves in fp32.
        precision = {"precision": "32-true"} if kind.startswith("vera") else {}
        options: dict[str, Any] = {"enable_checkpointing": False, "limit_train_batches": 1, **precision}
        trainer = runs.trainer(out, 2, stage, strategy=strategy, epochs=1, **options)
        module = Run(kind)
        trainer.fit(module, runs.batches(2))
        trainer.save_checkpoint(f"{out}/{kind}/small.ckpt")
        if kind in FULL:
            with cell.full_checkpoint(trainer.strategy):
                trainer.save_checkpoint(f"{out}/{kind}/full.ckpt")
        buffers = {name: tensor for name, tensor in module.named_buffers() if name in module.state_dict()}
        masters = {
            name: parameter.detach().float() if stage == 0 else safe_get_full_fp32_param(parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            frozen = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
        if trainer.is_global_zero:
            torch.save({"trained": masters, "buffers": buffers, "frozen": frozen}, f"{out}/{kind}/truth.pt")
        cell.stop()


@dataclass(frozen=True)
class Trained:
    """The files of one run, and its trained parameters as DeepSpeed reports them."""

    path: Path
    kind: str
    trained: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]

    @property
    def small(self) -> Path:
        return self.path / "small.ckpt"

    @property
    def full(self) -> Path:
        return self.path / "full.ckpt"

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {**self.trained, **self.buffers}

    def module(self, frozen: bool = False) -> Run:
        """Return the trained module, rebuilt without us: on its base in fp32, or in the dtype of the run."""
        module = Run(self.kind).eval()
        module.load_state_dict({**self.values, **(self.frozen if frozen else {})}, strict=False)
        return module


Made = Callable[[str, int], Trained]


@pytest.fixture(scope="module")
def made(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made(kind, stage)`: all kinds of a stage are trained together."""
    done: dict[int, Path] = {}

    def make(kind: str, stage: int) -> Trained:
        if stage not in done:
            done[stage] = tmp_path_factory.mktemp(f"zero{stage}")
            ranks(2, train, out=str(done[stage]), stage=stage, kinds=KINDS[stage])
        path = done[stage] / kind
        return Trained(path, kind, **torch.load(path / "truth.pt"))

    return make


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether the names, dtypes and bits are the same."""

    def said(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: (tensor.dtype, tensor.shape, runs.digest(tensor)) for name, tensor in tensors.items()}

    return said(found) == said(wanted)


def logits(model: Any) -> torch.Tensor:
    torch.set_num_threads(1)  # more of them only wait for each other, where the ranks wait too
    tokens = torch.randint(runs.VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens).logits
    return found


def pefts_own(model: Any, name: str, kind: str = "") -> dict[str, torch.Tensor]:
    """Return what PEFT itself would save; not the frozen embedding below an adapter, which PEFT would add.

    For a model without a PeftModel around it, PEFT adds no prefix, while `save_pretrained` does.
    """
    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
        model, adapter_name=name, save_embedding_layers=False if kind == "embedding" else "auto"
    )
    prefix = "" if isinstance(model, peft.PeftModel) else "base_model.model."
    return {f"{prefix}{own}": tensor for own, tensor in found.items()}


def loaded_by_peft(folder: Path, kind: str) -> Any:
    """Load an adapter folder by PEFT, which must not warn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(base(kind), folder)
    unrelated = ("is_gradient_checkpointing", "PRNG")  # of transformers, and of VeRA by its seed
    assert [w.message for w in caught if not any(said in str(w.message) for said in unrelated)] == []
    found = load_file(folder / "adapter_model.safetensors")
    result: Any = peft.set_peft_model_state_dict(model, found)
    assert result.unexpected_keys == []
    return model


def each(stage: int, *but: str) -> list[Any]:
    """Return all adapters that are trained in a stage, except some."""
    return [(kind, stage) for kind in KINDS[stage] if kind in ADAPTED and kind not in but]


@pytest.mark.parametrize(("kind", "stage"), [*each(2, *REFUSED), *each(3)])
def test_an_adapter_equals_pefts(made: Made, tmp_path: Path, kind: str, stage: int) -> None:
    run, name = made(kind, stage), NAMES.get(kind, "default")
    module = run.module()
    if kind == "both":
        module.model.base_model.set_adapter("first")
    done = export(run.small, tmp_path / "adapter", format="peft", adapter=name if kind in ("two", "both") else None)
    assert sorted(item.name for item in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    wanted = pefts_own(module.model, name, kind)
    if kind in ("norm", "tied"):  # trained in the model, besides the adapter: PEFT loads it, but would not save it
        own = {"norm": "model.norm.weight", "tied": "model.embed_tokens.weight"}[kind]
        wanted[f"base_model.model.{own}"] = run.trained[f"model.base_model.model.{own}"]
    assert found.keys() == wanted.keys()
    assert same(found, wanted)
    assert set(done.tensors) == found.keys()
    assert done.size == sum(tensor.nbytes for tensor in found.values())
    assert set(done.outside) == {own for own in run.trained if ".second." in own}

    config = peft.PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    theirs = module.model.peft_config[name]
    assert type(config) is type(theirs)
    assert config.to_dict() == {**theirs.to_dict(), "inference_mode": True}

    model = loaded_by_peft(tmp_path / "adapter", kind)
    assert same(pefts_own(model, "default", kind), pefts_own(module.model, name, kind))
    assert torch.equal(logits(model), logits(module.model))
    assert not torch.equal(logits(model), logits(base(kind)))


@pytest.mark.parametrize(
    ("kind", "stage"),
    each(2, *REFUSED, "adalora", "model", "norm", "tied", "both", "injected"),
)
def test_pefts_folder_loads_into_a_module(made: Made, tmp_path: Path, kind: str, stage: int) -> None:
    run, name = made(kind, stage), NAMES.get(kind, "default")
    module = run.module()
    module.model.save_pretrained(tmp_path, selected_adapters=[name], save_embedding_layers=False)
    again = Run(kind)
    load_trainable(again, tmp_path if name == "default" else tmp_path / name, adapter=name if kind == "two" else None)
    # An adapter has nothing of the module's own buffer.
    assert same(again.state_dict(), {**module.state_dict(), "seen": torch.zeros(1, dtype=torch.int64)})


def refusal(capsys: pytest.CaptureFixture[str], target: Path, *arguments: object) -> str:
    """Return the error message of an export that is refused; the target must be unchanged."""
    before = list(target.parent.rglob("*"))
    assert main(["export", *map(str, arguments)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ds-frozen-patch: ")
    assert said.err.count("\n") == 1
    assert list(target.parent.rglob("*")) == before
    return said.err


@pytest.mark.parametrize("stage", [2, 3])
def test_a_full_checkpoint_needs_a_configuration(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int
) -> None:
    run = made("lora", stage)
    target = tmp_path / "adapter"
    asked = (run.full, target, "--format", "peft")
    said = refusal(capsys, target, *asked)
    assert "does not contain the adapter's configuration" in said
    assert "--adapter-config adapter_config.json" in said

    config = CONFIGS["lora"](4)
    config.save_pretrained(tmp_path / "config")
    file = tmp_path / "config" / "adapter_config.json"
    export(run.small, tmp_path / "of small", format="peft")
    wanted = load_file(tmp_path / "of small" / "adapter_model.safetensors")
    for given in (file, file.parent):
        assert main(["export", *map(str, asked), "-q", "--adapter-config", str(given)]) == 0
        assert same(load_file(target / "adapter_model.safetensors"), wanted)
        found = peft.PeftConfig.from_pretrained(str(target))
        assert found.to_dict() == {**config.to_dict(), "inference_mode": True}
        assert torch.equal(logits(loaded_by_peft(target, "lora")), logits(run.module().model))
        shutil.rmtree(target)
    assert json.loads(file.read_text())["inference_mode"] is False  # ours says what it is for

    for wrong, why in {"no JSON": "{", "a list": "[1]", "something else": '{"r": 4}'}.items():
        bad = tmp_path / f"{wrong}.json"
        bad.write_text(wrong if why == "{" else why)
        said = refusal(capsys, target, *asked, "--adapter-config", bad)
        assert f"{bad} is not an adapter_config.json of PEFT" in said
    nowhere = tmp_path / "nowhere"
    assert f"{nowhere} is not an adapter_config.json" in refusal(capsys, target, *asked, "--adapter-config", nowhere)
    assert f"{tmp_path / 'adapter_config.json'} is no" in refusal(capsys, target, *asked, "--adapter-config", tmp_path)


def test_an_explicit_configuration_overrides_the_recorded_one(made: Made, tmp_path: Path) -> None:
    run = made("lora", 2)
    config = {**CONFIGS["lora"](4).to_dict(), "target_modules": QV, "revision": "mine"}
    (tmp_path / "mine.json").write_text(json.dumps(config))
    export(run.small, tmp_path / "adapter", format="peft", adapter_config=tmp_path / "mine.json")
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "adapter")).revision == "mine"


def with_configuration(run: Trained, to: Path, text: str) -> Path:
    """Return a copy of a checkpoint that records this configuration of its adapter."""
    path = shutil.copytree(run.small, to)

    def edit(state: dict[str, Any]) -> None:
        state[KEY]["adapters"]["model"]["default"] = text
        state[KEY].pop("digest")

    changed(path / "checkpoint" / "mp_rank_00_model_states.pt", edit)
    return path


def test_a_recorded_configuration_names_no_module_that_peft_would_import(made: Made, tmp_path: Path) -> None:
    config = {
        **CONFIGS["lora"](4).to_dict(),
        "auto_mapping": {"parent_library": "this"},
        "megatron_core": "antigravity",
    }
    path = with_configuration(made("lora", 2), tmp_path / "in.ckpt", json.dumps(config, default=list))
    with pytest.warns(UserWarning, match="was removed from adapter_config.json: PEFT would import"):
        export(path, tmp_path / "adapter", format="peft")
    found = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (found["auto_mapping"], found["megatron_core"]) == (None, None)
    loaded_by_peft(tmp_path / "adapter", "lora")


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"peft_type": []}', "1"])
def test_a_damaged_recorded_configuration(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path, target = with_configuration(made("lora", 2), tmp_path / "in.ckpt", text), tmp_path / "adapter"
    said = refusal(capsys, target, path, target, "--format", "peft")
    assert "The adapter's configuration in the checkpoint is damaged" in said


def test_a_full_checkpoint_needs_the_adapter_name(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made("mine", 2)
    CONFIGS["lora"](4).save_pretrained(tmp_path / "config")
    target = tmp_path / "adapter"
    asked = (run.full, target, "--format", "peft", "--adapter-config", tmp_path / "config")
    said = refusal(capsys, target, *asked)
    assert "contains no adapter 'default'. Choose one with --adapter." in said
    assert main(["export", *map(str, asked), "--adapter", "mine", "-q"]) == 0
    assert torch.equal(logits(loaded_by_peft(target, "mine")), logits(run.module().model))


def test_which_adapter(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "adapter"
    two = made("two", 2)
    said = refusal(capsys, target, two.small, target, "--format", "peft")
    assert "had no adapter 'default', but 'first', 'second'. Choose one with --adapter." in said
    said = refusal(capsys, target, two.small, target, "--format", "peft", "--adapter", "third")
    assert "had no adapter 'third', but 'first', 'second'" in said
    said = refusal(capsys, target, two.small, target, "--format", "peft", "--adapter", "second")
    assert "Parts of the adapter were frozen" in said
    assert ".lora_A.second.weight'" in said
    said = refusal(capsys, target, made("pair", 2).small, target, "--format", "peft")
    assert "several models with adapters: 'model', 'other'" in said
    assert "--format safetensors" in said


def test_no_adapter_at_all(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, target = made("no adapter", 2), tmp_path / "adapter"
    for source in (run.small, run.full):
        said = refusal(capsys, target, source, target, "--format", "peft")
        assert "are not those of exactly one PEFT model. Use --format safetensors." in said
    export(run.small, tmp_path / "trained.safetensors")
    assert same(load_file(tmp_path / "trained.safetensors"), run.values)


def with_frozen_as_saved(module: Run) -> dict[str, torch.Tensor]:
    """Return what PEFT would save, its frozen part in the dtype of the run."""
    wanted = pefts_own(module.model, "default")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    return {**wanted, name: wanted[name].bfloat16()}


def test_an_adapter_with_a_frozen_part(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, target = made("half frozen", 2), tmp_path / "adapter"
    said = refusal(capsys, target, run.small, target, "--format", "peft")
    assert "Parts of the adapter were frozen and are not in the checkpoint" in said
    assert "'model.base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight'" in said
    assert "patch(keep=[...])" in said
    assert "use a full checkpoint" in said
    # And so it is: a full checkpoint has them.
    module = run.module(frozen=True)
    module.model.peft_config["default"].save_pretrained(tmp_path / "config")
    export(run.full, target, format="peft", adapter_config=tmp_path / "config")
    assert same(load_file(target / "adapter_model.safetensors"), with_frozen_as_saved(module))


@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_with_a_kept_frozen_part(made: Made, tmp_path: Path, stage: int) -> None:
    run = made("kept", stage)
    kept = {name: tensor for name, tensor in run.frozen.items() if ".lora_B." in name}
    assert len(kept) == 1
    module = run.module()
    module.load_state_dict(kept, strict=False)
    export(run.small, tmp_path / "adapter", format="peft")
    assert same(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), with_frozen_as_saved(module))
    assert torch.equal(logits(loaded_by_peft(tmp_path / "adapter", "kept")), logits(module.model))
    export(run.small, tmp_path / "wide", format="peft", dtype="fp32")
    assert same(load_file(tmp_path / "wide" / "adapter_model.safetensors"), pefts_own(module.model, "default"))
    export(run.small, tmp_path / "trained.safetensors")
    assert same(load_file(tmp_path / "trained.safetensors"), {**run.values, **kept})


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_without_weights(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    run, target = made(kind, 2), tmp_path / "adapter"
    said = refusal(capsys, target, run.small, target, "--format", "peft")
    assert REFUSED[kind] in said
    assert "--format safetensors" in said
    export(run.small, tmp_path / "trained.safetensors")
    assert same(load_file(tmp_path / "trained.safetensors"), run.values)


@pytest.mark.parametrize("stage", [2, 3])
def test_trained_parameters_outside_the_adapter(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int
) -> None:
    run = made("head", stage)
    done = export(run.small, tmp_path / "adapter", format="peft")
    assert set(done.outside) == {"head.weight", "head.bias"}
    module = run.module()
    assert same(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), pefts_own(module.model, "default"))
    assert torch.equal(logits(loaded_by_peft(tmp_path / "adapter", "head")), logits(module.model))

    assert main(["export", str(run.small), str(tmp_path / "again"), "--format", "peft"]) == 0
    assert "outside the adapter's model: 'head.bias', 'head.weight'." in capsys.readouterr().out

    done = export(run.small, tmp_path / "all.safetensors", format="safetensors")
    assert done.outside == ()
    assert {"head.weight", "head.bias"} < set(done.tensors)
    assert same(load_file(tmp_path / "all.safetensors"), run.values)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_safetensors_file(made: Made, tmp_path: Path, stage: int) -> None:
    run = made("lora", stage)
    for source in (run.small, run.full):
        file = tmp_path / f"{source.stem}.safetensors"
        done = export(source, file)
        found = load_file(file)
        assert same(found, run.values)
        assert found["seen"].item() == 1
        assert (done.format, done.outside, set(done.tensors)) == ("safetensors", (), set(found))
        assert done.size == sum(tensor.nbytes for tensor in found.values())
    consolidate(run.small, tmp_path / "consolidated.safetensors")
    assert same(load_file(tmp_path / "consolidated.safetensors"), run.values)


def test_masters_of_another_run(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(made("lora", 2).small, tmp_path / "copy.ckpt"))
    (file,) = copy.glob("checkpoint/*rank_1*optim_states.pt")
    state = torch.load(file, weights_only=False)
    for master in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
        master.data.neg_()
    torch.save(state, file)
    for form in ("peft", "safetensors"):
        target = tmp_path / "trained.safetensors"
        said = refusal(capsys, target, copy, target, "--format", form, "-q")
        assert "are not from one run: the optimizer's masters differ from" in said
        assert file.name in said
    module = Run("lora")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match="are not from one run"):
        load_trainable(module, copy)
    assert same(module.state_dict(), before)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_another_dtype(made: Made, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    run = made("lora", 3)
    done = export(run.small, tmp_path / "trained.safetensors", dtype=name)
    assert same(
        load_file(tmp_path / "trained.safetensors"), {**{k: v.to(dtype) for k, v in run.trained.items()}, **run.buffers}
    )
    assert done.size == sum(2 * tensor.numel() for tensor in run.trained.values()) + 8
    export(run.small, tmp_path / "adapter", format="peft", dtype=name)
    wanted = {name: tensor.to(dtype) for name, tensor in pefts_own(run.module().model, "default").items()}
    assert same(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), wanted)


def test_a_tied_embedding(made: Made, tmp_path: Path) -> None:
    """It is trained under both of its names, and a safetensors file holds it once."""
    for stage in (2, 3):
        run = made("tied", stage)
        file = tmp_path / f"{stage}.safetensors"
        export(run.small, file)
        assert same(load_file(file), run.values)
        first, alias = (f"model.base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head"))
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", alias: first}
        for source in (file, run.small, run.full):
            module = Run("tied")
            load_trainable(module, source)
            assert same(module.state_dict(), run.module(frozen=source == run.full).state_dict())
            assert same({"": module.model.get_output_embeddings().weight}, {"": run.trained[first]})
        renamed = {alias if name == first else name: tensor for name, tensor in run.values.items()}
        save_file(renamed, tmp_path / "renamed.safetensors")
        module = Run("tied")
        load_trainable(module, tmp_path / "renamed.safetensors")
        assert same(module.state_dict(), run.module().state_dict())


def test_a_full_checkpoint_of_stage_0(made: Made, tmp_path: Path) -> None:
    """Another parameter has the shape of a trained one, so DeepSpeed's own does not tell which was trained."""
    run = made("embed", 0)
    export(run.full, tmp_path / "ours.safetensors")
    assert same(load_file(tmp_path / "ours.safetensors"), run.values)
    full = shutil.copytree(run.full, tmp_path / "full.ckpt")
    changed(full / "checkpoint" / "mp_rank_00_model_states.pt", lambda state: state.pop(PLAIN_GROUPS))
    with pytest.raises(CheckpointError, match="Pass --trainable"):
        export(full, tmp_path / "trained.safetensors")
    done = export(full, tmp_path / "trained.safetensors", trainable=["*lora_*", "*embed_tokens.weight"])
    assert set(done.tensors) == run.values.keys()
    assert same(load_file(tmp_path / "trained.safetensors"), run.values)


def test_a_full_checkpoint_of_stage_0_loads_into_a_module(made: Made) -> None:
    run = made("embed", 0)
    module = Run("embed")
    load_trainable(module, run.full)
    assert same(module.state_dict(), run.module(frozen=True).state_dict())


def test_invalid_options(made: Made, tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"format": "gguf"}, {"dtype": "int8"}]
    for options in wrong:
        with pytest.raises(ValueError, match="must be one of"):
            export(made("lora", 2).small, tmp_path / "adapter", **options)


# load_trainable


def of_lightning(run: Trained, path: Path) -> Path:
    """Return a file that Lightning alone has saved, of the trained module."""
    module = run.module(frozen=True)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
    keeper = ModelCheckpoint(str(path), filename="last")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        callbacks=[keeper],
    )
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path / "lightning.ckpt", weights_only=True)
    return path / "lightning.ckpt"


def consolidated(source: str, name: str, **options: Any) -> Callable[[Trained, Path], Path]:
    def make(run: Trained, path: Path) -> Path:
        consolidate(getattr(run, source), path / name, **options)
        return path / name

    return make


def exported(name: str, form: str) -> Callable[[Trained, Path], Path]:
    def make(run: Trained, path: Path) -> Path:
        export(run.small, path / name, format=form)
        return path / name

    return make


SOURCES: dict[str, Callable[[Trained, Path], Path]] = {
    "exported": exported("trained.safetensors", "safetensors"),
    "adapter": exported("adapter", "peft"),
    "consolidated": consolidated("small", "trained.ckpt"),
    "consolidated, safetensors": consolidated("small", "trained.safetensors"),
    "consolidated, whole": consolidated("full", "whole.ckpt"),
    "shards": consolidated("small", "shards", max_shard_size=2000),
    "shards, whole": consolidated("full", "shards", max_shard_size=40_000),
    "small": lambda run, path: run.small,
    "full": lambda run, path: run.full,
    "lightning": of_lightning,
}
WHOLE = ("consolidated, whole", "shards, whole", "full", "lightning")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_trained_parameters_load_into_a_module(made: Made, tmp_path: Path, source: str, stage: int) -> None:
    run = made("lora", stage)
    path = SOURCES[source](run, tmp_path)
    if source.startswith("shards"):
        assert len(list(path.glob("*.safetensors"))) > 1
    module = Run("lora")
    requires = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    places = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    load_trainable(module, path)
    wanted = run.module(frozen=source in WHOLE).state_dict()
    if source == "adapter":
        wanted["seen"] = torch.zeros(1, dtype=torch.int64)
    assert same(module.state_dict(), wanted)
    assert requires == {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    assert places == {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    wanted = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in wanted.items()}
    half = Run("lora").bfloat16()
    load_trainable(half, str(path))
    assert same(half.state_dict(), wanted)


@pytest.mark.parametrize("source", SOURCES)
def test_a_module_of_another_run_is_unchanged(made: Made, tmp_path: Path, source: str) -> None:
    run = made("lora", 2)
    path = SOURCES[source](run, tmp_path)
    lora = "model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"

    larger = Run("lora")
    larger.head = torch.nn.Linear(2, 2)
    refuses(larger, path, "missing keys: 'head.bias', 'head.weight'.")

    smaller = Run("lora")
    inner = smaller.model.base_model.model.model.layers[0].self_attn
    inner.q_proj = inner.q_proj.base_layer
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" if source == "adapter" else lora
    refuses(smaller, path, "unexpected keys: ", f"'{name}'")

    refuses(Run("lora", rank=2), path, f"other shapes: '{lora}'")

    other = Run("lora", rank=2)
    other.head = torch.nn.Linear(2, 2)
    refuses(other, path, "missing keys: 'head.bias', 'head.weight'; other shapes: ")


def refuses(module: torch.nn.Module, path: Path, *said: str) -> None:
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointMismatchError) as raised:
        load_trainable(module, path)
    assert str(raised.value).startswith(f"{path} does not fit this module; ")
    assert all(part in str(raised.value) for part in said), raised.value
    assert same(module.state_dict(), before)


def test_an_unexpected_head_is_named(made: Made, tmp_path: Path) -> None:
    path = exported("all.safetensors", "safetensors")(made("head", 2), tmp_path)
    refuses(Run("lora"), path, "unexpected keys: 'head.bias', 'head.weight'.")


def test_an_adapter_needs_a_matching_module(made: Made, tmp_path: Path) -> None:
    path = exported("adapter", "peft")(made("lora", 2), tmp_path)
    for module, count in ((torch.nn.Linear(2, 2), 0), (Run("pair"), 2)):
        with pytest.raises(CheckpointError, match=f"contains an adapter, but the module has {count} PEFT models"):
            load_trainable(module, path)
    refuses(
        Run("two"), path, "missing keys: 'model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.first.weight'"
    )
    module = Run("two")
    load_trainable(module, path, adapter="first")
    assert same(pefts_own(module.model, "first"), pefts_own(made("lora", 2).module().model, "default"))


def last_records(file: Path, least: int) -> None:
    """Flip a bit in the tensors at a file's end, after `least` bytes: after those that a reader has already used."""
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        found = [info for info in archive.infolist() if "/data/" in info.filename and info.file_size >= least]
    for info in found[len(found) // 2 :]:
        name, extra = (
            int.from_bytes(content[info.header_offset + at : info.header_offset + at + 2], "little") for at in (26, 28)
        )
        content[info.header_offset + 30 + name + extra + info.file_size - 1] ^= 1
    file.write_bytes(content)


def cut(file: Path, least: int = 4) -> None:
    file.write_bytes(file.read_bytes()[:-least])


@pytest.mark.parametrize(
    ("source", "file", "damage"),
    [
        ("exported", "", cut),
        ("adapter", "adapter_model.safetensors", cut),
        ("shards", "model-00002-of-*.safetensors", cut),
        ("consolidated", "", cut),
        ("consolidated", "", last_records),
        ("consolidated, whole", "", last_records),
        ("lightning", "", last_records),
        ("small", "checkpoint/*rank_1*optim_states.pt", cut),
        ("small", "checkpoint/*rank_1*optim_states.pt", last_records),
        ("full", "checkpoint/*rank_1*optim_states.pt", last_records),
        ("full", "checkpoint/*00_model_states.pt", last_records),
    ],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_damaged_file_changes_nothing_in_a_module(
    made: Made, tmp_path: Path, source: str, stage: int, file: str, damage: Callable[[Path, int], None]
) -> None:
    path = SOURCES[source](made("lora", stage), tmp_path)
    if source in ("small", "full"):
        path = Path(shutil.copytree(path, tmp_path / "copy.ckpt"))
    for item in path.glob(file) if file else [path]:
        damage(item, 8)
        damaged = item
    module = Run("lora")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        load_trainable(module, path)
    assert str(damaged) in str(raised.value)
    assert same(module.state_dict(), before)


def test_paths_with_nothing_to_load(made: Made, tmp_path: Path) -> None:
    module = Run("lora")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    (tmp_path / "empty").mkdir()
    torch.save({"epoch": 1}, tmp_path / "other.ckpt")
    (tmp_path / "text.ckpt").write_text("text")
    save_file({}, tmp_path / "empty.safetensors")
    for name in ("nowhere", "empty", "other.ckpt", "text.ckpt"):
        with pytest.raises(CheckpointError) as raised:
            load_trainable(module, tmp_path / name)
        assert str(tmp_path / name) in str(raised.value)
    refuses(module, tmp_path / "empty.safetensors", "missing keys: 'model.")
    assert same(module.state_dict(), before)
