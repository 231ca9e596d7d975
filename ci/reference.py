"""The reference of settings and commands, made from the sources: `nox -f ci/noxfile.py -s docs` writes it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import Field
from typing import Any

from tables import COMMANDS, SETTINGS, markdown

from ds_frozen_patch.cli.arguments import make_parser
from ds_frozen_patch.settings import OPTIONS

SHARED_BY = 3
"""An argument that this many commands have, with the same help, is listed once for all of them."""


def settings() -> str:
    """Return a row for each option of `patch()`: its values and its default."""
    rows = [(f"`{name}`", *_values(option), option.metadata["help"]) for name, option in OPTIONS.items()]
    return markdown(("option", "values", "default", "effect"), rows)


def commands() -> str:
    """Return the arguments that several commands have, and then a section for each command."""
    parsers = _commands()
    counts = Counter((_name(action), action.help) for parser in parsers.values() for action in _actions(parser))
    shared = [said for said, count in counts.items() if count >= SHARED_BY]
    parts = [f"## Arguments of several commands\n\n{markdown(('argument', 'effect'), _rows(shared))}"]
    for name, parser in parsers.items():
        is_run = name == "run"
        actions = list(_actions(parser))
        listed = {action: (_name(action), action.help) for action in actions if not (is_run and _is_setting(action))}
        also = [
            f"`{action.option_strings[0]}`" for action in listed if action.option_strings and listed[action] in shared
        ]
        settings = ", ".join(f"`{_name(action)}`" for action in actions if is_run and _is_setting(action))
        usage = (parser.usage or " ".join(["%(prog)s [options]", *_positional(actions)])) % {"prog": parser.prog}
        forms = " or ".join(f"`{form.strip()}`" for form in usage.splitlines())
        rows = _rows(said for said in listed.values() if said not in shared)
        table = f"{markdown(('argument', 'effect'), rows)}\n" if rows else ""
        if settings:
            also.append(f"and the [settings](python.md#settings): {settings}")
        parts.append(f"## {name}\n\n{parser.description}\n\n{forms}\n\n{table}Also: {', '.join(also)}.\n")
    return "\n".join(parts)


def _positional(actions: Iterable[argparse.Action]) -> list[str]:
    return [_name(action) + " ..." * (action.nargs == "+") for action in actions if not action.option_strings]


def _is_setting(action: argparse.Action) -> bool:
    return action.dest in OPTIONS


def _commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = (action.choices for action in make_parser()._actions if isinstance(action.choices, dict))
    return dict(choices)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.dest != "help")


def _name(action: argparse.Action) -> str:
    """Return how an argument is written: its options, and what stands for its value."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = str(action.metavar or choices or action.dest.upper()) if action.nargs != 0 else ""
    return f"{', '.join(action.option_strings)} {value}".strip()


def _rows(said: Iterable[tuple[str, str | None]]) -> list[tuple[str, str]]:
    return [(f"`{name}`", (about or "").replace("%(prog)s", "ds-frozen-patch")) for name, about in said]


def _values(option: Field[Any]) -> tuple[str, str]:
    """Return the values that an option may have, and its default."""
    if option.metadata["kind"] == "patterns":
        return "patterns", "none"
    if option.metadata["kind"] == "choice":
        choices = ", ".join(f'`"{value}"`' for value in option.metadata["choices"])
        return choices, f'`"{option.default}"`' if option.default else "off"
    return "switch", "`None`: see there" if option.default is None else "on" if option.default else "off"


if __name__ == "__main__":
    SETTINGS.write(settings())
    COMMANDS.write(commands())
