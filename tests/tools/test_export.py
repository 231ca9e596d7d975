"""`export` and `load_trainable`: adapters in PEFT's format, plain safetensors files, and loading them into modules."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch
from kit import cell, runs
from kit.adapters import Made, OfKind, Trained, logits, made_once, refusal, same
from kit.cell import pl
from kit.checkpoints import flip, rewrite_record, unmark
from kit.runs import small_llama
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ds_frozen_patch import CheckpointError, CheckpointMismatchError, consolidate, export, load_trainable
from ds_frozen_patch.cli import main

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
    "prompt": "PEFT computes the content of PROMPT_TUNING files",
    "shira": "PEFT computes the content of SHIRA files",
    "vblora, top k": "PEFT computes the content of VBLORA files",
    "adalora, fewer ranks": "PEFT computes the content of ADALORA files",
}
"""Adapters that no folder can be made of, and why."""
NAMES = {"mine": "mine", "model": "model", "two": "first", "both": "first"}
"""The adapter that is meant, where it is not "default"."""
ADAPTED = [*CONFIGS, *NAMES, "norm", "tied", "injected"]
KINDS = {
    0: ["lora"],
    1: ["lora"],
    2: [*ADAPTED, "head", "half frozen", "kept", "pair", "no adapter"],
    # Not modules_to_save: DeepSpeed 0.16 to 0.18 cannot train it here.
    3: ["lora", "dora", "embedding", "bias=all", "ia3", "vera", "two", "tied", "head", "kept"],
}
"""What is trained, by ZeRO stage."""


def base(kind: str) -> Any:
    """Return the model before it gets an adapter."""
    return small_llama(tie_word_embeddings=kind.startswith("tied"), attention_bias=kind.startswith("bias"))


class Run(OfKind):
    """A small Llama with one kind of adapter, and other trained parameters."""

    PATCHED: ClassVar[dict[str, Any]] = {"kept": {"keep": ["*.lora_B.*"]}, "half frozen": {"leave_out": ["*.lora_B.*"]}}
    FULL = ("lora", "mine", "tied", "half frozen", "no adapter")

    def __init__(self, kind: str, rank: int = 4) -> None:
        super().__init__(kind)
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
        if kind == "tied":
            inner.model.embed_tokens.requires_grad_(True)
        if kind in ("half frozen", "kept"):
            inner.model.layers[0].self_attn.q_proj.lora_B.requires_grad_(False)
        if kind == "pair":
            self.other = peft.get_peft_model(base(kind), CONFIGS["lora"](rank))
        if kind == "head":
            self.head = torch.nn.Linear(runs.VOCABULARY, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.model(input_ids=tokens, labels=tokens)
        loss: torch.Tensor = found.loss
        if self.kind == "head":
            loss = loss + self.head(found.logits).square().mean()
        if self.kind == "pair":
            loss = loss + self.other(input_ids=tokens, labels=tokens).loss
        return loss


@pytest.fixture(scope="module")
def made(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_once(ranks, tmp_path_factory, Run, KINDS)


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


@pytest.mark.parametrize("stage", [2, 3])
def test_a_full_checkpoint_needs_a_configuration(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int
) -> None:
    run, target = made("lora", stage), tmp_path / "adapter"
    asked = (run.full, target, "--format", "peft")
    config = CONFIGS["lora"](4)
    config.revision = "mine"  # unlike the recorded one, which this overrides
    config.save_pretrained(tmp_path / "config")
    file = tmp_path / "config" / "adapter_config.json"
    export(run.small, tmp_path / "of small", format="peft")
    wanted = load_file(tmp_path / "of small" / "adapter_model.safetensors")
    for source, given in ((run.full, file), (run.full, file.parent), (run.small, file)):
        assert main(["export", str(source), *map(str, asked[1:]), "-q", "--adapter-config", str(given)]) == 0
        assert same(load_file(target / "adapter_model.safetensors"), wanted)
        found = peft.PeftConfig.from_pretrained(str(target))
        assert found.to_dict() == {**config.to_dict(), "inference_mode": True}
        assert torch.equal(logits(loaded_by_peft(target, "lora")), logits(run.module().model))
        shutil.rmtree(target)
    assert json.loads(file.read_text())["inference_mode"] is False  # ours says what it is for

    for number, wrong in enumerate(("{", "[1]", '{"r": 4}')):
        bad = tmp_path / f"{number}.json"
        bad.write_text(wrong)
        said = refusal(capsys, target, "export", *asked, "--adapter-config", bad)
        assert f"{bad} is not an adapter_config.json of PEFT" in said
    for given, bad in ((tmp_path / "no", tmp_path / "no"), (tmp_path, tmp_path / "adapter_config.json")):
        assert f"{bad} is not an adapter_config.json" in refusal(
            capsys, target, "export", *asked, "--adapter-config", given
        )


def with_configuration(run: Trained, to: Path, text: str) -> Path:
    """Return a copy of a checkpoint that records this configuration of its adapter."""
    path = shutil.copytree(run.small, to)

    rewrite_record(path / "checkpoint", lambda values: values["adapters"]["model"].update(default=text))
    return path


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"peft_type": []}', "1"])
def test_a_damaged_recorded_configuration(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path, target = with_configuration(made("lora", 2), tmp_path / "in.ckpt", text), tmp_path / "adapter"
    said = refusal(capsys, target, "export", path, target, "--format", "peft")
    assert "The adapter's configuration in the checkpoint is damaged" in said


@pytest.mark.parametrize(
    ("kind", "source", "options", "wanted"),
    [
        *((kind, "small", "", [why, "--format safetensors"]) for kind, why in REFUSED.items()),
        ("lora", "full", "", ["does not contain the adapter's configuration", "--adapter-config adapter_config.json"]),
        ("mine", "full", "--adapter-config CONFIG", ["contains no adapter 'default'. Choose one with --adapter."]),
        ("two", "small", "", ["had no adapter 'default', but 'first', 'second'. Choose one with --adapter."]),
        ("two", "small", "--adapter third", ["had no adapter 'third', but 'first', 'second'"]),
        ("pair", "small", "", ["several models with adapters: 'model', 'other'", "--format safetensors"]),
        *(
            ("no adapter", source, "", ["are not those of exactly one PEFT model. Use --format safetensors."])
            for source in ("small", "full")
        ),
        (
            "half frozen",
            "small",
            "",
            [
                "Parts of the adapter were frozen and are not in the checkpoint",
                "'model.base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight'",
                *("patch(keep=[...])", "use a full checkpoint"),
            ],
        ),
    ],
)
def test_what_no_adapter_can_be_made_of(
    made: Made,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    source: str,
    options: str,
    wanted: list[str],
) -> None:
    run, target = made(kind, 2), tmp_path / "adapter"
    CONFIGS["lora"](4).save_pretrained(tmp_path / "config")
    more = options.replace("CONFIG", str(tmp_path / "config")).split()
    path = Path(shutil.copytree(getattr(run, source), tmp_path / "in"))
    if source == "full":  # as another program saves it
        unmark(path)
    asked = (path, target, "--format", "peft", *more)
    said = refusal(capsys, target, "export", *asked)
    assert [part for part in wanted if part not in said] == []
    export(run.small, tmp_path / "trained.safetensors")
    others = {n: p for n, p in run.frozen.items() if (".second." in n or ".ranknum." in n) and not cell.CELL.patches}
    assert same(load_file(tmp_path / "trained.safetensors"), {**run.values, **others})
    if kind == "mine":
        assert main(["export", *map(str, asked), "--adapter", "mine", "-q"]) == 0
        assert torch.equal(logits(loaded_by_peft(target, "mine")), logits(run.module().model))


def kept(run: Trained) -> dict[str, torch.Tensor]:
    """Return the frozen part of an adapter."""
    return {name: value for name, value in run.frozen.items() if ".lora_B." in name}


@pytest.mark.parametrize(("kind", "stage"), [("half frozen", 2), ("kept", 2), ("kept", 3)])
def test_a_frozen_part_of_an_adapter(made: Made, tmp_path: Path, kind: str, stage: int) -> None:
    """It is in a full checkpoint, and in one that keeps it."""
    run, target = made(kind, stage), tmp_path / "adapter"
    module = run.module()
    module.load_state_dict(kept(run), strict=False)
    module.model.peft_config["default"].save_pretrained(tmp_path / "config")
    options: dict[str, Any] = {"adapter_config": tmp_path / "config"} if kind == "half frozen" else {}
    source = run.full if kind == "half frozen" else run.small
    export(source, target, format="peft", **options)
    wanted = pefts_own(module.model, "default")
    (name,) = (name for name in wanted if name.endswith("layers.0.self_attn.q_proj.lora_B.weight"))
    of_the_run = {**wanted, name: wanted[name].bfloat16()}
    assert same(load_file(target / "adapter_model.safetensors"), of_the_run)
    assert torch.equal(logits(loaded_by_peft(target, kind)), logits(module.model))
    export(source, tmp_path / "wide", format="peft", dtype="fp32", **options)
    assert same(load_file(tmp_path / "wide" / "adapter_model.safetensors"), wanted)


@pytest.mark.parametrize("stage", [2, 3])
def test_trained_parameters_outside_the_adapter(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int
) -> None:
    run, target = made("head", stage), tmp_path / "adapter"
    assert main(["export", str(run.small), str(target), "--format", "peft"]) == 0
    assert "outside the adapter's model: 'head.bias', 'head.weight'." in capsys.readouterr().out
    module = run.module()
    assert same(load_file(target / "adapter_model.safetensors"), pefts_own(module.model, "default"))
    assert torch.equal(logits(loaded_by_peft(target, "head")), logits(module.model))


@pytest.mark.parametrize(
    ("kind", "stage"), [*(("lora", stage) for stage in range(4)), *((kind, 3) for kind in ("head", "kept"))]
)
def test_a_safetensors_file(made: Made, tmp_path: Path, kind: str, stage: int) -> None:
    run = made(kind, stage)
    wanted = {**run.values, **(kept(run) if kind == "kept" else {})}
    for source in (run.small, run.full) if kind in Run.FULL else (run.small,):
        file = tmp_path / f"{source.stem}.safetensors"
        done = export(source, file)
        found = load_file(file)
        assert same(found, wanted)
        assert found["seen"].item() == 1
        assert (done.format, done.outside, set(done.tensors)) == ("safetensors", (), set(found))
        assert done.size == sum(tensor.nbytes for tensor in found.values())
    consolidate(run.small, tmp_path / "consolidated.safetensors")
    assert same(load_file(tmp_path / "consolidated.safetensors"), wanted)


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


@pytest.mark.parametrize("stage", [2, 3])
def test_a_tied_embedding(made: Made, tmp_path: Path, stage: int) -> None:
    """It is trained under both of its names, and a safetensors file holds it once."""
    run, file, renamed = made("tied", stage), tmp_path / "trained.safetensors", tmp_path / "renamed.safetensors"
    export(run.small, file)
    assert same(load_file(file), run.values)
    first, alias = (f"model.base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head"))
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", alias: first}
    save_file({alias if name == first else name: tensor for name, tensor in run.values.items()}, renamed)
    for source in (file, run.small, run.full, renamed):
        module = Run("tied")
        load_trainable(module, source)
        assert same(module.state_dict(), run.module(frozen=source == run.full).state_dict())
        assert same({"": module.model.get_output_embeddings().weight}, {"": run.trained[first]})


@pytest.mark.parametrize("options", [{"format": "gguf"}, {"dtype": "int8"}])
def test_invalid_options(tmp_path: Path, options: Any) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        export(tmp_path / "in.ckpt", tmp_path / "adapter", **options)


# load_trainable


Source = Callable[[Trained, Path], Path]


def by(tool: Callable[..., Any], source: str, name: str, **options: Any) -> Source:
    def make(run: Trained, path: Path) -> Path:
        tool(getattr(run, source), path / name, **options)
        return path / name

    return make


def of_lightning(run: Trained, path: Path) -> Path:
    """Return a file that Lightning alone has saved, of the trained module."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=path)
    trainer.strategy.connect(run.module(frozen=True))
    trainer.save_checkpoint(path / "lightning.ckpt", weights_only=True)
    return path / "lightning.ckpt"


