"""Hugging Face's Trainer, whose engines are Accelerate's: the wrappers of its methods and of one function.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..common.names import Names
from ..common.overrides import Attributes, overridden
from ..common.probing import Finding, Target
from ..engine.served import attached
from ..publish import in_flight
from ..publish.journal import is_not_whole
from ..publish.publication import is_local
from ..settings import current as settings
from .around import Around
from .plain import last_whole, logger_of, numbered

_WRITERS = ("_save", "_save_rng_state")
"""Methods that write a part of a checkpoint, none of which waits for other ranks."""
_WRITERS_OF_SOME = ("_save_scaler",)
"""More of them, which not every release has."""

_UPLOADS = ("_log_artifacts", "_log_model", "_should_upload_checkpoint", "sync_checkpoints")
"""The attributes by which callbacks of transformers upload each checkpoint: those for MLflow, for W&B, ClearML, DVCLive
and SwanLab, for Neptune, and for Flyte."""
_OFF = (None, False, "false", "end")
_STATE = "trainer_state.json"
"""The last file of a checkpoint; without it, Trainer does not resume."""
_PREFIX = "checkpoint-"
_WEIGHTS = (".safetensors", ".bin")
_BESIDE = ("_save", "create_model_card", "save_metrics", "save_model", "save_state")
"""Methods of Trainer that write to `output_dir`, and not only when it saves a checkpoint."""
_READ = ("README.md", "all_results.json")
"""Files in `output_dir` that these methods update."""


NAMES = Names()
_uses = NAMES.uses


def load_checkpoint(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`deepspeed_load_checkpoint`: strict for PEFT too, since what may be missing is known.

    It looks for the folder itself, which may not have its name yet, or is at an address.
    """
    in_flight.wait()
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    served = attached(call.arguments.get("deepspeed_engine"))
    if "load_module_strict" in call.arguments and served is not None:
        call.arguments["load_module_strict"] = True
    with ExitStack() as stack:
        if served is not None and not is_local(path := call.arguments["checkpoint_path"]):
            from .remote import Readers

            brought = Readers(served.owner.device, path).brought(_WEIGHTS)
            call.arguments["checkpoint_path"] = stack.enter_context(brought)
        return wrapped(*call.args, **call.kwargs)


