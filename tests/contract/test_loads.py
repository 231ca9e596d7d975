"""Promise 24: nothing that we saved, and nothing that plain DeepSpeed loads strictly, is refused."""

from __future__ import annotations

import collections
import datetime
import enum
import fractions
import functools
import gc
import importlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from kit import owners, runs
from kit.cell import TRAINER, Callback, ModelCheckpoint
from kit.checkpoints import flip, model_states, refresh, rewrite_record
from kit.owners import Run

import ds_frozen_patch
from ds_frozen_patch import verify
from ds_frozen_patch.checkpoint.format import archive
from ds_frozen_patch.checkpoint.zero import layout
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.common.overrides import overridden

pytestmark = [pytest.mark.promise(24), pytest.mark.everyday, pytest.mark.once]

INFO = {"universal_checkpoint_version": 0.2, "vocabulary_parameter_patterns": ["lm_head"]}


def by_rank_0(change: Callable[[], object]) -> None:
    """Call a function on rank 0, while no other rank goes on."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        change()
    torch.distributed.barrier()


def tagged(out: str, tag: Any) -> tuple[bool, Any]:
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        run.train_epoch()
        run.engine.save_checkpoint(out, tag=tag, client_state={"universal_checkpoint_info": INFO, "mine": 1})
        other = Run("deepspeed", out, 2, 2)
        _, state = other.engine.load_checkpoint(out, tag=tag)
        return other.seen()[1] == run.seen()[1], state


@pytest.mark.short
@pytest.mark.parametrize("tag", [5, 0.25, "a/b"])
def test_any_tag_and_any_key_of_the_client_state(ranks: Any, tmp_path: Path, tag: Any) -> None:
    for is_same, state in ranks(2, tagged, out=str(tmp_path), tag=tag):
        assert is_same
        assert state["universal_checkpoint_info"] == INFO
        assert not [key for key in state if key.startswith("ds_frozen_patch")]


def with_one_more_file(out: str) -> list[str]:
    with owners.served(), runs.heard() as heard:
        run = Run("deepspeed", out, 2, 2)
        if torch.distributed.get_rank() == 0:
            run.at(0).mkdir()
            run.at(0).joinpath("ema_model_states.pt").touch()  # of the program
        torch.distributed.barrier()
        run.train(epochs=1)
        run.save(run.at(0))  # again, over the first
        if torch.distributed.get_rank() == 0:
            run.at(0).joinpath("ema_model_states.pt").unlink()
            (first, *_) = owners.model_files(run.at(0))
            first.with_name("backup_model_states.pt").write_bytes(first.read_bytes())
        torch.distributed.barrier()
        Run("deepspeed", out, 2, 2).load(run.at(0))
        shard = sorted(run.at(0).glob("*optim_states.pt"))[-1]
        by_rank_0(lambda: flip(shard))
        _, said = runs.refusal(Run("deepspeed", out, 2, 2).load, run.at(0))
    return [said, *(message for message in heard if "backup_model_states.pt" in message)]


def test_one_more_file_turns_no_check_off(ranks: Any, tmp_path: Path) -> None:
    (said, *told), _ = ranks(2, with_one_more_file, out=str(tmp_path))
    assert "is damaged" in said
    assert told


def without_optimizer(out: str, stage: int) -> bool:
    with owners.served():
        run = Run("deepspeed", out, 2, stage)
        run.train(epochs=1)
        module = owners.model(owners.PEFT, 1)
        config = {"train_micro_batch_size_per_gpu": 1}
        engine = deepspeed.initialize(model=module, config=config)[0]
        ds_frozen_patch.serve(engine)
        engine.load_checkpoint(out, tag=run.at(0).name)
        return bool(runs.trained_state(module) == run.seen()[1])


def test_an_engine_without_an_optimizer(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, without_optimizer, out=str(tmp_path), stage=2) == [True, True]


class Wider(runs.LoraRun):
    """Nothing is frozen, or a module that no checkpoint of that has."""

    def __init__(self, is_wider: bool) -> None:
        super().__init__()
        self.requires_grad_(True)
        if is_wider:
            self.added = torch.nn.Linear(2, 2).requires_grad_(False)


def onto_a_wider_one(out: str, stage: int) -> tuple[str, str]:
    data = runs.batches(2)
    if stage == 1:  # where files of others do not tell whether they are full
        ds_frozen_patch.patch()
    runs.trainer(out, 2, stage, epochs=1).fit(Wider(False), data)
    ds_frozen_patch.patch()
    return runs.refusal(runs.trainer(out, 2, stage).fit, Wider(True), data, ckpt_path=f"{out}/epoch=0.ckpt")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_full_checkpoint_may_lack_nothing(ranks: Any, tmp_path: Path, stage: int) -> None:
    for kind, said in ranks(2, onto_a_wider_one, out=str(tmp_path), stage=stage):
        assert (kind, "Missing key(s) in state_dict" in said, "added.weight" in said) == ("RuntimeError", True, True)


def unreadable_on_one(out: str) -> tuple[str, str]:
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        run.train(epochs=1)

        def fail(file: Path) -> Any:
            raise PermissionError(13, "Permission denied", str(file))

        is_first = torch.distributed.get_rank() == 0
        with overridden([(layout, "open_regular", fail)] if is_first else []):
            return runs.refusal(Run("deepspeed", out, 2, 2).engine.load_checkpoint, out)


def test_an_error_of_one_rank_is_raised_on_all(ranks: Any, tmp_path: Path) -> None:
    for kind, said in ranks(2, unreadable_on_one, out=str(tmp_path)):
        assert (kind, "Permission denied" in said) == ("CheckpointError", True)


def nothing_to_load(out: str) -> list[Any]:
    def load(folder: str) -> Any:
        return Run("deepspeed", out, 2, 2).engine.load_checkpoint(folder)

    Path(out, "empty").mkdir(exist_ok=True)
    plain = load(f"{out}/empty")
    with owners.served():
        return [plain, load(f"{out}/empty"), load(f"{out}/missing"), load(out)]


@pytest.mark.short
def test_a_program_may_begin_with_a_load_of_nothing(ranks: Any, tmp_path: Path) -> None:
    for plain, *served in ranks(2, nothing_to_load, out=str(tmp_path)):
        assert plain[0] is None
        assert served == [plain] * 3


def loaded_in_silence(out: str) -> list[str]:
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        run.train_epoch()
        run.save(run.at(0))
        with runs.heard() as heard:
            Run("deepspeed", out, 2, 2).load(run.at(0))
            Run("deepspeed", out, 2, 2).load(run.at(0), load_module_only=True)
    return [message for message in heard if message.startswith("WARNING")]


@pytest.mark.short
def test_a_load_of_the_same_run_or_of_weights_alone_warns_of_nothing(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, loaded_in_silence, out=str(tmp_path)) == [[], []]


def collected(out: str) -> None:
    ds_frozen_patch.patch()
    made = runs.fabric(2, 2)
    module = owners.model(owners.BY_HAND, 1)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    model, optimizer = made.setup(module, torch.optim.AdamW(trained))
    strategy: Any = made.strategy
    engine, gone = strategy.model, ref(strategy)
    del made, model, optimizer, strategy
    gc.collect()
    assert gone() is None
    engine.save_checkpoint(out, tag="checkpoint")


def test_an_engine_outlives_its_fabric(ranks: Any, tmp_path: Path) -> None:
    ranks(2, collected, out=str(tmp_path))
    (state, *_) = model_states(tmp_path)
    assert "count" in state["module"]
    assert not [name for name in state["module"] if "embed_tokens" in name]


def from_files(out: str) -> list[str]:
    ds_frozen_patch.patch()
    data = runs.batches(2)
    files = ModelCheckpoint(f"{out}/checkpoint", filename="{epoch}", save_weights_only=True)
    runs.trainer(out, 2, 2, epochs=1, callbacks=[files]).fit(runs.LoraRun(), data)
    other = Path(out, "other.ckpt")
    if torch.distributed.get_rank() == 0:
        content = torch.load(f"{out}/checkpoint/epoch=0.ckpt", weights_only=False)
        torch.save({**content, "optimizer_states": [{}], "lr_schedulers": [{}]}, other)
    torch.distributed.barrier()
    with runs.heard() as heard:
        for file in (f"{out}/checkpoint/epoch=0.ckpt", str(other)):
            runs.trainer(f"{out}/again", 2, 2, epochs=1).fit(runs.LoraRun(), data, ckpt_path=file)
    return [said for said in heard if "starts from the weights" in said]


def test_single_files(ranks: Any, tmp_path: Path) -> None:
    """In a folder called as DeepSpeed's tag; and one of another strategy, which has more than the weights."""
    own, other = ranks(2, from_files, out=str(tmp_path))[0]
    assert own.startswith("INFO")
    assert other.startswith("WARNING")
    assert "of another strategy" in other


