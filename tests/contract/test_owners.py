"""Promise 19: what holds for Lightning holds for DeepSpeed alone, for Accelerate and for Trainer."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from kit import owners, runs
from kit.cell import TRAINER, DeepSpeedStrategy
from kit.checkpoints import record_in
from kit.owners import BY_HAND, ONE_MORE, PEFT, Run
from kit.processes import RankError
from safetensors import safe_open

import ds_frozen_patch
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.engine.served import attached
from ds_frozen_patch.publish import journal
from ds_frozen_patch.publish.journal import is_not_whole
from ds_frozen_patch.publish.notes import Note, notes

pytestmark = pytest.mark.promise(19)
EVERYDAY = pytest.mark.everyday  # the others, once for each owner, run in every cell
ACCELERATE, TRAINERS = pytest.mark.promise(19, by="accelerate"), pytest.mark.promise(19, by="trainer")
BY = owners.OWNERS
ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/guides/huggingface.md"))
TIED = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight")
HAS_HUB = hasattr(importlib.import_module("transformers.trainer"), "hf_api")
HAS_FLAG = "exclude_frozen_parameters" in inspect.signature(DeepSpeedStrategy).parameters


def whole_and_resumed(by: str, out: str, stage: int, kind: str) -> Any:
    with owners.served():
        whole = Run(by, out, 2, stage, kind)
        first = whole.train()
        resumed = Run(by, f"{out}/again", 2, stage, kind)
        return first, resumed.train(whole.at(0)), owners.trained(whole.module)


IN_EVERY_CELL = ((2, PEFT), (3, BY_HAND))
CASES = [*IN_EVERY_CELL, pytest.param(0, PEFT, marks=EVERYDAY), pytest.param(3, PEFT, marks=EVERYDAY)]
STAGES = [2, pytest.param(3, marks=EVERYDAY)]


@pytest.mark.parametrize(("stage", "kind"), CASES)
@pytest.mark.parametrize("by", BY)
def test_trainable_only_and_resumed_bit_for_bit(ranks: Any, tmp_path: Path, by: str, stage: int, kind: str) -> None:
    seen = ranks(2, whole_and_resumed, by=by, out=str(tmp_path), stage=stage, kind=kind)
    for (losses, state), resumed, _ in seen:
        assert len(set(losses)) == 2 * owners.STEPS
        assert resumed == (losses[owners.STEPS :], state)
    for file in owners.model_files(tmp_path):
        saved = torch.load(file, weights_only=False)
        assert sorted(saved["module"]) == seen[0][2]
        # Trainer writes to all parameters in a save of ZeRO-3.
        assert all(entry.fingerprint for entry in record_in(file.parent).left_out)


def loaded_otherwise(by: str, out: str, stage: int, kind: str, other: dict[str, Any]) -> list[Any]:
    """What a load says onto another base, into another model, and into one with a buffer that was not saved."""
    said: list[Any] = []
    with owners.served():
        whole = Run(by, out, 2, stage, kind)
        whole.train(epochs=1)
        for odd in ({"seed": 2}, other, {"kind": ONE_MORE}):
            run = Run(by, f"{out}/again", 2, stage, **{"kind": kind, **odd})
            said.append(runs.refusal(run.train, whole.at(0)))
    return said


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("by", BY)
def test_another_base_and_another_model_are_errors(ranks: Any, tmp_path: Path, by: str, stage: int) -> None:
    other = {"kind": BY_HAND}
    for base, strict, more in ranks(2, loaded_otherwise, by=by, out=str(tmp_path), stage=stage, kind=PEFT, other=other):
        assert base[0] == "CheckpointMismatchError"
        assert "The base is not the one that the checkpoint was saved with" in base[1]
        assert strict[0] == "CheckpointMismatchError"
        assert "left out parameters that the model does not have" in strict[1]
        assert "q_proj.base_layer.weight" in strict[1]
        assert more[0] == "RuntimeError"
        assert 'Missing key(s) in state_dict: "' in more[1]
        assert 'extra"' in more[1]


def full_ones(by: str, out: str) -> None:
    """The last one is saved again, when its folder has files of others."""
    with owners.served():
        run = Run(by, out, 2, 2, BY_HAND)
        with ds_frozen_patch.full_checkpoint():
            run.train(epochs=1)
            place = run.at(int(by == "trainer"))
            if torch.distributed.get_rank() == 0:
                (place / "logs").mkdir()
                (place / "logs" / "mine.txt").write_text("mine")
                (place / "mine.json").write_text("{}")
            torch.distributed.barrier()
            run.save(place)


@EVERYDAY
@pytest.mark.parametrize("by", BY)
def test_full_checkpoints_on_demand_beside_files_of_others(ranks: Any, tmp_path: Path, by: str) -> None:
    ranks(2, full_ones, by=by, out=str(tmp_path))
    for file in owners.model_files(tmp_path):
        assert len(torch.load(file, weights_only=False)["module"]) > 20
    (theirs,) = tmp_path.glob("*/logs/mine.txt")
    assert theirs.read_text() == "mine"
    assert (theirs.parents[1] / "mine.json").is_file()
    assert owners.model_files(theirs.parents[1])


def saved_at_two(by: str, out: str, stage: int) -> Any:
    with owners.served(export="safetensors"):
        return Run(by, out, 2, stage).train()


def resumed_at_one(by: str, out: str, stage: int, elastic: bool) -> Any:
    with owners.served(elastic=elastic):
        run = Run(by, f"{out}/again", 1, stage)
        return run.train(run.at(0, out)) if elastic else runs.refusal(run.train, run.at(0, out))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("by", BY)
def test_another_world_size(ranks: Any, tmp_path: Path, by: str, stage: int) -> None:
    everyone = ranks(2, saved_at_two, by=by, out=str(tmp_path), stage=stage)
    ((kind, said),) = ranks(1, resumed_at_one, by=by, out=str(tmp_path), stage=stage, elastic=False)
    assert kind == "CheckpointMismatchError"
    assert "at world size 2 in fp16 or fp32, and DeepSpeed cannot load it in ZeRO stage" in said
    ((losses, _),) = ranks(1, resumed_at_one, by=by, out=str(tmp_path), stage=stage, elastic=True)
    expected = torch.tensor([losses for losses, _ in everyone]).mean(dim=0)[owners.STEPS :]
    of_steps = torch.tensor(losses).view(owners.STEPS, -1).mean(dim=1)
    assert torch.allclose(of_steps, expected, atol=2e-5)
    (file,) = tmp_path.glob("*[04]/**/trainable.safetensors")
    with safe_open(file, "pt") as exported:
        assert sum("lora_" in name for name in exported.keys()) == 8  # noqa: SIM118


def killed(by: str, out: str, stage: int, at: str) -> None:
    """Rank 0 dies half-way through writing a file of the second checkpoint."""
    with owners.served(), owners.dying(at):
        Run(by, out, 2, stage).train()


def gone_on(by: str, out: str, stage: int) -> Any:
    with owners.served():
        run = Run(by, out, 2, stage)
        return (run.train(True if by == "trainer" else run.at(0)), Run(by, f"{out}/whole", 2, stage).train())


PARTS = {
    "deepspeed": ("model_states.pt", "optim_states.pt", "latest"),
    "accelerate": ("model_states.pt", "random_states_0.pkl"),
    "trainer": ("model_states.pt", "adapter_config.json", "rng_state_0.pth", "trainer_state.json"),
}


def files(without: str = "") -> list[Any]:
    """Those of each owner, the last of them in every cell."""
    chosen = {by: [at for at in PARTS[by] if at != without] for by in BY}
    return [pytest.param(by, at, marks=() if at == ats[-1] else EVERYDAY) for by, ats in chosen.items() for at in ats]


@pytest.mark.parametrize(("by", "at"), files())
def test_killed_within_a_save(ranks: Any, tmp_path: Path, by: str, at: str) -> None:
    with pytest.raises(RankError) as error:
        ranks(2, killed, by=by, out=str(tmp_path), stage=2, at=at)
    assert "ProcessDied" in {raised[0] for raised in error.value.raised if raised}
    if by == "deepspeed":
        assert (tmp_path / "latest").read_text() == "epoch0"
        (problem,) = ds_frozen_patch.verify(tmp_path, "epoch1").problems
        assert "epoch1 is not whole" in str(problem)
    elif at == "model_states.pt":
        assert is_not_whole(tmp_path / ("epoch1" if by == "accelerate" else "checkpoint-8"))
    for (losses, state), whole in ranks(2, gone_on, by=by, out=str(tmp_path), stage=2):
        assert (losses, state) == (whole[0][owners.STEPS :], whole[1])
    assert not list(tmp_path.rglob(".*"))


def failing(by: str, out: str, stage: int, at: str) -> Any:
    """Rank 0 cannot write a file; the run goes on, and the next save works."""
    with owners.served():
        options: dict[str, Any] = {"save_strategy": "no"} if by == "trainer" else {}
        run = Run(by, out, 2, stage, **options)
        if by == "trainer":
            run.trainer.train()
        with owners.failing(at):
            said = runs.refusal(run.save, run.at(1))
        torch.distributed.barrier()
        left = sorted(item.name for item in Path(out).rglob("*") if item.is_file())
        torch.distributed.barrier()
        run.save(run.at(1))
        return said, left


@pytest.mark.parametrize(("by", "at"), files(without="latest"))
def test_a_write_error_is_raised_on_every_rank(ranks: Any, tmp_path: Path, by: str, at: str) -> None:
    for (kind, said), left in ranks(2, failing, by=by, out=str(tmp_path), stage=2, at=at):
        assert kind == "CheckpointError"
        assert "was not saved. Rank 0" in said
        assert "No space left" in said
        if at.endswith("_states.pt"):
            assert "There is no checkpoint there now." in said
            assert not [name for name in left if name.endswith("_states.pt") or name == "latest"]
            assert by == "trainer" or not left
        assert "trainer_state.json" not in left or at == "trainer_state.json"  # without it, none is whole
    names = {item.name for item in tmp_path.iterdir() if not item.name.startswith(".")}
    assert {"epoch1"} <= names or names == {"checkpoint-8"}


# DeepSpeed alone


def served_badly() -> list[Any]:
    said = [runs.refusal(ds_frozen_patch.serve, torch.nn.Linear(1, 1))]
    state = ds_frozen_patch.status()[TRAINER].state
    with owners.served():
        run = Run("deepspeed", "", 2, 2)
        ds_frozen_patch.serve(run.engine)  # again
        other = Run("accelerate", "", 2, 2)
        ds_frozen_patch.serve(other.engine)
        before = attached(other.engine)
    assert before is not None
    return [*said, state, before.owner.logger.name]


@EVERYDAY
def test_serve_takes_engines_once(ranks: Any) -> None:
    for (kind, said), state, logger in ranks(2, served_badly):
        assert kind == "TypeError"
        assert "not an object of torch.nn.modules.linear.Linear" in said
        assert state == ("has it itself" if HAS_FLAG else "can be wrapped")
        assert logger == "accelerate.ds_frozen_patch"


def killed_in_the_renames(out: str) -> None:
    """A first save, and one over it that is killed when its journal counts and no file has its name."""
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        run.train(epochs=1)
        run.train_epoch()
        torch.save(run.seen()[1], f"{out}/expected{torch.distributed.get_rank()}.bin")
        with overridden([(journal, "_do", lambda *_: os._exit(9))]):
            run.save(run.at(0), 1)


def resumed_after_it(out: str) -> Any:
    with owners.served():
        again = Run("deepspeed", out, 2, 2, seed=1)
        path, state = again.engine.load_checkpoint(out)
        expected = torch.load(f"{out}/expected{torch.distributed.get_rank()}.bin")
        return str(path), state["epoch"], again.seen()[1] == expected


@EVERYDAY
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.parametrize("read_only", [False, True])
def test_a_load_finishes_a_save(ranks: Any, tmp_path: Path, read_only: bool) -> None:
    """Where it may not, it reads the files under their hidden names, and so do the tools."""
    with pytest.raises(RankError):
        ranks(2, killed_in_the_renames, out=str(tmp_path))
    names = sorted(item.name for item in (tmp_path / "epoch0").iterdir())
    assert [name for name in names if "journal" in name]
    with mounted_read_only(tmp_path) if read_only else nullcontext():
        assert not ds_frozen_patch.verify(tmp_path).problems
        for path, epoch, is_same in ranks(2, resumed_after_it, out=str(tmp_path)):
            assert Path(path).parent == tmp_path / "epoch0"
            assert (epoch, is_same) == (2, True)
        left = sorted(item.name for item in (tmp_path / "epoch0").iterdir())
        assert left == (names if read_only else [name for name in names if not name.startswith(".")])


@contextmanager
def mounted_read_only(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def weights_of_an_earlier_tag(out: str, stage: int) -> Any:
    """Loaded without the optimizer, where `latest` names a later checkpoint."""
    with owners.served():
        run = Run("deepspeed", out, 2, stage)
        expected = []
        for epoch in range(2):
            run.train_epoch()
            run.save(run.at(epoch), epoch)
            expected.append(run.seen()[1])
        again = Run("deepspeed", out, 2, stage)
        again.load(run.at(0), load_optimizer_states=False)
        return [again.seen()[1] == state for state in expected]


@EVERYDAY
@pytest.mark.parametrize("stage", [2, 3])
def test_the_weights_of_an_earlier_tag(ranks: Any, tmp_path: Path, stage: int) -> None:
    assert ranks(2, weights_of_an_earlier_tag, out=str(tmp_path), stage=stage) == [[True, False]] * 2


def weights_saved(out: str, stage: int) -> None:
    run = Run("deepspeed", out, 2, stage)
    for who in ("plain", "ours"):
        for flag in (False, True):
            run.engine.save_16bit_model(f"{out}/{who}/{flag}", exclude_frozen_parameters=flag)
        ds_frozen_patch.serve(run.engine)


@EVERYDAY
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_save_16bit_model_is_not_changed(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(2, weights_saved, out=str(tmp_path), stage=stage)
    for flag in ("False", "True"):
        plain, ours = (tmp_path / who / flag / "pytorch_model.bin" for who in ("plain", "ours"))
        assert ours.read_bytes() == plain.read_bytes()
    names = torch.load(tmp_path / "ours" / "False" / "pytorch_model.bin")
    assert {name for name in names if name.endswith(("embed_tokens.weight", "lm_head.weight"))} == set(TIED)


def configured_by_a_file(out: str) -> Any:
    """By itself, DeepSpeed would save the path of its configuration."""
    with owners.served():
        run = Run("deepspeed", out, 2, 2, as_file=True)
        run.train(epochs=1)
        again = Run("deepspeed", out, 2, 2, as_file=True)
        again.load(run.at(0))
        return again.first


@EVERYDAY
def test_a_configuration_in_a_file(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, configured_by_a_file, out=str(tmp_path)) == [1, 1]
    for file in owners.model_files(tmp_path):
        assert torch.load(file, weights_only=False)["ds_config"]["zero_optimization"]["stage"] == 2
    ((losses, _),) = ranks(1, resumed_at_one, by="deepspeed", out=str(tmp_path), stage=2, elastic=True)
    assert len(losses) == owners.STEPS


def resumed_as_with_zenflow(out: str) -> list[str]:
    """Return the warnings about the batch when the engine's accumulation is not the configured one, as with ZenFlow."""
    with owners.served(), runs.heard() as said:
        before, again = (Run("deepspeed", out, 2, 2) for _ in range(2))
        for run in (before, again):
            run.engine._config.gradient_accumulation_steps = 2
        before.save(before.at(0))
        again.load(before.at(0))
    return [message for message in said if "gradient accumulation" in message]


