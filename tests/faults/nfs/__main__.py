"""Save from several nodes on real NFS, in a virtual machine: `nox -f ci/noxfile.py -s nfs`.

Linux's own NFS server and, for each node, an NFS client of its own run in one User-mode Linux, a kernel that is a
process of this machine and sees its files read-only; it needs neither KVM nor a network. On a processor with AMX,
that of Debian 12 (6.1) panics; 7.2 works, with its modules in /usr/lib/uml/modules. The nodes train together, and
save to one name after every step. After each save the folder is read on the server. A save failed if it raised an
error on any node, or if what lies under the name then is not whole or not of this save. It was lost if there is no
whole checkpoint at all under the name then, neither the new one nor the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

GUEST = Path(__file__).resolve().with_name("guest.sh")
MODULES = Path("/lib/modules")  # must exist here: the virtual machine mounts its own over it
PACKAGES = "apt-get install --no-install-recommends user-mode-linux nfs-kernel-server iproute2 e2fsprogs kmod"
PROGRAMS = {"linux.uml": "User-mode Linux", "rpc.nfsd": "an NFS server", "mount.nfs": "an NFS client"}
PROGRAMS |= {"rpcbind": "rpcbind", "ip": "iproute2", "mkfs.ext4": "e2fsprogs", "modprobe": "kmod"}
END = "The machine ends."
SILENCE = 900  # seconds without a word from the machine after which it is taken to hang


def main() -> int:
    parser = argparse.ArgumentParser(prog="nox -f ci/noxfile.py -s nfs --", description=__doc__)
    parser.add_argument("--saves", type=int, default=200, help="how many for each number of nodes and version")
    parser.add_argument("--nodes", default="2,4", help="numbers of nodes, 2 to 8")
    parser.add_argument("--versions", default="4.2,4.1,3", help="versions of NFS")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--plain", action="store_true", help="without the patch: Lightning and DeepSpeed alone")
    parser.add_argument("--memory", type=int, default=6, help="GiB for the machine")
    arguments = parser.parse_args()
    if missing := what_is_missing():
        print(
            f"This machine lacks {', '.join(missing)}. On Debian as root: mkdir -p {MODULES} && {PACKAGES}",
            file=sys.stderr,
        )
        return 2
    if os.geteuid():
        print("The virtual machine reads this machine's files as the user who starts it: be root.", file=sys.stderr)
        return 2
    told = boot(arguments)
    wanted = [f"{version}-{nodes}" for version in arguments.versions.split(",") for nodes in arguments.nodes.split(",")]
    return report(told, wanted, arguments.saves)


def what_is_missing() -> list[str]:
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    programs = [name for program, name in PROGRAMS.items() if not shutil.which(program)]
    return programs + ([] if MODULES.is_dir() else [str(MODULES)])


def boot(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the machine to its end, and return the nodes' reports; its other output goes to stderr."""
    told: list[dict[str, Any]] = []
    settings = {"python": sys.executable, "plain": "yes" if arguments.plain else "no"}
    settings |= {name: getattr(arguments, name).replace(",", " ") for name in ("nodes", "versions")}
    settings |= {name: str(getattr(arguments, name)) for name in ("saves", "stage")}
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder, "disk")
        with disk.open("wb") as file:
            file.truncate(8 * 2**30)  # a file with holes
        command = ["linux.uml", f"mem={arguments.memory}G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"]
        command += [f"ubd0={disk}", f"uml_dir={folder}", "con=null", "con0=null,fd:1", "loglevel=1", f"init={GUEST}"]
        command += [f'NFS_{name.upper()}="{value}"' for name, value in settings.items()]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "bufsize": 0}  # select sees no buffers
        machine = subprocess.Popen(command, start_new_session=True, **streams)  # type: ignore[call-overload]
        assert machine.stdout
        try:
            while select.select([machine.stdout], [], [], SILENCE)[0]:
                raw = machine.stdout.readline()
                line = raw.decode(errors="replace").strip()
                if not raw or line == END:
                    break
                if line.startswith("RESULT "):
                    told.append(json.loads(line.removeprefix("RESULT ")))
                    if told[-1]["kind"] == "end":
                        print(f"NFS and nodes {told[-1]['of']}: done", file=sys.stderr, flush=True)
                elif line:
                    print(line, file=sys.stderr, flush=True)
            else:
                print(f"The machine said nothing for {SILENCE} seconds, and was ended.", file=sys.stderr)
        finally:
            os.killpg(machine.pid, signal.SIGKILL)  # its processes are processes here, children of the first
            machine.wait()
    return told


def report(told: list[dict[str, Any]], wanted: list[str], saves: int) -> int:
    """Print the outcomes of the saves; return whether any is an error."""
    by_run: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for entry in told:
        by_run[entry.pop("of")][entry.pop("kind")].append(entry)
    print("| NFS | nodes | saves | failed | lost | not made | seconds a save | other names in the folder |")
    print("|---|---|---|---|---|---|---|---|")
    bad, notes = False, []
    for run in wanted:
        version, nodes = run.split("-")
        made = by_run[run]["save"]
        failed, lost = (sum(save[what] for save in made) for what in ("failed", "lost"))
        median = sorted(save["seconds"] for save in made)[len(made) // 2] if made else 0
        left = ", ".join(name for end in by_run[run]["end"] for name in end["names"])
        cells = (version, nodes, len(made), failed, lost, saves - len(made), f"{median:.2f}", left)
        print(f"| {' | '.join(map(str, cells))} |")
        bad = bad or bool(failed or lost or saves > len(made))
        if nodes == wanted[0].split("-")[1]:
            notes += [f"NFS {version}, the client: {json.dumps(found)}" for found in by_run[run]["client"]]
        notes += [f"NFS {version}, {nodes} nodes, first failure: {s['why']}" for s in made if s["why"]][:1]
    print("", *notes, sep="\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