class Settings:
    class Kind(enum.Enum):
        ONE = 1

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


SIMPLE: list[Callable[[random.Random], Any]] = [
    lambda chance: chance.choice([None, True, "", "ü\0", b"\0", 1j, ..., int, len, torch.bfloat16, Settings.Kind.ONE]),
    lambda chance: chance.randint(-2, 2) * 7 ** chance.choice([1, 30, 300, 3000]),
    lambda chance: chance.random() * 10 ** chance.randint(-300, 300),
    lambda chance: Path("/", str(chance.random())),
    lambda chance: chance.choice([np.float32, np.int64, np.bool_])(chance.randint(0, 9)),
    lambda chance: functools.partial(int, base=chance.randint(2, 9)),
    lambda chance: set(chance.sample(range(10**6), chance.choice([0, 3, 60_000]))),
    lambda chance: {(str(number), chance.random()): number for number in range(chance.choice([3, 3000]))},
    lambda chance: nested(chance.choice([3, 200])),
    lambda chance: datetime.date(2026, 1, chance.randint(1, 30)),
    lambda chance: fractions.Fraction(chance.randint(1, 9), 7),
]
WITHIN: list[Callable[[list[Any]], Any]] = [
    list,
    tuple,
    lambda items: dict(enumerate(items)),
    lambda items: {f"key {number}": item for number, item in enumerate(items)},
    Settings,
    collections.deque,
    lambda items: collections.OrderedDict(enumerate(items)),
    lambda items: collections.defaultdict(list, {Settings.Kind.ONE: items}),
]


