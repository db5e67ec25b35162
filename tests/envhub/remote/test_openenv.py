"""OpenEnv both ways, by the recorded wire: our client at a strict server, and their client's messages at our server.

`make test-adapters-openenv` does the same with OpenEnv's own client and server.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Env, EnvError, Observation
from tests.envhub.env_cases import said
from tests.envhub.env_hosts import EnvHost, env_host, stub_server

TASK = Task(env="openenv", split="train", index=1)
HUGE = 10**20  # more than 64 bits


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stub_server("tests.envhub.remote.openenv_stub", tmp_path_factory.mktemp("openenv")) as url:
        yield url


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    names = "--names=kg,tests.envhub.unruly:UnrulyEnv"
    with env_host(tmp_path_factory.mktemp("envs"), names, "--max-episodes=1") as running:
        yield running


@pytest.fixture(autouse=True)
def alone(host: EnvHost) -> None:
    """The only slot is free again: the server hears a little later that a client has left."""
    host.wait_until(lambda health: health["episodes"] == 0, "the slot")


def counting(url: str, **options: Any) -> Env:
    shown = {"action_field": "words", "observation_field": "text"}
    return make_env("openenv", {"url": url, **shown, **options})


async def test_an_episode_there_is_counted_down_to_the_end(stub: str) -> None:
    env = counting(stub, rules="Say the numbers.")
    start = await env.reset(TASK)
    assert start.messages[0] == Message("system", "Say the numbers.")
    first = int(said(start).removeprefix("count down from "))
    wrong = await env.step("99")
    assert (said(wrong), wrong.rewards, wrong.done) == ("no", {"openenv": 0.0}, False)
    turns = [await env.step(str(number)) for number in range(first, 0, -1)]
    assert [turn.rewards["openenv"] for turn in turns] == [pytest.approx(1 / first)] * first
    assert [turn.score for turn in turns[:-1]] == [0.0] * (first - 1)
    assert turns[-1].terminated and turns[-1].success and turns[-1].score == 1.0
    with pytest.raises(EnvError, match="is over; call reset first"):
        await env.step("1")
    assert env.replay_only and env.state_key() == "" and env.admissible() == []
    await env.close()
    with pytest.raises(EnvError, match="call reset first"):
        await env.step("1")


def test_a_task_is_one_start_and_splits_are_different_ones(stub: str) -> None:
    async def starts(split: str) -> list[str]:
        env = counting(stub)
        told = [said(await env.reset(Task(env="openenv", split=split, index=index))) for index in range(20)]
        await env.close()
        return told

    train = asyncio.run(starts("train"))
    assert asyncio.run(starts("train")) == train != asyncio.run(starts("held_out"))
    assert len(set(train)) == 4
    with pytest.raises(ValueError, match="split must be train or held_out"):
        asyncio.run(starts("test"))


async def test_all_of_an_observation_is_shown_as_json_where_no_field_is_named(stub: str) -> None:
    env = counting(stub, observation_field="")
    shown = json.loads(said(await env.reset(TASK)))
    assert shown["tags"] == ["a", {"b": 1}] and shown["text"].startswith("count down")
    await env.close()
    env = counting(stub, observation_field="tags")
    assert json.loads(said(await env.reset(TASK))) == ["a", {"b": 1}]
    await env.close()


@pytest.mark.parametrize(
    ("options", "action", "complaint"),
    [
        ({}, "break", "reported EXECUTION_ERROR: the database is gone"),
        ({}, "lie", "malformed ObservationData of OpenEnv: Object missing required field `observation`"),
        ({"action_field": "message"}, "4", r'Invalid message \[\{"type": "missing", "loc": \["words"'),
    ],
)
async def test_what_goes_wrong_is_an_env_failure(
    stub: str, options: dict[str, str], action: str, complaint: str
) -> None:
    env = counting(stub, **options)
    await env.reset(TASK)
    with pytest.raises(EnvError, match=complaint):
        await env.step(action)
    with pytest.raises(EnvError, match="call reset first"):
        await env.step(action)
    await env.reset(TASK)
    await env.close()


def test_an_unknown_observation_field_is_reported_with_the_known_ones(stub: str) -> None:
    env = counting(stub, observation_field="txt")
    with pytest.raises(EnvError, match=r"`env.options.observation_field` must be one of text, tags, the fields that"):
        asyncio.run(env.reset(TASK))
    asyncio.run(env.close())


async def test_a_full_server_is_waited_for(stub: str) -> None:
    one, other = counting(stub), counting(stub)
    await one.reset(TASK)
    start = asyncio.create_task(other.reset(TASK))
    await asyncio.sleep(1.0)
    assert not start.done()
    await one.close()
    await start
    await other.close()


async def told_by(host: EnvHost, env: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{host.url}/openenv/{env}/ws") as connection:
        answers = []
        for message in messages:
            await connection.send_str(json.dumps(message))
            with contextlib.suppress(TypeError):  # the connection was closed instead
                answers.append(json.loads(await connection.receive_str()))
        return answers


def test_their_client_plays_ours_as_we_do(host: EnvHost) -> None:
    near = make_env("kg", {"hops": 3})
    task = Task(env="kg", split="held_out", index=6)
    start = asyncio.run(near.reset(task))
    actions, turns = list[str](), list[Observation]()
    while not turns or not turns[-1].done:
        actions.append(near.expert())
        turns.append(asyncio.run(near.step(actions[-1])))
    reset = {"type": "reset", "data": {"seed": 6, "split": "held_out", "options": {"hops": 3}}}
    steps = [{"type": "step", "data": {"message": action}} for action in actions]
    first, *rest, state = asyncio.run(told_by(host, "kg", reset, *steps, {"type": "state"}))
    assert set(first) == {"type", "data"} and set(first["data"]) == {"observation", "reward", "done"}
    assert (first["data"]["reward"], first["data"]["done"]) == (None, False)
    assert first["data"]["observation"]["text"] == start.messages[0].content
    assert [told["data"]["observation"]["text"] for told in rest] == [turn.messages[0].content for turn in turns]
    assert [told["data"]["reward"] for told in rest] == [turn.rewards["solved"] for turn in turns]
    assert [told["data"]["done"] for told in rest] == [turn.done for turn in turns]
    assert rest[-1]["data"]["observation"]["success"] is True
    assert state == {"type": "state", "data": {"episode_id": "kg/held_out/6", "step_count": len(actions)}}


@pytest.mark.parametrize(
    ("messages", "code", "complaint"),
    [
        ([{"type": "step", "data": {"message": "x"}}], "EXECUTION_ERROR", "call reset first"),
        ([{"type": "dance"}], "UNKNOWN_TYPE", "dance"),
        ([{"type": "reset", "data": {"seed": "x"}}], "VALIDATION_ERROR", "Expected `int | null`"),
        ([{"type": "reset", "data": {"seed": HUGE}}], "VALIDATION_ERROR", "2**64"),
        ([{"type": "reset", "data": {"options": {"hops": HUGE}}}], "VALIDATION_ERROR", "2**64"),
        ([{"type": "reset", "data": {"split": "test"}}], "VALIDATION_ERROR", "Invalid enum value 'test'"),
        ([{"type": "reset", "data": {"options": {"hops": 9}}}], "VALIDATION_ERROR", "`env.options.hops` must be"),
        ([{"type": "reset", "data": {"options": {"hops": "x" * 70_000}}}], "VALIDATION_ERROR", "the limit is 65536"),
        ([{"type": "reset", "data": {}}, {"type": "step", "data": {"text": "x"}}], "VALIDATION_ERROR", "`message`"),
    ],
)
def test_an_invalid_message_of_their_client_is_an_error_in_their_format(
    host: EnvHost, messages: list[dict[str, Any]], code: str, complaint: str
) -> None:
    last = asyncio.run(told_by(host, "kg", *messages))[-1]
    assert last["type"] == "error" and set(last["data"]) == {"message", "code"}
    assert last["data"]["code"] == code and complaint in last["data"]["message"]


def test_a_crash_is_an_error_and_the_next_reset_starts_again(host: EnvHost) -> None:
    reset, crash = {"type": "reset", "data": {"seed": 1}}, {"type": "step", "data": {"message": "crash"}}
    hello = {"type": "step", "data": {"message": "hello"}}
    answers = asyncio.run(told_by(host, "tests.envhub.unruly:UnrulyEnv", reset, crash, hello, reset, hello))
    assert [answer["type"] for answer in answers] == ["observation", "error", "error", "observation", "observation"]
    assert answers[1]["data"]["message"] == "the environment is lost: its process ended with -6"
    assert answers[4]["data"]["observation"]["text"] == "hello"


async def test_a_client_beyond_the_limit_gets_capacity_reached(host: EnvHost) -> None:
    reset = {"type": "reset", "data": {}}
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{host.url}/openenv/kg/ws") as first:
        await first.send_str(json.dumps(reset))
        await first.receive()
        assert host.health()["episodes"] == 1
        (full,) = await told_by(host, "kg", reset)
        await first.send_str(json.dumps({"type": "close"}))
        assert (await first.receive()).type is aiohttp.WSMsgType.CLOSE
    assert full["data"]["code"] == "CAPACITY_REACHED"
    host.wait_until(lambda health: health["episodes"] == 0, "the slot")


def test_the_schema_names_the_action_and_others_are_not_served(host: EnvHost) -> None:
    async def asked(path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"{host.url}{path}") as reply:
            return reply.status, await reply.text()

    status, schema = asyncio.run(asked("/openenv/kg/schema"))
    assert status == 200 and "message" in schema
    assert asyncio.run(asked("/openenv/household/schema"))[0] == 404


async def test_our_clients_of_their_protocols_play_our_server_too(host: EnvHost) -> None:
    env = make_env("openenv", {"url": f"{host.url}/openenv/kg", "observation_field": "text"})
    await env.reset(TASK)
    assert said(await env.step("answer(#1)")) == "no variable #1"
    await env.close()
