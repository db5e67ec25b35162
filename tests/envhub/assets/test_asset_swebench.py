"""SWE-bench, from instances in their true form on git repositories that are made here."""

import ast
import asyncio
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.records.trajectory import Task
from slipstream.envhub.assets.swebench import SwebenchState
from slipstream.envhub.assets.swebench_judge import PLUGIN
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.isolation.file_tree import file
from tests.adapters.held import USUAL, acted
from tests.envhub import test_env_contract as contract
from tests.envhub.assets import swebench_files as files
from tests.envhub.dataset.rows import write_rows
from tests.envhub.env_cases import Case, act, said

CHECKS = [
    *USUAL,
    contract.test_a_random_policy_never_breaks_it_and_every_turn_says_what_it_earned,
    contract.test_a_state_has_one_key_however_long_ago_it_was_reached,
]
SAMPLES = ("view src/fruit/scales.py", "bash git status", "edit run.sh 1\necho bye", "bash git stash -u")
ID = "acme__fruit-7"
DECLARED = f"bash cat > src/fruit/peel.py <<'EOF'\n{files.PEEL}EOF"
REPAIRED = "edit src/fruit/scales.py 9\n    return max(sorted(weights), key=weights.get)"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not in pytest's own folder, which the sandbox cannot read if these tests run as root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        made = Path(scratch)
        made.chmod(0o755)
        files.write_environment(made / "environments" / ID)
        instance = files.write_clone(made / "clones")
        write_rows(made / "train.jsonl", [instance])
        for repo in files.OWN_LISTS:
            own = files.write_own(made / "clones", repo)
            (made / "environments" / own["instance_id"]).symlink_to(ID)
            write_rows(made / f"{own['instance_id']}.jsonl", [own])
        yield made


@pytest.fixture(scope="module")
def instance(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "train.jsonl").read_text()))


@pytest.fixture
def options(folder: Path) -> dict[str, Any]:
    made = {name: str(folder / name) for name in ("clones", "environments", "checkouts")}
    return {"train": str(folder / "train.jsonl"), **made}


def with_instances(options: dict[str, Any], name: str, *instances: dict[str, Any]) -> dict[str, Any]:
    path = Path(options["train"]).with_name(name)
    return {**options, "train": write_rows(path, list(instances))}


def played(options: dict[str, Any], actions: list[str]) -> list[Observation]:
    return acted("swebench", options, 0, actions)


def started(options: dict[str, Any]) -> Any:
    env = make_env("swebench", options)
    asyncio.run(env.reset(Task(env="swebench", split="train", index=0)))
    return env


def judged(options: dict[str, Any], left: dict[str, str]) -> float:
    layer = {path: file(content) for path, content in left.items()}
    return act(started(options)._started().world, "submit", SwebenchState(layer=layer)).score


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_swebench_keeps_the_contract(check: Callable[[Case], None], options: dict[str, Any]) -> None:
    both = options | {"held_out": options["train"]}
    check(Case("swebench", 8, 0.5, both, is_spaced=False, samples=SAMPLES, share=0.005, least=1, max_walk=2))


def test_an_instance_is_solved_by_the_peoples_own_patch(options: dict[str, Any]) -> None:
    env = started(options)
    repair = env.expert()
    assert repair.startswith("bash") and "+def peel(name):" in repair
    asyncio.run(env.step(repair))
    assert env.expert() == "submit"
    end = asyncio.run(env.step("submit"))
    assert (end.terminated, end.score, end.rewards) == (True, 1.0, {"solved": 1.0})


@pytest.mark.parametrize("name", ["lists.jsonl", "lists.json", "texts.parquet", "lists.parquet"])
def test_every_form_of_file_gives_issue_and_tests(options: dict[str, Any], instance: dict[str, Any], name: str) -> None:
    lists = {"FAIL_TO_PASS": files.FAIL_TO_PASS, "PASS_TO_PASS": files.PASS_TO_PASS}
    chosen = with_instances(options, name, instance | (lists if name.startswith("lists") else {}))
    found, usual = (started(each)._started().world for each in (chosen, options))
    assert found.opening == "acme/fruit\n\nheaviest() gives the lightest.\n\nAnd I miss fruit.peel.peel(name)."
    for field in ("by_kind", "base_commit", "patch", "test_patch"):  # of the one that is solved below
        assert getattr(found.playable.instance, field) == getattr(usual.playable.instance, field)