def each_kind() -> list[Any]:
    """Every kind of value, in several sizes, and every kind of container."""
    simple = [make(random.Random(seed)) for make in SIMPLE for seed in range(20 if make is SIMPLE[0] else 6)]
    return [make(simple if make is list else [1j, Settings.Kind.ONE]) for make in WITHIN]


def made_up(chance: random.Random, depth: int = 0) -> Any:
    """Some value that a program may keep, of values within values."""
    if depth == 4 or chance.random() < 0.3:
        return chance.choice(SIMPLE)(chance)
    return chance.choice(WITHIN)([made_up(chance, depth + 1) for _ in range(chance.randint(0, 4))])


def are_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial):
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    if isinstance(one, Settings):
        return are_same(one.value, other.value)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other)


class Carrying(runs.LoraRun):
    """Keeps a value of its own in each checkpoint: in its hyper-parameters, and beside them."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.save_hyperparameters({"mine": value})
        self.value = value
        self.found: list[Any] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.value

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found += [checkpoint["mine"], checkpoint["hyper_parameters"]["mine"]]


class Keeping(Callback):
    """Keeps it too."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"mine": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["mine"]


def carried(out: str, stage: int, what: str) -> dict[str, Any]:
    value = each_kind() if what == "each" else made_up(random.Random(what))
    ds_frozen_patch.patch()
    data = runs.batches(2)
    module, again, callback = Carrying(value), Carrying(None), Keeping(None)
    kept = ModelCheckpoint(out, filename="{epoch}", save_top_k=-1)
    trainer = runs.trainer(out, 2, stage, epochs=1, callbacks=[kept, Keeping(value)])
    trainer.fit(module, data)
    other = runs.trainer(f"{out}/again", 2, stage, epochs=1, callbacks=[callback])
    other.fit(again, data, ckpt_path=f"{out}/epoch=0.ckpt")
    found: dict[str, Any] = {"same": [are_same(value, one) for one in (*again.found, callback.value)]}
    found["state"] = runs.trained_state(module) == runs.trained_state(again)
    if stage and trainer.is_global_zero:
        convert = importlib.import_module(f"{TRAINER}.utilities.deepspeed").convert_zero_checkpoint_to_fp32_state_dict
        # Lightning's own, which goes on, cannot load classes before 2.6.0 with torch 2.6.
        assert runs.outcome(convert, f"{out}/epoch=0.ckpt", f"{out}/whole.ckpt")[0] in ("", "UnpicklingError")
    shard = sorted(Path(out, "epoch=0.ckpt", "checkpoint").glob("*model_states.pt"))[-1]
    trainer.strategy.barrier()
    if trainer.is_global_zero:  # the checks still run
        state = torch.load(shard, weights_only=False)
        torch.save({**state, "ds_frozen_patch": "another"}, shard)
        refresh(shard.parent)
    trainer.strategy.barrier()
    if stage:
        fit = runs.trainer(f"{out}/again", 2, stage, epochs=1).fit
        found["said"] = runs.refusal(fit, Carrying(value), data, ckpt_path=f"{out}/epoch=0.ckpt")[1]
    return found


