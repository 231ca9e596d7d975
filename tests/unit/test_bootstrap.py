"""`ds-frozen-patch run`: a program that does not import us, and its child processes, are patched; nothing else changes.

The programs run in a Python that has a made-up Lightning (`kit.programs`), and no other package. Tests of what could
differ between Python versions run in each cell.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from kit.cell import FABRIC, TRAINER
from kit.programs import Site

from ds_frozen_patch.cli import main
from ds_frozen_patch.patching.run import CONNECTORS

Run = Callable[..., "subprocess.CompletedProcess[str]"]

COMMAND = (sys.executable, "-m", "ds_frozen_patch", "run")
LOOK = """
import sys
def look():
    import lightning.pytorch.strategies.deepspeed as strategies, deepspeed.runtime.engine as engines
    functions = strategies.DeepSpeedStrategy.save_checkpoint, engines.DeepSpeedEngine.save_checkpoint
    return [hasattr(function, "__wrapped__") for function in functions]
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without packages."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


@pytest.fixture
def run(site: Site, python: Path) -> Run:
    def run(program: str, *options: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        (site.root / "program.py").write_text(LOOK + program)
        command = [sys.executable, "-m", "ds_frozen_patch", "run", *options, "--", str(python), "program.py", "--lr=1"]
        return execute(site, command, status, **environment)

    return run


def execute(site: Site, command: list[str], status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*filter(None, [environment.pop("before", "")]), str(site.root)])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=site.root, env=variables, timeout=60, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_a_program_is_patched_transparently(run: Run, python: Path) -> None:
    program = """
if __name__ == "__main__":
    print(sys.argv, [entry for entry in sys.path if "bootstrap" in entry], "sitecustomize" in sys.modules)
    print([name for name in ("wrapt", "ds_frozen_patch", "logging", "typing") if name in sys.modules])
    print(look())
    print([type(finder).__module__ for finder in sys.meta_path if not isinstance(finder, type)])
    print(__import__("lightning").__spec__.submodule_search_locations)
"""
    of_system = "import sys; print('sitecustomize' in sys.modules)"  # Debian's and Ubuntu's Pythons have one
    is_there = subprocess.check_output([str(python), "-c", of_system], text=True).strip()
    done = run(program)
    said = done.stdout.splitlines()
    assert said[:3] == [f"['program.py', '--lr=1'] [] {is_there}", "[]", "[True, True]"]
    assert "sitecustomize" not in said[3]
    assert "site-packages" not in said[4]
    assert done.stderr == ""


@pytest.mark.everyday
@pytest.mark.once
@pytest.mark.parametrize("start", ["subprocess", "spawn", "fork", "forkserver"])
def test_child_processes_are_patched(run: Run, start: str) -> None:
    program = """
import multiprocessing, subprocess, os
if __name__ == "__main__":
    if "child" in sys.argv: print(look())
    elif START == "subprocess":
        print(subprocess.check_output([sys.executable, *sys.argv, "child"], text=True))
    else:
        with multiprocessing.get_context(START).Pool(1) as pool: print(pool.apply(look))
"""
    assert run(f"START = {start!r}{program}").stdout.split("\n")[0] == "[True, True]"


