"""An upper bound for the time that regular expressions from a checkpoint can take to match."""

from __future__ import annotations

import importlib
import re
import sys
from math import inf
from typing import Any

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_LENGTH = 100
"""The assumed length of module names."""
_LONGEST = 2000


def count_steps(pattern: str) -> float:
    """An upper bound for the number of ways to match a name against a regular expression; infinite if unknown.

    Sequences multiply the number. A repetition of something with several ways of its own counts as infinite.
    """
    try:
        return _ways(_parser.parse(pattern)) if len(pattern) <= _LONGEST else inf
    except (re.error, OverflowError, RecursionError):
        return inf


def _ways(parsed: Any) -> float:
    found: float = 1
    for opcode, argument in parsed:
        name = str(opcode)
        if name.endswith("_REPEAT"):
            least, most, inner = argument
            ways = _ways(inner)
            if most > 1 and ways > 1:
                return inf
            found *= ways * (1 + min(int(most), _LENGTH) - min(least, _LENGTH))
        elif name == "BRANCH":
            found *= sum(map(_ways, argument[1]))
        elif name == "ATOMIC_GROUP":
            found *= _ways(argument)
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            found *= _ways(argument[-1])
        elif name.startswith("GROUPREF"):
            return inf
    return found
