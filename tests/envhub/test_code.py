"""Programs: what is run, what is judged, and that only correct outputs earn a score."""

import random

import pytest

from slipstream.envhub.code.code import CodeWorld, make_code
from slipstream.envhub.code.code_task import OPERATIONS, PRINTS, draw_problem
from slipstream.envhub.isolation.sandbox import Limits
from tests.envhub.env_cases import act, task_of


def world(index: int = 0, *, split: str = "train", num_steps: int = 2) -> CodeWorld:
    return make_code(task_of("code", index, split), num_steps=num_steps)


def time_is_limited(monkeypatch: pytest.MonkeyPatch, wall_s: float) -> None:
    monkeypatch.setattr("slipstream.envhub.code.code.LIMITS", Limits(wall_s=wall_s))


def test_run_shows_the_output_for_the_examples() -> None:
    problem = world().problem
    shown = act(world(), f"run\n```python\n{problem.program}```")
    assert shown.text == "\n".join(f"Output: {output or '(nothing)'}" for _, output in problem.examples)
    assert (shown.over, shown.state) == (False, world().first)


def test_a_correct_program_gets_the_full_score_even_with_empty_outputs() -> None:
    empty = next(w for w in map(world, range(60)) if any(not output for _, output in w.problem.tests))
    assert act(empty, empty.expert(empty.first)).score == 1.0


def test_a_wrong_program_gets_the_share_of_its_correct_outputs() -> None:
    problem = world().problem
    constant = act(world(), f"submit print({problem.tests[0][1]!r})")
    right = sum(output.split() == problem.tests[0][1].split() for _, output in problem.tests)
    assert (constant.over, constant.score) == (True, right / 6)
    assert act(world(), "submit raise SystemExit").score == sum(not output for _, output in problem.tests) / 6


@pytest.mark.parametrize(
    "failing",
    [
        *("while True: pass", "import os; os.kill(os.getpid(), 9)", "1 / 0"),
        "import os\nfor name in os.listdir('.'): os.remove(name)",
    ],
)
def test_the_empty_output_of_a_failed_program_is_wrong(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    time_is_limited(monkeypatch, 1.0)
    empty = next(w for w in map(world, range(60)) if any(not output for _, output in w.problem.tests))
    assert act(empty, f"submit\n{failing}").score == 0.0


def test_no_output_is_correct_for_more_than_half_of_the_tests() -> None:
    for index in range(60):
        outputs = [right for _, right in world(index, split="held_out", num_steps=3).problem.tests]
        assert max(map(outputs.count, outputs)) <= 3


def test_no_program_is_in_both_splits() -> None:
    train, held_out = (
        {world(index, split=split, num_steps=1).problem.program for index in range(100)}
        for split in ("train", "held_out")
    )
    assert not train & held_out


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("print(1", "SyntaxError"),
        ("raise ValueError('no')", "ValueError: no"),
        ("import socket; socket.create_connection(('169.254.169.254', 80), 2)", "unreachable"),
        ("print(open('/etc/passwd').read())", "No such file"),
        ("x = bytearray(10**10)", "MemoryError"),
        ("pass", "(nothing)"),
    ],
)
def test_an_error_is_shown(program: str, shown: str) -> None:
    assert shown in act(world(), f"run\n{program}").text


def test_an_endless_program_is_stopped_and_the_other_inputs_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    time_is_limited(monkeypatch, 1)
    slow = "v = input().split()\nwhile len(v) != 0: pass\nprint('end')"
    change = act(world(), f"submit\n{slow}")
    assert (change.over, change.text.endswith("of 6 passed")) == (True, True)


def test_a_right_program_that_waits_for_a_busy_machine_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    time_is_limited(monkeypatch, 6)
    of_task = world()
    waits = "import os, time\nif not os.path.exists('0.code'): time.sleep(2)"
    assert act(of_task, f"submit\n{waits}\n{of_task.problem.program}").score == 1.0


def test_a_program_cannot_find_the_correct_outputs() -> None:
    """It sees its own inputs, and of the outputs only what it printed itself."""
    peek = "import glob\nfor name in sorted(glob.glob('*')): print(name, len(open(name).read()))"
    said = act(world(), f"run\n{peek}").text
    seen = {line.split()[0] for line in said.replace("Output: ", "").splitlines()}
    assert seen == {"0.code", "program.py", *(f"{run}.{what}" for run in (0, 1) for what in ("err", "in", "out"))}


def test_each_operation_does_what_its_words_say() -> None:
    """The results for k = 3, by hand, in the order of the table."""
    results = [eval(python.format(k=3), {"v": [4, -3, 4, 20, 7, 15]}) for _, python, _ in OPERATIONS]
    assert results == [
        [4, 4, 20],
        [4, 4, 20, 7, 15],
        [4, 4, 20, 7],
        [7, 0, 7, 23, 10, 18],
        [12, -9, 12, 60, 21, 45],
        [16, 9, 16, 400, 49, 225],
        [20, 15, 7, 4, 4, -3],
        [15, 7, 20, 4, -3, 4],
        [4, -3, 20, 7, 15],
        [20, 7, 15, 4, -3, 4],
        [4, 1, 5, 25, 32, 47],
    ]


def test_problems_differ_and_their_tests_are_not_among_the_examples() -> None:
    texts = set()
    for seed in range(50):
        problem = draw_problem(random.Random(seed), num_steps=2, num_tests=6)
        texts.add(problem.text)
        assert len(problem.tests) == 6
        assert not set(problem.examples) & set(problem.tests)
    assert len(texts) == 50
    assert len(PRINTS) == 4
