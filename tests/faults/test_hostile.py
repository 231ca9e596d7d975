"""Files made to run code, use up memory or never end: no tool may let them.

Each is a whole checkpoint, or a base, with one hostile part. Every tool must refuse it with one error, or work, without
running or importing anything.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import resource
import shutil
import struct
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import Checkpoints, base_model, changed, commands
from kit.hostile import limited, members, named, repacked, text
from memory import memory
from safetensors.torch import save_file

from ds_frozen_patch import CheckpointError, CheckpointMismatchError, load_trainable
from ds_frozen_patch.cli import main
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.record import KEY, LeftOut, Record, digest_of

pytestmark = pytest.mark.promise(14)

MEMORY = 150 << 20
SECONDS = 20
FORBIDDEN = (
    "compile", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pickle.find_class",
    "pty.spawn", "socket.connect", "subprocess.Popen", "webbrowser.open",
)  # fmt: skip
events: list[tuple[str, Any]] | None = None


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if events is not None and (event in FORBIDDEN or (event == "import" and arguments[0] not in sys.modules)):
        callers = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(None)}
        if event != "compile" or "traceback" not in callers:  # which parses the lines that it shows
            events.append((event, arguments[:1]))


@pytest.fixture(scope="module", autouse=True)
def hooked() -> None:
    sys.addaudithook(hook)  # there is no way to take it off again


@contextmanager
def watched() -> Iterator[None]:
    """Assert that nothing runs, and that neither much memory nor much time is used."""
    global events

    found: list[tuple[str, Any]] = []
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + (4 << 30), limit[1]))
    try:
        with limited(SECONDS, MEMORY):
            events = found
            yield
    finally:
        events = None
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert found == []


class Evil:
    """Runs code as soon as it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.said = function, arguments

    def __reduce__(self) -> Any:
        return self.said


def touch(canary: Path) -> Evil:
    return Evil(os.system, f"touch '{canary}'")


# What an opcode can do, as the last entry of a state: each pushes one object. TEXT is a command for a shell.
TEXT = b"X\x05\0\0\0TOUCH"
CALLED = (
    "os.system", "posix.system", "builtins.eval", "__builtin__.exec", "runpy.run_path", "torch.hub.load", "torch.load",
    "deepspeed.runtime.config.DeepSpeedConfig", "lightning.pytorch.cli.LightningCLI",
    "peft.tuners.lora.config.LoraConfig", "lightning.fabric.utilities.data.AttributeDict",
)  # fmt: skip
BY_OPCODE: dict[str, bytes] = {
    "subprocess.Popen": b"csubprocess\nPopen\n(" + TEXT + b"I-1\nNNNNNI00\nI01\ntR",
    "getattr": b"cbuiltins\ngetattr\n(cbuiltins\nstr\nX\4\0\0\0jointR",
    "import_module": b"cimportlib\nimport_module\nX\4\0\0\0this\x85R",
    "INST": b"(" + TEXT + b"ios\nsystem\n",
    "OBJ": b"(cos\nsystem\n" + TEXT + b"o",
    "STACK_GLOBAL": b"\x8c\2os\x8c\6system\x93" + TEXT + b"\x85R",
    "NEWOBJ": b"csubprocess\nPopen\n(" + TEXT + b"t\x81",
    "NEWOBJ_EX": b"csubprocess\nPopen\n(" + TEXT + b"t}X\5\0\0\0shell\x88s\x92",
    "EXT1": b"\x82\1",
    "an argument's argument": b"ccollections\ndeque\n(cos\nsystem\n" + TEXT + b"\x85Rl\x85R",
    "PERSID": b"P" + b"../../x\n",
    "a record that is text": b"X\x05\0\0\0abcdeQ",
    "a record with a list for a name": b"(X\7\0\0\0storagectorch\nFloatStorage\n]X\3\0\0\0cpuK\1tQ",
    "lists in each other": b"]" * 50_000 + b"a" * 49_999,
    "tuples in each other": b")" + b"\x85" * 50_000,
    "two things at the end": b"NN",
    "an end before the end": b".",
    "more taken than there is": b"0000000000",
}  # fmt: skip
BY_OPCODE |= {f"call of {name}": named(name) + TEXT + b"\x85R" for name in CALLED}


def inject(code: bytes, file: Path, canary: Path) -> None:
    """Put what opcodes push into the state of a file, as its last entry."""
    command = f"touch '{canary}'"
    code = code.replace(TEXT, text(command))
    repacked(file, lambda content: content[:-1] + b"X\4\0\0\0mine" + code + b"s.")


