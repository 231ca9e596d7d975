"""What PEFT and torch make of a model: each shape saves small, resumes strictly, bit for bit, and checks its base.

`test_variants` has more of them: `modules_to_save`, several adapters, and a frozen batch norm in train mode.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from kit import runs
from kit.cell import PRECISION, DeepSpeedStrategy
from kit.checkpoints import left_out_of, model_states
from kit.processes import RankError
from kit.runs import small_llama
from safetensors.torch import load_file
from torch.nn.utils import parametrizations

import ds_frozen_patch
from ds_frozen_patch import CheckpointError, consolidate, verify

pytestmark = [pytest.mark.promise(15), pytest.mark.everyday, pytest.mark.once]

QV = ["q_proj", "v_proj"]
LORA: dict[str, Any] = {"r": 4, "target_modules": QV}
PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
METHODS: dict[str, Callable[[], Any]] = {
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "vera": lambda: peft.VeraConfig(**LORA),
    "randlora": lambda: peft.RandLoraConfig(**LORA),
    "randlora by seed": lambda: peft.RandLoraConfig(**LORA, save_projection=False),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=QV),
    "vblora": lambda: peft.VBLoRAConfig(**LORA, num_vectors=8, vector_length=4),
    "loha": lambda: peft.LoHaConfig(**LORA),
    "lokr": lambda: peft.LoKrConfig(**LORA),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=QV),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=QV),
    "hra": lambda: peft.HRAConfig(**LORA),
    "shira": lambda: peft.ShiraConfig(**LORA),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, target_modules=QV, total_step=10),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "norms": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(**PROMPT),
    "prefix": lambda: peft.PrefixTuningConfig(**PROMPT),
    "p-tuning": lambda: peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=16),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[*range(runs.VOCABULARY // 2)]),
    "tied tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[1, 5]),
    "tied modules_to_save": lambda: peft.LoraConfig(**LORA, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "pissa": lambda: peft.LoraConfig(**LORA, init_lora_weights="pissa"),
    "two adapters": lambda: peft.LoraConfig(**LORA),
    "configure_model": lambda: peft.LoraConfig(**LORA),
}
NO_FOLDER = {
    "prompt": "PROMPT_TUNING files",
    "prefix": "PREFIX_TUNING files",
    "p-tuning": "P_TUNING files",
    "shira": "SHIRA files",
}
"""Methods whose file no `patch(export="peft")` can write, and a part of the reason that it gives."""
OTHERS = ["batch norm in eval mode", "weight_norm", "orthogonal"]
KINDS = {2: [*METHODS, *OTHERS], 3: ["vera", "vblora", "prefix", "weight_norm"]}
IN_FP32 = ("vera", "orthogonal", "batch norm in eval mode")
"""Plain DeepSpeed 0.19.8 leaves their buffers in fp32 when it casts the parameters to bf16, and cannot train."""


def base(kind: str) -> Any:
    """Return the model before it gets an adapter."""
    return small_llama(num_hidden_layers=1, tie_word_embeddings=kind.startswith("tied"))


class Shaped(runs.LoraRun):
    """A small Llama in one of the shapes."""

    def __init__(self, kind: str) -> None:
        super(runs.LoraRun, self).__init__()
        self.kind = kind
        self.model = None if kind == "configure_model" else self.build()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.losses: list[float] = []

    def build(self) -> Any:
        model = base(self.kind)
        if self.kind in METHODS:
            model = peft.get_peft_model(model, METHODS[self.kind]())
            if self.kind == "two adapters":
                model.add_adapter("second", METHODS[self.kind]())
            return model
        model.requires_grad_(False)
        if self.kind == "batch norm in eval mode":
            norm = torch.nn.BatchNorm1d(8).requires_grad_(False).eval()
            model.lm_head = torch.nn.Sequential(norm, torch.nn.Linear(32, runs.VOCABULARY))
            return model
        getattr(parametrizations, self.kind)(model.model.layers[0].self_attn.o_proj)
        model.requires_grad_(False).lm_head.requires_grad_(True)
        return model

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if self.kind == "batch norm in eval mode":
            self.model.lm_head[0].eval()
        return self


def train(kind: str, out: str, stage: int, resume_from: str | None) -> tuple[Shaped, Any]:
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    strategy = DeepSpeedStrategy(config=runs.config(stage, **zero))
    precision = "32-true" if kind in IN_FP32 else PRECISION
    trainer = runs.trainer(out, 2, strategy=strategy, precision=precision, limit_train_batches=2)
    module = Shaped(kind)
    trainer.fit(module, runs.batches(2), ckpt_path=resume_from)
    return module, trainer


def evaluated(kind: str, out: str, stage: int, ckpt_path: str) -> Any:
    trainer = runs.trainer(out, 2, stage, precision="32-true" if kind in IN_FP32 else PRECISION)
    return trainer.test(Shaped(kind), runs.batches(2), ckpt_path=ckpt_path, verbose=False)


def whole_and_resumed(out: str, stage: int, kinds: list[str]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        print(kind, flush=True)  # if it fails, the report ends with it
        ds_frozen_patch.patch(export="peft")
        folder = f"{out}/{kind}"
        # BOFT would look for a CUDA compiler, for minutes where there is one.
        with mock.patch("peft.tuners.boft.layer.get_fbd_cuda", return_value=None), runs.heard() as messages:
            whole, trainer = train(kind, folder, stage, None)
            in_memory = trainer.test(whole, runs.batches(2), verbose=False)
            state = runs.trained_state(whole)
            resumed, _ = train(kind, f"{folder}/again", stage, f"{folder}/epoch=0.ckpt")
            loaded = evaluated(kind, folder, stage, f"{folder}/epoch=1.ckpt")
        if kind in METHODS and stage < 3 and trainer.is_global_zero:
            theirs = peft.get_peft_model_state_dict(whole.model, save_embedding_layers=False)
            torch.save({name: tensor.cpu() for name, tensor in theirs.items()}, f"{folder}/theirs.pt")
        found[kind] = {
            "whole": (whole.losses[2:], state),
            "resumed": (resumed.losses, runs.trained_state(resumed)),
            "tested": (in_memory, loaded),
            "frozen": {n for n, p in whole.named_parameters(remove_duplicate=False) if not p.requires_grad},
            "messages": [message for message in messages if message.startswith("WARNING")],
        }
        ds_frozen_patch.unpatch()
    return found


Made = Callable[[str, int], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def made(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made(kind, stage)`: its checkpoints' folder, and each rank's results; a stage trains its kinds together."""
    done: dict[int, tuple[Path, list[dict[str, Any]] | RankError]] = {}

    def make(kind: str, stage: int) -> tuple[Path, list[dict[str, Any]]]:
        if stage not in done:
            path = tmp_path_factory.mktemp(f"zero{stage}")
            try:
                done[stage] = path, ranks(2, whole_and_resumed, out=str(path), stage=stage, kinds=KINDS[stage])
            except RankError as error:  # not once more for each test
                done[stage] = path, error
        path, found = done[stage]
        if isinstance(found, RankError):
            raise found
        return path / kind, [own[kind] for own in found]

    return make


