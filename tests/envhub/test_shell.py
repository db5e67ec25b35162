"""The shell: how an action is parsed, and that the bash command of every job gives its result."""

import asyncio
import random

import pytest

from slipstream.common.records.trajectory import Task
from slipstream.envhub.isolation.file_tree import file, folder
from slipstream.envhub.isolation.sandbox import Limits, run_in_sandbox
from slipstream.envhub.shell.action import Act, parse_act, write_bash
from slipstream.envhub.shell.shell import ShellState, ShellWorld, make_shell
from slipstream.envhub.shell.shell_task import PROCESSES, READS, WRITES, Job, draw_tree


@pytest.mark.parametrize(
    ("action", "act"),
    [
        ("Think: look first.\nAct: bash\n```bash\nls -l\n```", Act(verb="bash", text="ls -l")),
        ("Act: bash\n\n```bash\ncat a\ncat b\n```\nthanks", Act(verb="bash", text="cat a\ncat b")),
        ("Act: bash\n```shell\nls -l\n```", Act(verb="bash", text="ls -l")),
        ("Act: bash ```ls -l```", Act(verb="bash", text="ls -l")),
        ("bash ls", Act(verb="bash", text="ls")),
        ("Act: answer(42)", Act(verb="answer", text="42")),
        ("Think: f(x)\nAct: answer( a (b) )", Act(verb="answer", text="a (b)")),
        ("Act: finish", Act(verb="finish")),
        ("Act: bash", None),
        ("Act: bash\n```bash\n\n```", None),
        ("ls", None),
        ("", None),
        ("bash echo \0", None),
        ("Act: answer(\0)", None),
        ("Act: answer(\ud800)", None),
        ("bash " + "x" * 30_000, None),
    ],
)
def test_an_action_is_parsed_in_the_format_of_react(action: str, act: Act | None) -> None:
    assert parse_act(action) == act
    if act is not None and act.verb == "bash":
        assert parse_act(write_bash(act.text)) == act


@pytest.mark.parametrize("draw", [*READS, *WRITES, *PROCESSES], ids=lambda draw: draw.__name__.strip("_"))
def test_the_bash_of_every_job_gives_its_result(draw) -> None:  # type: ignore[no-untyped-def]
    """Compares the answers and results, computed in Python, with those of bash."""
    checked = 0
    for seed in range(40):
        rng = random.Random(seed)
        tree = draw_tree(rng, num_files=20)
        job: Job = draw(rng, tree)
        if job.answer in ("", "0") and job.result in (None, tree) and job.left == job.processes:
            continue
        finished = asyncio.run(run_in_sandbox(job.bash, tree, limits=Limits(wall_s=20), processes=job.processes))
        if job.result is None:
            assert finished.output.split()[-1].split("=")[-1] == job.answer, job
        else:
            assert (finished.tree, finished.processes) == (job.result, job.left), job
        checked += 1
        if checked == 4:
            return
    raise AssertionError("no such job could be drawn")


def world(kind: str, index: int = 2, wall_s: float = 20) -> ShellWorld:
    task = Task(env="shell", split="train", index=index)
    return make_shell(task, profile="small", kind=kind, num_files=8, limits=Limits(wall_s=wall_s))


def test_an_answer_must_be_exact_and_a_change_complete() -> None:
    question, change = world("read"), world("write")
    answer = asyncio.run(question.act(question.first, f"Act: answer({question.job.answer})"))
    assert (answer.score, answer.over) == (1.0, True)
    assert asyncio.run(question.act(question.first, "Act: answer(nothing)")).score == 0.0
    assert asyncio.run(change.act(change.first, "Act: finish")).score == 0.0
    assert change.job.result is not None
    assert asyncio.run(change.act(ShellState(tree=change.job.result), "Act: finish")).score == 1.0
    more = {**change.job.result, "mine": file("x")}
    assert asyncio.run(change.act(ShellState(tree=more), "Act: finish")).score == 0.0


def test_a_question_needs_answer_and_a_change_needs_finish() -> None:
    question, change = world("read"), world("write")
    assert not asyncio.run(question.act(question.first, "Act: finish")).valid
    assert not asyncio.run(change.act(change.first, "Act: answer(1)")).valid


def test_a_killed_command_keeps_what_it_had_done() -> None:
    slow = world("read", wall_s=1)
    change = asyncio.run(slow.act(slow.first, "bash mkdir mine; sleep 100"))
    assert change.state.tree["mine"] == folder()
    assert "killed" in change.text
    loud = asyncio.run(slow.act(slow.first, "bash seq 9000; sleep 100")).text
    assert "[cut]" in loud and "killed" in loud
    assert not change.over


def test_ending_another_process_gives_score_0() -> None:
    drawn = (world("processes", index) for index in range(100))
    ending = next(each for each in drawn if each.job.result is not None)  # a change

    async def score(*commands: str) -> float:
        state = ending.first
        for command in commands:
            state = (await ending.act(state, write_bash(command))).state
        return (await ending.act(state, "Act: finish")).score

    other = next(name for name in ending.job.left if name)
    assert asyncio.run(score(ending.job.bash, "true")) == 1.0
    assert asyncio.run(score("true")) == 0.0
    assert asyncio.run(score(ending.job.bash, f"kill $(grep -l '^{other}' /proc/[0-9]*/cmdline | cut -d/ -f3)")) == 0.0
    assert asyncio.run(score(ending.job.bash, "touch mine")) == 0.0