def laughs() -> list[Any]:
    """Return the "billion laughs": short by references, but 10 to the power of 40 items if expanded."""
    found: list[Any] = ["ha" * 1000]
    for _ in range(40):
        found = [found] * 10
    return found


def itself() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["itself"] = found
    return found


# What is in a state, by what a pickle of torch.save can say: (state, something evil) -> None
IN_A_STATE: dict[str, Callable[[dict[Any, Any], Any], Any]] = {
    "hyper-parameters": lambda s, evil: s["hyper_parameters"].update(mine={"deeper": [evil]}),
    "the client's state": lambda s, evil: s.update(mine=evil),
    "a key": lambda s, evil: s.update({Evil(collections.deque, [evil]): 1}),
    "a key of a set": lambda s, evil: s.update(mine={Evil(collections.deque, [evil])}),
    "the state of an OrderedDict": lambda s, evil: setattr(s["module"], "mine", evil),
    "the id of the save": lambda s, evil: s.update({KEY: evil}),
    "the module": lambda s, evil: s["module"].update({"mine.weight": evil}),
    "param_shapes": lambda s, evil: s["param_shapes"].append({"mine": evil}),
    "arguments of a class": lambda s, evil: s.update(mine=collections.deque([evil])),
    "attributes of a class": lambda s, evil: s.update(mine=argparse.Namespace(mine=evil)),
    "attributes of a tensor": lambda s, evil: s.update(mine=attributed(evil)),
    "the configuration": lambda s, evil: s["ds_config"].update(mine=evil),
}


def attributed(evil: Any) -> torch.nn.Parameter:
    found = torch.nn.Parameter(torch.ones(2))
    vars(found)["mine"] = evil
    return found


# What a state says that is no code, and is of another kind than it should be.
SAID: dict[str, Callable[[dict[str, Any]], Any]] = {
    "laughs in the configuration": lambda s: s["ds_config"].update(mine=laughs()),
    "laughs as the id of the save": lambda s: s.update({KEY: laughs()}),
    "laughs as the number of steps": lambda s: s.update(global_steps=laughs()),
    "laughs in the client's state": lambda s: s.update(mine=laughs()),
    "a configuration that holds itself": lambda s: s.update(ds_config=itself()),
    "a tensor beyond its record": lambda s: s.update(mine=beyond()),
    "names that are numbers": lambda s: s["module"].update({5: torch.ones(1)}),
    "names that are nothing": lambda s: s["param_shapes"].append({None: torch.Size([1])}),
    "shapes that are text": lambda s: s["param_shapes"].append({"mine": "abc"}),
    "shapes that are large": lambda s: s["param_shapes"].append({"mine": (1 << 62, 1 << 62)}),
    "shapes that are long": lambda s: s["param_shapes"].append({"mine": (3,) * 100_000}),
    "shapes that are negative": lambda s: s["param_shapes"].append({"mine": (-1, -3)}),
    "frozen shapes that are large": lambda s: s.update(frozen_param_shapes={"mine": ((1 << 4000),)}),
    "fragments that are text": lambda s: s.update(frozen_param_fragments={"mine": "abc"}),
    "aliases that are lists": lambda s: s.update(shared_params={"mine": []}),
    "ranks that are text": lambda s: s.update(dp_world_size="2"),
    "a record of lists": lambda s: s.update({KEY: '{"format": 1, "left_out": [[], 1]}'}),
    "a record that is nested": lambda s: s.update({KEY: '{"format": ' + "[" * 10**6}),
    "a record whose names are numbers": lambda s: s.update({KEY: record(1, (1,))}),
    "a record of large shapes": lambda s: s.update({KEY: record("a", (1 << 99,))}),
    "a record of dotted names": lambda s: s.update({KEY: record("a." * 100_000, (1,))}),
    "numbers that are huge": lambda s: s.update(global_steps=10**600, epoch=10**5000, ds_version=10**600),
    "ranks that are huge": lambda s: s.update(dp_world_size=10**600),
    "names that are dotted": lambda s: s["module"].update({"a." * 100_000: torch.ones(1)}),
}


def beyond() -> Evil:
    storage = torch.ones(4)._typed_storage()  # type: ignore[no-untyped-call]
    return Evil(torch._utils._rebuild_tensor_v2, storage, 2, (4,), (1,), False, collections.OrderedDict())