@pytest.mark.parametrize(("kind", "stage"), [(kind, stage) for stage, kinds in KINDS.items() for kind in kinds])
def test_shapes_save_and_resume(made: Made, kind: str, stage: int) -> None:
    path, found = made(kind, stage)
    for rank, own in enumerate(found):
        assert own["resumed"] == own["whole"]
        assert len(own["resumed"][0]) == 2
        assert own["tested"][0] == own["tested"][1]
        expected = [NO_FOLDER[kind]] * 2 if kind in NO_FOLDER else []  # one for each run
        expected = expected or (["trains 0 PEFT adapters"] * 2 if kind in OTHERS else [])
        assert len(own["messages"]) == (0 if rank else len(expected)), own["messages"]
        assert all(part in said for part, said in zip(expected, own["messages"], strict=False))
    of_adapters = {name for name in found[0]["frozen"] if ".ranknum." in name or ".second." in name}  # no base has them
    frozen = found[0]["frozen"] - of_adapters
    assert frozen
    earlier, later = (model_states(path / f"epoch={epoch}.ckpt") for epoch in (0, 1))
    for state in (*earlier, *later):
        assert not frozen & state["module"].keys()
        assert set(state.get("frozen_param_fragments") or ()) == of_adapters
    assert left_out_of(path / "epoch=0.ckpt") == frozen  # only these may be missing in a load
    if stage < 3:  # in ZeRO-3 the module's state holds placeholders
        assert any(not torch.equal(value, later[0]["module"][name]) for name, value in earlier[0]["module"].items())


@pytest.mark.parametrize("kind", METHODS)
def test_a_folder_from_peft(made: Made, kind: str) -> None:
    path, _ = made(kind, 2)
    folder = path / "epoch=1.ckpt" / "adapter"
    if kind in NO_FOLDER:
        assert not folder.exists()
        return
    written, theirs = load_file(folder / "adapter_model.safetensors"), torch.load(path / "theirs.pt")
    assert written.keys() == theirs.keys()
    for name, value in theirs.items():  # in the dtype of the model; ours have the masters' fp32
        assert torch.equal(written[name].to(value.dtype), value), name


NO_BASE = {
    "pissa": "init_lora_weights='pissa' changes the base's weights",
}


@pytest.mark.parametrize("kind", [kind for kind in METHODS if kind not in NO_BASE])
def test_the_base_is_verified(made: Made, tmp_path: Path, kind: str) -> None:
    base(kind).save_pretrained(tmp_path)
    path, _ = made(kind, 2)
    found = verify(path / "epoch=0.ckpt", base=tmp_path)
    assert found.problems == ()
    assert found.compared == found.left_out > 0


@pytest.mark.parametrize("kind", NO_BASE)
def test_a_base_of_another_model_is_refused(made: Made, tmp_path: Path, kind: str) -> None:
    base(kind).save_pretrained(tmp_path / "base")
    path, _ = made(kind, 2)
    (problem,) = verify(path / "epoch=0.ckpt", base=tmp_path / "base").problems
    assert NO_BASE[kind] in problem
    with pytest.raises(CheckpointError) as raised:
        consolidate(path / "epoch=0.ckpt", tmp_path / "whole.safetensors", base=tmp_path / "base")
    assert NO_BASE[kind] in str(raised.value)