@EVERYDAY
@pytest.mark.short
def test_the_update_interval_of_zenflow_is_not_taken_for_another_batch(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, resumed_as_with_zenflow, out=str(tmp_path)) == [[], []]


# Accelerate


def numbered_run(out: str, **options: Any) -> Run:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(out, automatic_checkpoint_naming=True, **options)
    run = Run("accelerate", out, 2, 2, accelerator={"project_config": project})
    run.accelerator.register_for_checkpointing(run.scheduler.scheduler)
    return run


def numbered(out: str, limit: int | None) -> Any:
    with owners.served():
        run = numbered_run(out, total_limit=limit)
        hooked: list[str] = []
        run.accelerator.register_save_state_pre_hook(lambda models, weights, folder: hooked.append(folder))
        run.train(epochs=3)
        said = run.accelerator.save_state()
        again = numbered_run(out, total_limit=limit)
        again.accelerator.load_state()
        is_same = again.seen()[1] == run.seen()[1]
        return str(said), len(hooked), is_same, run.accelerator.project_configuration.iteration


@ACCELERATE
@pytest.mark.parametrize(
    ("limit", "kept"), [(2, 2), *(pytest.param(*case, marks=EVERYDAY) for case in ((None, 4), (0, 1)))]
)
def test_numbered_by_accelerate(ranks: Any, tmp_path: Path, limit: int | None, kept: int) -> None:
    for said, hooked, is_same, iteration in ranks(2, numbered, out=str(tmp_path), limit=limit):
        assert said == str(tmp_path / "checkpoints" / "checkpoint_3")
        assert (hooked, is_same, iteration) == (4, True, 4)
    names = sorted(item.name for item in (tmp_path / "checkpoints").iterdir())
    assert names == [f"checkpoint_{number}" for number in range(4)][-kept:]
    assert (tmp_path / "checkpoints" / "checkpoint_3" / "custom_checkpoint_0.pkl").is_file()


