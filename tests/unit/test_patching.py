"""Promises 11 and 12: any order of import, patch and unpatch; all or nothing; refusals with a remedy.

Every case is a process of its own. Most use made-up releases of Lightning and DeepSpeed, which import at once and can
differ as no real release does; the last ones use the real ones.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import shutil
import subprocess
import sys
from typing import get_type_hints

import pytest
from kit.cell import FABRIC, TRAINER
from kit.programs import FLAG, STRATEGY, Site

import ds_frozen_patch as dfp
from ds_frozen_patch.patching.wrapping import TARGETS
from ds_frozen_patch.settings import Settings

pytestmark = pytest.mark.promise(11)


LOOK = """
import inspect
def imported():
    import lightning.pytorch.strategies.deepspeed as strategies, deepspeed.runtime.engine as engines
    return strategies.DeepSpeedStrategy, engines.DeepSpeedEngine
def state():
    strategy, engine = map(vars, imported())
    names = ("__init__", "save_checkpoint", "load_checkpoint")
    kinds = {hasattr(cls[name], "__wrapped__") for cls in (strategy, engine) for name in names}
    kinds |= {"exclude_frozen_parameters" in inspect.signature(imported()[0]).parameters}
    return {(True,): "patched", (False,): "plain"}.get(tuple(kinds), kinds)
"""


ORDERS = ["".join(order) for length in (1, 2, 3, 4) for order in itertools.product("ipu", repeat=length)]


def test_any_order(site: Site) -> None:
    """i: import, p: patch, u: unpatch. The last patch or unpatch decides."""
    orders = [order for order in ORDERS if order.count("i") == 1]
    program = f"""