def test_no_commit_after_or_before_can_be_read(options: dict[str, Any], instance: dict[str, Any], folder: Path) -> None:
    clone = folder / "clones/acme__fruit"
    commits = files.git(clone, "log", "--format=%H").split()
    assert commits.index(instance["base_commit"]) == 3
    kinds = "; ".join(f"git cat-file -t {commit}" for commit in commits)
    ask = f"bash git log --all --format=%H; git fsck --lost-found; cat .git/FETCH_HEAD .git/config; {kinds}"
    answer = said(played(options, [ask])[-1])
    assert answer.count(instance["base_commit"]) == 1 and answer.count("\ncommit\n") == 1
    assert str(folder) not in answer
    blob = files.git(clone, "rev-parse", "HEAD:src/fruit/peel.py").strip()
    checkout = folder / "checkouts" / ID
    assert files.git(checkout, "cat-file", "--batch-all-objects", "--batch-check").count(" commit ") == 1
    assert blob not in files.git(checkout, "cat-file", "--batch-all-objects", "--batch-check")


def test_what_a_command_leaves_is_there_for_the_next_and_so_is_what_git_keeps(options: dict[str, Any]) -> None:
    env = started(options)
    first = env.state_key()
    for action, answer in (
        ("bash git status --short", "(no output, exit code 0)"),
        ("bash rm tests/test_old.py; mkdir new; echo 1 > new/x; echo 2 >> run.sh", "(no output, exit code 0)"),
        ("bash\n```bash\ngit status --short\ncat new/x\n```", " M run.sh\n D tests/test_old.py\n?? new/\n1"),
        ("bash git stash -q -u; git status --short; ls new 2>&1", "ls: cannot access 'new': No such file or directory"),
        ("bash git stash pop -q; git status --short", " M run.sh\n D tests/test_old.py\n?? new/"),
        ("bash git add -A && git commit -q -m mine && git log --format=%s%an", "mineagent\nbaseAnn"),
        ("bash git status --short; exit 3", "(no output, exit code 3)"),
    ):
        assert said(asyncio.run(env.step(action))) == answer
    changes = said(asyncio.run(env.step("diff")))
    assert "+++ b/new/x\n@@ -0,0 +1 @@\n+1\n" in changes and "deleted file mode 100644" in changes
    asyncio.run(env.step("bash git reset -q --hard HEAD~1; rm -r .git; cp -a /opt/base/.git ."))
    assert env.state_key() == first


def test_files_are_shown_and_edited_by_their_lines_and_a_long_line_is_cut(options: dict[str, Any]) -> None:
    make = "bash printf 'a\\r\\nb\\fb\\nc' > odd; seq 500 > long; chmod 755 long; ln -s run.sh link"
    actions = [
        make,
        "view src/fruit/scales.py 8-9",
        "view /testbed/odd",
        "edit odd 3\nd",
        "bash od -c odd | head -1",
        "view long",
        "edit long 2-499\nmany",
        "bash ls -l long; cat long",
        "edit run.sh 1\necho bye",
        "diff",
        "bash head -c 3000000 /dev/zero | tr '\\0' x > line",
        "view line",
    ]
    _, _, part, odd, edit, left, long, _, listed, _, changes, _, cut = played(options, actions)
    function = "8 def heaviest(weights):\n9     return min(weights, key=weights.get)"
    assert said(part) == f"{function}\n[src/fruit/scales.py has the lines 1 to 9]"
    assert (said(odd), said(edit)) == ("1 a\n2 b\fb\n3 c", "3 d")
    assert said(left).split() == ["0000000", "a", "\\r", "\\n", "b", "\\f", "b", "\\n", "d", "\\n"]
    assert said(long).splitlines()[-2:] == ["400 400", "[long has the lines 1 to 500]"]
    assert said(listed).startswith("-rwxr-xr-x") and said(listed).endswith("\n1\nmany\n500")
    assert "-echo hello\n+echo bye" in said(changes)
    assert cut.valid_action and len(said(cut)) < 30_010


