"""The README's table of what was tried to lose data, as the tests have left it: `nox -f ci/noxfile.py -s faults`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from machine import described, machine
from table import README, markdown, put_into_readme

BEGIN, END = "<!-- faults: nox -f ci/noxfile.py -s faults -->\n", "<!-- end of faults -->\n"


def main(results: Path) -> None:
    """Put what pytest has written into the README; rows of tests that were not run stay as they are."""
    suite = next(ElementTree.parse(results).iter("testsuite"))
    minutes = float(suite.get("time", "")) / 60
    when = f"on {suite.get('timestamp', '')[:10]}, for {minutes:.0f} minutes, on {described(machine(results))}"
    tried = collect(suite)
    said, before = written()
    if before.keys() <= tried.keys():
        text = f"Tried {when}."
    else:
        first = said.partition("\n\nAnew ")[0]
        text = f"{first}\n\nAnew {when}: {'; '.join(tried)}."
        tried = Counter(before | tried)
    put_into_readme(BEGIN, f"{text}\n\n{render(tried).strip()}", END)


def written() -> tuple[str, dict[str, int]]:
    """What the README says now: the sentences before the table, and its rows."""
    section = README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    rows = re.findall(r"^\| (.*) \| (\d+) \| 0 \|$", section, re.MULTILINE)
    return section.partition("\n\n|")[0], {what: int(times) for what, times in rows}


def collect(suite: ElementTree.Element) -> Counter[str]:
    """How often each thing was tried; exits if a test has failed."""
    tried: Counter[str] = Counter()
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            sys.exit(f"{case.get('name')} failed, so there is no table")
        for item in case.iter("property"):
            tried[item.get("name", "")] += int(item.get("value", ""))
    return tried


def render(tried: Counter[str]) -> str:
    """A row for each thing; none was lost, or the tests would have failed."""
    lines = [["what was tried", "times", "lost, hung or accepted in silence"], ["---"] * 3]
    return markdown([*lines, *([what, str(times), "0"] for what, times in tried.items())], [])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
