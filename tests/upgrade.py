"""Promise 13: a checkpoint of older releases resumes under newer ones, its base verified.

`nox -f ci/noxfile.py -s upgrade` runs `python tests/upgrade.py save DIR` with the older releases, then
`python tests/upgrade.py resume DIR` with the newest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STAGES = (0, 1, 2, 3)
# DeepSpeed itself makes another optimizer of bf16 in stage 0, from release to release.
PRECISIONS = ("32-true", "bf16-mixed", "bf16-mixed", "bf16-mixed")


def save(out: str, stage: int) -> dict[str, Any]:
    """Train two epochs, saving after each; gives the second one's losses, and what was trained by the first."""
    import runs
    from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

    import ds_frozen_patch

    ds_frozen_patch.patch()
    states: list[Any] = []
    callbacks = [
        ModelCheckpoint(out, filename="{epoch}", save_top_k=-1),
        LambdaCallback(on_train_epoch_end=lambda trainer, module: states.append(runs.trained_state(module))),
    ]
    module = runs.LoraRun()
    runs.trainer(out, 2, stage, callbacks=callbacks, precision=PRECISIONS[stage]).fit(module, runs.batches(2))
    return {"losses": module.losses[runs.BATCHES :], "state": states[0]}


def resume(out: str, stage: int) -> dict[str, Any]:
    """Resume after the first epoch; give what `save` gave, and what a base of another seed is told."""
    import runs
    from lightning.pytorch.callbacks import LambdaCallback

    import ds_frozen_patch

    ds_frozen_patch.patch()
    states: list[Any] = []
    callback = LambdaCallback(on_train_start=lambda trainer, module: states.append(runs.trained_state(module)))
    module = runs.LoraRun()
    options: Any = {"enable_checkpointing": False, "precision": PRECISIONS[stage]}
    trainer = runs.trainer(f"{out}/again", 2, stage, callbacks=[callback], **options)
    with runs.heard() as messages:
        trainer.fit(module, runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")
    other = runs.trainer(f"{out}/again", 2, stage, **options)
    refused = runs.refusal(other.fit, runs.LoraRun(seed=2), runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")
    warned = [message for message in messages if message.startswith("WARNING")]
    return {"losses": module.losses, "state": states[0], "warned": warned, "refused": refused}


def main(action: str, folder: Path) -> None:
    """Run one of the two on two ranks, in every stage, and compare."""
    from importlib.metadata import version

    from ranks import Ranks

    ranks = Ranks(2, "lightning", folder / "output.txt")
    releases = f"lightning {version('lightning')} + deepspeed {version('deepspeed')}"
    for stage in STAGES:
        out = str(folder / f"zero{stage}")
        facts = folder / f"zero{stage}.json"
        if action == "save":
            facts.write_text(json.dumps({"by": releases, "ranks": ranks(save, out=out, stage=stage)}))
            continue
        saved = json.loads(facts.read_text())
        for before, after in zip(saved["ranks"], ranks(resume, out=out, stage=stage), strict=True):
            trained = {name: digest for name, digest in before["state"].items() if "lora_" in name or name == "seen"}
            differ = {name for name, digest in trained.items() if after["state"].get(name) != digest}
            assert len(trained) == 9
            assert not differ, f"not bit-equal after the load: {differ}"
            assert after["warned"] == [], after["warned"]
            assert after["refused"][0] == "CheckpointMismatchError", after["refused"]
            assert len(after["losses"]) == len(before["losses"])
            drift = max(abs(a / b - 1) for a, b in zip(after["losses"], before["losses"], strict=True))
            assert drift < 1e-3, drift
        print(f"ZeRO-{stage}: saved by {saved['by']}, resumed by {releases}: base verified, loss within {drift:.1e}")
    ranks.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
