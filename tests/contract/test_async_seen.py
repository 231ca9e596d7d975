"""Promise 26: to the process that saves asynchronously, a checkpoint is there when the save has returned.

Each test compares what is seen with the disk slow to what a synchronous save shows.
"""

from __future__ import annotations

import gc
import io
import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from kit import owners, runs
from kit.cell import TRAINER, Callback, ModelCheckpoint, pl
from kit.owners import PEFT, Run, writing
from kit.processes import RankError
from safetensors.torch import load_file

import ds_frozen_patch
from ds_frozen_patch import ranks as agreeing
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.frameworks.for_transformers import may_read
from ds_frozen_patch.publish import in_flight
from ds_frozen_patch.publish.journal import is_unfinished
from ds_frozen_patch.publish.publication import Publication

pytestmark = [pytest.mark.promise(26), pytest.mark.everyday]
SLOW = 0.7


def both_ways(
    ranks: Any, function: Callable[..., Any], out: Path, waits: bool = True, **arguments: Any
) -> tuple[Any, Any]:
    """What a function returns, and the names that it leaves in its folder, with a slow disk and synchronously."""
    found = []
    for way in (True, False):
        folder = out / "run"
        asked: dict[str, Any] = {"function": function, "waits": waits, "async_save": way, "arguments": arguments}
        seen = ranks(2, in_one_way, out=str(folder), **asked)
        found.append((seen, sorted(str(item.relative_to(folder)) for item in folder.rglob("*"))))
        folder.rename(out / ("async" if way else "sync"))
    return found[0], found[1]


def in_one_way(
    function: Callable[..., Any], out: str, async_save: bool, arguments: dict[str, Any], waits: bool = False
) -> Any:
    with owners.served(waits, async_save=async_save), writing(seconds=SLOW):
        seen = function(out, **arguments)
        ds_frozen_patch.wait()
    return seen


def problems(path: str | Path) -> Any:
    """What is wrong with a checkpoint in the eyes of a program that reads its files."""
    if not Path(path).is_dir():
        return "no folder"
    tags = [item for item in Path(path).iterdir() if item.is_dir() and not item.name.startswith("adapter")]
    if not Path(path, "latest").is_file() or any(map(is_unfinished, tags)):
        return "incomplete"
    return len(list(Path(path).rglob("*_states.pt")))


# Lightning


class Scored(runs.LoraRun):
    """Its metric is best at the first epoch, or step."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.log("score", float(self.seen), on_epoch=True, on_step=False)
        return loss


def kept_by_two_callbacks(out: str) -> Any:
    best = ModelCheckpoint(out, monitor="score", mode="min", save_top_k=1)
    newest = ModelCheckpoint(out, monitor="epoch", mode="max", save_top_k=1)
    runs.trainer(out, 2, 2, epochs=3, callbacks=[best, newest]).fit(Scored(), runs.batches(2))
    return best.best_model_path, newest.best_model_path


def named_like_what_was_removed(out: str) -> Any:
    """The second callback is free to use the name of what the first has just removed."""
    options: dict[str, Any] = {"auto_insert_metric_name": False, "monitor": "step", "mode": "max", "save_top_k": 1}
    first = ModelCheckpoint(out, filename="{step}", every_n_train_steps=1, **options)
    second = ModelCheckpoint(out, filename="1", every_n_train_steps=2, **options)
    runs.trainer(out, 2, 2, epochs=1, callbacks=[first, second]).fit(Scored(), runs.batches(2))
    return first.best_model_path, second.best_model_path


class Reading(pl.loggers.Logger):
    """Looks at each checkpoint that it is told of."""

    name, version = "reading", 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def log_metrics(self, *_: Any, **__: Any) -> None: ...

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.seen.append(problems(checkpoint_callback._last_checkpoint_saved))


def read_by_a_logger(out: str) -> Any:
    logger, callback = Reading(), ModelCheckpoint(out, filename="{epoch}", save_top_k=-1)
    trainer = runs.trainer(out, 2, 2, callbacks=[callback])
    trainer.loggers = [logger]
    trainer.fit(runs.LoraRun(), runs.batches(2))
    return logger.seen


class Copying(ModelCheckpoint):
    """Copies each checkpoint once it is saved."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if trainer.is_global_zero:
            shutil.copytree(filepath, f"{filepath}.copy")


def copied_by_a_subclass(out: str) -> Any:
    callback = Copying(out, filename="{epoch}", save_top_k=-1)
    runs.trainer(out, 2, 3, callbacks=[callback]).fit(runs.LoraRun(), runs.batches(2))
    torch.distributed.barrier()
    return [problems(Path(out, f"epoch={epoch}.ckpt.copy")) for epoch in (0, 1)]


