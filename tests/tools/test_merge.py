"""Promise 27, `merge`: folders that `from_pretrained` loads, against what PEFT's `merge_and_unload` makes in memory."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch
import transformers
from deepspeed.utils import safe_get_full_fp32_param
from kit import owners
from kit.adapters import Made, OfKind, Trained, logits, made_once, refusal, same
from kit.checkpoints import contents, snapshot, unmark
from memory import memory, reset_peak_memory
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ds_frozen_patch import CheckpointError, consolidate, export, merge, verify
from ds_frozen_patch.checkpoint.format.records import Records
from ds_frozen_patch.checkpoint.format.stored import Storage
from ds_frozen_patch.cli import main

pytestmark = [pytest.mark.promise(27), pytest.mark.everyday, pytest.mark.once]

QV = ["q_proj", "v_proj"]
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


def of(name: str, **changes: Any) -> Callable[[], Any]:
    """Return what makes a model of this architecture, without weights of anyone."""

    def make() -> Any:
        torch.manual_seed(1)
        sizes = GPT2 if name == "GPT2" else SIZES
        config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
        build: Any = AutoModelForCausalLM.from_config
        return build(config)

    return make


LLAMA, TIED = of("Llama", tie_word_embeddings=False), of("Llama", tie_word_embeddings=True)
BIASED = of("Llama", tie_word_embeddings=False, attention_bias=True)
MIXTRAL = of("Mixtral", num_local_experts=4, tie_word_embeddings=False)
MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": of("Qwen2", tie_word_embeddings=False),
    "qwen2 tied": of("Qwen2", tie_word_embeddings=True),
    "mistral": of("Mistral", tie_word_embeddings=False),
    "gemma": of("Gemma", head_dim=16),
    "mixtral": MIXTRAL,
    "experts": MIXTRAL,
    "experts, by hand": MIXTRAL,
    "gpt2": of("GPT2"),
    "gpt2, square": of("GPT2"),
    "gpt2, untied": of("GPT2", tie_word_embeddings=False),
    "bias=lora_only": BIASED,
    "bias=all": BIASED,
}


def lora(targets: Any = QV, **options: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, **{"init_lora_weights": False, **options})


CONFIGS: dict[str, Callable[[], Any]] = {
    "rslora": partial(lora, use_rslora=True),
    "dora": partial(lora, use_dora=True),
    "patterns": partial(
        lora, [*QV, "up_proj"], rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 3}, alpha_pattern={"v_proj": 5}
    ),
    "regex": partial(lora, r".*\.layers\.1\..*(q|v)_proj"),
    "all linear": partial(lora, "all-linear", use_rslora=True),
    "embedding": partial(lora, [*QV, "embed_tokens"]),
    "embedding, tied": partial(lora, [*QV, "embed_tokens"]),
    "head, tied": partial(lora, [*QV, "lm_head"]),
    "modules_to_save": partial(lora, modules_to_save=["lm_head", "input_layernorm"]),
    "embedding saved, tied": partial(lora, modules_to_save=["embed_tokens"]),
    "head saved, tied": partial(lora, modules_to_save=["lm_head"]),
    "tokens": partial(lora, trainable_token_indices=[7, 5]),
    "bias=lora_only": partial(lora, bias="lora_only"),
    "bias=all": partial(lora, bias="all"),
    "experts": partial(lora, QV, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    "gpt2": partial(lora, ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    "gpt2, square": partial(lora, ["attn.c_proj"]),
    "gpt2, untied": partial(lora, ["c_attn", "c_proj", "lm_head", "wte"]),
}
BY_HAND = ("by hand", "by hand, tied", "by hand, kept", "by hand, teacher", "experts, by hand", "all, tied")
KINDS = [
    *("llama", "tied", "qwen2", "qwen2 tied", "mistral", "gemma", "mixtral"),
    *CONFIGS,
    *("two", "norm", "injected", "kept", "teacher"),
    *BY_HAND,
]
NOT_PLAIN = {
    "dora": "'lora_magnitude_vector', 'use_dora'). Export it with --format peft",
    "tokens": "is not plain LoRA ('trainable_token_indices')",
    "experts": "is not plain LoRA ('target_parameters')",
    "experts, by hand": "has 'model.layers.0.mlp.experts.down_proj'",
}
"""What is for PEFT to merge, or for nobody, and the message."""
MERGED = [kind for kind in KINDS if kind not in NOT_PLAIN]
IN_ZERO_3 = ["llama", "tied", "mixtral", "embedding", "gpt2", "by hand", "two"]
SHORT = [("tied", 2), ("llama", 3), ("by hand", 2)]
UNTIED = "Tied weights were trained apart, so config.json has tie_word_embeddings=false."
NOT_VERIFIED = "No record says what the base was, so it is not verified."
APART = ("embedding, tied", "head, tied")
"""PEFT adds the adapter to both tied weights, so what it merges is not the trained model. Ours has two weights."""


def base(kind: str) -> Any:
    """Return the model before it gets an adapter."""
    return MODELS.get(kind, TIED if "tied" in kind else LLAMA)()


class Run(OfKind):
    """A small model of one kind."""

    PATCHED: ClassVar[dict[str, Any]] = {kind: {"keep": ["*model.norm.weight"]} for kind in ("kept", "by hand, kept")}

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.model = base(kind)
        torch.manual_seed(2)
        if kind in BY_HAND:
            parts = {"by hand, tied": "embed", "experts, by hand": "experts", "all, tied": ""}
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(parts.get(kind, "layers.1.") in name)
        elif kind == "injected":  # as the model's own `add_adapter` does, which may want a newer PEFT than there is
            peft.inject_adapter_in_model(lora(), self.model)
        else:
            name = "first" if kind == "two" else "default"
            self.model = peft.get_peft_model(self.model, CONFIGS.get(kind, lora)(), adapter_name=name)
        if kind == "two":
            self.model.add_adapter("second", lora(["q_proj", "o_proj"]))
            self.model.base_model.set_adapter(["first", "second"])
        if kind == "norm":
            self.model.base_model.model.model.norm.requires_grad_(True)
        if "kept" in kind:  # a frozen parameter whose value the base's folder lacks
            next(p for name, p in self.model.named_parameters() if name.endswith("model.norm.weight")).data += 1
        if "teacher" in kind:
            self.teacher = base(kind).requires_grad_(False)
            self.teacher.model.norm.weight.data += 1
        self.head = torch.nn.Linear(96, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.model(input_ids=tokens, labels=tokens)
        loss: torch.Tensor = found.loss + self.head(found.logits).square().mean()
        return loss


def merged(run: Trained, adapter: str) -> Any:
    """Return what PEFT merges in memory."""
    model = run.module().model
    if run.kind in BY_HAND:
        return model
    if run.kind == "injected":
        return peft.PeftModel.from_pretrained(base(run.kind), exported(run)).merge_and_unload()
    return model.merge_and_unload(adapter_names=[adapter])


def exported(run: Trained) -> Path:
    """Return the folder of an adapter as `export` writes it."""
    folder = run.path / "adapter"
    if not folder.exists():
        export(run.small, folder, format="peft")
    return folder


@pytest.fixture(scope="module")
def made(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_once(ranks, tmp_path_factory, Run, {2: KINDS, 3: IN_ZERO_3})


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`bases(kind)`: the folder of its base, in several files."""
    root = tmp_path_factory.mktemp("bases")

    def make(kind: str, dtype: torch.dtype = torch.float32) -> Path:
        folder = root / f"{kind} {dtype}"
        if not folder.exists():
            base(kind).to(dtype).save_pretrained(folder, max_shard_size="30KB" if dtype == torch.float32 else "15KB")
            assert len(list(folder.glob("*.safetensors"))) > 2
        return folder

    return make