def test_the_users_sitecustomize_runs(run: Run, site: Site, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.mktemp("own")
    (own / "sitecustomize.py").write_text("import sys; sys.own = 'it ran'")
    program = "import sitecustomize; print(sys.own, sitecustomize.__file__, look())"
    for before in (f"{own}", f"{own}:/nowhere"):
        assert run(program, before=before).stdout == f"it ran {own}/sitecustomize.py [True, True]\n"
    (own / "sitecustomize.py").write_text("1/0")
    done = run("print(look())", before=str(own))
    assert done.stdout == "[True, True]\n"
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.short
@pytest.mark.everyday
@pytest.mark.once
def test_options_become_settings(run: Run) -> None:
    program = "look(); from ds_frozen_patch.settings import current; print(current())"
    options = (
        "--verify-base warn --keep a.* --keep b --leave-out q --export peft --elastic --restart-optimizer --no-fsync"
        " --weights-only --no-whole-model --async-save --no-verify-files"
    )
    said = run(program, *options.split()).stdout
    assert said == (
        "Settings(verify_base='warn', keep=('a.*', 'b'), leave_out=('q',), export='peft',"
        " elastic=True, restart_optimizer=True, fsync=False, weights_only=True, whole_model=False, async_save=True,"
        " verify_files=False)\n"
    )
    undone = run(program, "--no-keep", "--no-export", DS_FROZEN_PATCH_KEEP="c", DS_FROZEN_PATCH_EXPORT="peft").stdout
    assert "keep=()" in undone
    assert "export=None" in undone
    assert "elastic=False" in run(program, "--no-elastic", DS_FROZEN_PATCH_KEEP=" c , d ").stdout
    assert "keep=('c', 'd')" in run(program, DS_FROZEN_PATCH_KEEP=" c , d ").stdout


def test_a_program_without_lightning(run: Run, site: Site) -> None:
    shutil.rmtree(site.root / "lightning")
    site.accelerate()
    program = "import accelerate.accelerator as found; print(hasattr(found.Accelerator.save_state, '__wrapped__'))"
    assert run(program).stdout == "True\n"
    assert run(f"import ds_frozen_patch as dfp; dfp.unpatch(); {program}").stdout == "False\n"


@pytest.mark.everyday
@pytest.mark.once
def test_the_switch(run: Run) -> None:
    """It is the operator's, who may set it to 0 where somebody else has written `run` into a script."""
    program = "import ds_frozen_patch as dfp; print(look(), dfp.status().in_force)"
    assert run(program, DS_FROZEN_PATCH="0").stdout == "[False, False] False\n"
    assert run(program, DS_FROZEN_PATCH="").stdout == run(program).stdout == "[True, True] True\n"


@pytest.mark.everyday
@pytest.mark.once
def test_environment_variables_alone(site: Site, python: Path) -> None:
    command = [*COMMAND, "--keep", "it's *", "--env"]
    lines = execute(site, command).stdout
    (site.root / "program.py").write_text(LOOK + "import os; print(look(), os.environ.get('DS_FROZEN_PATCH_KEEP'))")
    starts = (f"{switch} {python} program.py" for switch in ("", "DS_FROZEN_PATCH=0", "unset DS_FROZEN_PATCH;"))
    shell = "\n".join([lines, *starts])
    for before in ("", "/nowhere"):
        said = execute(site, ["sh", "-c", shell], before=before).stdout.splitlines()
        assert said == ["[True, True] it's *", "[False, False] it's *", "[False, False] it's *"]


@pytest.mark.everyday
@pytest.mark.once
def test_status_patch_and_unpatch_in_the_program(run: Run) -> None:
    state = "; print(dfp.status()['lightning.pytorch'].state)"
    assert run(f"import ds_frozen_patch as dfp{state}; print(look())").stdout == "waiting for import\n[True, True]\n"
    waits = "any(hasattr(finder, 'leave_unpatched') for finder in sys.meta_path)"
    asked = f"import sys, ds_frozen_patch as dfp; before = {waits}{state}; print(before, {waits})"
    assert run(asked).stdout == "waiting for import\nTrue True\n", "asking for the status has patched"
    unpatched = run(f"import ds_frozen_patch as dfp; dfp.unpatch(){state}; print(look())").stdout
    assert unpatched == "can be wrapped\n[False, False]\n"
    late = run(f"look(); import ds_frozen_patch as dfp{state}; dfp.unpatch(); print(look())").stdout
    assert late.endswith("[False, False]\n")
    program = """
import ds_frozen_patch as dfp
from ds_frozen_patch.settings import current
dfp.patch(keep=["a"])
print(look(), current().keep, current().verify_base)
"""
    assert run(program, "--keep", "b", "--verify-base", "off").stdout == "[True, True] ('a',) off\n"


REFUSALS: dict[str, Callable[[Site], Any]] = {
    "at once": lambda site: site.deepspeed("0.9.5", flag=""),
    "at its import": lambda site: site.write(
        "deepspeed/runtime/engine.py",
        (site.root / "deepspeed/runtime/engine.py").read_text() + "\ndel DeepSpeedEngine.load_checkpoint\n",
    ),
    "at that of Lightning": lambda site: site.write(
        "lightning/fabric/strategies/deepspeed.py", "DeepSpeedStrategy = 0"
    ),
    "not installed here": lambda site: (site.root / "ds_frozen_patch").unlink(),
}
SAID = {
    "at once": "has no argument exclude_frozen_parameters",
    "at its import": "has no method load_checkpoint",
    "at that of Lightning": "has no class DeepSpeedStrategy",
    "not installed here": "cannot import ds_frozen_patch",
}
IMPORTS = """
import importlib.util, multiprocessing
import lightning.pytorch.strategies.deepspeed as strategies, lightning.fabric.strategies.deepspeed
importlib.util.find_spec("deepspeed")  # as programs look for what they may use
class Module:
    def __init__(self, *kinds): self.kinds = kinds
    def parameters(self): return [type("Parameter", (), {"requires_grad": kind}) for kind in self.kinds]
class Adam:
    def step(self): ...
"""
TRAINS = """
from deepspeed.runtime.engine import DeepSpeedEngine
engine = DeepSpeedEngine(model=Module(True, False), optimizer=Adam())
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool: pool.apply(print)
    print("trained", hasattr(strategies.DeepSpeedStrategy.save_checkpoint, "__wrapped__"))
"""
SAVES_NOTHING_FROZEN = {
    "no DeepSpeed": "",
    "DeepSpeed imported": "import deepspeed",
    "inference": "import deepspeed.runtime.engine as engines; engines.DeepSpeedEngine(model=Module(True, False))",
    "all trained": "import deepspeed.runtime.engine as e; e.DeepSpeedEngine(model=Module(True), optimizer=Adam())",
    "unpatched": "import ds_frozen_patch as dfp; dfp.unpatch()" + TRAINS.partition("if __name__")[0],
}


@pytest.mark.everyday
@pytest.mark.once
@pytest.mark.promise(12)
@pytest.mark.parametrize("why", REFUSALS)
def test_a_refusal_warns_or_with_strict_fails(run: Run, site: Site, why: str) -> None:
    """Once the program trains with an engine whose checkpoints have frozen parameters, before its first step."""
    REFUSALS[why](site)
    done = run(IMPORTS + TRAINS, RANK="0", LOCAL_RANK="0")
    assert done.stdout.endswith("trained False\n")
    assert done.stderr.count(SAID[why]) == 1
    assert done.stderr.endswith(
        "The program continues without it: its DeepSpeed checkpoints contain frozen parameters too.\n"
    )
    assert run(IMPORTS + TRAINS, RANK="1", LOCAL_RANK="1").stderr == ""
    for strict in ({"DS_FROZEN_PATCH_STRICT": "1"}, {}):
        done = run(IMPORTS + TRAINS, *([] if strict else ["--strict"]), status=1, **strict)
        assert done.stdout == ""
        assert SAID[why] in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.everyday
@pytest.mark.once
@pytest.mark.promise(12)
@pytest.mark.parametrize("program", SAVES_NOTHING_FROZEN)
@pytest.mark.parametrize("why", ["at once", "at its import", "at that of Lightning"])
def test_strict_fails_nowhere_else(run: Run, site: Site, why: str, program: str) -> None:
    """Where no checkpoint would have frozen parameters, `run` says nothing."""
    REFUSALS[why](site)
    done = run(f"{IMPORTS}{SAVES_NOTHING_FROZEN[program]}\nprint('ran')", "--strict")
    assert (done.stdout, done.stderr) == ("ran\n", "")


@pytest.mark.everyday
@pytest.mark.once
@pytest.mark.promise(12)
@pytest.mark.parametrize("has_package", [True, False])
def test_a_program_without_deepspeed(run: Run, site: Site, has_package: bool) -> None:
    """It says nothing, not even to programs that look for DeepSpeed."""
    list(map(shutil.rmtree, site.root.glob("deepspeed*")))
    if not has_package:
        REFUSALS["not installed here"](site)
    looks = "\ntry: import deepspeed\nexcept ImportError: print('without')"
    done = run(IMPORTS + looks, "--strict")
    assert (done.stdout, done.stderr) == ("without\n", "")


def test_an_untested_release_is_no_news_without_an_engine(run: Run, site: Site) -> None:
    list(map(shutil.rmtree, site.root.glob("lightning-*")))
    site.lightning(version="99.1")
    done = run("print(look())")
    assert (done.stdout, done.stderr) == ("[True, True]\n", "")


@pytest.mark.everyday
@pytest.mark.once
def test_deepspeed_alone(run: Run, site: Site) -> None:
    """Whatever the program has looked for before, and imports then."""
    shutil.rmtree(site.root / "lightning")
    looks = "import importlib.util as util; util.find_spec('lightning'); util.find_spec('accelerate')\n"
    imports = "import deepspeed.runtime.engine as e; print(hasattr(e.DeepSpeedEngine.save_checkpoint, '__wrapped__'))"
    for program in (imports, looks + imports):
        assert run(program).stdout == "True\n"
    unpatched = f"{looks}import ds_frozen_patch as dfp; dfp.unpatch(); {imports}"
    assert run(unpatched).stdout == "False\n"


@pytest.mark.everyday
@pytest.mark.once
@pytest.mark.promise(12)
def test_an_explicit_patch_still_raises(run: Run, site: Site) -> None:
    for why in ("at once", "at its import"):
        site.deepspeed()
        REFUSALS[why](site)
        for first in ("", "import lightning\n"):
            done = run(f"{first}import ds_frozen_patch as dfp; dfp.patch(); import deepspeed.runtime.engine", status=1)
            assert "PatchError" in done.stderr
            assert SAID[why] in done.stderr


@pytest.mark.everyday
@pytest.mark.once
@pytest.mark.parametrize("variable", [f"DS_FROZEN_PATCH_{name}" for name in ("STRICT", "EXPORT", "CPU", "EXPRT")])
def test_a_wrong_variable_ends_the_program(run: Run, variable: str) -> None:
    done = run("import lightning", status=1, **{variable: "yes"})
    said = f"The environment variable {variable} has" if variable.endswith("EXPRT") else f"{variable} must be"
    assert f"ds-frozen-patch: {said}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.everyday
@pytest.mark.once
def test_exit_statuses_and_signals_are_passed_through(run: Run, site: Site, tmp_path: Path) -> None:
    run("sys.exit(7)", status=7)
    run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", status=-signal.SIGKILL)
    catches = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print(os.getpid(), flush=True)"
    (site.root / "program.py").write_text(
        f"import os, signal, sys, time; {catches}; [time.sleep(0.1) for _ in 99 * '.']"
    )
    command = [*COMMAND, sys.executable, "program.py"]
    with subprocess.Popen(command, cwd=site.root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 3


@pytest.mark.everyday
@pytest.mark.once
def test_a_command_that_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, text = tmp_path / "train.py", tmp_path / "text"
    script.write_text("print('trains')")
    text.write_text("no program")
    text.chmod(0o755)
    wrong = {"no-such-command": 127, str(tmp_path / "no"): 127, str(tmp_path): 126, str(script): 126, str(text): 126}
    for name, status in wrong.items():
        assert main(["run", "--", name]) == status
        assert name in capsys.readouterr().err
    assert main(["run", str(script)]) == 126
    assert f"python {script}" in capsys.readouterr().err


@pytest.mark.short
@pytest.mark.everyday
@pytest.mark.once
@pytest.mark.parametrize("arguments", [[], ["--"], ["--env", "--", "true"], ["--verify-base=loud", "true"]])
def test_invalid_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["run", *arguments])
    assert exit_.value.code == 2
    assert "ds-frozen-patch run: error: " in capsys.readouterr().err


def test_the_names_that_cpu_replaces_exist() -> None:
    """`contract/test_run.py` shows, for one Lightning, that a program which requests a GPU then trains on the CPU."""
    own = [module for module in CONNECTORS if module.startswith((f"{TRAINER}.", f"{FABRIC}."))]
    assert len(own) == 2
    for module in own:
        connector = getattr(import_module(module), CONNECTORS[module])
        assert callable(connector._choose_gpu_accelerator_backend)
        assert callable(connector._choose_auto_accelerator)
