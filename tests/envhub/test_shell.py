"""The shell: how an action is parsed, and that the bash command of every job gives its result."""

import asyncio
import random

import pytest

from slipstream.envhub.isolation.file_tree import Tree, file, folder
from slipstream.envhub.isolation.sandbox import Limits, run_in_sandbox
from slipstream.envhub.shell.action import Act, parse_act, write_bash
from slipstream.envhub.shell.shell import ShellState, ShellWorld, make_shell
from slipstream.envhub.shell.shell_task import PROCESSES, READS, WRITES, Job, draw_tree
from tests.envhub.env_cases import act, task_of


@pytest.mark.parametrize(
    ("action", "parsed"),
    [
        ("Think: look first.\nAct: bash\n```bash\nls -l\n```", Act(verb="bash", text="ls -l")),
        ("Act: bash\n\n```bash\ncat a\ncat b\n```\nthanks", Act(verb="bash", text="cat a\ncat b")),
        ("Act: bash\n```shell\nls -l\n```", Act(verb="bash", text="ls -l")),
        ("Act: bash ```ls -l```", Act(verb="bash", text="ls -l")),
        ("bash ls", Act(verb="bash", text="ls")),
        ("Act: answer(42)", Act(verb="answer", text="42")),
        ("Think: f(x)\nAct: answer( a (b) )", Act(verb="answer", text="a (b)")),
        ("Act: finish", Act(verb="finish")),
        *((action, None) for action in ("Act: bash", "Act: bash\n```bash\n\n```", "ls", "", "bash " + "x" * 30_000)),
        *((action, None) for action in ("bash echo \0", "Act: answer(\0)", "Act: answer(\ud800)")),
    ],
)
def test_an_action_is_parsed_in_the_format_of_react(action: str, parsed: Act | None) -> None:
    assert parse_act(action) == parsed
    if parsed is not None and parsed.verb == "bash":
        assert parse_act(write_bash(parsed.text)) == parsed


@pytest.mark.parametrize("draw", [*READS, *WRITES, *PROCESSES], ids=lambda draw: draw.__name__.strip("_"))
def test_the_bash_of_every_job_gives_its_result(draw) -> None:  # type: ignore[no-untyped-def]
    """Compares the answers and results, computed in Python, with those of bash: of four jobs each, in one sandbox."""
    drawn = [(tree := draw_tree(rng, num_files=20), draw(rng, tree)) for rng in map(random.Random, range(40))]
    asked = [(tree, job) for tree, job in drawn if job.answer not in ("", "0") or job.result not in (None, tree)]
    jobs: list[tuple[Tree, Job]] = (asked or [(tree, job) for tree, job in drawn if job.left != job.processes])[:4]
    assert len(jobs) == 4, "no such job could be drawn"
    for group in [[each] for each in jobs] if jobs[0][1].processes else [jobs]:
        whole = {f"{n}/{path}": node for n, (tree, _) in enumerate(group) for path, node in tree.items()}
        command = "\n".join(f"cd ~/{n}; {job.bash}; echo --" for n, (_, job) in enumerate(group))
        limits, beside = Limits(wall_s=20), group[0][1].processes
        finished = asyncio.run(run_in_sandbox(command, whole, limits=limits, processes=beside))
        for n, ((_, job), said) in enumerate(zip(group, finished.output.split("--\n")[:-1], strict=True)):
            if job.result is None:
                assert said.split()[-1].split("=")[-1] == job.answer, job
            else:
                left = {path[2:]: node for path, node in (finished.tree or {}).items() if path.startswith(f"{n}/")}
                assert (left, finished.processes) == (job.result, job.left), job


def world(kind: str, index: int = 2) -> ShellWorld:
    return make_shell(task_of("shell", index), kind=kind)


def test_an_answer_must_be_exact_and_a_change_complete() -> None:
    question, change = world("read"), world("write")
    answer = act(question, f"Act: answer({question.job.answer})")
    assert (answer.score, answer.over) == (1.0, True)
    assert act(question, "Act: answer(nothing)").score == 0.0
    assert not act(question, "Act: finish").valid
    assert change.job.result is not None
    more = {**change.job.result, "mine": file("x")}
    for tree, score in ((change.first.tree, 0.0), (change.job.result, 1.0), (more, 0.0)):
        assert act(change, "Act: finish", ShellState(tree=tree)).score == score
    assert not act(change, "Act: answer(1)").valid


def test_a_killed_command_keeps_what_it_had_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.envhub.shell.shell.LIMITS", Limits(wall_s=1))
    slow = world("read")
    change = act(slow, "bash mkdir mine; sleep 100")
    assert change.state.tree["mine"] == folder()
    assert "killed" in change.text
    loud = act(slow, "bash seq 9000; sleep 100").text
    assert "[cut]" in loud and "killed" in loud
    assert not change.over


def test_ending_another_process_gives_score_0() -> None:
    drawn = (world("processes", index) for index in range(100))
    ending = next(each for each in drawn if each.job.result is not None)  # a change

    other = next(name for name in ending.job.left if name)
    kill_other = f"kill $(grep -l '^{other}' /proc/[0-9]*/cmdline | cut -d/ -f3)"
    right = act(ending, write_bash(ending.job.bash)).state
    for state, command, score in (
        (right, "true", 1.0),
        (ending.first, "true", 0.0),
        (right, kill_other, 0.0),
        (right, "touch mine", 0.0),
    ):
        assert act(ending, "Act: finish", act(ending, write_bash(command), state).state).score == score