@_uses("Trainer", "args?", "is_deepspeed_enabled?", "state")
@_uses("TrainingArguments", "device", "output_dir?", "save_total_limit", "should_save")
@_uses("TrainerState", "best_model_checkpoint")
def train(wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Trainer.train`: what it resumes from at an address is brought down, but for what its engine reads."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    output = getattr(getattr(trainer, "args", None), "output_dir", None) or ""
    resume = call.arguments.get("resume_from_checkpoint")
    path = str(output if resume is True else resume)
    if not getattr(trainer, "is_deepspeed_enabled", False) or (is_local(path) and is_local(output)):
        return wrapped(*args, **kwargs)
    from ..buckets import file_system
    from .remote import Readers, remove_old

    in_flight.wait()
    _leave_no_folder(trainer, output)
    if not is_local(output):
        file_system(output)  # so that a missing library raises now, and not at the first save
    with ExitStack() as stack:
        if not is_local(path):
            device = trainer.args.device
            path = Readers(device, path).newest(_PREFIX, _STATE, "transformers") if resume is True else path
            place = stack.enter_context(Readers(device, path).brought(_WEIGHTS))
            call.arguments["resume_from_checkpoint"] = place
            stack.enter_context(overridden(_keeping_best(trainer, Path(place, _STATE))))
        result = wrapped(*call.args, **call.kwargs)
    best = trainer.state.best_model_checkpoint
    if not is_local(best) and trainer.args.save_total_limit == 1 and trainer.args.should_save:
        remove_old(Path(best), _PREFIX, 1)  # as Trainer does, which has kept the last one to resume from
    _leave_no_folder(trainer, output)
    return result


@_uses("Trainer", "args?", "is_deepspeed_enabled?")
@_uses("TrainingArguments", "output_dir?", "should_save")
def write(wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Trainer.save_model`, and what else of it writes to `output_dir`: at an address, that is uploaded.

    The ranks do not agree on it, since a program may call it on one of them only.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    output = str(call.arguments.get("output_dir") or getattr(getattr(trainer, "args", None), "output_dir", None) or "")
    if not getattr(trainer, "is_deepspeed_enabled", False) or is_local(output):
        return wrapped(*args, **kwargs)
    from .remote import uploading

    with uploading(output, *(_READ if trainer.args.should_save else ())) as place:
        if "output_dir" in call.signature.parameters:
            call.arguments["output_dir"] = place  # in `args` it would be saved
            result = wrapped(*call.args, **call.kwargs)
        else:
            with overridden([(trainer.args, "output_dir", place)]):
                result = wrapped(*args, **kwargs)
    _leave_no_folder(trainer, output)
    return result


@_uses("TrainingArguments", "should_save")
def _leave_no_folder(trainer: Any, output: str) -> None:
    """Remove the local folder that Trainer creates under the name of an address; warn if it is not empty."""
    if is_local(output):
        return
    with suppress(OSError):  # it is not there, or not empty
        os.removedirs(output)
    if trainer.args.should_save and Path(output).exists():
        logger_of("transformers").warning(
            "%s is also a folder on this machine: a callback or a subclass of Trainer has written to it as if the"
            " address were a local path. What is in it is not uploaded.",
            output,
        )


@_uses("Trainer", "_load_callback_state?", "state")
@_uses("TrainerState", "best_model_checkpoint")
def _keeping_best(trainer: Any, file: Path) -> Attributes:
    """What lets a resumed Trainer know the best checkpoint at an address; since 5 it looks for it on this machine."""
    if not file.exists() or not hasattr(trainer, "_load_callback_state"):
        return []
    state, original = json.loads(file.read_text(encoding="utf-8")), trainer._load_callback_state
    file.write_text(json.dumps({**state, "best_model_checkpoint": None}), encoding="utf-8")

    def restore() -> None:
        trainer.state.best_model_checkpoint = state["best_model_checkpoint"]
        original()

    return [(trainer, "_load_callback_state", restore)]


@_uses("Trainer", "_get_output_dir", "callback_handler", "model_wrapped", "state")
@_uses("TrainerState", "best_model_checkpoint", "global_step")
@_uses("CallbackHandler", "callbacks")
@_uses("transformers.trainer", "PREFIX_CHECKPOINT_DIR")
def save_checkpoint(wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Trainer._save_checkpoint`: an error of one rank is raised on all, and what it writes is synced.

    The removal of older checkpoints follows after that, and uploads after a save in flight.
    """
    served = attached(getattr(trainer, "model_wrapped", None))  # which Trainers of others set later
    if served is None:
        return wrapped(*args, **kwargs)
    trial = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("trial")
    prefix = sys.modules["transformers.trainer"].PREFIX_CHECKPOINT_DIR
    folder = Path(trainer._get_output_dir(trial=trial), f"{prefix}-{trainer.state.global_step}")
    later = list[Callable[[], Any]]()
    peft = sys.modules.get("peft")  # of whose models Trainer itself leaves out what is frozen, merged or not
    is_peft = peft is not None and isinstance(trainer.model, peft.PeftModel)
    with Around(served.owner, folder, _STATE) as around:
        with overridden([*_replacements(trainer, around, later), (served, "undoes_merges", is_peft)]):
            result = wrapped(*args, **kwargs)
        if _saves_the_best(trainer) or trainer.state.best_model_checkpoint == str(around.folder):
            trainer.state.best_model_checkpoint = around.shown
        around.end(served)
    for call in later:
        in_flight.afterwards(call)
    for callback in trainer.callback_handler.callbacks:
        if may_read(callback):
            in_flight.wait_for(type(callback).__name__)
    return result


@_uses("Trainer", "args", "state")
@_uses("TrainingArguments", "save_strategy")
@_uses("TrainerState", "best_global_step?", "global_step")
def _saves_the_best(trainer: Any) -> bool:
    """True if the checkpoint that Trainer saves is the best so far, which not every rank may see."""
    state, strategy = trainer.state, trainer.args.save_strategy
    return strategy in ("steps", "epoch") and getattr(state, "best_global_step", None) == state.global_step


@_uses("callbacks", *(f"{name}?" for name in _UPLOADS))
def may_read(callback: Any) -> bool:
    """Whether the `on_save` of a callback, which Trainer calls next, may read the checkpoint."""
    is_own = callback.on_save.__module__.startswith("transformers.")
    return not is_own or any(getattr(callback, name, None) not in _OFF for name in _UPLOADS)


@_uses("Trainer", *_WRITERS, *(f"{name}?" for name in _WRITERS_OF_SOME), "save_model", "state")
@_uses("Trainer", "_get_output_dir", "_push_from_checkpoint?", "_rotate_checkpoints?", "args")
@_uses("TrainerState", "best_model_checkpoint", "save_to_json")
@_uses("TrainingArguments", "save_total_limit")
@_uses("transformers.trainer", "rotate_checkpoints?")
def _replacements(trainer: Any, around: Around, later: list[Callable[[], Any]]) -> Attributes:
    """What records the errors of Trainer's writers, and puts off what must see a checkpoint that is whole."""
    defer, write_state = around.ranks.deferring, trainer.state.save_to_json

    def save_to_json(path: str) -> None:
        """The last file; without it, the checkpoint is not taken for a whole one."""
        if trainer.state.best_model_checkpoint == str(around.folder):
            trainer.state.best_model_checkpoint = around.shown
        if not around.ranks.errors:
            defer(write_state)(path)

    def put_off(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        later.append(partial(call, *args, **kwargs))

    def put_off_removal(*_: Any, **__: Any) -> None:
        from .remote import remove_old

        newest, limit = Path(around.shown), trainer.args.save_total_limit
        if limit and limit > 0:
            best = Path(trainer.state.best_model_checkpoint or newest)
            later.append(partial(remove_old, newest, _PREFIX, limit, best))

    attributes: Attributes = [(trainer.state, "save_to_json", save_to_json)]
    writers = [name for name in (*_WRITERS, *_WRITERS_OF_SOME) if hasattr(trainer, name)]
    attributes += [(trainer, name, defer(getattr(trainer, name))) for name in writers]
    if not settings().whole_model and _may_leave_out_the_model(trainer):
        attributes += [(trainer, "save_model", defer(partial(_save_without_weights, trainer)))]
    module = sys.modules["transformers.trainer"]
    after = [(trainer, "_push_from_checkpoint"), (trainer, "_rotate_checkpoints"), (module, "rotate_checkpoints")]
    attributes += [
        (owner, name, partial(put_off, getattr(owner, name))) for owner, name in after if hasattr(owner, name)
    ]
    if around.is_remote:
        attributes = [(owner, name, put_off_removal if "rotate" in name else call) for owner, name, call in attributes]
        attributes += [(trainer, "_get_output_dir", lambda *_, **__: str(around.folder.parent))]
    return attributes


@_uses("Trainer", "args", "model", "save_model")
@_uses("TrainingArguments", "push_to_hub", "save_only_model")
@_uses("models", "_hf_peft_config_loaded?", "peft_config?")
def _may_leave_out_the_model(trainer: Any) -> bool:
    """Whether Trainer's own `save_model` writes what is frozen too, into a checkpoint that is complete without it."""
    is_own = type(trainer).save_model is sys.modules["transformers.trainer"].Trainer.save_model
    has_adapters = hasattr(trainer.model, "peft_config") or getattr(trainer.model, "_hf_peft_config_loaded", False)
    return is_own and not has_adapters and not trainer.args.save_only_model and not trainer.args.push_to_hub


@_uses("Trainer", "_save")
@_uses("transformers.utils", "SAFE_WEIGHTS_NAME", "WEIGHTS_NAME")
def _save_without_weights(trainer: Any, output_dir: str, **_: Any) -> None:
    """What `Trainer.save_model` writes beside the weights: the configuration and the tokenizer."""
    from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

    trainer._save(output_dir, state_dict={})
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):  # what is written for no weights
        Path(output_dir, name).unlink(missing_ok=True)


def find_last(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`get_last_checkpoint`, for `resume_from_checkpoint=True`: the newest one that is whole."""
    in_flight.wait()
    path = wrapped(*args, **kwargs)
    if path is None or _is_whole(Path(path)):
        return path
    folders = numbered(Path(path).parent, rf"{re.escape(Path(path).name.rpartition('-')[0])}-(\d+)")
    newest = last_whole(folders, _is_whole, logger_of("transformers"))
    if newest is None and not is_not_whole(Path(path)):
        return path  # one without DeepSpeed, of which we know nothing
    return str(newest) if newest is not None else None


def _is_whole(folder: Path) -> bool:
    """Whether a checkpoint has the file that Trainer writes last."""
    try:
        json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return not is_not_whole(folder)


def _judge(_: Any | None, text: str) -> Finding:
    if "os.rename(" in text:  # up to 4.38
        return Finding("refused", "Trainer._save_checkpoint renames the folder of the checkpoint itself")
    return Finding("patchable", "leaves frozen parameters out for PEFT alone, and then loads non-strictly")


TARGET = Target(
    "transformers",
    "transformers.trainer",
    "Trainer",
    {
        "train": train,
        "_save_checkpoint": save_checkpoint,
        "_get_output_dir": in_flight.after_it,  # at the end of training, Trainer lists this folder, and removes from it
    },
    _judge,
    ("transformers",),
    "install a tested release of transformers (4.40.2 is the oldest), or uninstall it if nothing uses it",
    beside={
        "transformers.trainer:deepspeed_load_checkpoint": load_checkpoint,
        "transformers.trainer:get_last_checkpoint": find_last,
        "transformers.trainer_utils:get_last_checkpoint": find_last,
        **{f"transformers.trainer:Trainer.{name}": write for name in _BESIDE},
    },
    names=NAMES,
    kinds={
        "Trainer": "transformers.trainer:Trainer",
        "TrainerState": "transformers.trainer_callback:TrainerState",
        "CallbackHandler": "transformers.trainer_callback:CallbackHandler",
        "TrainingArguments": "transformers.training_args:TrainingArguments",
    },
    is_optional=True,
)
