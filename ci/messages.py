"""Every message of the package, read from its sources, for the page `docs/messages.md`: Sphinx calls it (`conf.py`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src" / "ds_frozen_patch"
PARTS = {
    "Patching, settings and `run`": ("patching", "settings", "bootstrap", "workarounds", "testing"),
    "Saves": ("core/save", "core/base", "save", "publish", "common"),
    "Loads": ("core/load", "core/record", "load", "manifest", "fingerprint", "parameters"),
    "Lightning, Accelerate, Trainer and engines": ("frameworks", "engine"),
    "Tools": ("tools", "checkpoint", "cli/dispatch", "cli/commands"),
    "What is wrong with a file, in brackets": ("checkpoint/format",),
}
"""The modules of each part of the page. `--help` and the faults of upstream have pages of their own."""
NO_MESSAGES = ("checkpoint/format/allowed",)
WORD, LEAST_WORDS = re.compile(r"(?<!\S)[^\W\d_]+"), 3
CODE = re.compile(r"^\s*import |^export |\(\?|\\")
MARKS, ESCAPED = re.compile(r"[`*_{}<>|#~\[\]]"), r"\\\g<0>"


def text() -> str:
    """Return the list of messages, in Markdown."""
    return "\n".join(f"## {title}\n\n{_list(modules)}" for title, modules in PARTS.items())


def messages(modules: tuple[str, ...]) -> list[str]:
    """Return the messages of modules and packages, without those in packages that have another part."""
    others = {name for names in (*PARTS.values(), NO_MESSAGES) for name in names} - set(modules)
    found: set[str] = set()
    for file in sorted(SOURCES.rglob("*.py")):
        module = file.relative_to(SOURCES).with_suffix("").as_posix()
        if _longest(module, modules) > _longest(module, others):
            found.update(strings(ast.parse(file.read_text(encoding="utf-8"))))
    return sorted(found, key=str.casefold)


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the texts in a module but for its docstrings; "…" stands for what is put in."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    whole = _whole(node)
    if whole is None:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)
    elif not CODE.search(whole):
        lines = (line.strip(" ,") for line in re.sub(r"%[sd]", "…", whole).split("\n"))
        yield from (line for line in lines if len(WORD.findall(line)) >= LEAST_WORDS)


def _whole(node: ast.AST) -> str | None:
    """Return the text of a string, of an f-string, or of several that are added; None of anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_whole(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _whole(node.left), _whole(node.right)
        return None if left is None and right is None else f"{left or '…'}{right or '…'}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _longest(module: str, names: Collection[str]) -> int:
    return max((len(name) for name in names if f"{module}/".startswith(f"{name}/")), default=0)


def _list(modules: tuple[str, ...]) -> str:
    lines = (MARKS.sub(ESCAPED, message) for message in messages(modules))
    return "".join(f"- {line}\n" for line in lines)