def check_carried(ranks: Any, **arguments: Any) -> None:
    for found in ranks(2, carried, **arguments):
        assert found.pop("same") == [True] * 3
        assert found.pop("state")
        assert "is of another save" in found.pop("said", "is of another save")
        assert found == {}


@pytest.mark.parametrize("stage", [0, 3])
def test_whatever_was_saved_is_loaded(ranks: Any, tmp_path: Path, stage: int) -> None:
    check_carried(ranks, out=str(tmp_path), stage=stage, what="each")


@pytest.mark.parametrize("stage", [1, 2])
def test_any_value(ranks: Any, tmp_path: Path, stage: int, pytestconfig: pytest.Config) -> None:
    for number in range(30 if pytestconfig.getoption("--faults") else 2):
        check_carried(ranks, out=str(tmp_path / str(number)), stage=stage, what=f"seed {number} in stage {stage}")


# The record


class OfOneRank:
    """Cannot be unpickled on rank 1, as where a node lacks a package."""

    def __init__(self, raises: bool = False) -> None:
        assert not raises or torch.distributed.get_rank() == 0, "there is no such package on this node"

    def __reduce__(self) -> Any:
        return OfOneRank, (True,)


def read_by(load: Any) -> list[tuple[str, bool]]:
    """Load, and return the files that were unpickled meanwhile, and whether the engine's reader did it."""
    within, found = [False], []
    read, unpickle = TorchCheckpointEngine.load, torch.load

    def by_the_engine(*args: Any, **kwargs: Any) -> Any:
        within[0] = True
        try:
            return read(*args, **kwargs)
        finally:
            within[0] = False

    def by_torch(file: Any, *args: Any, **kwargs: Any) -> Any:
        found.append((Path(file).name, within[0]))
        return unpickle(file, *args, **kwargs)

    def by_us(file: Path, *args: Any, **kwargs: Any) -> Any:
        found.append((file.name, False))
        return read_archive(file, *args, **kwargs)

    read_archive = archive.unpickle
    with overridden(
        [(TorchCheckpointEngine, "load", by_the_engine), (torch, "load", by_torch), (archive, "unpickle", by_us)]
    ):
        runs.outcome(load)
    return found


def reads(out: str, stage: int) -> Any:
    with owners.served(), runs.heard() as heard:
        run = Run("deepspeed", out, 2, stage)
        run.train(epochs=1)
        place = run.at(0)
        found: dict[str, Any] = {"usual": read_by(lambda: Run("deepspeed", out, 2, stage).load(place))}
        found["another base"] = read_by(lambda: Run("deepspeed", out, 2, stage, seed=7).load(place))
        by_rank_0((place / RECORD).unlink)
        found["no record"] = read_by(lambda: Run("deepspeed", out, 2, stage).load(place))
        found["said"] = [message for message in heard if "cannot be verified" in message]
        run.engine.save_checkpoint(out, tag="odd", client_state={"epoch": 1, "mine": OfOneRank()})
        found["one rank"] = runs.refusal(Run("deepspeed", out, 2, stage).load, Path(out, "odd"))
        return found


@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed_is_the_first_to_unpickle(ranks: Any, tmp_path: Path, stage: int) -> None:
    """The base is compared before. Without the record, nothing is, and a warning says so."""
    for rank, found in enumerate(ranks(2, reads, out=str(tmp_path), stage=stage)):
        assert found["usual"]
        assert {by_the_engine for _, by_the_engine in found["usual"]} == {True}
        assert found["another base"] == []
        assert found["no record"] == found["usual"]
        assert len(found["said"]) == (rank == 0)
        kind, said = found["one rank"]
        assert kind == "CheckpointError"
        assert "odd" in said
        assert "there is no such package on this node" in said


