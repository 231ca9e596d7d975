"""Each name of others that is not public is used in one place, which declares it: see `common.names`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import ds_frozen_patch
from ds_frozen_patch import internals
from ds_frozen_patch.frameworks import for_accelerate, for_lightning, for_transformers
from ds_frozen_patch.patching.wrapping import TARGETS

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]

ROOT = Path(ds_frozen_patch.__file__).parent
WHERE = ("internals.py", "cures.py")
FRAMEWORKS = ("frameworks", "patching", "bootstrap", "testing.py")
"""These use names of Lightning, Accelerate, transformers and wrapt."""
OF_OTHERS = {
    *("_modules", "_parameters", "_buffers", "_metadata", "_open_zipfile_writer"),  # of torch
    *(
        "_Pickler",
        "_exit",
        "_initializing",
        "_get_default_store",
        "_weight_conversions",
        "_C",
        "_get_storage_alignment",
        "_open_zipfile_writer",
        "_save",
        "_serialization_tls",
    ),  # of Python, torch and transformers
    *("_check_values", "_copy", "_copy_from"),  # ours, of another object of the same class or module
}
BASIC = {"module", "optimizer", "device", "lr_scheduler", "backward", "register_forward_pre_hook"}
"""What everyone uses of an engine, and its being a module of torch's."""
COMMON = {"config", "global_steps", "dist", "comm", "load", "save", "makedirs", "optimizer", "status", "scale_window"}
"""Names that others have too."""

import_module("ds_frozen_patch.cures")  # which declares names too
NAMES = {name for used in internals.NAMES.used for name in used.names}
TREES = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in sorted(ROOT.rglob("*.py"))}


def read(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The attributes that code uses, each with the expression that has it."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute):
            yield ast.unparse(inner.value), inner.attr
        elif isinstance(inner, ast.Call) and ast.unparse(inner.func) in ("getattr", "hasattr", "setattr", "delattr"):
            of, name, *_ = inner.args
            yield ast.unparse(of), str(name.value) if isinstance(name, ast.Constant) else ""


def is_private(name: str) -> bool:
    return name.startswith(("_", "ds_")) and not name.startswith("__")


def is_engine(expression: str) -> bool:
    return expression.rpartition(".")[2] == "engine"


OTHERS = [path for path in TREES if path not in WHERE and not path.startswith(FRAMEWORKS)]


@pytest.mark.parametrize("path", OTHERS)
def test_no_other_module_uses_a_name_that_is_not_public(path: str) -> None:
    used = {name for of, name in read(TREES[path]) if of not in ("self", "cls")}
    private = {name for name in used if is_private(name)}
    assert not private - OF_OTHERS
    assert not used & (NAMES - set(internals.PUBLIC) - COMMON)
    modules = {node.module or "" for node in ast.walk(TREES[path]) if isinstance(node, ast.ImportFrom)}
    of_deepspeed = {module for module in modules if module.split(".")[0] == "deepspeed"}
    assert of_deepspeed <= {"deepspeed", "deepspeed.runtime.engine"}


def test_all_that_is_used_of_an_engine_is_declared() -> None:
    used = {name for path, tree in TREES.items() if path not in WHERE for of, name in read(tree) if is_engine(of)}
    in_frameworks = {"gradient_clipping", "global_rank", "local_rank"}
    wrapped = {"module_state_dict", "load_module_state_dict", "zero_optimization_stage"}
    assert used - BASIC - in_frameworks - wrapped <= NAMES
    everywhere = {name for tree in TREES.values() for _, name in read(tree)}
    assert set(internals.PUBLIC) <= everywhere


@pytest.mark.parametrize("path", WHERE)
def test_each_function_declares_what_it_uses(path: str) -> None:
    for function in (node for node in TREES[path].body if isinstance(node, ast.FunctionDef)):
        texts = [
            node.value
            for decorator in function.decorator_list
            for node in ast.walk(decorator)
            if isinstance(node, ast.Constant)
        ]
        declared = {name for text in texts if isinstance(text, str) for name in text.rstrip("?").split("|")}
        used = {name for of, name in read(function) if is_private(name) or is_engine(of)}
        overridden = {
            node.elts[1].value
            for node in ast.walk(function)
            if isinstance(node, ast.Tuple) and len(node.elts) == 3 and isinstance(node.elts[1], ast.Constant)
        }
        lacking = (used | {name for name in overridden if isinstance(name, str)}) - declared
        lacking -= {*internals.PUBLIC, *BASIC, "zero_optimization_stage", "load", "sub_group_to_group_id"} - declared
        assert not {name for name in lacking if name in NAMES or is_private(name)}, function.name


def test_a_cure_needs_no_name() -> None:
    """Where a fault is not, it needs no cure; and what is probed must not depend on what has been imported."""
    for node in ast.walk(TREES["cures.py"]):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "uses":
            assert all(isinstance(arg, ast.Constant) and str(arg.value).endswith("?") for arg in node.args[1:])


OBJECTS = {"strategy", "trainer", "accelerator", "project", "loop", "epoch_loop", "fit_loop", "state", "args"}
OBJECTS |= {"callback_handler", "checkpoint_io", "combined"}
"""What variables and attributes in `frameworks/` are called that are objects of a framework's."""
NAMES_OF = {
    "for_accelerate.py": for_accelerate.NAMES,
    "for_transformers.py": for_transformers.NAMES,
    "for_lightning": for_lightning.NAMES,
}


@pytest.mark.parametrize("path", [path for path in TREES if path.startswith("frameworks/for_")])
def test_all_that_is_used_of_a_framework_is_declared(path: str) -> None:
    declared = {name for used in NAMES_OF[path.split("/")[1]].used for name in used.names}
    declared |= {name for what in TARGETS for name in what.wrappers}
    dictionaries = {"get", "items", "keys", "update", "values"}  # a state may also be one
    of_public_protocols = {"load_checkpoint", "save_checkpoint", "fn"}  # of a CheckpointIO, and of Trainer's state
    used = {name for of, name in read(TREES[path]) if of.rpartition(".")[2] in OBJECTS}
    private = {name for of, name in read(TREES[path]) if is_private(name) and of not in ("self", "torch")}
    assert not (used | private) - declared - dictionaries - of_public_protocols - {""}
