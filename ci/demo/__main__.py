"""Train with LoRA on two CPU ranks, save full and trainable-only, resume, compare: `nox -f ci/noxfile.py -s demo`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from demo.picture import drawing
from rich.console import Console
from rich.table import Table

from ds_frozen_patch import inspect

SAVED_STEPS = 8  # SAVED_EPOCH * STEPS_PER_EPOCH of train.py, whose import would start Lightning here

PARTS = {
    "model weights": "*model_states.pt",
    "optimizer state": "*optim_states.pt",
}


def main() -> int:
    """Run the demo; 0 if every resumed run equals its uninterrupted one and the checkpoints did shrink."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the checkpoints in this new directory")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the sizes into this file, as SVG")
    parser.add_argument("--quantized", action="store_true", help="quantize the frozen base to 4 bits")
    options = parser.parse_args()
    if options.quantized and find_spec("bitsandbytes") is None:
        sys.exit("The demo with --quantized needs bitsandbytes: pip install bitsandbytes")
    if options.keep and options.keep.exists():
        parser.error(f"--keep: {options.keep} exists already; name a directory that does not")
    if options.picture and not options.picture.absolute().parent.is_dir():
        parser.error(f"--picture: there is no folder {options.picture.absolute().parent}")

    talk = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="ds_frozen_patch-demo-") as scratch:
        root = options.keep or Path(scratch)
        results = []
        try:
            more = ["--quantized"] if options.quantized else []
            for stage in (2, 3):
                out = root / f"zero{stage}"
                out.mkdir(parents=True)
                _train(talk, f"ZeRO-{stage}, uninterrupted", out, stage, *more)
                checkpoint = str(out / "trainable-only.ckpt")
                _train(talk, f"ZeRO-{stage}, resumed", out, stage, *more, "--ckpt-path", checkpoint)
                results.append(_result(stage, out))
            if options.picture:
                _draw(root / "zero2", options.picture)
        except subprocess.CalledProcessError as failed:
            talk.print(f"[red]A training run failed with exit code {failed.returncode}.[/red] Its last output:")
            talk.print(failed.output[-3000:], markup=False, highlight=False)
            return 1
    status = _report(Console(), results, "bf16 and NF4" if options.quantized else "fp32")
    if options.picture:
        Console().print(f"The sizes as a picture: {options.picture}", highlight=False, soft_wrap=True)
    return status


def _train(talk: Console, title: str, out: Path, stage: int, *more: str) -> None:
    command = [sys.executable, "-m", "demo.train", str(out), "--stage", str(stage), *more]
    output = []
    with talk.status(f"{title}: starting two ranks") as status:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.startswith(("model built", "epoch ", "done")):
                status.update(f"{title}: {line.strip()}")
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command, "".join(output))
    talk.print(f"{title}: done", highlight=False)


def _result(stage: int, out: Path) -> dict[str, Any]:
    whole = json.loads((out / "losses.json").read_text())
    sizes = {
        kind: {part: sum(f.stat().st_size for f in (out / f"{kind}.ckpt").rglob(glob)) for part, glob in PARTS.items()}
        for kind in ("full", "trainable-only")
    }
    resumed = json.loads((out / "resumed.json").read_text())["losses"]
    return {"stage": stage, "whole": whole, "resumed": resumed, "sizes": sizes}


def _draw(out: Path, picture: Path) -> None:
    full, small = (inspect(out / name).kinds for name in ("full.ckpt", "trainable-only.ckpt"))
    picture.write_text(drawing(full, small, "The demo: LoRA on a small Llama, ZeRO-2, AdamW"), encoding="utf-8")


def _report(show: Console, results: list[dict[str, Any]], kept_in: str) -> int:
    facts = results[0]["whole"]
    show.print(
        f"\nLlama with tied embeddings + LoRA: {facts['frozen'] / 1e6:.1f} M frozen and"
        f" {facts['trainable'] / 1e6:.2f} M trainable parameters, 2 ranks, {kept_in}.\n",
        highlight=False,
    )
    sizes = Table(title="Bytes of a checkpoint, in MB", title_justify="left")
    for column in ("", "full", "trainable-only", "ratio"):
        sizes.add_column(column, justify="left" if not column else "right")
    shrunk = True
    for result in results:
        full, small = result["sizes"]["full"], result["sizes"]["trainable-only"]
        for part in PARTS:
            sizes.add_row(f"ZeRO-{result['stage']} {part}", _mb(full[part]), _mb(small[part]), "")
        ratio = sum(full.values()) / sum(small.values())
        shrunk &= ratio > 10
        sizes.add_row(
            f"[bold]ZeRO-{result['stage']} total[/bold]", _mb(sum(full.values())), _mb(sum(small.values())),
            f"[bold]{ratio:.1f} x[/bold]", end_section=True,
        )  # fmt: skip
    show.print(sizes)

    equal = True
    losses = Table(title="\nLoss on rank 0 after the checkpoint", title_justify="left")
    for column in ("step", *(f"ZeRO-{r['stage']} {kind}" for r in results for kind in ("uninterrupted", "resumed"))):
        losses.add_column(column, justify="right")
    tails = [(r["whole"]["losses"][SAVED_STEPS:], r["resumed"]) for r in results]
    for step in range(max(len(losses_of) for tail in tails for losses_of in tail)):
        cells = [f"{part[step]:.6f}" if step < len(part) else "-" for tail in tails for part in tail]
        losses.add_row(str(SAVED_STEPS + step + 1), *cells)
    show.print(losses)
    for result, (whole, resumed) in zip(results, tails, strict=True):
        same = bool(resumed) and whole == resumed
        equal &= same
        verdict = "[green]equals[/green]" if same else "[red]DIFFERS FROM[/red]"
        show.print(
            f"ZeRO-{result['stage']}: the resumed run {verdict} the uninterrupted one, bit for bit.", highlight=False
        )
    if not shrunk:
        show.print("[red]The trainable-only checkpoints are not ten times smaller: something is wrong.[/red]")
    return 0 if equal and shrunk else 1


def _mb(count: float) -> str:
    return f"{count / 1e6:,.2f}"


if __name__ == "__main__":
    sys.exit(main())