def served(folder: Path, **options: Any) -> Any:
    """Load a folder as people do. Nothing may be missing, unexpected or of another shape."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model, info = load(folder, output_loading_info=True, **options)
    assert {name: list(found) for name, found in info.items() if found} == {}
    return model.eval()


def same_model(one: Any, other: Any) -> bool:
    """Whether two models have the same weights, bit for bit."""
    return same(one.state_dict(), other.state_dict())


def short(kind: str, stage: int) -> Any:
    return pytest.param(kind, stage, marks=[pytest.mark.short] if (kind, stage) in SHORT else [])


@pytest.mark.parametrize(
    ("kind", "stage"), [*(short(kind, 2) for kind in MERGED), *(short(kind, 3) for kind in IN_ZERO_3)]
)
def test_a_folder_serves_what_peft_merges(
    made: Made, bases: Callable[..., Path], tmp_path: Path, kind: str, stage: int
) -> None:
    run, folder = made(kind, stage), bases(kind)
    before = snapshot(run.small), snapshot(folder)
    names = ["first", "second"] if kind == "two" else ["default"]
    for name in names:
        done = merge(run.small, tmp_path / name, base=folder, adapter=name if kind == "two" else None)
        model = served(tmp_path / name)
        assert done.unverified == ()
        assert {own for own in done.outside if ".second." not in own and ".first." not in own} == (
            {"head.bias", "head.weight"}
        )
        if kind in APART:
            assert UNTIED in done.notes
            assert not model.config.tie_word_embeddings
            assert torch.allclose(logits(model), logits(run.module().model), atol=1e-5)
            continue
        wanted = merged(run, name)
        assert (UNTIED in done.notes) == (kind in ("embedding saved, tied", "head saved, tied"))
        assert model.config.tie_word_embeddings == wanted.config.tie_word_embeddings
        assert same_model(model, wanted)
        assert torch.equal(logits(model), logits(wanted))
        assert not torch.equal(logits(model), logits(base(kind)))
    assert (snapshot(run.small), snapshot(folder)) == before


@pytest.mark.parametrize("kind", ["llama", "tied", "embedding", "gpt2", "bias=all", "norm"])
def test_in_the_dtype_of_the_base(made: Made, bases: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """As by PEFT's own way: the base in its dtype, the adapter in fp32."""
    run, folder = made(kind, 2), bases(kind, torch.bfloat16)
    merge(run.small, tmp_path / "bf16", base=folder)
    merge(run.small, tmp_path / "converted", base=bases(kind), dtype="bf16")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    wanted = peft.PeftModel.from_pretrained(loaded, exported(run)).merge_and_unload()
    for name in ("bf16", "converted"):
        model = served(tmp_path / name, dtype="auto")
        assert model.dtype == torch.bfloat16
        assert same_model(model, wanted)


