"""The README's table of what was tried to lose data, as the tests have left it: `nox -f ci/noxfile.py -s faults`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from table import markdown, put_into_readme

BEGIN, END = "<!-- faults: nox -f ci/noxfile.py -s faults -->\n", "<!-- end of faults -->\n"


def collect(results: Path) -> Counter[str]:
    """How often each thing was tried; exits if a test has failed."""
    tried: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            sys.exit(f"{case.get('name')} failed: see {results}")
        for item in case.iter("property"):
            tried[item.get("name", "")] += int(item.get("value", ""))
    return tried


def render(tried: Counter[str]) -> str:
    """A row for each thing; none was lost, or the tests would have failed."""
    lines = [["what was tried", "times", "lost, hung or accepted in silence"], ["---"] * 3]
    return markdown([*lines, *([what, str(times), "0"] for what, times in tried.items())], [])


if __name__ == "__main__":
    put_into_readme(BEGIN, render(collect(Path(sys.argv[1]))), END)
