"""The README's first command works, and reports correct figures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import ds_frozen_patch
from ds_frozen_patch.common.text import human_bytes


@pytest.mark.everyday
@pytest.mark.once
def test_demo(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _check(*demo)


@pytest.mark.everyday
@pytest.mark.once
def test_the_picture_of_the_demo(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    picture = demo[0].with_name("sizes.svg")
    assert f"The sizes as a picture: {picture}\n" in demo[1].stdout
    texts = [element.text or "" for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    full, small = (
        ds_frozen_patch.inspect(demo[0] / "zero2" / f"{name}.ckpt").size for name in ("full", "trainable-only")
    )
    assert texts[0] == f"A full checkpoint: {human_bytes(full)}"
    assert texts[1] == f"The same, trainable-only: {human_bytes(small)}, {full / small:.0f} times smaller"


@pytest.mark.everyday
@pytest.mark.once
def test_demo_refuses_a_picture_where_no_folder_is(run_demo: Any, tmp_path: Path) -> None:
    done = run_demo("--picture", str(tmp_path / "none" / "sizes.svg"))
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


@pytest.mark.everyday
@pytest.mark.quantized
@pytest.mark.promise(16)
def test_demo_of_a_quantized_base(run_demo: Any, tmp_path: Path) -> None:
    done = run_demo("--quantized", "--keep", str(tmp_path / "kept"))
    _check(tmp_path / "kept", done)
    assert "22.9 M frozen" in done.stdout  # numbers, and not the bytes that they are packed into
    assert "bf16 and NF4" in done.stdout


@pytest.mark.short
@pytest.mark.everyday
@pytest.mark.once
def test_the_container_is_small_and_made_in_ci() -> None:
    root = Path(__file__).parents[1]
    instructions = (root / "ci" / "demo" / "Dockerfile").read_text().splitlines()
    assert len(instructions) <= 10
    assert "-s" in instructions[-1]
    assert "docker build -f ci/demo/Dockerfile" in (root / ".github" / "workflows" / "ci.yml").read_text()


@pytest.mark.everyday
@pytest.mark.once
def test_demo_asks_for_bitsandbytes(run_demo: Any) -> None:
    done = run_demo("--quantized")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "The demo with --quantized needs bitsandbytes: pip install bitsandbytes\n"


@pytest.mark.everyday
@pytest.mark.once
def test_demo_refuses_a_directory_that_exists(run_demo: Any, tmp_path: Path) -> None:
    done = run_demo("--keep", str(tmp_path))
    assert done.returncode == 2
    assert f"{tmp_path} exists already" in done.stderr


def _check(kept: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in (2, 3):
        assert f"ZeRO-{stage}: the resumed run equals the uninterrupted one, bit for bit." in done.stdout
        whole = json.loads((kept / f"zero{stage}" / "losses.json").read_text())["losses"]
        resumed = json.loads((kept / f"zero{stage}" / "resumed.json").read_text())["losses"]
        assert whole[8:] == resumed
        assert len(resumed) == 8
        assert whole[-1] < whole[0]
    assert "Warning" not in done.stderr