SOURCES: dict[str, Source] = {
    "exported": by(export, "small", "trained.safetensors"),
    "adapter": by(export, "small", "adapter", format="peft"),
    "consolidated": by(consolidate, "small", "trained.ckpt"),
    "consolidated, safetensors": by(consolidate, "small", "trained.safetensors"),
    "consolidated, whole": by(consolidate, "full", "whole.ckpt"),
    "shards": by(consolidate, "small", "shards", max_shard_size=2000),
    "shards, whole": by(consolidate, "full", "shards", max_shard_size=40_000),
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
    before = {name: (parameter.requires_grad, parameter.data_ptr()) for name, parameter in module.named_parameters()}
    load_trainable(module, path)
    wanted = run.module(frozen=source in WHOLE).state_dict()
    if source == "adapter":
        wanted["seen"] = torch.zeros(1, dtype=torch.int64)
    assert same(module.state_dict(), wanted)
    assert before == {name: (own.requires_grad, own.data_ptr()) for name, own in module.named_parameters()}
    wanted = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in wanted.items()}
    half = Run("lora").bfloat16()
    load_trainable(half, str(path))
    assert same(half.state_dict(), wanted)


def refused(module: torch.nn.Module, path: Path, error: type[Exception] = CheckpointError) -> str:
    """Return why nothing is loaded; the module must be unchanged."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(error) as raised:
        load_trainable(module, path)
    assert same(module.state_dict(), before)
    return str(raised.value)


def refuses(module: torch.nn.Module, path: Path, *said: str) -> None:
    why = refused(module, path, CheckpointMismatchError)
    assert why.startswith(f"{path} does not fit this module; ")
    assert all(part in why for part in said), why


@pytest.mark.parametrize("source", SOURCES)
def test_a_module_of_another_run_is_unchanged(made: Made, tmp_path: Path, source: str) -> None:
    path = SOURCES[source](made("lora", 2), tmp_path)
    lora = "model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" if source == "adapter" else lora
    smaller = Run("lora")
    inner = smaller.model.base_model.model.model.layers[0].self_attn
    inner.q_proj = inner.q_proj.base_layer
    refuses(smaller, path, "unexpected keys: ", f"'{name}'")
    refuses(Run("lora", rank=2), path, f"other shapes: '{lora}'")
    for rank, more in ((4, "."), (2, "; other shapes: ")):
        larger = Run("lora", rank)
        larger.head = torch.nn.Linear(2, 2)
        refuses(larger, path, f"missing keys: 'head.bias', 'head.weight'{more}")


def test_an_adapter_needs_a_matching_module(made: Made, tmp_path: Path) -> None:
    path = SOURCES["adapter"](made("lora", 2), tmp_path)
    for module, count in ((torch.nn.Linear(2, 2), 0), (Run("pair"), 2)):
        assert f"contains an adapter, but the module has {count} PEFT models" in refused(module, path)
    module = Run("two")
    refuses(module, path, "missing keys: 'model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.first.weight'")
    load_trainable(module, path, adapter="first")
    assert same(pefts_own(module.model, "first"), pefts_own(made("lora", 2).module().model, "default"))


@pytest.mark.parametrize(
    ("source", "file"), [("exported", ""), ("consolidated, whole", ""), ("full", "checkpoint/*model_states.pt")]
)
def test_a_damaged_file_changes_nothing_in_a_module(made: Made, tmp_path: Path, source: str, file: str) -> None:
    path = Path(SOURCES[source](made("lora", 2), tmp_path))
    if path.is_dir():
        path = Path(shutil.copytree(path, tmp_path / "copy.ckpt"))
    damaged = next(path.glob(file)) if file else path
    if damaged.suffix == ".safetensors":
        damaged.write_bytes(damaged.read_bytes()[:-8])
    else:
        flip(damaged)
    assert str(damaged) in refused(Run("lora"), path)


def test_paths_with_nothing_to_load(tmp_path: Path) -> None:
    module = Run("lora")
    (tmp_path / "empty").mkdir()
    torch.save({"epoch": 1}, tmp_path / "other.ckpt")
    (tmp_path / "text.ckpt").write_text("text")
    save_file({}, tmp_path / "empty.safetensors")
    for name in ("nowhere", "empty", "other.ckpt", "text.ckpt"):
        assert str(tmp_path / name) in refused(module, tmp_path / name)
    refuses(module, tmp_path / "empty.safetensors", "missing keys: 'model.")