def record(name: Any, shape: tuple[int, ...]) -> str:
    """Return a record that a file may carry, of one parameter that was left out."""
    return Record("mine", 2, 2, 1, {}, "trainable-only", (LeftOut((name,), shape, "float32", None),), 4).to_json()


# What a file is.
def deflated(file: Path, _: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\2X\0\0\0\x10" + b"a" * (1 << 28) + b"0}.", compresslevel=1)


def folder_in(file: Path) -> str:
    """Return the folder that all records of a file are in."""
    return next(iter(members(file))).partition("/")[0]


def member(name: str, content: bytes = b"x", attributes: int = 0) -> Callable[[Path, Path], None]:
    def add(file: Path, _: Path) -> None:
        info = zipfile.ZipInfo(name)
        info.external_attr = attributes
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(info, content)

    return add


def overlapping(file: Path, _: Path) -> None:
    """Let all records begin where the largest does, with its size."""
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
        infos = [info for info in archive.infolist() if "/data/" in info.filename]
        content = bytearray(file.read_bytes())
    for info in infos:
        place = content.rindex(info.filename.encode()) - 46
        content[place + 16 : place + 28] = struct.pack("<III", largest.CRC, largest.file_size, largest.file_size)
        content[place + 42 : place + 46] = struct.pack("<I", largest.header_offset)
    file.write_bytes(content)


def legacy(file: Path, canary: Path) -> None:
    torch.save({"module": {}, "mine": touch(canary)}, file, _use_new_zipfile_serialization=False)


def bare_pickle(file: Path, canary: Path) -> None:
    file.write_bytes(pickle.dumps(touch(canary)))


