"""Promise 19, beyond a save and a resume: settings, tools, ranks and nodes that differ, for each owner."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import nodes, owners, runs
from kit.checkpoints import refresh
from kit.owners import BY_HAND, OWNERS, PEFT, Run
from kit.processes import RankError, ThisProcess
from safetensors import safe_open
from safetensors.torch import load_file

import ds_frozen_patch
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.engine import handshake
from ds_frozen_patch.publish.publication import Publication

pytestmark = [pytest.mark.promise(19), pytest.mark.everyday]
by_each = pytest.mark.parametrize("by", OWNERS)


# Settings of `patch()`, and of DeepSpeed


def whole_and_resumed(
    by: str, out: str, stage: int, kind: str, settings: dict[str, Any], config: dict[str, Any] | None = None
) -> Any:
    with owners.served(**settings):
        whole = Run(by, out, 2, stage, kind, config=config)
        losses, state = whole.train()
        again = Run(by, f"{out}/again", 2, stage, kind, config=config)
        return again.train(whole.at(0)) == (losses[owners.STEPS :], state), owners.trained(whole.module)


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("stage", "kind", "settings", "zero"),
    [
        (3, BY_HAND, {"keep": ["*.0.mlp.up_proj.*"]}, {}),
        (2, PEFT, {}, {"offload_optimizer": CPU}),
        (3, PEFT, {}, {"offload_optimizer": CPU, "offload_param": CPU}),
    ],
    ids=["keep", "offload", "offload-all"],
)
@by_each
def test_settings(
    ranks: Any, tmp_path: Path, by: str, stage: int, kind: str, settings: dict[str, Any], zero: dict[str, Any]
) -> None:
    arguments = {"stage": stage, "kind": kind, "settings": settings, "config": {"zero_optimization": zero}}
    seen = ranks(2, whole_and_resumed, by=by, out=str(tmp_path), **arguments)
    assert all(is_same for is_same, _ in seen)
    kept = ["model.layers.0.mlp.up_proj.weight"] if settings else []
    for file in owners.model_files(tmp_path):
        assert sorted(torch.load(file, weights_only=False)["module"]) == sorted([*seen[0][1], *kept])


@pytest.mark.parametrize("by", ["deepspeed", "accelerate"])  # Trainer refuses bf16 on CPUs
def test_an_export_of_a_run_in_bf16(ranks: Any, tmp_path: Path, by: str) -> None:
    arguments = {"stage": 2, "kind": PEFT, "settings": {"export": "peft"}, "config": {"bf16": {"enabled": True}}}
    for is_same, _ in ranks(2, whole_and_resumed, by=by, out=str(tmp_path), **arguments):
        assert is_same
    files = sorted(tmp_path.glob("*[04]/**/adapter/adapter_model.safetensors"))
    assert len(files) == 1
    weights = load_file(files[0])
    assert len(weights) == 8
    assert json.loads((files[0].parent / "adapter_config.json").read_text())["r"] == 4


class RunsCode:
    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def untrusting(by: str, out: str, place: str) -> Any:
    with owners.served(weights_only=True):
        return runs.refusal(Run(by, f"{out}/again", 2, 2).train, Path(place))


@by_each
def test_trust(ranks: Any, tmp_path: Path, by: str) -> None:
    """Runs resume with `trust=False`, and a file of DeepSpeed's that names a function of the system is refused."""
    arguments = {"stage": 2, "kind": PEFT, "settings": {"weights_only": True}}
    for is_same, _ in ranks(2, whole_and_resumed, by=by, out=str(tmp_path), **arguments):
        assert is_same
    file = next(file for file in tmp_path.rglob("*optim_states.pt") if "again" not in file.parts)
    torch.save({**torch.load(file, weights_only=False), "mine": RunsCode(str(tmp_path / "canary"))}, file)
    refresh(file.parent)
    place = file.parents[by != "deepspeed"]
    for kind, said in ranks(2, untrusting, by=by, out=str(tmp_path), place=str(place)):
        assert kind == "CheckpointError"
        assert "system" in said
    assert not (tmp_path / "canary").exists()


# Tools


def saved_fully(by: str, out: str, stage: int, patched: bool) -> Any:
    with owners.served() if patched else nullcontext():
        run = Run(by, out, 2, stage, BY_HAND)
        losses, state = run.train()
    return losses, state, {name: value.detach().clone() for name, value in run.module.state_dict().items()}