def killed_while_numbering(out: str, at: str) -> None:
    with owners.served(), owners.dying(at):
        numbered_run(out).train()


def refused_number(out: str) -> Any:
    with owners.served():
        return runs.refusal(numbered_run(out, iteration=1).accelerator.save_state)[0]


def numbered_again(out: str) -> Any:
    """Go on from the first checkpoint, and save the second anew."""
    with owners.served():
        run = numbered_run(out, iteration=1)
        run.accelerator.load_state()
        run.accelerator.save_state()
        refused = runs.refusal(numbered_run(out, iteration=1).accelerator.save_state)
        again = numbered_run(out)
        again.accelerator.load_state()
        return run.accelerator.project_configuration.iteration, again.seen()[1] == run.seen()[1], refused[0]


@ACCELERATE
@pytest.mark.parametrize("at", ["model_states.pt", pytest.param("random_states_0.pkl", marks=EVERYDAY)])
def test_killed_while_accelerate_numbers(ranks: Any, tmp_path: Path, at: str) -> None:
    with pytest.raises(RankError):
        ranks(2, killed_while_numbering, out=str(tmp_path), at=at)
    folders = [tmp_path / "checkpoints" / f"checkpoint_{number}" for number in range(2)]
    assert sorted(folders[0].parent.iterdir()) == folders
    if at == "model_states.pt":  # and as if the process of its note were one that runs
        ((path, note),) = notes(folders[1]).items()
        Note.of_this_process(note.tag, True, False).write(path)
        assert ranks(2, refused_number, out=str(tmp_path)) == ["ValueError"] * 2
        note.write(path)
    assert ranks(2, numbered_again, out=str(tmp_path)) == [(2, True, "ValueError")] * 2
    assert sorted(folders[0].parent.iterdir()) == folders
    assert not list(tmp_path.rglob(".*"))