class Removing(Callback):
    """Saves, and at once lets the strategy remove what it has saved, as Lightning's tuner does."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        path = f"{trainer.default_root_dir}/tuning.ckpt"
        trainer.save_checkpoint(path)
        trainer.strategy.remove_checkpoint(path)


def removed_at_once(out: str) -> None:
    runs.trainer(out, 2, 2, callbacks=[Removing()], enable_checkpointing=False).fit(runs.LoraRun(), runs.batches(2))


class Reporting(Callback):
    """As Ray Train's callback: saves, lets a storage copy what is there, and removes it, in one breath."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        place = Path(trainer.default_root_dir, "temporary")
        trainer.save_checkpoint(f"{place}/checkpoint.ckpt", weights_only=False)
        if trainer.is_global_zero:
            shutil.copytree(place, place.with_name(f"storage-{trainer.current_epoch}"))
        torch.distributed.barrier()
        if trainer.local_rank == 0:
            shutil.rmtree(place)


def reported(out: str) -> Any:
    trainer = runs.trainer(out, 2, 2, callbacks=[Reporting()], enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(2))
    return [problems(Path(out, f"storage-{epoch}", "checkpoint.ckpt")) for epoch in (0, 1)]


def seen_after_fit(out: str) -> Any:
    callback = ModelCheckpoint(out)
    runs.trainer(out, 2, 2, callbacks=[callback]).fit(runs.LoraRun(), runs.batches(2))
    return problems(callback.best_model_path)


# Trainer


class CopyingCallback(transformers.TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir, f"checkpoint-{state.global_step}")
            shutil.copytree(path, path.with_name(f"copy-{state.global_step}"))


def copied_by_a_callback(out: str) -> Any:
    run = Run("trainer", out, 2, 2)
    run.trainer.add_callback(CopyingCallback())
    run.train()
    torch.distributed.barrier()
    return [problems(Path(out, f"copy-{step}")) for step in (owners.STEPS, 2 * owners.STEPS)]


class GoesOn(transformers.Trainer):
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.found = problems(Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}"))


OF_TRL: dict[str, Any] = {"__name__": "trl.trainer.sft_trainer", "Trainer": transformers.Trainer}
exec(
    """
class SFTTrainer(Trainer):
    def _save_checkpoint(self, model, trial):
        self.create_model_card()
        super()._save_checkpoint(model, trial)

    def create_model_card(self): ...
""",
    OF_TRL,
)


def seen_by_a_wrapper(out: str) -> Any:
    """A program has put a function of its own in the place of the method."""
    run, found = Run("trainer", out, 2, 2), []
    save = run.trainer._save_checkpoint

    def save_and_look(*args: Any) -> None:
        save(*args)
        found.append(problems(Path(out, f"checkpoint-{run.trainer.state.global_step}")))

    run.trainer._save_checkpoint = save_and_look
    run.train()
    return found


SFTTrainer: Any = OF_TRL["SFTTrainer"]


class EndsThere(SFTTrainer):  # type: ignore[misc]
    """As the trainers of TRL, which write a model card before."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.in_flight = in_flight.is_any()
        return super().training_step(*args, **kwargs)


def seen_by_an_override(out: str) -> Any:
    run = Run("trainer", out, 2, 2)
    run.trainer.__class__ = GoesOn
    run.train(epochs=1)
    return run.trainer.found


def seen_after_train(out: str) -> Any:
    run = Run("trainer", out, 2, 2)
    run.trainer.train()
    return [problems(Path(out, f"checkpoint-{step}")) for step in (owners.STEPS, 2 * owners.STEPS)]


def not_waited_for(out: str) -> bool:
    run = Run("trainer", out, 2, 2)
    run.trainer.__class__ = EndsThere
    run.train()
    return bool(run.trainer.in_flight)


class Going(runs.LoraRun):
    """Sees whether a save is in flight while it trains."""

    in_flight = False

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.in_flight = self.in_flight or in_flight.is_any()
        return super().training_step(batch, index)


def not_waited_for_in_fit(out: str) -> bool:
    """With one of Lightning's own loggers, which must not read a folder either."""
    module, callback = Going(), ModelCheckpoint(out, filename="{epoch}", save_top_k=1, monitor="epoch", mode="max")
    trainer = runs.trainer(out, 2, 2, epochs=3, callbacks=[callback])
    trainer.loggers = [pl.loggers.CSVLogger(out)]
    trainer.fit(module, runs.batches(2))
    return module.in_flight


# Accelerate, Fabric and DeepSpeed alone


