"""Real MCP servers, by the package's own server and client: `make test-adapters` runs it with mcp 1.x and with 2.x."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Env, EnvError, Observation
from tests.adapters.held import acted
from tests.envhub.env_cases import said, task_of

SERVER = Path(__file__).parent / "notes_server.py"
COMMAND = [sys.executable, str(SERVER)]
TASKS = [
    {
        "instruction": "Copy the note a to a note b.",
        "setup": [{"name": "write", "arguments": {"title": "a", "text": "plums"}}],
        "check": [
            {"name": "read", "arguments": {"title": "b"}, "equals": "plums"},
            {"name": "read", "arguments": {"title": "a"}, "contains": "plum"},
        ],
        "solution": [
            {"name": "read", "arguments": {"title": "a"}},
            {"name": "write", "arguments": {"title": "b", "text": "plums"}},
        ],
    },
    {
        "instruction": "What is in the note c?",
        "setup": [{"name": "wipe"}, {"name": "write", "arguments": {"title": "c", "text": "Pears"}}],
        "answer": "pears",
    },
]

pytestmark = pytest.mark.filterwarnings("ignore")  # the package's own


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(task) for task in TASKS) + "\n")
    return str(path)


@pytest.fixture
def url() -> Iterator[str]:
    """A server over streamable HTTP, on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        number = listener.fileno()
        process = subprocess.Popen([*COMMAND, str(number)], pass_fds=[number])
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def played(tasks: str, index: int, actions: list[str], **options: Any) -> list[Observation]:
    return acted("mcp", {"train": tasks, "command": COMMAND, **options}, index, actions)


async def solved_by_the_expert(env: Env, index: int) -> Observation:
    observation = await env.reset(task_of("mcp", index))
    while not observation.done:
        observation = await env.step(env.expert())
    return observation


def test_a_task_is_played_over_stdio_and_judged_by_what_the_server_holds(tasks: str) -> None:
    actions = [call("read", title="a"), call("write", title="b", text="plums"), "Done"]
    opening, read, written, end = played(tasks, 0, actions)
    assert opening.messages[1].content == "Copy the note a to a note b."
    listed = [json.loads(line) for line in opening.messages[0].content.splitlines()[1:]]
    assert {tool["name"] for tool in listed} >= {"read", "write", "wipe"}
    write = next(tool for tool in listed if tool["name"] == "write")
    assert write["description"] == "Write a note."
    assert write["inputSchema"]["required"] == ["title", "text"]
    assert (said(read), said(written), read.valid_action) == ("plums", "written", True)
    assert (end.terminated, end.score, end.success, end.rewards) == (True, 1.0, True, {"solved": 1.0})


def test_what_is_not_done_scores_nothing_and_every_check_counts(tasks: str) -> None:
    assert played(tasks, 0, ["done"])[-1].score == 0.0
    spoiled = [call("write", title="b", text="plums"), call("write", title="a", text="figs"), "done"]
    assert played(tasks, 0, spoiled)[-1].score == 0.0


def test_an_answer_is_compared_without_case_and_a_wrong_one_ends_it_too(tasks: str) -> None:
    for answer, score in (("answer( PEARS )", 1.0), ("answer(apples)", 0.0)):
        end = played(tasks, 1, [answer])[-1]
        assert (end.terminated, end.score) == (True, score)


def test_what_makes_no_sense_is_told_and_changes_nothing(tasks: str) -> None:
    nonsense = ["", "hello", "{", call("fly"), call("wipe"), '{"name": "read", "more": 1}', "answer(7)", "\ud800"]
    nonsense += ["[" * 5000, call("read", title="z"), call("read")]
    observations = played(tasks, 0, nonsense, hidden=["wipe"])
    assert "wipe" not in observations[0].messages[0].content
    assert [o.valid_action for o in observations[1:]] == [False] * len(nonsense)
    assert all(o.rewards == {"solved": 0.0} and not o.done and said(o) for o in observations[1:])
    assert said(observations[-2]).startswith("error: Error executing tool read")  # by the server itself, as is the next
    assert said(observations[-1]).startswith("error: ")


async def test_the_expert_does_the_solution_of_the_file_and_says_where_there_is_none(tasks: str) -> None:
    env = make_env("mcp", {"train": tasks, "command": COMMAND})
    assert (await solved_by_the_expert(env, 2)).success  # the first task again: they go round
    await env.reset(task_of("mcp", 1))
    with pytest.raises(NotImplementedError, match="has no solution"):
        env.expert()
    await env.close()