def asked_of_accelerate(out: str) -> Any:
    """What the program says to `save_state` and `load_state` counts."""
    with owners.served():
        run = Run("accelerate", out, 2, 2, BY_HAND, exclude_frozen_parameters=False)
        run.train(epochs=1)
        other = Run("accelerate", out, 2, 2, PEFT)
        other.options["exclude_frozen_parameters"] = True
        other.save(Path(out, "peft"))
        strict = runs.refusal(other.load, run.at(0))
        said = runs.refusal(run.load, Path(out, "nothing"))
        (Path(out) / "empty").mkdir(exist_ok=True)
        return strict, said, runs.refusal(run.load, Path(out, "empty"))


@EVERYDAY
@ACCELERATE
def test_what_the_program_says_to_accelerate_counts(ranks: Any, tmp_path: Path) -> None:
    for strict, nothing, empty in ranks(2, asked_of_accelerate, out=str(tmp_path)):
        assert strict[0] == "CheckpointMismatchError"
        assert nothing[0] == "ValueError"
        assert empty[0] == "CheckpointError"
        assert "empty" in empty[1]
    (full,) = owners.model_files(tmp_path / "epoch0")
    assert len(torch.load(full, weights_only=False)["module"]) > 20
    (small,) = owners.model_files(tmp_path / "peft")
    assert len(torch.load(small, weights_only=False)["module"]) == 9


