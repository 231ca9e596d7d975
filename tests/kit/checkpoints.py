"""Checkpoints of real runs, and ways to read, compare, damage and watch them, and runs that are killed meanwhile.

Saving runs inside a rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ds_frozen_patch
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.parameters import plain
from ds_frozen_patch.publish.journal import is_not_whole
from ds_frozen_patch.record import KEY, Record, digest_of, read_record, write_record
from kit import cell, runs
from kit.cell import PRECISION, Callback, DeepSpeedStrategy


def model_states(checkpoint: str | Path) -> list[dict[str, Any]]:
    """Return the state in each `*model_states.pt` of a checkpoint that this test run has saved.

    The names are those of the user's module, without the prefix of Lightning 2.0.
    """
    files = sorted(Path(checkpoint, "checkpoint").glob("*model_states.pt"))
    states = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
    for state in states:
        state["module"] = {plain(name): value for name, value in state["module"].items()}
    return states


def left_out_of(checkpoint: str | Path) -> set[str]:
    """Return the names that the records of a checkpoint list, wherever they are below this path."""
    return {name for file in Path(checkpoint).rglob(RECORD) for name in record_in(file.parent).names}


def size(checkpoint: str | Path) -> int:
    """Return the bytes of all files of a checkpoint, as `du --apparent-size` counts them."""
    return sum(file.stat().st_size for file in Path(checkpoint).rglob("*") if file.is_file())


EMBEDDING = "model.base_model.model.model.embed_tokens.weight"
HEAD = "model.base_model.model.lm_head.weight"
NORM = "model.base_model.model.model.norm.weight"


class Odd(runs.LoraRun):
    """A run that also trains tied embeddings, in several parameter groups, beside frozen parameters of odd sizes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model.base_model.model.model.embed_tokens.weight.requires_grad_(True)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]), requires_grad=False)
        self.odd = torch.nn.Parameter(torch.arange(35.0).reshape(5, 7), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW([{"params": trained[::2], "lr": 1e-2}, {"params": trained[1::2], "lr": 1e-3}])


class Half(runs.LoraRun):
    """A run whose second layer has frozen adapters: trained and frozen parameters have the same shapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, parameter in self.named_parameters():
            if ".layers.1." in name:
                parameter.requires_grad_(False)


class Bend(torch.nn.Module):
    """Parameters that no world size divides, down to one element; DeepSpeed 0.19.8 cannot train scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.odd = torch.nn.Parameter(torch.arange(35.0).reshape(5, 7) / 35)

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        bent: torch.Tensor = loss * self.scale.sum() + self.odd.float().square().sum()
        return bent


class Uneven(runs.LoraRun):
    """A run that also trains these, in two parameter groups with different settings."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bend = Bend()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        bent: torch.Tensor = self.bend(super().training_step(batch, index))
        return bent

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": trained[::2], "lr": 1e-2}, {"params": trained[1::2], "lr": 1e-3, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups)


class Wrapped(runs.LoraRun):
    """A run with activation checkpointing: the names of its parameters differ from those in its state dict."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        layers = self.model.base_model.model.model.layers
        for place in range(len(layers)):
            layers[place] = checkpoint_wrapper(layers[place])


MODULES: dict[str, type[runs.LoraRun]] = {
    "lora": runs.LoraRun,
    "odd": Odd,
    "half": Half,
    "uneven": Uneven,
    "wrapped": Wrapped,
}


def settings(stage: int) -> dict[str, Any]:
    """Return a configuration in which ZeRO-3 also partitions small parameters, into several sub-groups."""
    extra: dict[int, dict[str, Any]] = {
        2: {"round_robin_gradients": True},  # another order of the parameters than in stage 1
        3: {"stage3_param_persistence_threshold": 0, "sub_group_size": 600},
    }
    return runs.config(stage, **extra.get(stage, {}))


def trainer(out: str, world_size: int, stage: int, precision: str, epochs: int = 2) -> Any:
    """Return a trainer with these settings, whose checkpoints are trainable-only, and which saves none by itself."""
    cell.trainable_only()
    options: dict[str, Any] = {"epochs": epochs, "enable_checkpointing": False, "precision": precision}
    return runs.trainer(out, world_size, strategy=DeepSpeedStrategy(config=settings(stage)), **options)


def save_both_ways(
    out: str, world_size: int, stage: int, precision: str, module: str, epochs: int, options: dict[str, Any]
) -> dict[str, str]:
    """Save a trainable-only and a full checkpoint of the same state; return a digest of each parameter and buffer."""
    run = trainer(out, world_size, stage, precision, epochs)
    made = MODULES[module](**options)
    run.fit(made, runs.batches(world_size))
    run.save_checkpoint(f"{out}/small.ckpt")
    with cell.full_checkpoint():
        run.save_checkpoint(f"{out}/full.ckpt")
    return runs.trained_state(made)


def save_by_deepspeed(out: str, world_size: int, stage: int) -> dict[str, str]:
    """Save by DeepSpeed, without Lightning and without us."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    module = runs.LoraRun().model
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    bf16 = {"bf16": {"enabled": True}} if PRECISION.startswith("bf16") and stage else {}
    config = {**settings(stage), **bf16, "train_micro_batch_size_per_gpu": 2}
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    for tokens in runs.batches(world_size):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(f"{out}/full.ckpt", tag="step4")
    return runs.trained_state(module)


def resume(path: str, out: str, world_size: int, stage: int, precision: str) -> tuple[list[float], dict[str, str], int]:
    module, run = runs.LoraRun(), trainer(out, world_size, stage, precision)
    run.fit(module, runs.batches(world_size), ckpt_path=path)
    return module.losses, runs.trained_state(module), run.global_step


def resume_on_another_base(path: str, out: str, world_size: int, stage: int, precision: str) -> tuple[str, str]:
    fit = trainer(out, world_size, stage, precision).fit
    return runs.refusal(fit, runs.LoraRun(seed=2), runs.batches(world_size), ckpt_path=path)


class Checkpoints:
    """`checkpoints(stage, world_size)`: a folder with `small.ckpt` and `full.ckpt` of the same state, made once."""

    def __init__(self, ranks: Any, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.made: dict[Any, Path] = {}
        self.trained: dict[Path, dict[str, str]] = {}
        """For each folder, a digest of each parameter and buffer as the run had them."""

    def __call__(
        self,
        stage: int,
        world_size: int = 2,
        precision: str | None = None,
        *,
        module: str = "lora",
        epochs: int = 1,
        **options: Any,
    ) -> Path:
        said = precision_of(stage) if precision is None else precision
        arguments: dict[str, Any] = {"stage": stage, "world_size": world_size, "precision": said, "module": module}
        arguments |= {"epochs": epochs, "options": options}
        return self._of(world_size, save_both_ways, arguments)

    def by_deepspeed(self, stage: int, world_size: int = 2) -> Path:
        """Return a folder with a `full.ckpt` that DeepSpeed alone has saved."""
        return self._of(world_size, save_by_deepspeed, {"world_size": world_size, "stage": stage})

    def _of(self, world_size: int, function: Callable[..., Any], arguments: dict[str, Any]) -> Path:
        key = (function.__name__, repr(arguments))
        if key not in self.made:
            out = Path(tempfile.mkdtemp(dir=self.folder))
            self.trained[out] = self.ranks(world_size, function, out=str(out), **arguments)[0]
            self.made[key] = out
        return self.made[key]


def precision_of(stage: int) -> str:
    return PRECISION if stage else "32-true"


def snapshot(path: Path) -> dict[str, tuple[str, int]]:
    """Return the contents and modification time of every file below a path, or of the file there."""
    files = [item for item in path.rglob("*") if item.is_file()] if path.is_dir() else [path]
    return {
        str(item.relative_to(path)): (hashlib.sha256(item.read_bytes()).hexdigest(), item.stat().st_mtime_ns)
        for item in files
    }


def contents(path: Path) -> dict[str, str]:
    """Return the contents of every file below a path, or of the file there."""
    return {name: digest for name, (digest, _) in snapshot(path).items()}


def loaded(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False)


def of_any_save(file: Path) -> Any:
    """Return a file's state without the id of its save."""
    state = loaded(file)
    state.pop(KEY, None)
    return state


def weights_of(file: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = loaded(file)["state_dict"]
    return found


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, in which NaN equals NaN."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same(one: Any, other: Any, at: str = "") -> None:
    """Assert that two loaded states are the same: types, values and tensors' bits, in any container."""
    assert type(one) is type(other), at
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), at
        assert one.requires_grad == other.requires_grad, at
        assert raw(one) == raw(other), at
        assert_same(vars(one), vars(other), f"{at}.__dict__")
    elif isinstance(one, dict):
        assert list(one) == list(other), at
        for key in one:
            assert_same(one[key], other[key], f"{at}/{key}")
        if hasattr(one, "__dict__"):
            assert_same(vars(one), vars(other), f"{at}.__dict__")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), at
        for index, items in enumerate(zip(one, other, strict=True)):
            assert_same(*items, f"{at}/{index}")
    elif hasattr(one, "__dict__") and not isinstance(one, type | Enum):
        assert_same(vars(one), vars(other), f"{at}.__dict__")
    else:
        assert one == other, at


