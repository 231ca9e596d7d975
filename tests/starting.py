"""How programs that were written elsewhere are started, and a tokenizer in place of one that they would download."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]
PLAIN = Path(__file__).parent / "programs" / "plain"
"""On PYTHONPATH, a program under `run` is not patched."""


def start(
    command: Sequence[str],
    folder: Path,
    *options: str,
    path: Path | None = None,
    ranks: Sequence[dict[str, str]] = ({},),
    **environment: str,
) -> None:
    """Run a program in a folder under `ds-frozen-patch run --cpu`, and wait for it.

    Args:
        command: the program and its arguments.
        options: more options of `run`.
        path: what is added to PYTHONPATH.
        ranks: the environment of each process to start; else one starts the others.
        environment: the environment of all of them.
    """
    # Some launchers set the number of threads, DeepSpeed's does not; the last bits of a loss depend on it.
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (variables.get("PYTHONPATH"), str(path or ""))))
    run = [sys.executable, "-m", "ds_frozen_patch", "run", "--cpu", "--strict", "--verify-base=error", *options]
    with (folder / "output.txt").open("w+") as output:
        launch = partial(subprocess.Popen, [*run, "--", *command], cwd=folder, stdout=output, stderr=output)
        started = [launch(env=variables | rank) for rank in ranks]
        try:
            statuses = [process.wait(timeout=400) for process in started]
        finally:
            for process in started:
                process.kill()
            output.seek(0)
            print(output.read())
    assert not any(statuses), statuses


def save_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> None:
    """Save a tokenizer of these words, the first two of which are padding and what it does not know."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, unknown = words[:2]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, unk_token=unknown)  # type: ignore[no-untyped-call]
    saved.save_pretrained(folder)