# Trainer


def kept(out: str, patched: bool, options: dict[str, Any]) -> Any:
    """What is there after a run, and what its state says of the best checkpoint."""
    with owners.served() if patched else nullcontext():
        run = Run("trainer", out, 2, 2, num_train_epochs=4, **options)
        losses, state = run.train()
        best = run.trainer.state.best_model_checkpoint
        return losses, state, best and Path(best).name, run.trainer.state.best_metric


EACH: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch"}


STRATEGIES: dict[str, dict[str, Any]] = {
    "steps": {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2},
    "best-limit": {**EACH, "load_best_model_at_end": True, "save_total_limit": 1, "learning_rate": 0.2},
    "best": {**EACH, "save_strategy": "best", "metric_for_best_model": "loss", "learning_rate": 0.2},
    "model": {"save_only_model": True},
}


@TRAINERS
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name == "best-limit" else EVERYDAY)
        for name, options in STRATEGIES.items()
    ],
)
def test_trainer_keeps_what_it_would(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    results, names = [], []
    for who, patched in (("ours", True), ("plain", False)):
        results.append(ranks(2, kept, out=str(tmp_path / who), patched=patched, options=options))
        items = (tmp_path / who).rglob("*")
        files = (str(item.relative_to(tmp_path / who)) for item in items if item.is_file())
        names.append(sorted(file for file in files if not file.endswith(RECORD)))
    assert results[0] == results[1]
    assert names[0] == names[1]
    for file in (tmp_path / "ours").glob("*/trainer_state.json"):
        assert ".ds_frozen_patch" not in file.read_text()


def best_unseen(out: str) -> Any:
    """What each rank says of the best checkpoint, if rank 1 looks for its folder before rank 0 has made it."""
    exists = os.path.exists

    def not_yet(path: Any) -> bool:
        return exists(path) and not (Path(path).name.startswith("checkpoint-") and torch.distributed.get_rank() == 1)

    with owners.served(), overridden([(os.path, "exists", not_yet)]):
        run = Run("trainer", out, 2, 2, load_best_model_at_end=True, learning_rate=0.2, **EACH)
        run.train()
        return Path(run.trainer.state.best_model_checkpoint).name


@EVERYDAY
@TRAINERS
def test_a_rank_that_does_not_see_the_best_checkpoint(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, best_unseen, out=str(tmp_path))
    assert first == second
    assert (tmp_path / first).is_dir()


def without_the_model(out: str, stage: int, kind: str, options: dict[str, Any]) -> Any:
    with owners.served(whole_model=False):
        whole = Run("trainer", out, 2, stage, kind, **options)
        losses, state = whole.train()
        whole.trainer.save_model(f"{out}/last")
        resumed = () if options else Run("trainer", f"{out}/again", 2, stage, kind).train(whole.at(0))
        return not options and resumed != (losses[owners.STEPS :], state)


@EVERYDAY
@TRAINERS
@pytest.mark.parametrize(
    ("stage", "kind", "options", "left"),
    [
        (3, BY_HAND, {}, set()),
        (2, BY_HAND, {"save_only_model": True}, {"model.safetensors"}),
        (2, PEFT, {}, {"adapter_model.safetensors"}),
    ],
)
def test_without_the_file_of_the_whole_model(
    ranks: Any, tmp_path: Path, stage: int, kind: str, options: dict[str, Any], left: set[str]
) -> None:
    assert not any(ranks(2, without_the_model, out=str(tmp_path), stage=stage, kind=kind, options=options))
    for place in tmp_path.glob("checkpoint-*"):
        assert {file.name for file in place.glob("*.safetensors")} == left
        assert (place / "training_args.bin").is_file()
        assert (place / "config.json").is_file() == (kind == BY_HAND)
    (file,) = (tmp_path / "last").glob("*model.safetensors")
    with safe_open(file, "pt") as weights:
        names = list(weights.keys())
    assert len(names) == 8 if kind == PEFT else len(names) > 20


class Hub:
    """What Trainer calls to upload, with nothing behind it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, folder_path: str, ignore_patterns: Any = (), **options: Any) -> Any:
        names = sorted(str(item.relative_to(folder_path)) for item in Path(folder_path).rglob("*") if item.is_file())
        # Our record is uploaded with the checkpoint, and plain Trainer does not wait for what rank 1 writes last.
        ignored = [*ignore_patterns, f"*{RECORD}", "*rng_state_1.pth"]
        left = [name for name in names if not any(fnmatch(name, pattern) for pattern in ignored)]
        self.calls.append((Path(folder_path).name, options.get("path_in_repo"), options["commit_message"], left))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def uploaded(out: str, patched: bool) -> Any:
    from transformers import trainer

    hub = Hub()
    options: dict[str, Any] = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "hub_token": "none"}
    with owners.served() if patched else nullcontext(), overridden([(trainer, "hf_api", lambda: hub)]):
        run = Run("trainer", out, 2, 2, BY_HAND, **options)

        def list_meanwhile() -> None:
            hub.upload_folder(out, ["_*", "checkpoint-*"], commit_message="of the save before, which is not over yet")

        with owners.on_write("model_states.pt", list_meanwhile, 2):
            run.train()
    return hub.calls


@EVERYDAY
@TRAINERS
@pytest.mark.skipif(not HAS_HUB, reason="this transformers uploads by functions, and not by an object")
def test_uploads(ranks: Any, tmp_path: Path) -> None:
    """What is uploaded is what plain Trainer uploads, even by an upload that still runs when the next save begins."""
    found = [ranks(2, uploaded, out=str(tmp_path / who / "run"), patched=who == "ours") for who in ("ours", "plain")]
    assert found[0] == found[1]
    assert len(found[0][0]) == 5  # each of two checkpoints, the model in it, and meanwhile
    assert not [item for item in (tmp_path / "ours" / "run").iterdir() if "ds_frozen_patch" in item.name]


def by_both(out: str, stage: int, kind: str) -> Any:
    """Plain Trainer's checkpoint resumed under `patch()`, and ours by plain Trainer."""
    plain = Run("trainer", f"{out}/plain", 2, stage, kind)
    expected = plain.train()
    with owners.served(), runs.heard() as messages, runs.heard("accelerate") as heard:
        run = Run("trainer", f"{out}/ours", 2, stage, kind)
        resumed = run.train(plain.at(0))
    assert not [message for message in messages if "WARNING" in message]
    again = Run("trainer", f"{out}/again", 2, stage, kind)
    back = again.train(run.at(1)) if kind == PEFT else runs.refusal(again.train, run.at(1))
    losses, state = expected
    return resumed == (losses[owners.STEPS :], state), heard, back


@TRAINERS
@pytest.mark.parametrize("kind", [PEFT, BY_HAND])
@pytest.mark.parametrize("stage", STAGES)
def test_plain_trainer_and_ours(ranks: Any, tmp_path: Path, stage: int, kind: str) -> None:
    for rank, (is_same, heard, back) in enumerate(ranks(2, by_both, out=str(tmp_path), stage=stage, kind=kind)):
        assert is_same
        warned = [message for message in heard if "cannot be verified" in message]
        assert len(warned) == (1 if rank == 0 and kind == PEFT else 0)
        assert back[0] == [] if kind == PEFT else "Missing key" in back[1]


def of_others(out: str) -> dict[str, Any]:
    """A load of each owner's checkpoint by each other."""
    said = {}
    with owners.served():
        made = {by: Run(by, f"{out}/{by}", 2, 2) for by in BY}
        for run in made.values():
            run.train(epochs=1)
        places = {by: run.at(1 if by == "trainer" else 0) for by, run in made.items()}
        for by, run in made.items():
            for other, place in places.items():
                if other != by:
                    said[f"{by} <- {other}"] = runs.refusal(run.train, place)
    return said


MISSING = {
    "deepspeed <- accelerate": "contains no *model_states.pt",  # a folder of Accelerate is not a tag
    "deepspeed <- trainer": "contains no *model_states.pt",
    "accelerate <- deepspeed": "has no subdirectory 'pytorch_model'",
    "accelerate <- trainer": "has no subdirectory 'pytorch_model'; it has 'global_step8'",
    "trainer <- deepspeed": "trainer_state.json",
    "trainer <- accelerate": "trainer_state.json",
}


@EVERYDAY
def test_a_checkpoint_of_another_owner(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2, of_others, out=str(tmp_path)):
        for loading, (kind, text) in said.items():
            assert kind == ("FileNotFoundError" if loading.startswith("trainer") else "CheckpointError")
            assert MISSING[loading] in text


# The pages


BLOCKS = re.findall(r"^<!-- skip: next .*?test_owners.*?-->\n```python\n(.*?)```", PAGES, re.MULTILINE | re.DOTALL)


def as_written(out: str, block: str) -> Any:
    """Run a block of the pages in a program of its kind; which of its engines are served."""
    import training
    from transformers import Trainer

    os.chdir(out)
    made: list[Any] = []
    names: dict[str, Any] = {"ds_frozen_patch": ds_frozen_patch}
    if "Trainer(" in block:
        run = Run("trainer", out, 2, 2)
        run.train()

        def trainer(model: Any, arguments: Any, train_dataset: Any) -> Trainer:
            training.on_cpu_ranks()
            made.append(training.hugging_face(owners.model(PEFT, 1), owners.tokens(), out, run._config()))
            return made[0]  # type: ignore[no-any-return]

        names |= {"Trainer": trainer, "model": None, "arguments": None, "dataset": None}
    elif "accelerator" in block:
        run = Run("accelerate", out, 2, 2)
        run.accelerator.free_memory()
        adam, scheduler = run._optimizer()
        names |= {"accelerator": run.accelerator, "model": run.module, "optimizer": adam, "scheduler": scheduler}
    elif "initialize" in block:
        run = Run("deepspeed", out, 2, 2)
        adam, scheduler = run._optimizer()
        config = {**run._config(), "train_micro_batch_size_per_gpu": 4}
        initialize = partial(deepspeed.initialize, optimizer=adam, lr_scheduler=scheduler)
        names |= {"deepspeed": SimpleNamespace(initialize=initialize), "model": run.module, "config": config}
    exec(block, names)
    engine = made[0].model_wrapped if made else names.get("engine", names.get("model"))
    return {name: item.state == "wrapped" for name, item in ds_frozen_patch.status().items()}, engine and attached(
        engine
    ) is not None


@pytest.mark.everyday
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[-1][:20])
def test_what_the_pages_say(ranks: Any, tmp_path: Path, block: str) -> None:
    for wrapped, is_served in ranks(2, as_written, out=str(tmp_path), block=block):
        assert wrapped["deepspeed"]
        assert wrapped["accelerate"]
        assert wrapped["transformers"]
        assert is_served
    assert len(BLOCKS) == 3
