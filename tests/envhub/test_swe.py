"""Repositories to repair: their bugs, edits, test runs, and attacks that must get score 0."""

import ast
import asyncio
import inspect
import random
from functools import cache
from pathlib import Path

import pytest

from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.file_tree import Tree, file, folder
from slipstream.envhub.isolation.sandbox import Limits
from slipstream.envhub.swe import tests as swe_tests
from slipstream.envhub.swe.bug import draw_bug
from slipstream.envhub.swe.functions import FUNCTIONS
from slipstream.envhub.swe.git import with_layer
from slipstream.envhub.swe.repo import NUM_SHOWN, Repo, draw_repo
from slipstream.envhub.swe.swe import LIMITS, SweState, SweWorld, make_swe
from tests.envhub.env_cases import act, task_of


@cache
def world(index: int = 0) -> SweWorld:
    return make_swe(task_of("swe", index), issue="example", num_files=1, num_bugs=1)


def changed(files: dict[str, str], *, is_tested: bool = False) -> SweState:
    return SweState(layer={path: file(content) for path, content in files.items()}, is_tested=is_tested)


def tree_of(files: dict[str, str]) -> Tree:
    return {path.split("/")[0]: folder() for path in files} | {path: file(text) for path, text in files.items()}


def source_path(world: SweWorld) -> str:
    return next(path for path in world.repo.files if path.startswith(world.repo.package) and "__init__" not in path)


def submitted(world: SweWorld, source: str) -> float:
    return act(world, "submit", changed({source_path(world): source})).score


@cache
def whole_repo() -> Repo:
    rng = random.Random(5)
    while (repo := draw_repo(rng, split="train", package="plain_drum", num_files=5, num_bugs=3)) is None:
        pass
    return repo


def test_a_bug_changes_one_line_of_a_function_and_is_valid_python() -> None:
    changed = set()
    for module in FUNCTIONS.values():
        for entry in module:
            source = inspect.getsource(entry.function)
            for seed in range(30):
                bug = draw_bug(random.Random(seed), source, split=("train", "held_out")[seed % 2])
                if bug is None:
                    continue
                lines = source.splitlines()
                assert lines[bug.line - 1] == bug.right != bug.wrong
                ast.parse("\n".join([*lines[: bug.line - 1], bug.wrong, *lines[bug.line :]]))
                changed.add(entry.function.__name__)
    assert len(changed) == 28  # all but basket_total, which has nothing to mutate


def test_no_bug_is_in_both_splits() -> None:
    bugs: dict[str, set[tuple[str, str]]] = {"train": set(), "held_out": set()}
    for split, of_split in bugs.items():
        for index in range(40):
            repo = make_swe(task_of("swe", index, split), issue="none", num_files=2, num_bugs=2).repo
            of_split |= {(name, bug.wrong) for name, bug in repo.bugs.items()}
    assert not bugs["train"] & bugs["held_out"]
    assert len(bugs["held_out"]) > 20


def test_exactly_the_tests_that_the_bugs_break_fail_before_and_all_pass_after() -> None:
    """A function without a bug may fail only because it uses one that has a bug."""
    repo = whole_repo()
    uses = {entry.function.__name__: entry.uses for module in FUNCTIONS.values() for entry in module}
    callers = {name for name in repo.tests if {used.__name__ for used in uses[name]} & repo.bugs.keys()}
    before = asyncio.run(swe_tests.passed_tests(tree_of(repo.files), repo.tests, limits=LIMITS))
    after = asyncio.run(swe_tests.passed_tests(tree_of(repo.right_files), repo.tests, limits=LIMITS))
    assert repo.bugs.keys() <= repo.tests.keys() - before <= repo.bugs.keys() | callers
    assert after == repo.tests.keys()


def test_the_repositorys_own_tests_show_every_bug_and_nothing_else() -> None:
    repo = whole_repo()
    said = asyncio.run(swe_tests.run_tests(tree_of(repo.files), limits=LIMITS))
    assert all(f" test_{name} _" in said for name in repo.bugs)
    assert said.endswith(" passed")
    right = asyncio.run(swe_tests.run_tests(tree_of(repo.right_files), limits=LIMITS))
    assert right.splitlines()[-1] == f"{len(repo.tests)} passed"


def test_the_judging_calls_are_never_shown() -> None:
    for seed in range(30):
        repo = draw_repo(random.Random(seed), split="train", package="p", num_files=2, num_bugs=1)
        if repo is None:
            continue
        shown = "\n".join(repo.files.values())
        for test in repo.tests.values():
            assert test.calls and not any(f"assert {call} ==" in shown for call in test.calls)


def test_the_issue_shows_a_wrong_call_and_its_correct_result() -> None:
    for index in range(20):
        here = world(index)
        (example,) = here.repo.examples
        call, _, rest = example.partition(") ")
        should = rest.partition(" and should give ")[2]
        scope: dict[str, object] = {}
        exec(here.repo.right_files[source_path(here)], scope)
        assert eval(f"{call})", scope) == eval(should), example
        assert call.startswith(tuple(here.repo.bugs))