def record_in(path: Path) -> Record:
    """Return the record of a checkpoint: of the folder of its tag, or of the only tag in it."""
    folder = path if (path / RECORD).exists() else next(path.glob(f"*/{RECORD}")).parent
    found = read_record(folder)
    assert found is not None
    return found


def rewrite_record(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the values of a record, and give it the digest that fits them."""
    values = json.loads((folder / RECORD).read_text())
    change(values)
    values.pop("digest", None)
    (folder / RECORD).write_text(json.dumps({**values, "digest": digest_of(values)}))


def names_of_copy(path: Path) -> list[str]:
    """Return the names of the files in a tool's output: those of the checkpoint, without DeepSpeed's converter.

    The converter is a program that people run, and the one in a checkpoint from elsewhere may have been replaced, so no
    tool copies it.
    """
    return sorted(snapshot(path).keys() - {"zero_to_fp32.py", "zero_to_torch.py"})


def assert_pruned(pruned: Path, small: Path) -> None:
    """Assert that a pruned checkpoint has the files of the trainable-only one, with the same contents."""
    assert sorted(snapshot(pruned)) == names_of_copy(small)
    assert (pruned / "latest").read_text() == (small / "latest").read_text()
    for file in sorted((small / "checkpoint").glob("*.pt")):
        assert_same(of_any_save(pruned / "checkpoint" / file.name), of_any_save(file), file.name)
        assert (pruned / "checkpoint" / file.name).stat().st_size <= file.stat().st_size + 64
    mine, said = record_in(pruned), record_in(small)
    assert replace(mine, save="", versions={}, adapters={}, files={}) == replace(
        said, save="", versions={}, adapters={}, files={}
    )
    assert {name: said.versions[name] for name in mine.versions} == mine.versions
    assert all(parameter.fingerprint for parameter in mine.left_out)
    assert mine.left_out
    assert mine.files.keys() == said.files.keys()


def records_of(file: Path) -> dict[str, range]:
    """Return the positions of each record's bytes in a file of `torch.save`."""
    found = {}
    with zipfile.ZipFile(file) as archive:
        content = file.read_bytes()
        for info in archive.infolist():
            begin = info.header_offset
            begin += 30 + sum(int.from_bytes(content[begin + at : begin + at + 2], "little") for at in (26, 28))
            found[info.filename.partition("/")[2]] = range(begin, begin + info.file_size)
    return found


def flip(file: Path, record: str | None = None) -> None:
    """Flip one bit in the middle of a record: by default, of the largest record of a tensor."""
    places = records_of(file)
    place = places[record or max((name for name in places if name.startswith("data/")), key=lambda n: len(places[n]))]
    content = bytearray(file.read_bytes())
    content[place[len(place) // 2]] ^= 16
    file.write_bytes(content)


def record_of(file: Path, find: Callable[[Any], torch.Tensor]) -> str:
    """Return the record of a file that has a tensor's bytes."""
    wanted = find(loaded(file))
    content = file.read_bytes()
    (name, *_) = [
        name
        for name, place in records_of(file).items()
        if name.startswith("data/") and raw(wanted) in content[place.start : place.stop]
    ]
    return name


def changed(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Load a file by torch, change its state and save it again."""
    state = loaded(file)
    change(state)
    torch.save(state, file)
    refresh(file.parent)


def refresh(folder: Path) -> None:
    """Let the record, if there is one, describe the files as they are now."""
    if record := read_record(folder):
        write_record(folder, record)


def unmark(path: Path) -> None:
    """Remove the record of a checkpoint, and the id in its files, as if plain Lightning had saved them."""
    for file in path.rglob("*model_states.pt"):
        changed(file, lambda state: state.pop(KEY, None))
    for file in path.rglob(RECORD):
        file.unlink()


def state_of_one_rank(module: dict[str, torch.Tensor], **more: Any) -> dict[str, Any]:
    """Return the state of a checkpoint of one file, as in ZeRO stage 0; what has `frozen` in its name is frozen."""
    trained = {name: tensor.shape for name, tensor in module.items() if "frozen" not in name}
    state = {"module": module, "param_shapes": [trained], "dp_world_size": 1, "ds_config": {}, "ds_version": "0.17.6"}
    return {**state, **more}


def of_one_rank(
    path: Path, module: dict[str, torch.Tensor], tag: str = "checkpoint", protocol: int = 2, **more: Any
) -> Path:
    """Create such a checkpoint."""
    (path / tag).mkdir(parents=True)
    (path / "latest").write_text(tag)
    torch.save(state_of_one_rank(module, **more), path / tag / "mp_rank_00_model_states.pt", pickle_protocol=protocol)
    return path


def base_model(seed: int = 1, **options: Any) -> Any:
    """Return the Hugging Face model that a run was built from, as a program loads it before it adds adapters."""
    return runs.LoraRun(seed=seed, **options).model.unload()


TOOLS: dict[str, tuple[str, list[str], str]] = {
    "prune": ("full.ckpt", ["prune"], "out.ckpt"),
    "consolidate": ("full.ckpt", ["consolidate"], "out.ckpt"),
    "consolidate to a folder": ("full.ckpt", ["consolidate", "--max-shard-size", "10kB"], "out"),
    "export": ("small.ckpt", ["export", "--format", "safetensors"], "out.safetensors"),
    "export to a folder": ("small.ckpt", ["export", "--format", "peft"], "out"),
    "reshard": ("small.ckpt", ["reshard", "--ranks", "3"], "out.ckpt"),
}
"""The tools that write, as the command line names them: what each is given of `Checkpoints`, and what it makes."""


def commands(small: Path, full: Path, out: Path) -> dict[str, list[str]]:
    """Return each tool's command on a hostile checkpoint, or on a good one with the hostile one as its base."""
    good = small.parent.parent / "good" / "small.ckpt"

    def at(name: str) -> str:
        return str(out / name)

    return {
        "inspect": ["inspect", str(full)],
        "prune": ["prune", str(full), at("pruned.ckpt")],
        "consolidate": ["consolidate", str(full), at("one.ckpt")],
        "consolidate to a folder": ["consolidate", str(small), at("folder"), "--max-shard-size", "10kB"],
        "consolidate with a base": ["consolidate", str(good), at("merged.ckpt"), "--base", str(full)],
        "export": ["export", str(full), at("trained.safetensors"), "--format", "safetensors"],
        "export to a folder": ["export", str(small), at("adapter"), "--format", "peft"],
        "verify": ["verify", str(small)],
        "verify with a base": ["verify", str(good), "--base", str(full)],
        "reshard": ["reshard", str(full), at("three.ckpt"), "--ranks", "3"],
    }


class Diary(Callback):
    """Records what a run has done before it is killed: the loss of each step, and each completed save."""

    def __init__(self, file: str, on_step: Callable[[], None] = lambda: None) -> None:
        self.file, self.on_step = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), on_step

    def note(self, line: str) -> None:
        os.write(self.file, f"{line}\n".encode())

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.note(f"step {trainer.global_step} {module.losses[-1]!r}")
        self.on_step()

    def note_removals(self, trainer: Any) -> None:
        """Record each checkpoint that this trainer is about to remove."""
        disk: Any = trainer.strategy.checkpoint_io
        remove = disk.remove_checkpoint

        def remove_checkpoint(path: Any) -> None:
            self.note(f"removes {Path(path).name}")
            remove(path)

        disk.remove_checkpoint = remove_checkpoint


def newest(out: Path, diary: str) -> Path | None:
    """Return the newest checkpoint: all are whole, but for a new one that was being saved, and none is lost.

    One that Lightning was about to remove, because it had a newer one, may be gone in part.

    Args:
        out: the folder of the checkpoints.
        diary: the text of rank 0's.
    """
    found: dict[Path, int] = {}
    lines = re.findall(r"^(saved \d+|removes) (.*)$", diary, re.MULTILINE)
    outdated = {name for name, what in {name: what for what, name in lines}.items() if what == "removes"}
    for path in out.glob("[!.]*"):
        if path.is_symlink() and not path.exists():
            continue  # Lightning removes what its link to the last one leads to, and then links anew
        problems = ds_frozen_patch.verify(path).problems
        if problems:
            was_saved = any(name == path.name for what, name in lines if what != "removes")
            assert path.resolve().name in outdated or (is_not_whole(path) and not was_saved), problems
            continue
        found[path] = model_states(path)[0]["global_step"]
    saved = [int(what.split()[1]) for what, _ in lines if what != "removes"]
    assert max(found.values(), default=0) >= max(saved, default=0)
    return max(found, key=lambda path: (found[path], path.name), default=None)
