"""A checkpoint's contents can neither forge the command line's output nor cause a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import of_one_rank

from ds_frozen_patch import CheckpointError, CheckpointMismatchError
from ds_frozen_patch.cli import main
from ds_frozen_patch.record import KEY, LeftOut, Record

pytestmark = pytest.mark.promise(14)

FORGED = "\x1b[2J\x1b[1;1H\r\nsmall.ckpt: no problems in 3 files\u202e\x9b2J"


def stage_0(folder: Path, tag: str = "checkpoint", name: str = "layer.weight", **state: Any) -> Path:
    """Return a checkpoint of one rank without ZeRO, made by hand."""
    weights = {name: torch.ones(2, 2), "frozen.weight": torch.ones(3)}
    return of_one_rank(folder / "made.ckpt", weights, tag, **state)


SAYS: dict[str, dict[str, Any]] = {
    "a version": {"ds_version": FORGED},
    "Lightning's version": {"pytorch-lightning_version": FORGED},
    "a name that is left out": {
        "name": FORGED,
        KEY: Record(
            FORGED, 1, 0, 1, {FORGED: FORGED}, "trainable-only", (LeftOut((FORGED,), (2, 2), FORGED, None),)
        ).to_json(),
    },
    "the tag": {"tag": FORGED.replace("\r\n", "")},
    "the id of a save": {KEY: FORGED},
}


@pytest.mark.parametrize("kind", SAYS)
def test_checkpoint_contents_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    source = str(stage_0(tmp_path, **SAYS[kind]))
    for command in (["inspect", source], ["verify", source], ["prune", source, str(tmp_path / "small")]):
        main(command)
        out, err = capsys.readouterr()
        said = (out + err).replace("\n", "")
        assert said.isprintable(), (command, said)
        assert not [line for line in (out + err).splitlines() if line.startswith("small.ckpt: no problems")], command
        main([*command, "--json"])
        out, err = capsys.readouterr()
        assert (out + err).isascii(), command
        assert not out or json.loads(out)


def test_unexpected_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; with `--debug`, the traceback."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr("ds_frozen_patch.cli.commands.inspect", fails)
    assert main(["inspect", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err == (
        "ds-frozen-patch: ZeroDivisionError: by\\nzero. This was not expected; --debug shows where it was raised.\n"
    )
    with pytest.raises(ZeroDivisionError):
        main(["inspect", str(tmp_path), "--debug"])


def test_what_latest_leads_to_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stage_0(tmp_path)
    for secret in ("my secret/../x", "a password", "x" * 300):
        (tmp_path / "elsewhere").write_text(secret)
        (folder / "latest").unlink(missing_ok=True)
        (folder / "latest").symlink_to(tmp_path / "elsewhere")
        assert main(["inspect", str(folder)]) == 1
        said = capsys.readouterr().err
        assert secret[:20] not in said
        assert "subdirectory" in said


def test_errors_cannot_control_a_terminal() -> None:
    for kind in (CheckpointError, CheckpointMismatchError):
        assert str(kind("- a\x1b[2Jb: saved\n- c")) == "- a\\x1b[2Jb: saved\n- c"


def test_a_safetensors_file_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stage_0(tmp_path)
    assert main(["export", str(folder), str(tmp_path / "out.ckpt"), "--format", "safetensors"]) == 1
    assert f"Call it {tmp_path / 'out.safetensors'}." in capsys.readouterr().err
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize("name", ["__metadata__", "layer.\ud800"])
def test_names_that_safetensors_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder, target = stage_0(tmp_path, name=name), tmp_path / "out.safetensors"
    assert main(["consolidate", str(folder), str(target)]) == 1
    assert "A safetensors file cannot have a tensor called" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