def test_a_file_is_shown_and_edited_by_line_numbers() -> None:
    here = world()
    path = source_path(here)
    lines = here.repo.files[path].splitlines()
    viewed = act(here, f"view {path}")
    assert viewed.text.splitlines()[:2] == [f"1 {lines[0]}", f"2 {lines[1]}"]
    assert viewed.state.seen == {path}

    def edited(action: str) -> list[str]:
        change = act(here, f"edit {path} {action}")
        assert change.valid, change.text
        return with_layer(here.tree, change.state.layer)[path].content.decode().splitlines()

    assert edited("1-2\n```python\ndef f():\n```") == ["def f():", *lines[2:]]
    assert edited("2\n    x = 1") == [lines[0], "    x = 1", *lines[2:]]
    assert edited("2-1\n    x = 1\n    y = 2") == [lines[0], "    x = 1", "    y = 2", *lines[1:]]
    assert edited("1-2") == lines[2:]
    assert edited(f"{len(lines) + 1}-{len(lines)}\nend = 1") == [*lines, "end = 1"]
    assert edited(f"1-1\n{lines[0]}") == lines
    assert act(here, f"edit {path} 1-1\n{lines[0]}").state == here.first  # as it was: no trace of it


@pytest.mark.parametrize(
    "action", ["0-1", "3-1", "1-9999", "999-999", "x", "", "-1", "1-1\n" + "x" * 20_001, "1\n\ud800"]
)
def test_an_invalid_edit_is_refused(action: str) -> None:
    here = world()
    change = act(here, f"edit {source_path(here)} {action}")
    assert (change.valid, change.state) == (False, here.first)


def test_missing_files_are_neither_shown_nor_created() -> None:
    for action in ("view nothing.py", "view /etc/passwd", "view ../x", "edit conftest.py 1-0\nimport os", "view"):
        assert not act(world(), action).valid, action


def test_a_diff_shows_the_changes() -> None:
    here = world()
    path, (bug,) = source_path(here), here.repo.bugs.values()
    assert act(here, "diff").text == "nothing is changed"
    right = here.repo.right_files[path]
    said = act(here, "diff", changed({path: right})).text.splitlines()
    assert said[:2] == [f"--- {path}", f"+++ {path}"]
    assert said[3:] == [f"-{bug.wrong}", f"+{bug.right}"]


def test_a_file_that_a_command_made_large_is_cut_and_not_compared_line_by_line() -> None:
    large = act(world(), "bash seq 1000000 | head -c 3000000 > large").state
    assert len(act(world(), "view large", large).text) < 30_010
    assert act(world(), "diff", large).text == "large is too large to be shown"


def test_it_is_a_git_repository_and_a_command_continues_where_the_last_one_ended() -> None:
    here = world()
    path, state = source_path(here), here.first
    for action, said in (
        ("bash git log --format=%s; git status --short", "first"),
        (f"bash\n```shell\nsed -i 1d {path}; echo 1 > new; git status --short\n```", f" M {path}\n?? new"),
        ("bash git add -A; git commit -q -m mine; git log --format=%s; git status --short", "mine\nfirst"),
        (
            "bash rm new; git rm -q -r tests; git stash -q; git status --short; git stash pop -q; git status --short",
            " D new\n D " + next(name for name in here.repo.files if name.startswith("tests/")),
        ),
        ("bash python3 -m pytest --version; exit 3", f"pytest {pytest.__version__}"),
        ("view new", "no file new"),
        ("bash git reset -q --hard HEAD~1; git stash clear", "(no output, exit code 0)"),
    ):
        change = act(here, action, state)
        assert (change.text, change.valid) == (said, said != "no file new")
        state = change.state
    assert act(here, "diff", state).text == "nothing is changed"
    assert act(here, "bash git diff --stat HEAD", state).text == "(no output, exit code 0)"


def test_too_large_files_are_dropped_and_the_end_is_judged() -> None:
    here = world()
    holes = act(here, f"bash truncate -s 4M {here.repo.package}/a {here.repo.package}/b {here.repo.package}/c")
    assert "the files cannot be kept" in holes.text
    assert act(here, "submit", holes.state).score == 0.0
    path = source_path(here)
    full = act(
        here,
        f"bash rm -r .git {path}; touch {path}; head -c 4M /dev/zero > a; "
        "head -c $((8 * 2**20 - 2**12 * 10 - $(stat -c %s a))) /dev/zero > b",
    ).state
    assert "b" in full.layer
    assert act(here, "bash git log --format=%s; ls -d b", full).text.splitlines()[:2] == ["first", "b"]
    assert not act(here, f"edit {path} 1-0\n{'x' * 20_000}", full).valid
    assert act(here, "submit", full).over


def test_the_same_commands_lead_to_the_same_state_and_so_do_edits() -> None:
    here = world()
    path = source_path(here)
    commands = [f"edit {path} 1-0\n# mine", "bash git add -A", "bash git commit -q -m mine; git gc -q; git status"]
    states = []
    for _ in range(2):
        state = here.first
        for command in commands:
            state = act(here, command, state).state
        states.append(state)
    assert states[0] == states[1]
    by_edit = act(here, f"edit {path} 1-0\n# mine").state
    by_bash = act(here, f"bash sed -i '1i # mine' {path}; rm -r .git").state
    assert by_edit == by_bash != here.first


