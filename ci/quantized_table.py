"""The table of quantized bases in `docs/qlora.md`, of what their tests have left: `nox -s quantized`."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

from table import markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "qlora.md"
BEGIN, END = "<!-- table: nox -f ci/noxfile.py -s quantized -->\n", "<!-- end of table -->\n"


def render(results: Path) -> str:
    """A row for each kind of base and ZeRO stage; exits if a test failed."""
    rows, refused = [], {}
    for case in ElementTree.parse(results).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            sys.exit(f"{case.get('name')} failed: see {results}")
        said = {item.get("name"): item.get("value", "") for item in case.iter("property")}
        if "refused" in said:
            refused[said["kind"]] = said["refused"]
        elif "bytes" in said:
            rows.append(said)
    lines = [["base", "ZeRO", "full", "trainable-only", "against bf16", "refused if another"], ["---"] * 6]
    for row in rows:
        ratio = int(row["bytes"]) / int(row["control"])
        sizes = [f"{int(row[name]) / 1000:,.0f} kB" for name in ("full", "bytes")]
        lines.append([row["kind"], row["stage"], *sizes, f"{ratio:.2f}", refused.get(row["kind"], "")])
    return markdown(lines, [])


def main(file: str) -> None:
    """Put the table of these results into the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{render(Path(file))}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