def test_the_files_are_those_of_the_base(made: Made, bases: Callable[..., Path], tmp_path: Path) -> None:
    run, folder = made("llama", 2), bases("llama")
    done = merge(run.small, tmp_path / "served", base=folder)
    weights = sorted(file.name for file in folder.glob("*.safetensors"))
    assert sorted(done.files) == weights
    assert done.folded == 4
    ours, theirs = (
        json.loads((path / "model.safetensors.index.json").read_text()) for path in (tmp_path / "served", folder)
    )
    assert ours["weight_map"] == theirs["weight_map"]
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"] == done.size
    changed = set()
    for name in weights:
        found, before = load_file(tmp_path / "served" / name), load_file(folder / name)
        assert found.keys() == before.keys()
        changed |= {own for own in found if not torch.equal(found[own], before[own])}
    assert changed == {f"model.layers.{layer}.self_attn.{own}.weight" for layer in (0, 1) for own in QV}
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "served" / name).read_text()) == json.loads((folder / name).read_text())


def test_the_base_is_read_once(
    made: Made, bases: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, original = Counter[Path](), Records._read_into

    def counted(self: Records, storage: Storage, begin: int, content: memoryview) -> None:
        read[storage.path.parent] += len(content)
        original(self, storage, begin, content)

    monkeypatch.setattr(Records, "_read_into", counted)
    done = merge(made("llama", 2).small, tmp_path / "served", base=bases("llama"))
    assert done.unverified == ()
    assert read[bases("llama")] == done.size


@pytest.mark.parametrize("kind", ["llama", "modules_to_save", "embedding saved, tied", "gpt2"])
def test_an_adapter_folder(made: Made, bases: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    run, folder = made(kind, 2), bases(kind)
    done = merge(exported(run), tmp_path / "of folder", base=folder)
    merge(run.small, tmp_path / "of checkpoint", base=folder)
    assert contents(tmp_path / "of folder") == contents(tmp_path / "of checkpoint")
    assert NOT_VERIFIED in done.notes
    run.module().model.save_pretrained(tmp_path / "pefts own")
    merge(tmp_path / "pefts own", tmp_path / "of pefts", base=folder)
    assert contents(tmp_path / "of pefts") == contents(tmp_path / "of checkpoint")


def in_one_file(folder: Path, out: Path, rename: Callable[[str], str] = str, pickled: bool = False) -> Path:
    """Copy a base into a folder with one file of weights."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("model*"))
    tensors = {rename(name): value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    if pickled:
        torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, out / "pytorch_model.bin")
    else:
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_other_names_and_formats(made: Made, bases: Callable[..., Path], tmp_path: Path) -> None:
    """gpt2's own files have no names of the outer module; older models have pickles, with tied weights twice."""
    run = made("gpt2", 2)
    folder = in_one_file(bases("gpt2"), tmp_path / "gpt2", lambda name: name.removeprefix("transformer."))
    merge(run.small, tmp_path / "served", base=folder)
    assert sorted(load_file(tmp_path / "served" / "model.safetensors")) == sorted(
        load_file(folder / "model.safetensors")
    )
    assert same_model(served(tmp_path / "served"), merged(run, "default"))
    for kind in ("tied", "by hand, tied", "embedding saved, tied"):
        run, folder = made(kind, 2), in_one_file(bases(kind), tmp_path / f"{kind}, pickled", pickled=True)
        done = merge(run.small, tmp_path / f"{kind}, served", base=folder)
        assert done.files == ("model.safetensors",)
        assert done.unverified == ()
        assert same_model(served(tmp_path / f"{kind}, served"), merged(run, "default"))


def others(folder: Path) -> set[str]:
    return {name for name in contents(folder) if not name.startswith("model")}


def test_what_else_a_model_has(made: Made, bases: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bases("llama"), tmp_path / "base"))
    plain = others(folder)
    kept = ["tokenizer.json", "tokenizer.model", "LICENSE", "onnx/notes.txt"]
    scripts = ["modeling_own.py"]
    dropped = [
        "onnx/run.sh",
        "starts",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "tf_model.h5",
        "model.gguf",
    ]
    dropped += ["onnx/model.onnx", "pytorch_model.bin.index.json", ".cache/hub.json", ".gitattributes"]
    dropped += ["adapter_config.json"]
    for name in (*kept, *scripts, *dropped):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "secret").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret")
    (folder / "inner.txt").symlink_to("tokenizer.json")
    (folder / "elsewhere").symlink_to(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    custom = {**config, "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (folder / "config.json").write_text(json.dumps(custom))
    merge(made("llama", 2).small, tmp_path / "served", base=folder)
    assert others(tmp_path / "served") == {*plain, *kept, "inner.txt"}
    assert json.loads((tmp_path / "served" / "config.json").read_text()) == custom


def test_the_cache_of_the_hub(
    made: Made,
    bases: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There, all files are links; the model's id on the hub names the folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place, blobs = tmp_path / "models--org--own" / "snapshots" / "1234", tmp_path / "models--org--own" / "blobs"
    place.mkdir(parents=True)
    (tmp_path / "models--org--own" / "refs").mkdir()
    for revision in ("main", "v1"):
        (tmp_path / "models--org--own" / "refs" / revision).write_text("1234")
    blobs.mkdir()
    for number, file in enumerate(bases("llama").iterdir()):
        shutil.copy(file, blobs / str(number))
        (place / file.name).symlink_to(f"../../blobs/{number}")
    run = made("llama", 2)
    done = merge(run.small, tmp_path / "served", base=place)
    assert done.notes == ()
    merge(run.small, tmp_path / "of folder", base=bases("llama"))
    assert contents(tmp_path / "served") == contents(tmp_path / "of folder")
    assert not any(item.is_symlink() for item in (tmp_path / "served").iterdir())
    for name in ("org/own", "org/own@v1"):
        assert main(["merge", str(run.small), str(tmp_path / name), "--base", name]) == 0
        assert contents(tmp_path / name) == contents(tmp_path / "served")
        assert verify(run.small, base=name).compared == verify(run.small).left_out > 0
        capsys.readouterr()
    said = refusal(capsys, tmp_path / "none", "merge", run.small, tmp_path / "none", "--base", "org/other@v2")
    assert "There is no base at org/other@v2" in said
    assert said.endswith("get it: hf download org/other --revision v2\n")


def test_the_command(
    made: Made, bases: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = made("llama", 2), tmp_path / "served"
    arguments = ["merge", str(run.small), str(target), "--base", str(bases("llama"))]
    assert main([*arguments, "--dry-run"]) == 0
    assert not target.exists()
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "The adapter 'default' is folded into 4 of them." in said
    assert said.replace("Wrote", "Would write").startswith(said.split("\n")[0].replace("Wrote", "Would write"))
    assert "already exists" in refusal(capsys, target, *arguments[:5])


def test_refusals(made: Made, bases: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, target = made("two", 2), tmp_path / "served"

    def refused(*arguments: object, source: Path = run.small, base: Path | None = None) -> str:
        return refusal(capsys, target, "merge", source, target, "--base", base or bases("llama"), *arguments)

    for more, given, said in (
        ([], bases("llama"), "The run had no adapter 'default', but 'first', 'second'"),
        (["third"], bases("llama"), "The run had no adapter 'third', but 'first', 'second'"),
        (["first"], tmp_path, "is not the folder of a model"),
        (["first"], run.small, "is not the folder of a model"),
        (["first"], bases("gpt2"), "lacks"),
    ):
        assert said in refused(*(["--adapter", *more] if more else []), base=given)

    other = base("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 3] += 1
    other.save_pretrained(tmp_path / "other")
    said = refused("--adapter", "first", base=tmp_path / "other")
    assert (
        "is not the base that the run used: the values differ in 'model.base_model.model.model.layers.1.mlp.up" in said
    )
    small = of("Llama", vocab_size=95, tie_word_embeddings=False)()
    small.save_pretrained(tmp_path / "smaller")
    assert "has shape [95, 32]" in refused("--adapter", "first", base=tmp_path / "smaller")
    assert "has shape [95, 32]" in refused(source=made("by hand, tied", 2).small, base=tmp_path / "smaller")
    experts = base("mixtral")  # which transformers loads under other names than the files have
    with torch.no_grad():
        experts.model.layers[1].mlp.experts.down_proj[2, 3, 3] += 1
    experts.save_pretrained(tmp_path / "experts")
    said = refused(source=made("mixtral", 2).small, base=tmp_path / "experts")
    assert "the values differ in 'model.base_model.model.model.layers.1.mlp.experts.down_proj'" in said


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_not_plain_lora(
    made: Made, bases: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    target = tmp_path / "served"
    assert NOT_PLAIN[kind] in refusal(capsys, target, "merge", made(kind, 2).small, target, "--base", bases(kind))


Change = dict[str, Any]
REFUSED: dict[str, tuple[Callable[[], Any], Change, str]] = {
    "prompt": (
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        {},
        "is not plain LoRA ('PROMPT_TUNING'",
    ),
    "alora": (partial(lora, alora_invocation_tokens=[1, 2]), {}, "is not plain LoRA ('alora_invocation_tokens')"),
    # Configurations of strangers.
    "pattern": (lora, {"alpha_pattern": {"(": 3}}, "damaged"),
    "alpha": (lora, {"lora_alpha": "many"}, "damaged"),
    "type": (lora, {"peft_type": 5}, "it has no peft_type"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_cannot_be_merged(
    bases: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    config, changes, said = REFUSED[kind]
    folder, target = tmp_path / "adapter", tmp_path / "served"
    peft.get_peft_model(base("llama"), config()).save_pretrained(folder)
    recorded = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**recorded, **changes}))
    assert said in refusal(capsys, target, "merge", folder, target, "--base", bases("llama"), "-q")


def test_without_peft(
    made: Made,
    bases: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain LoRA needs transformers alone."""
    monkeypatch.setitem(sys.modules, "peft", None)
    merge(made("llama", 2).small, tmp_path / "served", base=bases("llama"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = refusal(capsys, tmp_path / "no", "merge", made("llama", 2).small, tmp_path / "no", "--base", bases("llama"))
    assert "pip install transformers" in said


def test_a_checkpoint_without_a_record(made: Made, bases: Callable[..., Path], tmp_path: Path) -> None:
    """As `exclude_frozen_parameters` of DeepSpeed alone leaves it: the base cannot be verified."""
    run = made("llama", 2)
    bare = Path(shutil.copytree(run.small, tmp_path / "bare"))
    unmark(bare)
    with pytest.raises(CheckpointError, match="does not contain the adapter's configuration"):
        merge(bare, tmp_path / "served", base=bases("llama"))
    done = merge(bare, tmp_path / "served", base=bases("llama"), adapter_config=exported(run))
    assert NOT_VERIFIED in done.notes
    assert same_model(served(tmp_path / "served"), merged(run, "default"))


def by_owner(out: str, world_size: int, by: str, stage: int, kind: str) -> None:
    with owners.served():
        run = owners.Run(by, out, world_size, stage, kind)
        run.train()
        masters = {
            name: safe_get_full_fp32_param(parameter)
            for name, parameter in run.module.named_parameters()
            if parameter.requires_grad
        }
    if not int(os.environ["RANK"]):
        torch.save(masters, f"{out}/truth.pt")


@pytest.mark.parametrize(("by", "stage"), [("trainer", 2), ("trainer", 3), ("deepspeed", 2), ("accelerate", 3)])
@pytest.mark.parametrize("kind", [owners.PEFT, owners.BY_HAND])
def test_checkpoints_of_others(ranks: Any, tmp_path: Path, by: str, stage: int, kind: str) -> None:
    out = tmp_path / "run"
    out.mkdir()
    # Alone: a Trainer in ZeRO-3 leaves its mark on PEFT.
    ranks(2, by_owner, alone=True, out=str(out), world_size=2, by=by, stage=stage, kind=kind)
    run = owners.model(kind, 1)
    inner = run if kind == owners.BY_HAND else owners.model(kind, 1).unload()
    bare = transformers.LlamaForCausalLM(inner.config)
    bare.load_state_dict(inner.state_dict(), strict=False)
    bare.save_pretrained(tmp_path / "base")
    run.load_state_dict(torch.load(out / "truth.pt"), strict=False)
    wanted = run if kind == owners.BY_HAND else run.merge_and_unload()
    places = {
        "deepspeed": (out, "epoch1"),
        "trainer": (out / "checkpoint-8", None),
        "accelerate": (out / "epoch1", None),
    }
    folder, tag = places[by]
    done = merge(folder, tmp_path / "served", tag, base=tmp_path / "base")
    assert (done.unverified, done.outside) == ((), ())
    model = served(tmp_path / "served")
    bare.load_state_dict(wanted.state_dict(), strict=False)
    assert same_model(model, bare)


def test_the_other_tools_find_experts(made: Made, bases: Callable[..., Path], tmp_path: Path) -> None:
    """transformers loads them under other names than the files have."""
    run, folder = made("mixtral", 2), bases("mixtral")
    found = verify(run.small, base=folder)
    assert (found.problems, found.unverified) == ((), ())
    assert consolidate(run.small, tmp_path / "whole.safetensors", base=folder).is_whole
    whole = load_file(tmp_path / "whole.safetensors")
    experts = base("mixtral").state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(whole["model.base_model.model.model.layers.1.mlp.experts.gate_up_proj"], experts.bfloat16())


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """The largest weight has 4 MB here."""
    model = of("Llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=12)()
    model.save_pretrained(tmp_path / "base", max_shard_size="50MB")
    peft.get_peft_model(model, lora("all-linear")).save_pretrained(tmp_path / "adapter")
    del model
    merge(tmp_path / "adapter", tmp_path / "once", base=tmp_path / "base", dry_run=True)  # imports what it needs
    reset_peak_memory()
    before = memory("VmRSS")
    done = merge(tmp_path / "adapter", tmp_path / "served", base=tmp_path / "base")
    assert done.size > 180_000_000
    assert memory("VmHWM") - before < 40_000_000