def test_a_repair_by_a_command_counts_and_other_files_do_not_matter() -> None:
    here = world()
    path, (bug,) = source_path(here), here.repo.bugs.values()
    lines = here.repo.files[path].splitlines()
    repair = f"bash sed -i '{lines.index(bug.wrong) + 1}c\\{bug.right}' {path}"
    for beside, score in (
        ("true", 1.0),
        ("rm -r tests .git", 1.0),
        (f"rm -r {here.repo.package}", 0.0),
        (f"mv {here.repo.package} /tmp; ln -s /tmp {here.repo.package}", 0.0),
    ):
        assert act(here, "submit", act(here, f"{repair}; {beside}").state).score == score


def test_files_stay_tested_after_a_command_that_does_not_change_them() -> None:
    here = world()
    tested = act(here, "test").state
    assert act(here, "bash git log", tested).state.is_tested
    assert not act(here, "bash touch new", tested).state.is_tested


def test_a_repair_with_other_code_counts_unless_it_breaks_another_function() -> None:
    here = world()
    right = here.repo.right_files[source_path(here)]
    assert submitted(here, f"import math  # not needed\n{right}\nEXTRA = math.pi\n") == 1.0
    other = next(name for name in here.repo.tests if name not in here.repo.bugs)
    assert submitted(here, f"{right}\n\ndef {other}(*arguments):\n    return None\n") == 0.0


HOSTILE = {
    "an exit": "import os\nos._exit(0)\n",
    "a value equal to everything": "class Yes(int):\n    __eq__ = lambda *_: True\n\n\nVALUE = Yes(7)\n",
    "a forged report": (
        "import json, os\nfor name in json.load(open('calls.json')):\n"
        "    json.dump([['gives', 1]] * 8, open(f'{name}.results', 'w'))\nos._exit(0)\n"
    ),
    "a malformed report": (
        "import json, os\nfor name in json.load(open('calls.json')):\n"
        "    open(f'{name}.results', 'w').write('[' * 100000)\nos._exit(0)\n"
    ),
    "a pytest that always passes": "import json, pytest\npytest.main = lambda *_: 0\njson.dump = lambda *_: 0\n",
    "an endless loop": "while True:\n    pass\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_package_that_attacks_the_judge_gets_score_0(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "an endless loop":
        monkeypatch.setattr("slipstream.envhub.swe.swe.LIMITS", Limits(wall_s=2))
    here = world()
    functions = "".join(f"def {test}(*arguments):\n    return globals().get('VALUE')\n" for test in here.repo.tests)
    assert submitted(here, HOSTILE[name] + functions) == 0.0


def test_a_table_of_the_shown_results_and_changed_tests_get_score_0() -> None:
    here = world()
    shown = [line.strip() for line in here.repo.files[f"tests/test_{Path(source_path(here)).name}"].splitlines()]
    pairs = [line.removeprefix("assert ").split(" == ") for line in shown if line.startswith("assert ")]
    assert len(pairs) == NUM_SHOWN * len(here.repo.tests)
    table = "TABLE = {" + ", ".join(f"{call!r}: {value}" for call, value in pairs) + "}\n"
    functions = "".join(
        f"def {name}(*arguments):\n    source = repr(arguments).replace(',)', ')').replace(chr(39), chr(34))\n"
        f"    return TABLE.get('{name}' + source)\n"
        for name in here.repo.tests
    )
    edits = {source_path(here): table + functions}
    assert act(here, "test", changed(edits)).text.endswith("passed")
    assert act(here, "submit", changed(edits)).score == 0.0
    tests = {path: "def test_all():\n    pass\n" for path in here.repo.files if path.startswith("tests/")}
    assert act(here, "test", changed(tests)).text.splitlines()[-1] == "1 passed"
    assert act(here, "submit", changed(tests)).score == 0.0


def test_changes_of_files_by_the_tests_are_dropped() -> None:
    here = world()
    path = source_path(here)
    edits = {f"tests/test_{Path(path).name}": f"open({path!r}, 'w').write('')\n"}
    assert act(here, "test", changed(edits)).state == changed(edits, is_tested=True)


def test_tests_that_end_pytest_are_not_an_error_of_the_environment() -> None:
    here = world()
    edits = {path: "import os\nos._exit(1)\n" for path in here.repo.files if path.startswith("tests/")}
    assert act(here, "test", changed(edits)).text == "(no output)"


def test_a_pytest_that_does_not_start_is_an_error_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swe_tests, "PACKAGES", ())
    swe_tests.pytest_mounts.cache_clear()
    try:
        with pytest.raises(EnvError, match=r"pytest does not start in the sandbox: .*No module named pytest"):
            act(world(), "test")
    finally:
        swe_tests.pytest_mounts.cache_clear()
