"""Our client with strict servers that speak AgentGym's wire, as recorded."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Env, EnvError
from tests.envhub.env_cases import said
from tests.envhub.env_hosts import stub_server

TASK = Task(env="agentgym", split="train", index=1)
FORMS = ("webshop", "alfworld", "sciworld", "textcraft", "wordle", "weather", "webarena")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stub_server("tests.envhub.remote.agentgym_stub", tmp_path_factory.mktemp("agentgym")) as url:
        yield url


def counting(stub: str, server: str, **options: Any) -> Env:
    return make_env("agentgym", {"url": f"{stub}/{server}", "server": server, "train": [0, 3], **options})


def tally(stub: str, server: str) -> Any:
    with urllib.request.urlopen(f"{stub}/{server}/tally", timeout=60) as reply:
        return json.load(reply)


@pytest.mark.parametrize("server", FORMS)
async def test_an_episode_there_is_counted_down_to_the_end(stub: str, server: str) -> None:
    env = counting(stub, server, rules="Say the numbers.")
    start = await env.reset(TASK)
    assert start.messages[0] == Message("system", "Say the numbers.")
    assert "count down from 3" in said(start) and start.rewards == {}
    wrong = await env.step("99")
    assert said(wrong).startswith("no") and (wrong.rewards, wrong.done) == ({"agentgym": 0.0}, False)
    turns = [await env.step(str(number)) for number in (3, 2, 1)]
    # The last step's reward is the score, and the turns add up to it.
    assert [turn.rewards["agentgym"] for turn in turns] == [0.25, 0.0, 0.75]
    assert [(turn.done, turn.score) for turn in turns] == [(False, 0.0), (False, 0.0), (True, 1.0)]
    assert (turns[-1].terminated, turns[-1].truncated) == (server != "webarena", server == "webarena")
    with pytest.raises(EnvError, match="is over; call reset first"):
        await env.step("1")
    await env.close()
    with pytest.raises(EnvError, match="call reset first"):
        await env.step("1")


async def test_further_fields_of_a_servers_reply_are_shown(stub: str) -> None:
    env = counting(stub, "alfworld")
    assert said(await env.reset(TASK)) == "count down from 3\nYou can: look, wait"
    assert env.admissible() == ["look", "wait"]
    await env.step("3")
    assert env.admissible() == ["look"]
    await env.close()
    env = counting(stub, "sciworld")
    assert said(await env.reset(TASK)) == "Your task is to count.\ncount down from 3"
    assert env.admissible() is None and env.state_key() == "" and env.replay_only
    await env.close()


def test_splits_are_numbers_there(stub: str) -> None:
    async def starts(split: str, **options: Any) -> list[str]:
        env = counting(stub, "textcraft", **options)
        told = [said(await env.reset(Task(env="x", split=split, index=index))) for index in range(3)]
        await env.close()
        return told

    assert asyncio.run(starts("train", train=[0, 1])) == [f"count down from {n}" for n in (2, 3, 2)]
    assert asyncio.run(starts("held_out", held_out=[2, 3])) == [f"count down from {n}" for n in (4, 5, 4)]
    with pytest.raises(ValueError, match=r"given by `env\.options\.held_out`"):
        asyncio.run(starts("held_out"))


async def test_an_environment_that_cannot_be_closed_is_used_again_and_others_are_closed(stub: str) -> None:
    before = {server: tally(stub, server) for server in ("webshop", "textcraft")}
    for _ in range(3):
        for server in before:
            env = counting(stub, server)
            await env.reset(TASK)
            await env.close()
    webshop, textcraft = (tally(stub, server) for server in before)
    assert webshop["created"] <= before["webshop"]["created"] + 1
    assert textcraft == {"created": before["textcraft"]["created"] + 3, "kept": 0}


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        ("break", "/step reported an error: the database is gone"),
        ("crash", "/step replied with status 500: Internal Server Error"),
        ("lie", "the server's reply has no field reward, only said; is `env.options.server` right"),
        ("flood", "replied with more than 8388608 bytes"),
    ],
)
async def test_what_goes_wrong_is_an_env_failure(stub: str, action: str, complaint: str) -> None:
    env = counting(stub, "textcraft")
    await env.reset(TASK)
    with pytest.raises(EnvError, match=complaint):
        await env.step(action)
    assert tally(stub, "textcraft")["kept"] == 0
    with pytest.raises(EnvError, match="call reset first"):
        await env.step("3")
    await env.reset(TASK)
    await env.close()


def test_a_server_of_another_kind_than_configured_is_an_environment_failure(stub: str) -> None:
    env = make_env("agentgym", {"url": f"{stub}/textcraft", "server": "webshop", "train": [0, 3]})
    with pytest.raises(EnvError, match="malformed reply of an AgentGym server"):
        asyncio.run(env.reset(TASK))


def test_options_that_cannot_be_meant_are_explained() -> None:
    known = {"url": "http://127.0.0.1:1", "server": "webshop", "train": [0, 3]}
    for options, complaint in (
        ({"url": "localhost"}, "`env.options.url` must be http://HOST:PORT of an AgentGym server"),
        ({"url": "http://localhost:port"}, "`env.options.url` must be http://HOST:PORT of an AgentGym server"),
        ({"server": "chess"}, "`env.options.server` must be webshop or alfworld or"),
        ({"train": [3]}, r"`env.options.train` must be the first and the last number of its tasks, such as \[0, 99\]"),
        ({"held_out": [5, 4]}, r"`env.options.held_out` must be .* got \[5, 4\]"),
        ({"held_out": [0, 10**20]}, r"`env.options.held_out` must be .* got \[0, 1000"),
    ):
        with pytest.raises(ValueError, match=complaint):
            make_env("agentgym", known | options)