def resumed(by: str, out: str, stage: int, world_size: int, place: str) -> Any:
    with owners.served():
        return Run(by, f"{out}/again", world_size, stage, BY_HAND).train(Path(place))


def saved_to(
    ranks: Any, run: Path, by: str, stage: int, patched: bool, epoch: int
) -> tuple[Any, Path, str | None, str]:
    """What each rank has seen of a run of two epochs, and its checkpoint of one: directory, tag, and folder's name."""
    run.mkdir()
    seen = ranks(2, saved_fully, by=by, out=str(run), stage=stage, patched=patched)
    names = f"epoch{epoch}", f"checkpoint-{owners.STEPS * (epoch + 1)}"
    place = next(run / name for name in names if (run / name).exists())
    return (seen, run, place.name, place.name) if by == "deepspeed" else (seen, place, None, place.name)


@by_each
def test_the_tools_read_what_each_writes(ranks: Any, tmp_path: Path, by: str) -> None:
    seen, folder, tag, name = saved_to(ranks, tmp_path / "run", by, 2, patched=True, epoch=1)
    assert not ds_frozen_patch.verify(folder, tag).problems
    assert ds_frozen_patch.inspect(folder, tag).zero_stage == 2
    ds_frozen_patch.consolidate(folder, tmp_path / "trained.safetensors", tag)
    module = owners.model(BY_HAND, seed=1)
    ds_frozen_patch.load_trainable(module, folder, tag)
    trained = owners.trained(module)
    with safe_open(tmp_path / "trained.safetensors", "pt") as weights:
        assert sorted(weights.keys()) == trained
        own = module.state_dict()
        for key in trained:
            assert torch.equal(own[key], weights.get_tensor(key)), key
            assert torch.equal(own[key], seen[0][2][key]), key
    ds_frozen_patch.reshard(folder, tmp_path / "one" / name, tag, ranks=1)
    place = tmp_path / "one" / name / (tag or "")
    ((losses, _),) = ranks(1, resumed, by=by, out=str(tmp_path), stage=2, world_size=1, place=str(place))
    assert losses == []  # the run is over


@by_each
def test_a_full_checkpoint_pruned(ranks: Any, tmp_path: Path, by: str) -> None:
    """What was saved without us, pruned, is resumed bit for bit."""
    plain, folder, tag, name = saved_to(ranks, tmp_path / "run", by, 3, patched=False, epoch=0)
    target = tmp_path / "small" / name
    target.parent.mkdir()
    ds_frozen_patch.prune(folder, target, tag)
    found = ranks(2, resumed, by=by, out=str(tmp_path), stage=3, world_size=2, place=str(target / (tag or "")))
    assert found == [(losses[owners.STEPS :], state) for losses, state, _ in plain]


# Ranks and nodes


def set_up_unlike(by: str, out: str, how: str) -> Any:
    """Rank 1 has other settings, or is not patched."""
    handshake.WAIT_SECONDS = 1
    odd = os.environ["RANK"] == "1"
    if how == "setting":
        ds_frozen_patch.patch(**{"keep": ["*.x"]} if odd else {})  # type: ignore[arg-type]
    elif not odd:
        ds_frozen_patch.patch()
    run = Run(by, out, 2, 2)  # Trainer's engine is made when it trains
    return run.train()


@pytest.mark.once
@by_each
def test_other_settings_on_one_rank(ranks: Any, tmp_path: Path, by: str) -> None:
    with pytest.raises(RankError) as error:
        ranks(2, set_up_unlike, alone=True, by=by, out=str(tmp_path), how="setting")
    for kind, said in filter(None, error.value.raised):
        assert kind == "PatchError"
        assert "- keep: [] on rank 0, ['*.x'] on rank 1" in said
    assert len(error.value.raised) == 2


@pytest.mark.once
@pytest.mark.parametrize("by", ["accelerate", "trainer"])  # `serve()` patches
def test_an_unpatched_rank(ranks: Any, tmp_path: Path, by: str) -> None:
    with pytest.raises(RankError) as error:
        ranks(2, set_up_unlike, alone=True, grace=1, by=by, out=str(tmp_path), how="unpatched")
    assert error.value.raised[0] is not None
    assert error.value.raised[0][0] == "PatchError"
    assert "patch() was called on this rank, but not on rank 1" in error.value.raised[0][1]