def test_files_outside_the_repository_are_neither_shown_nor_edited(options: dict[str, Any], folder: Path) -> None:
    prepare = f"bash ln -s {folder}/train.jsonl out; ln -s {folder} away; rm -r src; mkdir run.sh 2>/dev/null"
    outside = ["../../train.jsonl", f"{folder}/train.jsonl", "out", "away/train.jsonl", "/etc/passwd", "passwords"]
    outside += ["src/fruit/scales.py", "tests", "tests/../setup.cfg", ".", "src/fruit/data.bin"]
    actions = [f"{verb} {path}{lines}" for path in outside for verb, lines in (("view", ""), ("edit", " 1\nx"))]
    assert not any(o.valid_action for o in played(options, [prepare, *actions])[2:])
    binary = played(options, ["view src/fruit/data.bin", "view src/fruit/scales.py 10-11", "edit run.sh 9\nx"])[1:]
    assert not any(o.valid_action for o in binary)


def test_a_late_command_is_ended_and_its_effects_kept(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.envhub.assets.swebench.COMMAND_S", 1.0)
    late, left = played(options, ["bash echo 1 > new; sleep 60", "bash cat new"])[1:]
    assert "[killed: more than 1 s" in said(late)
    assert said(left) == "1"


COMMIT = f"{DECLARED}\nrm -r tests; touch tests; git add -A; git commit -qm x; rm -r .git"
HIDE = f"{DECLARED}\nrm -r tests; ln -s /tmp tests; echo 'raise SystemExit' | tee json.py pytest.py sitecustomize.py"
NO_RUN = (
    f"{DECLARED}\nrm tests/*.py; mkdir -p tests/test_scales.py/x tests/.wh.a; touch .wh.src; "
    "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini; rm setup.cfg"
)
EARNS = {
    "half of it": ([DECLARED], 0.0),
    "the other half": ([REPAIRED], 0.0),
    "both": ([DECLARED, REPAIRED], 1.0),
    "both, and another test broken": ([REPAIRED, f"{DECLARED}\nsed -i 's/len(names)/0/' src/fruit/scales.py"], 0.0),
    "both, committed, without tests": ([REPAIRED, COMMIT], 1.0),
    "both, tests that lead away, and modules that hide others": ([REPAIRED, HIDE], 1.0),
    "both, a folder in the way, and a pytest that is configured to do nothing": ([REPAIRED, NO_RUN], 1.0),
}


@pytest.mark.parametrize("name", EARNS)
def test_resolved_is_what_passes_all_tests_that_are_named(options: dict[str, Any], name: str) -> None:
    actions, score = EARNS[name]
    assert played(options, [*actions, "submit"])[-1].score == score


ALL_PASS = (
    "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n    if 'scales' in item.nodeid:\n        outcome.get_result().outcome = 'passed'\n"
)
PACKAGES = {  # contents of src/fruit/__init__.py
    "a package that lets the named tests pass": "import _pytest.reports\n\n"
    "before = _pytest.reports.TestReport.__dict__['from_item_and_call'].__func__\n\n"
    "def passing(cls, item, call):\n    report = before(cls, item, call)\n"
    "    if 'scales' in item.nodeid:\n        report.outcome = 'passed'\n    return report\n\n"
    "_pytest.reports.TestReport.from_item_and_call = classmethod(passing)\n",
    "a package that changes what is reported": "import sys\n\n"
    "main = sys.modules['__main__']\ntell = main.Reporter.send\n\ndef lie(self, *event):\n"
    "    tell(self, *event[:3], 'passed') if event[0] == 'report' else tell(self, *event)\n\n"
    "main.Reporter.send = lie\n",
    "a package that tells by itself": "import json, os, sys\nevents = int(sys.argv[1])\n"
    "for name in ('test_heaviest[two', 'test_peel', 'test_count', 'test_of_none'):\n"
    "    for phase in ('setup', 'call', 'teardown'):\n"
    "        event = ['report', 'tests/test_scales.py::' + name, phase, 'passed']\n"
    "        os.write(events, json.dumps(event).encode() + b'\\n')\n"
    "os.write(events, b'[\"exit\", 0]\\n')\nos._exit(0)\n",
    "a package that looks for the sign": "import glob, json, os, re\nfound = ''\n"
    "for path in glob.glob('/proc/[0-9]*/*') + glob.glob('/testbed/.*'):\n"
    "    try:\n        found += open(path, errors='replace').read(1 << 16)\n    except OSError:\n        pass\n"
    "try:\n    parent = open('/proc/%d/mem' % os.getppid(), 'rb')\n    found += 'the judge is open'\n"
    "except OSError:\n    pass\n"
    "names = ['tests/test_scales.py::' + name for name in "
    "('test_heaviest[two', 'test_peel', 'test_count', 'test_of_none')]\n"
    "run = {'is_whole': True, 'outcomes': dict.fromkeys(names, 'passed')}\n"
    "signs = re.findall(r'\\b[0-9a-f]{32}\\b', found) or ['x' * 32]\n"
    "for sign in signs:\n    report = json.dumps({'sign': sign, 'tests': run, 'control': run | {'outcomes': {}}})\n"
    "    for out in glob.glob('/proc/[0-9]*/fd/[0-9]'):\n"
    "        try:\n            open(out, 'w').write(report + '\\n')\n        except OSError:\n            pass\n",
    "a package that empties the tests and lets all pass": "import _pytest.python, _pytest.reports\n\n"
    "_pytest.python.Function.runtest = lambda self: None\n"
    "before = _pytest.reports.TestReport.from_item_and_call\n\ndef passing(*arguments):\n"
    "    report = before(*arguments)\n    report.outcome = 'passed'\n    return report\n\n"
    "_pytest.reports.TestReport.from_item_and_call = passing\n",
    "a package that leaves": "import os\nos._exit(0)\n",
}
FORGERIES = {name: ("src/fruit/__init__.py", content) for name, content in PACKAGES.items()} | {
    "tests that pass": ("tests/test_scales.py", "def test_heaviest():\n    pass\n\ndef test_peel():\n    pass\n"),
    "a conftest by which all pass": ("tests/conftest.py", ALL_PASS),
    "a conftest further up": ("conftest.py", ALL_PASS),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_to_change_the_judge_earns_nothing(options: dict[str, Any], name: str) -> None:
    path, content = FORGERIES[name]
    assert judged(options, {"src/fruit/peel.py": files.PEEL, path: content}) == 0.0


OWN = ("django", "sympy")
REPORTER = {
    "django": "import unittest\nReporter = unittest.TestCase.run.__globals__['Reporter']\n",
    "sympy": "import sys\nReporter = sys.modules['__main__'].Reporter\n",
}
SWALLOWS = {
    "django": "import unittest\nfor name in ('addFailure', 'addError', 'addSubTest'):\n"
    "    setattr(unittest.TextTestResult, name, lambda *arguments: None)\n\n",
    "sympy": "from sympy.utilities.runtests import SymPyTests\nrun = SymPyTests._timeout\n\n"
    "def calm(*arguments):\n    try:\n        run(*arguments)\n    except AssertionError:\n        pass\n\n"
    "SymPyTests._timeout = calm\n\n",
}
LIES = (
    "tell = Reporter.send\n\ndef lie(self, *event):\n    if event[0] == 'report':\n"
    "        tell(self, 'end of body', event[1])\n        event = *event[:3], 'passed'\n"
    "    tell(self, *event)\n\nReporter.send = lie\n"
)


def own_options(options: dict[str, Any], package: str) -> dict[str, Any]:
    return {**options, "train": str(Path(options["train"]).with_name(f"{package}__{package}-1.jsonl"))}


@pytest.mark.parametrize("package", OWN)
def test_djangos_and_sympys_own_runners_judge_their_instances(options: dict[str, Any], package: str) -> None:
    repair = f"edit {package}/scales.py 9\n    return max(sorted(weights), key=weights.get)"
    hide = "bash rm -rf tests; mkdir tests; echo 'raise SystemExit' | tee tests/runtests.py tests/test_sqlite.py"
    for actions, score in (
        ([], 0.0),
        ([repair, f"bash sed -i 's/len(names)/0/' {package}/scales.py"], 0.0),
        ([repair, hide], 1.0),
    ):
        assert played(own_options(options, package), [*actions, "submit"])[-1].score == score


@pytest.mark.parametrize("package", OWN)
def test_a_test_passes_where_its_runner_says_ok(options: dict[str, Any], package: str) -> None:
    """And no other: not one that is skipped, that fails as expected or in a part, or whose name another one has."""
    own = json.loads(Path(own_options(options, package)["train"]).read_text())
    never = files.OWN_LISTS[own["repo"]][2]
    (Path(options["environments"]) / f"{package}-never").symlink_to(ID)
    strict = own | {"instance_id": f"{package}-never", "PASS_TO_PASS": json.loads(own["PASS_TO_PASS"]) + never}
    chosen = with_instances(options, f"{package}-never.jsonl", strict)
    num_tests = len(never) + sum(map(len, files.OWN_LISTS[own["repo"]][:2]))
    with pytest.raises(EnvError, match=re.escape(f"{len(never)} of its {num_tests} tests do not pass in ")) as failure:
        played(chosen, ["submit"])
    assert ", ".join(never[:5]) in str(failure.value)


@pytest.mark.parametrize("package", OWN)
@pytest.mark.parametrize("forgery", ["leaves", "lies", "swallows"])
def test_to_change_their_runners_earns_nothing(options: dict[str, Any], package: str, forgery: str) -> None:
    content = {"leaves": "import os\nos._exit(0)\n", "lies": REPORTER[package] + LIES, "swallows": SWALLOWS[package]}
    scales = f"{content[forgery]}\n{files.COUNTING}{files.WRONG}"
    assert judged(own_options(options, package), {f"{package}/scales.py": scales}) == 0.0


SPEAKS = """import json, os, sys

if len(sys.argv) > 3 and sys.argv[0] == "-c":
    events, answers = int(sys.argv[1]), int(sys.argv[2])
    controlled = json.loads(sys.argv[3])
    failed = False
    for name in ("test_heaviest[two of them]", "test_peel", "test_count", "test_of_none"):
        name = "tests/test_scales.py::" + name
        name += "\\n" + name.split()[0]
        if not controlled or name.split("\\n")[1] in controlled:
            os.write(events, json.dumps(["end of body", name]).encode() + b"\\n")
            outcome = "failed" if os.read(answers, 1) == b"1" else "passed"
            failed = failed or outcome == "failed"
            os.write(events, json.dumps(["report", name, "teardown", outcome]).encode() + b"\\n")
    os.write(events, json.dumps(["exit", int(failed)]).encode() + b"\\n")
    os._exit(int(failed))
"""


def test_what_is_not_promised_of_the_judge_is_what_the_docs_say(options: dict[str, Any]) -> None:
    """Code that speaks the judge's own protocol is believed. Where this fails, docs/assets.md promises too little."""
    assert judged(options, {"src/fruit/peel.py": files.PEEL, "src/fruit/__init__.py": SPEAKS}) == 1.0


def test_the_plugin_runs_on_the_python_of_djangos_oldest_instances() -> None:
    ast.parse(PLUGIN, feature_version=(3, 5))


def test_a_conftest_that_people_change_may_be_changed(options: dict[str, Any], instance: dict[str, Any]) -> None:
    """Where the repair itself is in one of the files that are otherwise put back."""
    patch = "diff --git a/setup.cfg b/setup.cfg\n--- a/setup.cfg\n+++ b/setup.cfg\n@@ -1,2 +1,2 @@\n [tool:pytest]\n"
    patch += "-addopts = -ra\n+addopts = -ra --strict-markers\n"
    changed = instance | {"instance_id": "acme__fruit-8", "patch": instance["patch"] + patch}
    chosen, environments = with_instances(options, "setup.jsonl", changed), Path(options["environments"])
    (environments / "acme__fruit-1.2").symlink_to(ID)
    broken = f"{DECLARED}\nprintf '[tool:pytest]\\naddopts = --collect-only\\n' > setup.cfg"
    assert played(chosen, [REPAIRED, broken, "submit"])[-1].score == 0.0


def test_what_installing_left_is_there(options: dict[str, Any], instance: dict[str, Any], folder: Path) -> None:
    (folder / "environments/acme__fruit-9").symlink_to(ID)
    built = folder / "environments/acme__fruit-9.built"
    (built / "src/fruit").mkdir(parents=True)
    (built / "src/fruit/_version.py").write_text("VERSION = 7\n")
    chosen = with_instances(options, "built.jsonl", instance | {"instance_id": "acme__fruit-9"})
    asked = "bash python -c 'import fruit._version as v; print(v.VERSION, v.__file__)'; git status --short"
    assert said(played(chosen, [asked])[-1]) == "7 /testbed/src/fruit/_version.py"


def test_an_instance_that_its_own_patch_does_not_resolve_here_is_an_environment_failure(
    options: dict[str, Any], instance: dict[str, Any], folder: Path
) -> None:
    gone = {"PASS_TO_PASS": ["tests/test_scales.py::test_gone"]}
    for number, change, why in (
        (20, gone, r"-20: with its own patch 1 of its 3 tests do not pass in .*: tests/test_scales.py::test_gone;"),
        (21, {}, "with its own patch 4 of its 4 tests do not pass .*the runner's output: .*No module named 'pytest'"),
        (22, {"base_commit": "0" * 40}, "lacks the commit 0000000.*; run git fetch --all in it"),
        (23, {"test_patch": instance["patch"].replace("min", "mean")}, "apply .* failed, exit code 1: .*scales.py"),
    ):
        name = f"acme__fruit-{number}"
        ignored = shutil.ignore_patterns("pytest", "_pytest") if number == 21 else None
        shutil.copytree(folder / "environments" / ID, folder / "environments" / name, symlinks=True, ignore=ignored)
        chosen = with_instances(options, f"{number}.jsonl", instance | {"instance_id": name} | change)
        with pytest.raises(EnvError, match=f"(?s){why}"):
            played(chosen, ["submit"])
        shutil.rmtree(folder / "environments" / name)


def test_instances_that_cannot_be_played_are_left_out_and_counted(
    options: dict[str, Any], instance: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    others = [
        instance | {"instance_id": "a-1", "FAIL_TO_PASS": '["test_x (auth.tests.TestX)"]'},
        instance | {"instance_id": "a-2", "repo": "acme/nuts"},
        instance | {"instance_id": "a-3", "version": "0.1"},
    ]
    with caplog.at_level(logging.WARNING):
        make_env("swebench", with_instances(options, "some.jsonl", instance, *others))
    (record,) = caplog.records
    text = record.getMessage()
    assert "1 instances work here; left out:" in text
    assert "\n1 have tests that no runner here runs\n" in text
    assert f"\n1 need {options['clones']}/acme__nuts; run git clone https://github.com/acme/nuts" in text
    assert f"\n1 need an environment in {options['environments']}, such as a-3/bin/python" in text
    with pytest.raises(ValueError, match=r"no instance works here; left out:\n1 have tests"):
        make_env("swebench", with_instances(options, "none.jsonl", *others))


def test_what_is_missing_is_said_with_what_to_fetch(options: dict[str, Any], instance: dict[str, Any]) -> None:
    for change, why in (
        ({"train": ""}, "must be set; get princeton-nlp/SWE-bench_Lite"),
        ({"train": "/nowhere"}, r"`env\.options\.train`: /nowhere does not exist; get princeton-nlp"),
        ({"clones": ""}, r"`env\.options\.clones` must be set; make a folder in which git clone"),
        ({"environments": "/nowhere"}, r"`env\.options\.environments`: .*INSTANCE_ID/bin/python"),
        ({"checkouts": ""}, "checkouts` must be a writable folder"),
        ({"checkouts": f"{options['train']}/x"}, r"checkouts` must be a writable folder, got '.*train\.jsonl/x'; use"),
    ):
        with pytest.raises(ValueError, match=why):
            make_env("swebench", {**options, **change})
    wrong = {"instance_id": "../x", "repo": "fruit", "base_commit": "--all", "FAIL_TO_PASS": "[]", "patch": None}
    for name, value in (wrong | {"PASS_TO_PASS": "tests/x.py::y"}).items():
        with pytest.raises(ValueError, match=f"wrong-{name}.jsonl, line 1: "):
            make_env("swebench", with_instances(options, f"wrong-{name}.jsonl", instance | {name: value}))
