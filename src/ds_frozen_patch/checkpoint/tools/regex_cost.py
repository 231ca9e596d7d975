"""Regular expressions that a checkpoint has brought along and others will run: whether one can take for ever."""

from __future__ import annotations

import importlib
import re
import sys
from math import inf
from typing import Any

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_LENGTH = 100
"""Of the names of modules that they are tried on."""
_LONGEST = 2000


def steps(pattern: str) -> float:
    """In how many ways a name can be tried against a regular expression, at most; infinite if that is not known.

    What follows on each other multiplies them. A repetition of what has several ways itself has too many.
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