def added_to(out: str, by: str) -> None:
    """A program adds files to its folder as soon as the save has returned, over an earlier checkpoint too."""
    run = Run(by, out, 2, 2)
    place = Path(out) if by == "deepspeed" else Path(out, "a")
    for number in (1, 2):
        run.train_epoch()
        run.save(place / "a" if by == "deepspeed" else place)
        if torch.distributed.get_rank() == 0:
            (place / "tokenizer.json").write_text(str(number))
            for states in place.rglob("*_optim_states.pt"):
                (states.parent / f"notes-{number}.txt").touch()
            if not list(place.rglob("*_optim_states.pt")):  # they are only recorded yet
                (place / ("a" if by == "deepspeed" else "pytorch_model") / f"notes-{number}.txt").touch()
        torch.distributed.barrier()


def seen_at_once(out: str) -> Any:
    """What is there as soon as a save of each kind has returned, as by a program that then writes "complete"."""
    fabric = runs.fabric(2, 2)
    module, optimizer = runs.fabric_setup(fabric)
    found = []
    for number in range(2):
        fabric.save(f"{out}/{number}.ckpt", {"model": module, "optimizer": optimizer})
        found.append(problems(f"{out}/{number}.ckpt"))
    for by in ("deepspeed", "accelerate", "trainer"):
        run = Run(by, f"{out}/{by}", 2, 2, save_strategy="no") if by == "trainer" else Run(by, f"{out}/{by}", 2, 2)
        if by == "trainer":
            run.train(epochs=1)
        run.save(run.at(1))
        found += [is_unfinished(item.parent) for item in owners.model_files(Path(out, by))]
    return found


def let_go(out: str) -> Any:
    """A function that sets up, saves, and returns: nothing but the save holds the engine."""

    def use() -> None:
        fabric = runs.fabric(2, 2)
        module, optimizer = runs.fabric_setup(fabric)
        runs.fabric_epoch(fabric, module, optimizer)
        fabric.save(f"{out}/a.ckpt", {"model": module, "optimizer": optimizer})

    use()
    gc.collect()
    ds_frozen_patch.wait()
    return problems(f"{out}/a.ckpt")