def with_a_late_rank(by: str, out: str) -> None:
    """Rank 1 is late with its random state, which each owner writes once the engine has saved."""
    import accelerate.accelerator
    import transformers

    module, name = {
        "accelerate": (accelerate.accelerator, "save_accelerator_state"),
        "trainer": (transformers.Trainer, "_save_rng_state"),
    }[by]
    write = getattr(module, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1 if os.environ["RANK"] == "1" else 0)
        return write(*args, **kwargs)

    with owners.served(), overridden([(module, name, late)]):
        Run(by, out, 2, 2).train(epochs=1)


@pytest.mark.short
@pytest.mark.parametrize(("by", "file"), [("accelerate", "random_states_1.pkl"), ("trainer", "rng_state_1.pth")])
def test_a_rank_that_is_late_with_its_files(ranks: Any, tmp_path: Path, by: str, file: str) -> None:
    ranks(2, with_a_late_rank, by=by, out=str(tmp_path))
    assert list(tmp_path.glob(f"*[04]/{file}"))
    assert not list(tmp_path.glob(".ds_frozen_patch-*"))


ON_EACH_NODE = {"checkpoint": {"use_node_local_storage": True}}
needs_nodes = pytest.mark.skipif(bool(nodes.why_unsupported()), reason=nodes.why_unsupported() or "-")


def on_a_node(this: ThisProcess, at: str, by: str) -> Any:
    options: dict[str, Any] = {"save_on_each_node": True} if by == "trainer" else {}
    if by == "accelerate":
        from accelerate.utils import ProjectConfiguration

        options = {"accelerator": {"project_config": ProjectConfiguration(save_on_each_node=True)}}
    with owners.served():
        whole = Run(by, f"{at}/run", 2, 2, PEFT, config=ON_EACH_NODE, **options)
        losses, state = whole.train()
        again = Run(by, f"{at}/run/again", 2, 2, PEFT, config=ON_EACH_NODE, **options)
        return again.train(whole.at(0)) == (losses[owners.STEPS :], state)


@needs_nodes
@by_each
def test_nodes_with_disks_of_their_own(tmp_path: Path, by: str) -> None:
    cluster = nodes.own_disks(tmp_path, 2)
    said = cluster.run(on_a_node, by=by)
    assert said == [("returned", True)] * 2, f"{said}\n{cluster.log()}"
    for files in cluster.files:
        assert len(list(files.glob("run/*[04]/**/*optim_states.pt"))) == 1
        assert not list(files.glob("run/.ds_frozen_patch-*"))


def closed_late_on_a_node(this: ThisProcess, at: str) -> tuple[float, float]:
    """When this node has removed what its save does not need any more, and when the save has returned."""
    close, closed = Publication._close, 0.0

    def late(place: Publication) -> None:
        nonlocal closed
        time.sleep(float(os.environ["RANK"]))
        close(place)
        closed = time.monotonic()

    with owners.served(), overridden([(Publication, "_close", late)]):
        Run("deepspeed", f"{at}/run", 2, 2, PEFT, config=ON_EACH_NODE).train(epochs=1)
    return closed, time.monotonic()


@needs_nodes
def test_a_save_returns_once_every_node_is_done(tmp_path: Path) -> None:
    cluster = nodes.own_disks(tmp_path, 2)
    closed, returned = zip(*(times for _, times in cluster.run(closed_late_on_a_node)), strict=True)
    assert max(closed) <= min(returned), cluster.log()


def failed_on_a_node(this: ThisProcess, at: str) -> Any:
    """What a save says whose files the second node cannot name, and what a load finds afterwards."""

    def fail(_: Publication) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with owners.served():
        run = Run("deepspeed", f"{at}/run", 2, 2, PEFT, config=ON_EACH_NODE)
        run.train_epoch()
        run.save(run.at(0))
        run.train_epoch()
        saved = runs.trained_state(run.module)
        with overridden([(Publication, "give_names", fail)] if os.environ["RANK"] == "1" else []):
            said = runs.refusal(run.save, run.at(0))
        other = Run("deepspeed", f"{at}/run", 2, 2, PEFT, config=ON_EACH_NODE)
        return said, runs.outcome(other.load, other.at(0)), runs.trained_state(other.module), saved


@pytest.mark.short
@needs_nodes
def test_a_save_that_one_node_cannot_name_loses_nothing(tmp_path: Path) -> None:
    cluster = nodes.own_disks(tmp_path, 2)
    for outcome, found in cluster.run(failed_on_a_node):
        assert outcome == "returned", (found, cluster.log())
        (kind, said), loaded, now, saved = found
        assert (kind, "Input/output error" in said) == ("CheckpointError", True)
        assert "was saved, but an error has followed" in said
        assert loaded == ("", "")
        assert now == saved