def lost_record(out: str, stage: int) -> Any:
    """A program copies the files of states alone; some frozen parameters are in them."""
    with owners.served(keep=["*norm*", "*.k_proj.base_layer.*"]), runs.heard() as heard:
        run = Run("deepspeed", out, 2, stage)
        run.train(epochs=1)
        place, found = run.at(0), dict[str, Any]()
        by_rank_0((place / RECORD).unlink)
        again = Run("deepspeed", out, 2, stage)
        again.load(place)
        found["same"] = again.seen()[1] == run.seen()[1]
        found["said"] = [message for message in heard if "cannot be verified" in message]
        again.train_epoch()
        again.save(again.at(1))
        by_rank_0((again.at(1) / RECORD).unlink)
        shard = owners.model_files(place)[-1].name
        by_rank_0(lambda: shutil.copy(again.at(1) / shard, place / shard))
        found["mixed"] = runs.outcome(Run("deepspeed", out, 2, stage).load, place)
        return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_without_its_record(ranks: Any, tmp_path: Path, stage: int) -> None:
    """Each frozen parameter may be missing, since nobody knows which were left out; one warning says so."""
    for rank, found in enumerate(ranks(2, lost_record, out=str(tmp_path), stage=stage)):
        assert found["same"]
        assert len(found["said"]) == (rank == 0)
        assert f"has no {RECORD} beside its files" in "".join(found["said"] or [f"has no {RECORD} beside its files"])
        if stage == 3:  # each rank has a file of model states, which names its save
            assert "has files of more than one save" in found["mixed"][1]


def without_optimizer_files(out: str) -> Any:
    """Some remove them, to keep the weights alone."""
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        run.train(epochs=1)
        place = run.at(0)
        by_rank_0(lambda: list(map(Path.unlink, place.glob("*_optim_states.pt"))))
        other = Run("deepspeed", out, 2, 2)
        other.load(place, load_module_only=True)
        return other.seen()[1] == run.seen()[1], runs.refusal(Run("deepspeed", out, 2, 2).load, place)


def test_weights_load_without_the_optimizer_files(ranks: Any, tmp_path: Path) -> None:
    for is_same, (kind, said) in ranks(2, without_optimizer_files, out=str(tmp_path)):
        assert is_same
        assert kind == "CheckpointError"
        assert "lacks 'zero_pp_rank_0_mp_rank_00_optim_states.pt', 'zero_pp_rank_1" in said


def edited_record(out: str, changes: dict[str, Any]) -> Any:
    """A record of another save, whose digest fits it."""
    with owners.served():
        run = Run("deepspeed", out, 2, 2)
        run.train(epochs=1)
        place = run.at(0)
        by_rank_0(lambda: rewrite_record(place, lambda values: values.update(changes)))
        return runs.refusal(Run("deepspeed", out, 2, 2).load, place), verify(out, tag=place.name).problems


@pytest.mark.parametrize("changes", [{"save": "another"}, {"world_size": 4}], ids=str)
def test_a_record_of_another_save(ranks: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    """A load and `verify` have one check for it."""
    for (kind, said), problems in ranks(2, edited_record, out=str(tmp_path), changes=changes):
        assert kind in ("CheckpointError", "CheckpointMismatchError")
        assert "save" in changes or "world size" in said or "another save than" in said
        assert any(f"is of another save than {RECORD} beside it" in problem for problem in problems)


def edited_files(out: str, verify_files: bool) -> Any:
    """A program that changes a file of states in place, as some do to rename keys."""
    with owners.served(verify_files=verify_files):
        run = Run("deepspeed", out, 2, 2)
        run.train(epochs=1)
        place = run.at(0)
        (file,) = place.glob("*model_states.pt")
        by_rank_0(lambda: torch.save({**torch.load(file, weights_only=False), "mine": 5}, file))
        first = runs.outcome(Run("deepspeed", out, 2, 2).load, place)
        by_rank_0((place / RECORD).unlink)
        Run("deepspeed", out, 2, 2).load(place)
        return first


@pytest.mark.parametrize("verify_files", [True, False])
def test_a_changed_file(ranks: Any, tmp_path: Path, verify_files: bool) -> None:
    for kind, said in ranks(2, edited_files, out=str(tmp_path), verify_files=verify_files):
        if not verify_files:
            assert kind == ""
            continue
        assert kind == "CheckpointError"
        assert "mp_rank_00_model_states.pt is of another save" in said
        assert "remove that record" in said