class Pickled:
    """State that pickles itself by way of `torch.save`, as some tokenizers, samplers and metrics do."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __getstate__(self) -> Any:
        torch.save(self.values, made := io.BytesIO())
        return made.getvalue()

    def __setstate__(self, state: Any) -> None:
        self.values = torch.load(io.BytesIO(state))


def pickled(out: str) -> Any:
    run = Run("deepspeed", out, 2, 2)
    mine = Pickled(torch.arange(5))
    run.engine.save_checkpoint(out, tag="a", client_state={"mine": mine})
    mine.values.zero_()
    return run.engine.load_checkpoint(out, tag="a")[1]["mine"].values.tolist()


def in_another_folder(out: str) -> Any:
    """The program changes its current folder while a save to a relative path is in flight."""
    Path(out).mkdir(exist_ok=True)
    before = Path.cwd()
    torch.distributed.barrier()
    try:
        os.chdir(out)
        run = Run("deepspeed", "run", 2, 2)
        for _ in range(2):
            run.save(Path("run", "a"))
            os.chdir(out)
            ds_frozen_patch.wait()
        run.save(Path("run", "b"))
        os.chdir("/")
        ds_frozen_patch.wait()
    finally:
        os.chdir(before)
    return problems(Path(out, "run"))


CALLERS = [
    ("ModelCheckpoint.file_exists, of two callbacks", kept_by_two_callbacks, {}),
    ("ModelCheckpoint.file_exists, of what is to be removed", named_like_what_was_removed, {}),
    ("Logger.after_save_checkpoint", read_by_a_logger, {}),
    ("an override of ModelCheckpoint._save_checkpoint", copied_by_a_subclass, {}),
    ("Strategy.remove_checkpoint", removed_at_once, {}),
    ("a callback that saves, copies and removes", reported, {}),
    ("the end of fit()", seen_after_fit, {}),
    ("TrainerCallback.on_save", copied_by_a_callback, {}),
    ("an override of Trainer._save_checkpoint", seen_by_an_override, {}),
    ("a function in the place of Trainer._save_checkpoint", seen_by_a_wrapper, {}),
    ("the end of train()", seen_after_train, {}),
    ("a program that saves", seen_at_once, {}),
    ("files added after engine.save_checkpoint", added_to, {"by": "deepspeed"}),
    ("files added after Accelerator.save_state", added_to, {"by": "accelerate"}),
    ("wait(), with a Fabric that is gone", let_go, {}),
    ("engine.load_checkpoint, of state that uses torch.save", pickled, {}),
    ("wait(), in another current folder", in_another_folder, {}),
]
"""Whoever asks for, reads, adds to or removes a checkpoint after a save; loads and retention are in `test_async`."""
IN_NO_WAIT = (let_go, pickled, in_another_folder)
"""What does not read a checkpoint before it has called `wait()`."""
SHORT = (named_like_what_was_removed, read_by_a_logger, reported, copied_by_a_callback, pickled)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        pytest.param(function, arguments, id=name, marks=pytest.mark.short if function in SHORT else ())
        for name, function, arguments in CALLERS
    ],
)
def test_the_same_as_after_a_synchronous_save(
    ranks: Any, tmp_path: Path, function: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    one, other = both_ways(ranks, function, tmp_path, function not in IN_NO_WAIT, **arguments)
    assert one == other
    assert not list(tmp_path.rglob(".ds_frozen_patch-*"))


def names_after_the_wait(out: str) -> list[list[str]]:
    """What a rank finds twice, while what is no longer needed takes rank 0 long to remove."""
    close = Publication._close

    def close_late(self: Publication) -> None:
        time.sleep(SLOW)
        close(self)

    found = []
    with owners.served(async_save=True), overridden([(Publication, "_close", close_late)]):
        run = runs.trainer(out, 2, 2, epochs=1, enable_checkpointing=False)
        run.fit(runs.LoraRun(), runs.batches(2))
        for _ in range(2):  # to a new path, and over a checkpoint
            run.save_checkpoint(f"{out}/a.ckpt")
            ds_frozen_patch.wait()
            found += [sorted(str(item) for item in Path(out).rglob("*"))]
            torch.distributed.barrier()
            found += [sorted(str(item) for item in Path(out).rglob("*"))]
    return found


def test_nothing_is_removed_after_the_wait(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2, names_after_the_wait, out=str(tmp_path)):
        assert found == [found[0]] * 4
        assert found[0]


@pytest.mark.parametrize("function", [not_waited_for, not_waited_for_in_fit], ids=["trainer of TRL", "fit"])
def test_a_training_of_a_framework_does_not_wait(ranks: Any, tmp_path: Path, function: Callable[[str], bool]) -> None:
    (one, names), (other, names_then) = both_ways(ranks, function, tmp_path)
    assert (one, other) == ([True, True], [False, False])
    assert names == names_then


def test_a_wait_for_a_reader_is_logged_once(ranks: Any, tmp_path: Path) -> None:
    for function, reader in ((copied_by_a_callback, "CopyingCallback"), (reported, "Reporting.on_train_epoch_end")):
        logged, _ = ranks(2, heard_of_a_reader, out=str(tmp_path / function.__name__), function=function)
        (line,) = [text for text in logged if reader in text or ".on_train_epoch_end" in text]
        assert "Waited 0." in line
        assert "may read it" in line


def heard_of_a_reader(out: str, function: Callable[[str], Any]) -> list[str]:
    with owners.served(waits=True, async_save=True), writing(seconds=0.3), runs.heard("accelerate") as logged:
        function(out)
    return [text for text in logged if "no_wait" in text]


# Tools


def consolidated(path: str, out: str) -> Any:
    ds_frozen_patch.consolidate(path, f"{out}.bin")
    return torch.load(f"{out}.bin", weights_only=True)["state_dict"]


def loaded_into_a_module(path: str, _: str) -> Any:
    module = owners.model(PEFT, 1)
    ds_frozen_patch.load_trainable(module, path)
    return dict(module.named_parameters())


def exported(path: str, out: str) -> Any:
    ds_frozen_patch.export(path, out)
    return load_file(out)


def pruned(path: str, out: str) -> Any:
    ds_frozen_patch.prune(path, out)
    return consolidated(out, out)


def resharded(path: str, out: str) -> Any:
    ds_frozen_patch.reshard(path, out, ranks=1)
    return consolidated(out, out)


def converted_by_lightning(path: str, out: str) -> Any:
    converter: Any = __import__(f"{TRAINER}.utilities.deepspeed", fromlist=["x"])
    return converter.convert_zero_checkpoint_to_fp32_state_dict(path, f"{out}.bin")["state_dict"]


def verified(path: str, _: str) -> Any:
    assert not ds_frozen_patch.verify(path, "verified").problems
    return "verified"


TOOLS: dict[str, Callable[[str, str], Any]] = {
    "consolidated": consolidated,
    "loaded into a module": loaded_into_a_module,
    "exported": exported,
    "pruned": pruned,
    "resharded": resharded,
    "converted by Lightning": converted_by_lightning,
    "converted by DeepSpeed": lambda path, _: get_fp32_state_dict_from_zero_checkpoint(path),
    "inspected": lambda path, _: ds_frozen_patch.inspect(path).tag,
    "verified": verified,
}


def read_at_once(out: str) -> Any:
    """What each tool says of a parameter, or of the tag, just after a save over an earlier checkpoint."""
    found = []
    run = Run("deepspeed", out, 2, 2)
    run.engine.save_checkpoint(f"{out}/run", tag="a")
    name = next(name for name, parameter in run.module.named_parameters() if parameter.requires_grad)
    for what, tool in TOOLS.items():
        run.train_epoch()
        tag = what if what in ("inspected", "verified") else "a"
        with ds_frozen_patch.full_checkpoint() if what == "pruned" else nullcontext():
            run.engine.save_checkpoint(f"{out}/run", tag=tag)
        if torch.distributed.get_rank() == 0:
            seen = tool(f"{out}/run", f"{out}/{what}")
            value = run.module.state_dict()[name].float()
            is_new = seen == tag if isinstance(seen, str) else any(map(value.equal, seen.values()))
            found.append((what, is_new))
        torch.distributed.barrier()
    return found


@pytest.mark.short
def test_tools_read_what_was_just_saved(ranks: Any, tmp_path: Path) -> None:
    found = ranks(2, in_one_way, function=read_at_once, out=str(tmp_path), async_save=True, arguments={})[0]
    assert found == [(what, True) for what in TOOLS]


# Ends


def patient(out: str, is_there: bool) -> None:
    """Rank 0 ends by an error; rank 1 writes for longer than rank 0 would wait for one that is gone."""
    limits = [(agreeing, "GRACE_SECONDS", 1.0), (agreeing, "BEAT_SECONDS", 0.1)]
    limits += [(agreeing, "LOST_SECONDS", 3600.0)]  # the limit without an error: longer than the test may take
    with owners.served(async_save=True), writing(seconds=3, rank=1), overridden(limits):
        run = Run("deepspeed", out, 2, 2)
        is_gone = not is_there and torch.distributed.get_rank() == 1
        with overridden([(in_flight, "start", lambda *_: os._exit(9))] if is_gone else []):
            run.engine.save_checkpoint(out, tag="a")
        in_flight.settle_at_end()
        ds_frozen_patch.wait()


def test_a_slow_rank_is_waited_for_after_an_error(ranks: Any, tmp_path: Path) -> None:
    ranks(2, patient, out=str(tmp_path), is_there=True)
    assert (tmp_path / "latest").read_text() == "a"


def test_a_rank_that_is_gone_is_given_up_soon_after_an_error(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, patient, out=str(tmp_path), is_there=False)
    assert caught.value.raised[0] is not None
    assert "rank 1 is gone" in caught.value.raised[0][1]


def waited_in_a_forked_process(out: str) -> Any:
    run = Run("deepspeed", out, 2, 2)
    run.engine.save_checkpoint(out, tag="a")
    if (child := os.fork()) == 0:
        status = 1
        with suppress(BaseException):
            assert is_unfinished(Path(out, "a"))
            ds_frozen_patch.wait()
            assert not is_unfinished(Path(out, "a"))
            status = 0
        os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.short
def test_a_forked_process_waits_too(ranks: Any, tmp_path: Path) -> None:
    arguments = {"function": waited_in_a_forked_process, "out": str(tmp_path), "async_save": True, "arguments": {}}
    assert ranks(2, in_one_way, **arguments) == [0, 0]


# What may read


def made(name: str, **values: Any) -> Any:
    """A callback of transformers, which need not have its service."""
    cls = getattr(transformers.integrations.integration_utils, name)
    callback = cls.__new__(cls)
    vars(callback).update({"_initialized": False, "_auto_end_run": False, **values})
    return callback


def test_callbacks_of_transformers() -> None:
    level = transformers.integrations.integration_utils.WandbLogModel
    cases: list[tuple[str, str, Any, bool]] = [
        ("WandbCallback", "_log_model", level.FALSE, False),
        ("WandbCallback", "_log_model", level.END, False),
        ("WandbCallback", "_log_model", level.CHECKPOINT, True),
    ]
    switches = [("MLflowCallback", "_log_artifacts"), ("ClearMLCallback", "_log_model")]
    switches.append(("FlyteCallback", "sync_checkpoints"))
    cases += [(cls, name, is_on, is_on) for cls, name in switches for is_on in (False, True)]
    for cls, name, value, reads in cases:
        assert may_read(made(cls, **{name: value})) is reads, (cls, value)
    assert not may_read(transformers.ProgressCallback())
    assert may_read(CopyingCallback())
