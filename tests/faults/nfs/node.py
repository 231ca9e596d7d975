"""The nodes in the virtual machine: they train, and save to one name repeatedly.

After each save, rank 0 checks the folder that the server exports, and reports on the console. Imports take a minute
there, so the nodes are forks of this process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import setuptools  # noqa: F401  -- before DeepSpeed imports distutils: it takes its place, to build ops
import torch
from kit.cell import TRAINER, Callback, DeepSpeedStrategy

from ds_frozen_patch import inspect, patch, verify
from ds_frozen_patch.testing import cpu_strategy

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NAME, NEW_NETWORK, EXCHANGE, HERE = 0x20000, 0x4000000, 0x40000000, 2, -100
NAME = "last.ckpt"
PATIENCE = timedelta(seconds=300)


class Node(Callback):
    """Saves after each step, and checks what the server has then."""

    def __init__(self, version: str, nodes: int, rank: int, saves: int) -> None:
        self.nodes, self.rank, self.saves = nodes, rank, saves
        self.run = f"{version}-{nodes}"
        self.client, self.server = Path("/mnt/nfs", version, self.run), Path("/mnt/disk", self.run)
        self.meetings = 0
        self.kept: int | None = None  # the step of the checkpoint that lies whole under the name

    def on_train_start(self, *_: Any) -> None:
        self.tell(kind="client", **self.try_client())

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        error, began = "", time.monotonic()
        try:
            trainer.save_checkpoint(self.client / NAME)
        except Exception as raised:
            error = f"rank {self.rank}: {type(raised).__name__}: {raised}"
        seconds = time.monotonic() - began
        errors = [text for text in self.meet(error) if text]
        if self.rank == 0:
            step, problem = look(self.server / NAME)
            if not errors and not problem and step != trainer.global_step:
                problem = f"The checkpoint is of step {step}, not {trainer.global_step}."
            lost = step is None or step not in (trainer.global_step, self.kept)
            self.kept = step
            why = " ".join([*errors[:1], problem]).strip()
            self.tell(kind="save", failed=bool(why), lost=lost, seconds=seconds, why=why)
        self.meet(None)
        trainer.should_stop = trainer.global_step >= self.saves

    def on_train_end(self, *_: Any) -> None:
        self.store().set(f"left/{self.rank}", "")
        if self.rank == 0:  # the store is in this process
            self.store().wait([f"left/{rank}" for rank in range(self.nodes)])
        self.tell(kind="end", names=sorted({entry.name for entry in self.server.iterdir()} - {NAME, "tried"}))

    def meet(self, value: Any) -> list[Any]:
        """Return each rank's value, by the process group's store: it also works after a collective has failed."""
        store = self.store()
        self.meetings += 1
        store.set(f"nfs/{self.meetings}/{self.rank}", json.dumps(value))
        return [json.loads(store.get(f"nfs/{self.meetings}/{rank}")) for rank in range(self.nodes)]

    def store(self) -> Any:
        return torch.distributed.distributed_c10d._get_default_store()

    def try_client(self) -> dict[str, Any]:
        """Check whether the nodes have separate caches, as on two machines: rank 0 changes, and the last rank looks."""
        first, last, folder = self.rank == 0, self.rank == self.nodes - 1, self.client / "tried"
        before, after, locked = (folder / name for name in ("before", "after", "locked"))
        if first:
            before.mkdir(parents=True)
        self.meet(None)
        _ = before.is_dir(), after.is_dir()  # now every node has both names in its cache
        self.meet(None)
        if first:
            before.rename(after)
        self.meet(None)
        seen = [before.is_dir(), after.is_dir()]
        names = [entry.name for entry in folder.iterdir()]
        self.meet(None)
        found: dict[str, Any] = {"is_dir(old), is_dir(new) after a rename elsewhere": seen, "listdir": names}
        with locked.open("a") as file:
            if first:
                fcntl.flock(file, fcntl.LOCK_EX)
            self.meet(None)
            if last:
                found["flock of what is locked elsewhere"] = attempt(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.meet(None)
        if last:
            before.mkdir()
            one, other = os.fsencode(before), os.fsencode(after)
            found["RENAME_EXCHANGE"] = attempt(call, "renameat2", HERE, one, HERE, other, EXCHANGE)
            found["fsync of a folder"] = attempt(os.fsync, os.open(folder, os.O_RDONLY))
        return dict(self.meet(found)[-1])

    def tell(self, **found: Any) -> None:
        if self.rank == 0:
            with Path("/dev/console").open("w") as console:
                console.write(f"\nRESULT {json.dumps({'of': self.run, **found})}\n")


def look(path: Path) -> tuple[int | None, str]:
    """Return the step of the checkpoint that is whole at this path, or what is wrong."""
    if not path.is_dir():
        return None, "Nothing is there under the name."
    try:
        if problems := verify(path).problems:
            return None, " ".join(problems)
        return inspect(path).global_step, ""
    except Exception as error:
        return None, f"What is there cannot be read: {error}"


def call(name: str, *arguments: Any) -> None:
    """Call a function of libc that returns 0 or sets errno."""
    if getattr(LIBC, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


def attempt(function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "works"


def train(version: str, nodes: int, rank: int, saves: int, stage: int) -> None:
    """Enter the namespaces of a node in a fork, and train."""
    with Path(f"/mnt/log{rank}").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from kit import runs

    namespaces = os.pidfd_open(int(Path(f"/mnt/node{rank}").read_text()))
    call("setns", namespaces, NEW_MOUNTS | NEW_NAME | NEW_NETWORK)
    os.environ |= {"RANK": str(rank), "NODE_RANK": str(rank), "WORLD_SIZE": str(nodes)}
    os.environ |= {"MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    node = Node(version, nodes, rank, saves)
    strategy = DeepSpeedStrategy(config=runs.config(stage), timeout=PATIENCE)
    options: dict[str, Any] = {"enable_checkpointing": False, "callbacks": [node], "num_nodes": nodes}
    runs.trainer(node.client, 1, strategy=strategy, epochs=saves, **options).fit(runs.LoraRun(), runs.batches(nodes))


def main() -> None:
    torch.set_num_threads(1)
    cpu_strategy(TRAINER)
    from kit import runs  # noqa: F401  -- with DeepSpeed, for all forks

    if os.environ["NFS_PLAIN"] == "no":
        patch()
    saves, stage = int(os.environ["NFS_SAVES"]), int(os.environ["NFS_STAGE"])
    for version in os.environ["NFS_VERSIONS"].split():
        for nodes in map(int, os.environ["NFS_NODES"].split()):
            forks = {}
            for rank in range(nodes):
                if not (fork := os.fork()):
                    try:
                        train(version, nodes, rank, saves, stage)
                    except BaseException:
                        traceback.print_exc()
                        sys.stderr.flush()
                        os._exit(1)
                    os._exit(0)
                forks[fork] = rank
            while forks:
                fork, status = os.wait()
                rank = forks.pop(fork)
                if status:
                    last = Path(f"/mnt/log{rank}").read_text(errors="replace").splitlines()[-15:]
                    print(
                        f"NFS {version}, {nodes} nodes: rank {rank} ended with an error.", *last, sep="\n", flush=True
                    )


if __name__ == "__main__":
    main()