def pipe(file: Path, *_: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def device(file: Path, _: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def sparse(file: Path, *_: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 36)


def beside(name: str, attributes: int = 0) -> Callable[[Path, Path], None]:
    """Add a pickle to the archive's folder, beside the one that is checked."""

    def add(file: Path, canary: Path) -> None:
        member(f"{folder_in(file)}/{name}", pickle.dumps(touch(canary)), attributes)(file, canary)

    return add


def another_folder_first(file: Path, canary: Path) -> None:
    found = {"other/data.pkl": pickle.dumps(touch(canary)), **members(file)}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in found.items():
            archive.writestr(name, content)


FILES: dict[str, Callable[[Path, Path], None]] = {
    "a pickle that inflates to 256 MB": deflated,
    "a member outside": member("../../outside"),
    "a second pickle": member("other/data.pkl"),
    "another folder first": another_folder_first,
    "a record twice": beside("data/0"),
    "overlapping records": overlapping,
    "a legacy file of torch": legacy,
    "a bare pickle": bare_pickle,
    "a pipe": pipe,
    "a device": device,
    "64 GB of nothing": sparse,
    "a pickle in capitals": beside("DATA.PKL"),
    "a tensor in capitals": beside("DATA/0"),
    "a pickle of TorchScript": beside("constants.pkl"),
    "a record that is a folder of DOS": beside("data/999", 0x10),
}


Change = Callable[[Path, Path], Any]


def at(name: str, change: Callable[[Path], Any]) -> Change:
    """Change one file of a checkpoint."""
    return lambda path, _: change(path / name)


def elsewhere(path: Path, _: Path) -> None:
    shutil.copytree(path / "checkpoint", path.parent / "elsewhere", dirs_exist_ok=True)
    (path / "latest").write_text("../elsewhere")


LATEST = (b"..", b"../..", b"/", b"/etc", b"", b"check\0point", b"\xff\xfe\xff", b"a" * 900)
FOLDERS: dict[str, Change] = {
    **{f"latest: {content[:20]!r}": at("latest", partial(Path.write_bytes, data=content)) for content in LATEST},
    "latest: another checkpoint": elsewhere,
    "latest: 64 GB": at("latest", sparse),
    "latest: a pipe": at("latest", pipe),
}


def with_digest(**changes: Any) -> Callable[[Path], object]:
    def edit(file: Path) -> None:
        values = {**json.loads(file.read_text()), **changes}
        del values["digest"]
        file.write_text(json.dumps({**values, "digest": digest_of(values)}))

    return edit


CHANGED_RECORDS: dict[str, Callable[[Path], Any]] = {
    "a record that is a pipe": pipe,
    "a record of 64 GB": sparse,
    "a record that is nested": lambda file: file.write_text("[" * 10**6),
    "a record of numbers": lambda file: file.write_text("[" + "1," * 10**6 + "1]"),
    "a record of words": with_digest(world_size="2", step=[1]),
    "a record of other files": with_digest(files={"../../../etc/passwd": {"size": 1, "directory": None}}),
    "a record without files": with_digest(files=None),
    "a record of nested names": with_digest(left_out=[{"names": [["x"] * 3], "shape": [["x"]]}]),
}
RECORDS = {name: at(f"checkpoint/{RECORD}", change) for name, change in CHANGED_RECORDS.items()}


# `inspect` reads no record in a file that has one beside it.
UNREAD = {(name, "inspect") for name in SAID if name.startswith("a record")}
HARMLESS = {*BY_OPCODE, *(f"os.system in {name}" for name in IN_A_STATE)}
"""What names code may be read, since nothing runs it."""
HARMLESS |= {
    "a member outside", "a second pickle", "laughs in the client's state", "laughs in the configuration",
    "laughs as the id of the save", "laughs as the number of steps", "a configuration that holds itself",
    "numbers that are huge",
}  # fmt: skip
"""What neither torch nor a tool reads."""


def on_file(kind: str, change: Change) -> Change:
    return lambda path, canary: change(min(path.rglob(f"*{kind}_states.pt")), canary)


def on_state(change: Callable[[dict[str, Any], Path], Any]) -> Change:
    return on_file("model", lambda file, canary: changed(file, lambda state: change(state, canary)))


def evil_in(change: Any, state: dict[str, Any], canary: Path) -> None:
    change(state, touch(canary))


def alone(change: Callable[[dict[str, Any]], Any], state: dict[str, Any], _: Path) -> None:
    change(state)


def attacks() -> dict[str, Change]:
    """Return all attacks by name: each receives a checkpoint and where its payload would leave a file."""
    found: dict[str, Change] = {}
    for kind in ("model", "optim"):
        found |= {f"{name} ({kind})": on_file(kind, partial(inject, code)) for name, code in BY_OPCODE.items()}
        found |= {f"{name} ({kind})": on_file(kind, change) for name, change in FILES.items()}
    for name, change in IN_A_STATE.items():
        found[f"os.system in {name}"] = on_state(partial(evil_in, change))
    return {**found, **{name: on_state(partial(alone, say)) for name, say in SAID.items()}, **FOLDERS, **RECORDS}


ATTACKS = attacks()


@pytest.fixture(scope="module")
def good(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both checkpoints of ZeRO-2 as `good`, after each tool has imported what it needs."""
    import encodings.cp437  # noqa: F401  -- for the names in archives

    folder = tmp_path_factory.mktemp("hostile")
    shutil.copytree(checkpoints(2), folder / "good")
    for line in commands(folder / "good" / "small.ckpt", folder / "good" / "full.ckpt", folder / "warm").values():
        assert main([*line, "--json"]) == 0, line
    return folder


@pytest.mark.timeout(1800)
def test_no_tool_runs_a_checkpoint(
    good: Path, capsys: pytest.CaptureFixture[str], long: bool, counted: Callable[[str, int], None]
) -> None:
    tried, wrong = 0, []
    for number, (name, attack) in enumerate(ATTACKS.items()):
        lines = attacked(good, attack)
        chosen = list(lines) if long else [list(lines)[number % len(lines)]]
        for tool in chosen:
            may_work = name.split(" (")[0] in HARMLESS or (name, tool) in UNREAD
            try:
                tried += 1
                refused(lines[tool], good, capsys, may_work)
            except Exception as error:
                wrong.append(f"{name}: {tool}: {type(error).__name__}: {error!s:.300}")
    assert not wrong, "\n".join([f"{len(wrong)} of {tried}", *wrong])
    counted("hostile checkpoint, read by a tool", tried)


def attacked(good: Path, attack: Change) -> dict[str, list[str]]:
    """Run the tools on a copy of the checkpoints that has become hostile."""
    shutil.rmtree(good / "bad", ignore_errors=True)
    shutil.copytree(good / "good", good / "bad")
    pair = good / "bad" / "small.ckpt", good / "bad" / "full.ckpt"
    for path in pair:
        attack(path, good / "canary")
    return commands(*pair, good / "out")


def refused(line: list[str], good: Path, capsys: pytest.CaptureFixture[str], may_work: bool) -> str:
    """Return what is printed to stderr."""
    try:
        with watched():
            status = main([*line, "--json"])
        found = capsys.readouterr()
        check(status, found, may_work)
        assert not (good / "canary").exists()
        assert not (good / "outside").exists()
        return found.err
    finally:
        (good / "canary").unlink(missing_ok=True)
        shutil.rmtree(good / "out", ignore_errors=True)


def lying(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Write a safetensors file with a changed header."""

    def write(folder: Path, _: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        said = json.loads(content[8 : 8 + length])
        header = change(said)
        header = header if isinstance(header, bytes) else json.dumps(said).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])

    return write


def first(said: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for name, entry in said.items() if name != "__metadata__")
    return found


def index(name: Any) -> Change:
    return lambda folder, _: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": name}})
    )


def weights_in(name: str, make: Callable[[Path], Any], **options: Any) -> Change:
    def write(folder: Path, canary: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save({"model.norm.weight": torch.ones(32), "mine": make(canary)}, folder / name, **options)

    return write


BASES: dict[str, Change] = {
    "os.system in a .bin": weights_in("pytorch_model.bin", touch),
    "os.system in a legacy .bin": weights_in("pytorch_model.bin", touch, _use_new_zipfile_serialization=False),
    "an index that leads out": index("../../../outside.safetensors"),
    "an index that leads to /": index("/etc/passwd"),
    "an index of lists": index([]),
    "an index that is deep": lambda folder, _: (folder / "model.safetensors.index.json").write_text("[" * 100_000),
    "an index of 64 GB": lambda folder, _: sparse(folder / "model.safetensors.index.json"),
    "a header that is deep": lying(lambda _: b"[" * 100_000),
    "a header that is no object": lying(lambda _: b"[1]"),
    "a header with a name twice": lying(lambda _: b'{"a": {}, "a": {}}'),
    "metadata that are text": lying(lambda said: said.update(__metadata__="abc")),
    "metadata of lists": lying(lambda said: said.update(__metadata__={"a": []})),
    "places that overlap": lying(lambda said: said.update(mine=dict(first(said)))),
    "a place far out": lying(lambda said: first(said).update(data_offsets=[1 << 60, 1 << 61])),
    "a place before": lying(lambda said: first(said).update(data_offsets=[-8, 0])),
    "places that are broken": lying(lambda said: first(said).update(data_offsets=[0.0, 8.0])),
    "shapes that are broken": lying(lambda said: first(said).update(shape=[float(x) for x in first(said)["shape"]])),
    "shapes that are negative": lying(lambda said: first(said).update(shape=[-x for x in first(said)["shape"]])),
    "shapes that are long": lying(lambda said: first(said).update(shape=[9] * 100_000)),
    "a header that says it is long": lambda folder, _: (folder / "model.safetensors").write_bytes(b"\xff" * 9),
    "weights that are a pipe": lambda folder, _: pipe(folder / "model.safetensors"),
}


def test_no_tool_runs_a_base(
    good: Path, capsys: pytest.CaptureFixture[str], counted: Callable[[str, int], None]
) -> None:
    model = {name: value.clone() for name, value in base_model().state_dict().items() if name != "lm_head.weight"}
    small = str(good / "good" / "small.ckpt")
    tried, wrong = 0, []
    for name, attack in BASES.items():
        folder = good / "base"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file(model, folder / "model.safetensors")
        attack(folder, good / "canary")
        module = torch.nn.Linear(1, 1)
        for line in (["consolidate", small, str(good / "out" / "one.ckpt")], ["verify", small]):
            tried += 1
            try:
                refused([*line, "--base", str(folder)], good, capsys, False)
                with pytest.raises((CheckpointError, CheckpointMismatchError)), watched():
                    load_trainable(module, folder)
            except Exception as error:
                wrong.append(f"{name}: {line[0]}: {type(error).__name__}: {error!s:.300}")
    assert not wrong, "\n".join([f"{len(wrong)} of {tried}", *wrong])
    counted("hostile base, read by a tool", tried)


def test_a_tag_is_a_name(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tag in ("..", ".", "", "/", "../small.ckpt/checkpoint", "checkpoint/../checkpoint", "a\0b"):
        refused(["inspect", str(good / "good" / "full.ckpt"), "--tag", tag], good, capsys, False)


def check(status: int, said: Any, may_work: bool) -> None:
    """Assert one error in one line, or what `verify` reports."""
    if status:
        assert status == 1
        problems = json.loads(said.out)["problems"] if said.out else []
        assert problems or said.err.startswith("ds-frozen-patch: ")
        assert len(said.err) < 3000
        assert "Traceback" not in said.err
    else:
        assert may_work, "it was not refused"
        json.loads(said.out)