import os
steps = {{"i": imported, "p": dfp.patch, "u": dfp.unpatch}}
for order in {orders}:
    if not (child := os.fork()):
        for step in order: steps[step]()
        print(order, state(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    expected = {order: "patched" if order.replace("i", "").endswith("p") else "plain" for order in orders}
    assert dict(line.split() for line in site.run(LOOK + program).splitlines()) == expected


def test_unpatch_restores_the_original_objects(site: Site) -> None:
    program = """
before = [dict(vars(cls)) for cls in imported()]
hooks = list(sys.meta_path)
for _ in range(3):
    dfp.patch(); dfp.patch()
    assert state() == "patched"
    dfp.unpatch(); dfp.unpatch()
    after = [dict(vars(cls)) for cls in imported()]
    assert all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(before, after)), after
assert dfp.status()["lightning.pytorch"].state == "can be wrapped"
print("same")
"""
    assert site.run(LOOK + program).strip() == "same"


def test_a_wrapper_around_ours(site: Site) -> None:
    program = """
cls, _ = imported()
dfp.patch()
ours = cls.load_checkpoint
cls.load_checkpoint = theirs = lambda self, path: "theirs " + ours(self, path)
dfp.unpatch()
assert cls.__dict__["load_checkpoint"] is theirs  # not ours to take away
assert cls().load_checkpoint("x") == "theirs loaded"
dfp.patch()
assert cls().load_checkpoint("x") == "theirs loaded"
dfp.unpatch()
assert cls.__dict__["load_checkpoint"] is theirs
"""
    site.run(LOOK + program)


def test_wrappers_are_pickled_and_copied_like_what_they_wrap(site: Site) -> None:
    site.write(
        "lightning/pytorch/utilities/deepspeed.py", "def convert_zero_checkpoint_to_fp32_state_dict(a): return a"
    )
    site.write("lightning/pytorch/utilities/__init__.py")
    program = """
import copy, pickle, subprocess
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict as plain
cls, engine = imported()
dfp.patch()
import lightning.pytorch.utilities.deepspeed as module
convert = module.convert_zero_checkpoint_to_fp32_state_dict
assert convert is not plain
assert copy.copy(convert) is copy.deepcopy([convert])[0] is pickle.loads(pickle.dumps(convert)) is convert
one = engine.__new__(engine)
one.mine = 5
for way in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
    method = way(one.save_checkpoint)
    assert method.__self__ is not one and method.__self__.mine == 5
    assert way(engine.save_checkpoint).__wrapped__ is vars(engine)["save_checkpoint"].__wrapped__
assert copy.copy(one.save_checkpoint).__self__ is one
child = "import pickle; print(pickle.loads(" + repr(pickle.dumps(convert)) + "))"
said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
assert said.startswith("<function convert_zero"), said
"""
    site.run(LOOK + program)


def test_status_says_what_is_true_now(site: Site) -> None:
    program = """
import importlib
import deepspeed.runtime.engine as module
dfp.patch()
def now():
    found = dfp.status()["deepspeed"]
    return found.state, found.found
assert now() == ("wrapped", "save_checkpoint takes exclude_frozen_parameters")
engine = module.DeepSpeedEngine
ours = vars(engine)["save_checkpoint"]
engine.save_checkpoint = lambda self, save_dir: None
assert now() == ("can be wrapped", "DeepSpeedEngine.save_checkpoint has been replaced since patch()")
import functools
engine.save_checkpoint = functools.wraps(ours)(lambda self, save_dir: ours(self, save_dir))
assert now()[0] == "wrapped", "functools.wraps shows that it calls ours"
engine.save_checkpoint = ours
importlib.reload(module)
assert now() == ("can be wrapped", "deepspeed.runtime.engine has been reloaded since patch()")
dfp.patch()
assert now()[0] == "wrapped" and hasattr(vars(module.DeepSpeedEngine)["save_checkpoint"], "__wrapped__")
dfp.unpatch()
assert now()[0] == "can be wrapped" and state() == "plain"
"""
    site.run(LOOK + program)


def test_a_method_that_somebody_has_put_back_is_restored(site: Site) -> None:
    """DeepSpeed's `zero.Init` does that to `__init__` of all modules. Layers of ours would double the time of each."""
    program = """
engine = imported()[1]
plain = vars(engine)["save_checkpoint"]
for _ in range(40):
    dfp.patch()
    engine.save_checkpoint = engine.save_checkpoint
    assert dfp.status()["deepspeed"].state == "wrapped"
    dfp.unpatch()
    assert vars(engine)["save_checkpoint"] is plain
"""
    site.run(LOOK + program)


def test_from_threads(site: Site) -> None:
    program = """
import faulthandler, threading, random
faulthandler.dump_traceback_later(20, exit=True)
def work(seed):
    pick = random.Random(seed)
    try:
        for _ in range(60):
            pick.choice([dfp.patch, dfp.unpatch, dfp.status, imported])()
    except BaseException as error:
        failed.append(error)
failed = []
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not failed, failed
dfp.patch(); assert state() == "patched", state()
dfp.unpatch(); assert state() == "plain", state()
"""
    for _ in range(3):
        site.run(LOOK + program)


def test_subclasses_and_strategies_already_built(site: Site) -> None:
    program = """
cls, _ = imported()
class Own(cls): pass
built = Own()
dfp.patch()
assert vars(cls)["save_checkpoint"].__wrapped__ is not None
assert Own.save_checkpoint.__wrapped__ is not None and built.save_checkpoint.__wrapped__ is not None
for shown in (cls, Own, Own.__init__, built.__init__):
    assert "exclude_frozen_parameters" in inspect.signature(shown).parameters, shown
assert "self" not in inspect.signature(built.__init__).parameters
assert Own(exclude_frozen_parameters=False).exclude_frozen_parameters is False
assert Own(exclude_frozen_parameters=None).exclude_frozen_parameters is True
assert Own(3).stage == 3
for wrong in ("yes", 1, []):
    try: Own(exclude_frozen_parameters=wrong)
    except TypeError as error: assert repr(wrong) in str(error) and "True, False or None" in str(error)
    else: raise AssertionError(wrong)
"""
    site.run(LOOK + program)


def test_patched_context(site: Site) -> None:
    program = """
with dfp.patched() as status:
    assert status["lightning.pytorch"].state == "waiting for import", status
    assert state() == "patched"
    with dfp.patched(): pass
    assert state() == "patched"
assert state() == "plain"
dfp.patch()
with dfp.patched(): pass
assert state() == "patched"
"""
    site.run(LOOK + program)


DROP = """
def again():
    for name in [name for name in sys.modules if name.partition(".")[0] == "ds_frozen_patch"]: del sys.modules[name]
    import ds_frozen_patch
    return ds_frozen_patch
def layers():
    function, count = vars(imported()[1])["save_checkpoint"], 0
    while hasattr(function, "__wrapped__"): function, count = function.__wrapped__, count + 1
    return count
"""


@pytest.mark.parametrize("order", ["imported(); dfp.patch()", "dfp.patch()", "dfp.patch(); dfp.unpatch()"])
def test_a_second_copy_of_the_package(site: Site, order: str) -> None:
    """A notebook drops our modules and imports them again; the first copy has wrapped, or waits for imports."""
    program = f"""
{order}
patch, unpatch = dfp.patch, dfp.unpatch
second = again()
assert second.patch is not patch
second.patch()
assert layers() == 1 and state() == "patched", layers()
assert {{item.state for item in second.status().values()}} == {{"wrapped", "waiting for import", "not installed"}}
unpatch()  # changes nothing, for it is not in force
assert layers() == 1 and state() == "patched"
third = again()
third.patch(keep=["a"])
assert layers() == 1
third.unpatch()
assert layers() == 0 and state() == "plain"
patch()
assert layers() == 1 and state() == "patched"
unpatch()
assert layers() == 0 and state() == "plain" and not [name for name in vars(sys) if "frozen" in name]
"""
    site.run(LOOK + DROP + program)


def states(site: Site, then: str = "") -> dict[str, str]:
    show = "for name, item in dfp.status().items(): print(name, item.state)"
    output = site.run(f"{then}\n{show}")
    return dict(line.split(maxsplit=1) for line in output.splitlines())


@pytest.mark.parametrize(
    ("order", "loads"),
    [
        ("dfp.patch(); imported()", "_allow_excluded_parameters(self.model)"),
        ("imported(); dfp.patch()", "strategies._allow_excluded_parameters(self.model)"),
    ],
)
def test_a_lightning_with_our_patch_series_is_unchanged(site: Site, order: str, loads: str) -> None:
    site.lightning(flag=FLAG, loads=loads)
    site.lightning("pytorch_lightning", "2.6.6", flag=FLAG)
    program = f"""
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {order}
print([str(w.message).split(":")[1] for w in caught if "series" in str(w.message)])
strategy = imported()[0]
print({{hasattr(vars(strategy)[name], "__wrapped__") for name in ("__init__", "save_checkpoint", "load_checkpoint")}})
print(dfp.status()["lightning.pytorch"].found.split(",")[0])
import pytorch_lightning.strategies.deepspeed
print([name for name, item in dfp.status().items() if item.state == "wrapped"])
print({{item.state for name, item in dfp.status().items() if "lightning" in name and "_" not in name}})
dfp.unpatch()
"""
    assert site.run(LOOK + program).splitlines() == [
        "[' lightning.pytorch 2.5.2, lightning.fabric 2.5.2. Its checkpoints are full unless you pass"
        " DeepSpeedStrategy(exclude_frozen_parameters=True), and it does not verify the base.']",
        "{False}",
        "complete",
        "['pytorch_lightning', 'deepspeed']",
        "{'has it itself'}",
    ]


def test_status_of_each_kind(site: Site) -> None:
    site.lightning("pytorch_lightning", "2.6.6", flag=FLAG)
    nothing = dict.fromkeys(["lightning_fabric", "accelerate", "transformers"], "not installed")
    assert states(site) == nothing | {
        "lightning.pytorch": "can be wrapped",
        "lightning.fabric": "can be wrapped",
        "pytorch_lightning": "has it itself",
        "deepspeed": "can be wrapped",
    }
    assert states(site, "dfp.patch(); import pytorch_lightning.strategies.deepspeed") == nothing | {
        "lightning.pytorch": "waiting for import",
        "lightning.fabric": "waiting for import",
        "pytorch_lightning": "wrapped",
        "deepspeed": "waiting for import",
    }
    assert states(site, LOOK + "dfp.patch(); imported()") == nothing | {
        "lightning.pytorch": "wrapped",
        "lightning.fabric": "waiting for import",
        "pytorch_lightning": "waiting for import",
        "deepspeed": "wrapped",
    }
    lines = site.run("print(dfp.status()); print(dfp.patch())").splitlines()
    assert lines[0] == "In force: no"
    assert lines[1].split() == ["framework", "version", "state", "found"]
    assert lines[9] == "In force: yes"
    assert lines[11].split()[:5] == ["lightning.pytorch", "2.5.2", "waiting", "for", "import"]


def test_status_and_patch_import_nothing(site: Site) -> None:
    found = "print([m for m in ('torch', 'lightning', 'deepspeed') if m in sys.modules])"
    assert site.run(f"dfp.status(); dfp.patch(); {found}").strip() == "[]"


REFUSED = """
try: dfp.patch()
except dfp.PatchError as error: print(error); refused = error
else: raise AssertionError("not refused")
status = dfp.status()
assert {item.state for item in status.values()} <= {"not installed", "cannot be wrapped"}, status
assert not status.in_force and status.problem == str(refused), status
"""


IMPORTS = "import lightning.pytorch.strategies.deepspeed, deepspeed.runtime.engine"


@pytest.mark.promise(12)
@pytest.mark.parametrize("before", ["", IMPORTS])
@pytest.mark.parametrize("case", ["old deepspeed", "no deepspeed", "missing module"])
def test_refused(site: Site, case: str, before: str) -> None:
    if case == "old deepspeed":
        site.deepspeed("0.9.5", flag="")
        words = ["deepspeed 0.9.5", "exclude_frozen_parameters", "pip install -U 'deepspeed>=0.10.1'"]
        shutil.rmtree(site.root / "deepspeed-0.17.6.dist-info")
    elif case == "no deepspeed":
        shutil.rmtree(site.root / "deepspeed")
        words = ["DeepSpeed is not installed", "pip install 'deepspeed>=0.10.1'"]
        before = before.partition(",")[0]
    else:
        (site.root / "lightning/fabric/strategies/deepspeed.py").unlink()
        words = ["lightning.fabric 2.5.2", "cannot be read"]
    message = site.run(before + REFUSED)
    assert all(word in message for word in words), message
    assert "nothing is patched" in message or case == "no deepspeed"


REFUSED_AT_IMPORT = """
dfp.patch()
imported()
try: import pytorch_lightning.strategies.deepspeed
except dfp.PatchError as error: print(error)
else: raise AssertionError("not refused")
assert state() == "plain"
"""


@pytest.mark.promise(12)
@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("case", ["renamed method", "deleted method", "missing class"])
def test_what_a_class_lacks_is_refused_once_it_is_imported(site: Site, case: str, is_imported: bool) -> None:
    """At the import of the framework at the latest, before any training; then nothing stays patched."""
    site.lightning("pytorch_lightning", "3.0.0", save="store" if case == "renamed method" else "save_checkpoint")
    if case == "deleted method":
        with (site.root / "pytorch_lightning/strategies/deepspeed.py").open("a") as file:
            file.write("del DeepSpeedStrategy.save_checkpoint\n")
    elif case == "missing class":
        site.write("pytorch_lightning/strategies/deepspeed.py", "DeepSpeedStrategy = None")
    before = "import pytorch_lightning.strategies.deepspeed" if is_imported else ""
    message = site.run(before + REFUSED if is_imported else LOOK + REFUSED_AT_IMPORT)
    words = [
        "no class DeepSpeedStrategy" if case == "missing class" else "no method save_checkpoint",
        "nothing is patched",
    ]
    assert all(word in message for word in [*words, "pytorch_lightning 3.0.0", "uninstall pytorch-lightning"]), message


@pytest.mark.promise(12)
def test_without_lightning(site: Site) -> None:
    shutil.rmtree(site.root / "lightning")
    assert states(site, "dfp.patch(); import deepspeed.runtime.engine")["deepspeed"] == "wrapped"


@pytest.mark.promise(15)
@pytest.mark.parametrize("is_beside_lightning", [False, True])
def test_an_accelerate_that_cannot_be_wrapped_is_left_alone(site: Site, is_beside_lightning: bool) -> None:
    """Others install it too. A program is warned when it creates an engine, see `test_names_of_frameworks`."""
    site.accelerate(end="del Accelerator.save_state")
    if not is_beside_lightning:
        shutil.rmtree(site.root / "lightning")
    program = "import warnings; warnings.simplefilter('error'); dfp.patch(); import accelerate.accelerator"
    assert states(site, program)["accelerate"] == "cannot be wrapped"
    assert states(site, f"import accelerate.accelerator; {program}")["accelerate"] == "cannot be wrapped"


@pytest.mark.promise(12)
@pytest.mark.parametrize("is_imported", [False, True])
def test_a_trainer_that_renames_its_folder_is_refused(site: Site, is_imported: bool) -> None:
    """As in transformers 4.36 to 4.38."""
    look = "import transformers.trainer" if is_imported else ""
    site.transformers("4.38.2", "; os.rename(folder, folder[4:])")
    assert states(site, look)["transformers"] == "cannot be wrapped"
    site.transformers("4.39.3")
    assert states(site, look)["transformers"] == "can be wrapped"


@pytest.mark.promise(12)
def test_other_signatures(site: Site) -> None:
    """Arguments that were added, renamed, or are passed through change nothing."""
    source = STRATEGY.format(flag="", save="save_checkpoint")
    source = source.replace("self, stage=2", "self, *args, stage=2, **kwargs")
    source = source.replace("load_checkpoint(self, path)", "load_checkpoint(self, where, /, weights_only=None, **more)")
    source = source.replace("save_checkpoint(self, checkpoint, filepath)", "save_checkpoint(self, *args, **kwargs)")
    site.write("lightning/pytorch/strategies/deepspeed.py", source)
    site.release("lightning", "2.5.2")
    program = """
dfp.patch()
cls, _ = imported()
assert dfp.status()["lightning.pytorch"].state == "wrapped"
strategy = cls(1, stage=3, exclude_frozen_parameters=False)
assert (strategy.stage, strategy.exclude_frozen_parameters) == (3, False)
assert strategy.save_checkpoint({}, filepath="x") == "saved"
assert strategy.load_checkpoint("x", weights_only=True, strict=False) == "loaded"
"""
    site.run(LOOK + program)


@pytest.mark.promise(12)
def test_a_fork_and_a_build_from_git_are_judged_by_features(site: Site) -> None:
    site.lightning("pytorch_lightning", "2.5.2+git.abc", flag=FLAG)
    site.deepspeed("0.9.0+git.fix")
    found = states(site, "dfp.patch()")
    assert found["pytorch_lightning"] == found["deepspeed"] == "waiting for import"


@pytest.mark.parametrize(
    ("lightning", "deepspeed", "named"),
    [
        ("2.6.6", "0.19.8", []),
        ("2.6.6+git.abc", "0.19.8.dev0", []),
        ("99.1.0", "0.19.8", ["lightning 99.1.0 (tested: up to "]),
        ("99.1.0.dev3", "99.0", ["lightning 99.1.0.dev3", "deepspeed 99.0"]),
        ("unknown", "0.17.6", []),
    ],
)
def test_releases_newer_than_the_tested_ones(site: Site, lightning: str, deepspeed: str, named: list[str]) -> None:
    """It is patched, with one warning, because it has the features that the package needs."""
    for folder in site.root.glob("*.dist-info"):
        shutil.rmtree(folder)
    site.lightning(version=lightning)
    site.deepspeed(deepspeed)
    program = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    dfp.patch(); dfp.patch(); dfp.status(); imported()
assert state() == "patched"
for one in caught: print(one.filename, one.message)
"""
    lines = site.run(LOOK + program).splitlines()
    assert len(lines) == bool(named)
    assert all(name in lines[0] and lines[0].startswith("<string>") for name in named)


def test_patch_has_the_options_as_arguments() -> None:
    """Editors read them and their defaults in its signature, and people their help in its docstring."""
    for function in (dfp.patch, dfp.patched):
        shown, declared = inspect.signature(function).parameters, inspect.signature(Settings).parameters
        assert shown == declared
        assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in shown.values())
    assert get_type_hints(dfp.patch) == {**get_type_hints(Settings), "return": dfp.Status}
    for field in dataclasses.fields(Settings):
        assert f"    {field.name}: {field.metadata['help'][:40]}" in str(dfp.patch.__doc__)


@pytest.mark.promise(12)
def test_wrong_arguments_patch_nothing(site: Site) -> None:
    program = """
import os
def refused(error, *words, **arguments):
    try: dfp.patch(**arguments)
    except error as raised: assert all(word in str(raised) for word in words), raised
    else: raise AssertionError(arguments)
    assert dfp.status()["lightning.pytorch"].state == "can be wrapped"
refused(ValueError, "verify_base", "'loud'", "'warn'", verify_base="loud")
refused(ValueError, "verify_base", verify_base=True)
refused(TypeError, "keep", "['*.random_features']", keep="*.weight")
refused(TypeError, "keep", keep=[1])
refused(TypeError, "keep", keep=3)
os.environ["DS_FROZEN_PATCH_VERIFY_BASE"] = "no"
refused(ValueError, "DS_FROZEN_PATCH_VERIFY_BASE", "'no'")
del os.environ["DS_FROZEN_PATCH_VERIFY_BASE"]
refused(TypeError, "elastic", elastic="yes")
refused(TypeError, "elastic", elastic=1)
refused(TypeError, "weights_only", weights_only="no")
refused(TypeError, "fsync", fsync=None)
refused(TypeError, "no option 'elastik'. Did you mean 'elastic'?", elastik=True)
refused(TypeError, "patch()", **{"export": None, "verify_bse": "off"})
os.environ["DS_FROZEN_PATCH_ELASTIC"] = "yes"
refused(ValueError, "DS_FROZEN_PATCH_ELASTIC", "'yes'")
"""
    site.run(program)


def test_unknown_variables_are_an_error(site: Site) -> None:
    """Those that `run` and its bootstrap set are known."""
    program = """
import os
for name in ("", "_STRICT", "_CPU", "_WARNED", "_KEEP"): os.environ["DS_FROZEN_PATCH" + name] = "0"
os.environ["DS_FROZEN_PATCH_VERIFYBASE"] = "off"
try: dfp.patch()
except ValueError as error: assert str(error) == (
    "The environment variable DS_FROZEN_PATCH_VERIFYBASE has no effect. Did you mean 'DS_FROZEN_PATCH_VERIFY_BASE'?"
)
else: raise AssertionError("not refused")
del os.environ["DS_FROZEN_PATCH_VERIFYBASE"]
dfp.patch()
"""
    site.run(program)


def test_settings_are_kept_and_given_back(site: Site) -> None:
    program = """
from ds_frozen_patch.settings import Settings, current
dfp.patch(export="peft"); dfp.patch(verify_base="warn", export=None); dfp.patch(keep=["a.*"]); dfp.patch()
assert current() == Settings(verify_base="warn", keep=("a.*",))
with dfp.patched(verify_base="off"): assert current() == Settings(verify_base="off", keep=("a.*",))
assert current() == Settings(verify_base="warn", keep=("a.*",))
dfp.unpatch()
assert current() == Settings()
import os; os.environ["DS_FROZEN_PATCH_VERIFY_BASE"] = "off"
dfp.patch(); assert current() == Settings(verify_base="off")
dfp.unpatch()
for word, elastic in (("1", True), ("0", False), ("", None)):
    os.environ["DS_FROZEN_PATCH_ELASTIC"] = word
    dfp.patch(); assert current().elastic is elastic
    dfp.patch(elastic=True); assert current().elastic is True
    dfp.unpatch()
"""
    site.run(program)


def test_few_attributes_are_wrapped() -> None:
    """With two Lightnings. 10 act only with `async_save=True`, 5 where Trainer has an address, one if PEFT merges."""
    assert sum(len(what.wrappers) + len(what.beside) for what in TARGETS) <= 46


REAL = """
import sys
import ds_frozen_patch as dfp
{before}
print(sorted(m for m in ("torch", "{trainer}", "deepspeed") if m in sys.modules))
status = dfp.patch()
print("{trainer}" in sys.modules)
import {trainer}, {fabric}.strategies, deepspeed
from {trainer}.strategies import DeepSpeedStrategy
import inspect
now = dfp.status()
print([name for name, item in sorted(now.items()) if item.state == "wrapped" and name[:5] not in ("accel", "trans")])
print("exclude_frozen_parameters" in inspect.signature(DeepSpeedStrategy).parameters)
wrapped = vars(deepspeed.DeepSpeedEngine)["save_checkpoint"]
dfp.unpatch()
print(vars(deepspeed.DeepSpeedEngine)["save_checkpoint"] is wrapped.__wrapped__)
"""


@pytest.mark.everyday
@pytest.mark.once
@pytest.mark.parametrize("before", ["", "import {trainer}, deepspeed"])
def test_real_lightning_and_deepspeed(before: str) -> None:
    names = {"trainer": TRAINER, "fabric": FABRIC}
    program = REAL.format(before=before.format(**names), **names)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[2")]
    assert lines[0] == ("[]" if not before else str(sorted(["deepspeed", "torch", TRAINER])))
    assert lines[1:] == [
        # The package `lightning` imports all of itself; of the others each does so alone.
        str(bool(before)),
        str(sorted(["deepspeed", FABRIC, TRAINER])),
        "True",
        "True",
    ]
