"""Hugging Face's Trainer, whose engines are Accelerate's: the wrappers of its methods and of one function.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..common.overrides import overridden
from ..common.probing import Finding, Seen, Target
from ..cures import Attributes, saves_the_best
from ..engine import in_flight
from ..engine.attached import attached
from ..save.save import Save
from ..save.saving import saving
from ..settings import current as settings

_WRITERS = ("_save", "_save_rng_state")
"""Methods that write a part of a checkpoint, none of which waits for other ranks."""
_WRITERS_OF_SOME = ("_save_scaler",)
"""More of them, which not every release has."""
_USES = ("_get_output_dir", "save_to_json", "PREFIX_CHECKPOINT_DIR")


def judge(version: str | None, seen: Seen) -> Finding:
    """Where it saves to, and how it writes its state, must be possible to replace. Up to 4.38 it renames the folder."""
    if not seen.unused("_save_checkpoint", ["rename"]):
        return TARGET.refused(version, "Trainer._save_checkpoint renames the folder of the checkpoint itself")
    reason = "leaves frozen parameters out for PEFT alone, and then loads non-strictly"
    return TARGET.refused_without(version, seen, {"_save_checkpoint": _USES}) or Finding("patchable", version, reason)


TARGET = Target(
    "transformers",
    "transformers.trainer",
    "Trainer",
    ("train", "_save_checkpoint", "_get_output_dir", *_WRITERS),
    ("transformers",),
    judge,
    "install a tested release of transformers (4.40.2 is the oldest), or leave it out of patch(targets=[...])",
    "transformers",
)
LOAD = Target("transformers", TARGET.module, "", ("deepspeed_load_checkpoint",))


def load_checkpoint(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`deepspeed_load_checkpoint`: strict for PEFT too, since what may be missing is known.

    It looks for the folder itself, which may not have its name yet.
    """
    in_flight.wait()
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    if "load_module_strict" in call.arguments and attached(call.arguments["deepspeed_engine"]) is not None:
        call.arguments["load_module_strict"] = True
    return wrapped(*call.args, **call.kwargs)


def save_checkpoint(wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Trainer._save_checkpoint`: `checkpoint-N` gets its name once all that Trainer writes into it is there.

    Uploads, and the removal of older checkpoints, follow after that.
    """
    engine = trainer.model_wrapped
    known = attached(engine)
    if known is None:
        return wrapped(*args, **kwargs)
    trial = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("trial")
    prefix = sys.modules[TARGET.module].PREFIX_CHECKPOINT_DIR
    final = os.path.join(trainer._get_output_dir(trial=trial), f"{prefix}-{trainer.state.global_step}")  # noqa: PTH118
    target = Path(final).resolve() if Path(final).is_symlink() else final
    later: list[Callable[[], Any]] = []
    exclude = known.owner.excludes(None)
    # An upload may still run when the next save begins, and leaves out names such as this one.
    place = Path(final).parent / "_ds_frozen_patch" if trainer.args.push_to_hub and target == final else None
    how: dict[str, Any] = {"keeps_others": True, "place": place, "goes_on_after_engine": True}
    with saving(engine, known, target, "a checkpoint of Trainer", exclude, **how) as save:
        save.base_is_known = False  # Trainer saves the model first, which writes to all parameters in ZeRO-3
        with overridden(_redirections(trainer, save, final, later)):
            result = wrapped(*args, **kwargs)
        _name_best(trainer, save, final)
    if place is not None:
        in_flight.wait()
        if known.remover is not None:
            known.remover.join()
        with suppress(OSError):
            place.rmdir()
    for call in later:
        in_flight.afterwards(call)
    return result


def train(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Trainer.train`: begins and ends with no save in flight."""
    in_flight.wait()
    result = wrapped(*args, **kwargs)
    in_flight.wait()
    return result


def _redirections(trainer: Any, save: Save, final: str, later: list[Callable[[], Any]]) -> Attributes:
    """What lets Trainer write to another place, and puts off what must see the final one."""
    parent = save.destination.parent
    write_state = trainer.state.save_to_json

    def save_to_json(path: str) -> None:
        _name_best(trainer, save, final)
        with save.deferring_errors(path):
            write_state(path)

    def put_off(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        places = {str(parent): os.path.dirname(final), str(save.destination): final}  # noqa: PTH120
        args = tuple(places.get(str(arg), arg) for arg in args)
        kwargs = {name: places.get(str(value), value) for name, value in kwargs.items()}
        if "best_model_checkpoint" in kwargs:
            kwargs["best_model_checkpoint"] = trainer.state.best_model_checkpoint
        later.append(partial(call, *args, **kwargs))

    attributes: Attributes = [(trainer, "_get_output_dir", lambda *_, **__: str(parent))]
    attributes += [(trainer.state, "save_to_json", save_to_json)]
    writers = [name for name in (*_WRITERS, *_WRITERS_OF_SOME) if hasattr(trainer, name)]
    attributes += [(trainer, name, save.deferring(getattr(trainer, name))) for name in writers]
    module = sys.modules[TARGET.module]
    if not settings().whole_model and _may_leave_out_the_model(trainer):
        attributes += [(trainer, "save_model", save.deferring(partial(_save_without_weights, trainer)))]
    after = [(trainer, "_push_from_checkpoint"), (trainer, "_rotate_checkpoints"), (module, "rotate_checkpoints")]
    attributes += [
        (owner, name, partial(put_off, getattr(owner, name))) for owner, name in after if hasattr(owner, name)
    ]
    return attributes


def _may_leave_out_the_model(trainer: Any) -> bool:
    """Whether Trainer's own `save_model` writes what is frozen too, into a checkpoint that is complete without it."""
    is_own = type(trainer).save_model is sys.modules[TARGET.module].Trainer.save_model
    has_adapters = hasattr(trainer.model, "peft_config") or getattr(trainer.model, "_hf_peft_config_loaded", False)
    return is_own and not has_adapters and not trainer.args.save_only_model and not trainer.args.push_to_hub


def _save_without_weights(trainer: Any, output_dir: str, **_: Any) -> None:
    """What `Trainer.save_model` writes beside the weights: the configuration and the tokenizer."""
    from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

    trainer._save(output_dir, state_dict={})
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):  # what is written for no weights
        Path(output_dir, name).unlink(missing_ok=True)


def _name_best(trainer: Any, save: Save, final: str) -> None:
    """Let Trainer's state name the best checkpoint by its final name, if it is this one."""
    if trainer.state.best_model_checkpoint == str(save.destination) or saves_the_best(trainer):
        trainer.state.best_model_checkpoint = final
