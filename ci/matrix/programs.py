"""Programs that were written elsewhere, for `tests/programs`: where each comes from, and what it runs in.

What a program asks for beside a cell's environment is in `ci/locks/program-NAME.in`, resolved in `program-NAME.txt`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Program:
    """A program that runs over the environment of a cell.

    `clones` gives, by the name of a folder, the address of a repository and a commit or a tag of it. `beside_torch` is
    what must be of one build with torch, and so has no hash. `alone` is in the lock without what it requires.
    """

    cell: str
    clones: dict[str, tuple[str, str]] = field(default_factory=dict)
    beside_torch: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


GITHUB = "https://github.com"
DSUC = (f"{GITHUB}/hongshanli23/DSUC", "b1d44c0cec13d6e813deb41f55c096d8e31b91bd")
OPENTHAIGPT = (f"{GITHUB}/OpenThaiGPT/openthaigpt-pretraining", "5f6a31fbcf0a4dbdbc557c41c4b5f8c067339a7e")
LLAMA = (f"{GITHUB}/facebookresearch/llama", "54c22c0d63a3f3c9e77f43a6a3041c00018f4964")
PEFT = (f"{GITHUB}/huggingface/peft", "v0.20.0")
TRANSFORMERS = (f"{GITHUB}/huggingface/transformers", "00d481d18f914b55e65faa31e82321629691eadb")

PROGRAMS = {
    "dsuc": Program("everyday", {"dsuc": DSUC}),
    "lightning-ir": Program("everyday"),
    "llamafactory": Program("everyday"),
    "ms-swift": Program("everyday"),
    "openrlhf": Program("everyday", alone=("openrlhf==0.11.2",)),
    "openthaigpt": Program("lightning-2.4", {"openthaigpt": OPENTHAIGPT, "llama": LLAMA}),
    "peft-sft": Program("newest", {"peft": PEFT}),
    "run-clm": Program("newest", {"transformers": TRANSFORMERS}),
    "torchgeo": Program("lightning-2.4", beside_torch=("torchvision==0.19.1",)),
    "trackers": Program("everyday"),
    "trl": Program("everyday"),
}