async def test_each_episode_has_a_server_of_its_own(tasks: str) -> None:
    one, other = (make_env("mcp", {"train": tasks, "command": COMMAND}) for _ in range(2))
    await one.reset(task_of("mcp"))
    await other.reset(task_of("mcp"))
    await one.step(call("wipe"))
    assert said(await other.step(call("read", title="a"))) == "plums"
    assert said(await one.reset(task_of("mcp"))) == "Copy the note a to a note b."
    assert said(await one.step(call("read", title="a"))) == "plums"
    await one.close()
    await one.close()
    await other.close()
    with pytest.raises(EnvError, match="call reset first"):
        await one.step("done")


async def test_a_server_that_dies_is_the_environments_failure(tasks: str) -> None:
    env = make_env("mcp", {"train": tasks, "command": COMMAND})
    await env.reset(task_of("mcp"))
    for _ in range(2):
        with pytest.raises(EnvError, match="the MCP server"):
            await asyncio.wait_for(env.step(call("crash")), 60)
    assert (await solved_by_the_expert(env, 0)).success
    await env.close()


@pytest.mark.parametrize("command", [[sys.executable, "-c", "raise SystemExit(1)"], ["no-such-program-here"]])
def test_a_server_that_does_not_start_is_the_environments_failure(tasks: str, command: list[str]) -> None:
    with pytest.raises(EnvError, match="the MCP server cannot be used"):
        played(tasks, 0, [], command=command)


def test_a_server_gets_the_secrets_that_it_is_given_and_no_others(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "k-1")
    monkeypatch.setenv("ACTOR_SECRET", "never")
    secrets = {"NOTES_KEY": "MY_KEY"}
    assert said(played(tasks, 0, [call("key")], secrets=secrets)[-1]) == "k-1 None"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match="MY_KEY is not set"):
        make_env("mcp", {"train": tasks, "command": COMMAND, "secrets": secrets})


def test_a_long_text_is_cut(tasks: str) -> None:
    assert len(said(played(tasks, 0, [call("long")])[-1])) == 4000


async def test_a_server_over_http_is_shared_and_set_up(tasks: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "Bearer k-2")
    env = make_env("mcp", {"train": tasks, "url": url, "secrets": {"Authorization": "MY_KEY"}, "hidden": ["wipe"]})
    deadline = time.monotonic() + 60
    while True:  # until it listens
        try:
            await env.reset(task_of("mcp", 1))
            break
        except EnvError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
    assert said(await env.step(call("header"))) == "Bearer k-2"
    assert not (await env.step(call("read", title="b"))).valid_action
    assert (await env.step("answer(pears)")).success
    assert (await solved_by_the_expert(env, 0)).success
    assert said(await env.reset(task_of("mcp", 0))) == "Copy the note a to a note b."
    assert said(await env.step(call("read", title="b"))) == "plums"  # what the episode before wrote
    await env.close()


def test_a_file_that_is_none_of_tasks_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    for line, why in (
        ('{"instruction": "x"}', "line 1: a task must have a check, an answer or both"),
        ('{"instruction": "x", "check": [{"name": "read"}]}', "line 1: a check must have either equals or contains"),
        ('{"instruction": "x", "answr": "y"}', "line 1: .*answr"),
        ("{", "line 1: "),
    ):
        path.write_text(line)
        with pytest.raises(ValueError, match=why):
            make_env("mcp", {"train": str(path), "command": COMMAND})


def test_options_that_do_not_fit_are_refused(tasks: str, tmp_path: Path) -> None:
    for options, why in (
        ({"train": tasks}, "exactly one of `env.options.command`"),
        ({"train": tasks, "command": COMMAND, "url": "http://127.0.0.1:1/mcp"}, "exactly one of `env.options.command`"),
        ({"train": tasks, "command": "python server.py"}, "`env.options.command` must be a list of texts"),
        ({"command": COMMAND}, "`env.options.train` must be set; write one JSON object a line"),
        ({"train": str(tmp_path / "none"), "command": COMMAND}, "none does not exist; write one JSON object a line"),
    ):
        with pytest.raises(ValueError, match=why):
            make_env("mcp", options)
    with pytest.raises(ValueError, match="there are no held_out tasks"):
        asyncio.run(make_env("mcp", {"train": tasks, "command": COMMAND}).reset(task_of("mcp", split="held_out")))
