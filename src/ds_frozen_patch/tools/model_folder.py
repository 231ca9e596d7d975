"""The folder of a Hugging Face model as a base: its configuration, the tensors of each file, and its other files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.format import safetensors as safetensors_file
from ..checkpoint.format.zip_directory import CHUNK_BYTES, open_regular
from ..common.errors import CheckpointError
from ..common.text import human_bytes
from .base import Base, open_base
from .loaded_names import CONFIG, read_model_config
from .output import SCRIPTS

INDEX = "model.safetensors.index.json"
_WEIGHTS = (
    ".bin", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot", ".pt", ".pth",
    ".safetensors", ".tflite", ".index.json",
)  # fmt: skip
_OTHERS = ("adapter_config.json",)  # it would make transformers look for an adapter
_MOST_BYTES, _MOST_FILES = 1 << 30, 10_000


@dataclass(frozen=True)
class WeightsFile:
    """A file with weights, and the names of its tensors."""

    path: Path
    names: list[str]

    @property
    def metadata(self) -> dict[str, str]:
        """What a safetensors file says besides its tensors."""
        about = safetensors_file.read_metadata(self.path) if self.path.suffix == ".safetensors" else {}
        return {key: value for key, value in about.items() if key != "format"}


@dataclass(frozen=True)
class ModelFolder:
    """A folder that `from_pretrained` loads.

    Attributes:
        path: of the folder.
        base: its tensors.
        config: the content of `config.json`.
        files: its files with weights, by the name that each has in a copy of the model.
    """

    path: Path
    base: Base
    config: dict[str, Any]
    files: dict[str, WeightsFile]

    @property
    def model_type(self) -> str:
        """What kind of model it is, as transformers calls it."""
        return str(self.config.get("model_type"))


def open_model_folder(path: str | Path, trust: bool = False) -> ModelFolder:
    """Read what a folder has, but no tensors.

    Raises:
        CheckpointError: it is not the folder of a model, or is damaged.
    """
    folder = Path(path)
    config = read_model_config(folder)
    base = open_base(folder, trust)
    by_file: dict[Path, list[str]] = {}
    for name, tensor in base.tensors.items():
        for file in {piece.storage.path for piece in tensor.pieces}:
            by_file.setdefault(file, []).append(name)
    if odd := [file for file in by_file if file.parent != folder]:
        raise CheckpointError(f"{folder} is not the folder of a Hugging Face model: its weights are in {odd[0]}.")
    whole = folder / "model.safetensors"
    if whole in by_file and not (folder / INDEX).is_file():  # transformers reads no other
        by_file = {whole: by_file[whole]}
    for file, names in by_file.items():
        if file.suffix == ".safetensors":  # the base has aliases, too
            stored = safetensors_file.read_types(file)
            names[:] = [name for name in names if name in stored]
    files = {_new_name(file, by_file): WeightsFile(file, names) for file, names in by_file.items()}
    return ModelFolder(folder, base, config, files)


def _new_name(file: Path, files: dict[Path, list[str]]) -> str:
    if len(files) == 1:
        return "model.safetensors"
    return file.name if file.suffix == ".safetensors" else f"{file.stem.removeprefix('pytorch_')}.safetensors"


def copy_more(folder: Path, target: Path) -> tuple[list[str], list[str]]:
    """Copy what a model has besides weights and its configuration: tokenizer, generation config, licence and so on.

    Weights, hidden files and scripts are not copied, nor what links lead to outside of the folder, except in the cache
    of Hugging Face's hub, where all files are links.

    Args:
        folder: of the model.
        target: an existing directory.

    Returns:
        The names of the scripts, and of the links, that were not copied.

    Raises:
        CheckpointError: there are far more or larger files than a model has.
    """
    scripts: list[str] = []
    links: list[str] = []
    room, count = _MOST_BYTES, 0
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            item = Path(parent) / name
            inner = item.relative_to(folder)
            low = name.lower()
            if name.startswith(".") or low.endswith(_WEIGHTS) or name in _OTHERS or str(inner) == CONFIG:
                continue
            count += 1
            if low.endswith(SCRIPTS):
                scripts.append(str(inner))
            elif not _is_inside(item, folder):
                links.append(str(inner))
            else:
                room -= item.stat().st_size
                if room < 0 or count > _MOST_FILES:
                    raise CheckpointError(
                        f"{folder} has more than {human_bytes(_MOST_BYTES)} or {_MOST_FILES} files besides its"
                        f" weights, up to {inner}. Pass a folder with the model alone."
                    )
                if not _copy(item, target / inner):
                    scripts.append(str(inner))
    return scripts, links


def _is_inside(item: Path, folder: Path) -> bool:
    """Whether a file is in a folder, or in the place where the hub's cache has the files of such folders."""
    if not item.is_symlink():
        return item.is_file()
    home = folder.resolve()
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    resolved = item.resolve()
    return resolved.is_file() and any(place in resolved.parents for place in (home, *blobs))


def _copy(item: Path, target: Path) -> bool:
    """Copy the bytes of a file, unless it is a script."""
    with open_regular(item) as source:
        if (chunk := source.read(CHUNK_BYTES)).startswith(b"#!"):
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as copy:
            while chunk:
                copy.write(chunk)
                chunk = source.read(CHUNK_BYTES)
    return True
