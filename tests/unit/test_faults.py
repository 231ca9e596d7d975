"""The list of upstream's faults: which an installed release has, and that each patch it names mends one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import upstream
from under_test import CELL

from ds_frozen_patch.workarounds import fault
from ds_frozen_patch.workarounds.fault import FAULTS, worked_around

pytestmark = [pytest.mark.short, pytest.mark.everyday]
SERIES = Path(__file__).resolve().parents[2] / "patches"
TEXTS = upstream.read()
MENDED = [
    pytest.param(package, name, id=name)
    for package, texts in TEXTS.items()
    for name, said in texts.items()
    if "patch" in said
]


def added(patch: Path) -> dict[str, str]:
    """Return what a patch adds to each file."""
    parts = re.split(r"^diff --git a/(\S+).*\n", patch.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        file: "\n".join(line[1:] for line in change.splitlines() if line[:1] == "+" and line[:3] != "+++")
        for file, change in zip(parts[::2], parts[1::2], strict=True)
    }


def mark_of(package: str, name: str) -> tuple[str, str]:
    """Return the file and the text that show that a fault is mended."""
    mark = FAULTS[package][name].mark
    assert mark is not None
    return mark


@pytest.mark.parametrize(("package", "name"), MENDED)
def test_the_patch_leaves_the_mark(package: str, name: str) -> None:
    file, text = mark_of(package, name)
    patch = TEXTS[package][name]["patch"]
    patches = [path for path in SERIES.glob(f"**/{patch}") if package in ("fabric", path.parts[-3])]
    assert len(patches) == 2
    for patch in patches:
        (change,) = (change for at, change in added(patch).items() if at.endswith(f"{package}/{file}"))
        assert text in change


@pytest.mark.parametrize(("package", "name"), MENDED)
def test_a_mended_package_has_the_fault_no_longer(
    package: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, text = mark_of(package, name)
    target = {"fabric": "lightning.fabric"}.get(package, package)
    monkeypatch.setattr(fault, "version_of", lambda _: "0.19.8")
    assert name in worked_around(target, "9.0")
    monkeypatch.setattr(fault, "package_folder", lambda _: tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("nothing")
    assert name in worked_around(target, "9.0")
    (tmp_path / file).write_text(f"if this:\n    {text}\n")
    assert name not in worked_around(target, "9.0")


def test_the_mark_of_a_mended_fault_is_in_the_releases_that_mended_it() -> None:
    """The DeepSpeed of the cell `everyday` has such a fault, that of `newest` no longer."""
    mended = [found for found in FAULTS["deepspeed"].values() if found.mended and found.mark]
    assert mended
    assert [found.is_installed("deepspeed") for found in mended] == [found.is_of(CELL.deepspeed) for found in mended]


def test_releases_have_the_faults_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault, "package_folder", lambda _: None)
    deepspeed = {release: set(worked_around("deepspeed", release)) for release in ("0.10.1", "0.17.6", "0.18.5")}
    assert deepspeed["0.10.1"] - deepspeed["0.17.6"] == {"gathering loads"}
    assert deepspeed["0.17.6"] - deepspeed["0.18.5"] == {"plain optimizers in bf16", "several ranks on NVMe"}
    assert deepspeed["0.17.6"] - deepspeed["0.10.1"] == {
        "weights of another tag",
        "loads without an optimizer",
        "buffers through fp32",
        "zero_to_fp32 without huggingface_hub",
        "optimizer on NVMe",
    }
    assert worked_around("transformers", "4.50.3") == ("best checkpoint",)
    assert worked_around("transformers", "5.23.0") == ()
    assert set(worked_around("deepspeed", None)) == FAULTS["deepspeed"].keys()
    monkeypatch.setattr(fault, "version_of", lambda _: "0.17.6")
    assert worked_around("lightning_fabric", "2.2.0") == ("moved optimizer class",)
    monkeypatch.setattr(fault, "version_of", lambda _: None)
    assert worked_around("lightning.fabric", "2.6.5") == ("gradient clipping",)


def test_each_fault_has_its_text() -> None:
    assert {package: [*texts] for package, texts in TEXTS.items()} == {key: [*faults] for key, faults in FAULTS.items()}


def test_the_page_shows_the_list() -> None:
    assert upstream.BLOCK.read() == upstream.text().strip(), "write it again: nox -f ci/noxfile.py -s docs"
