"""Our client of OpenEnv at a strict server, by the recorded wire. `make test-adapters-openenv` takes OpenEnv's own."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Env, EnvError
from tests.envhub.env_cases import said
from tests.envhub.env_hosts import stub_server

TASK = Task(env="openenv", split="train", index=1)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stub_server("tests.envhub.remote.openenv_stub", tmp_path_factory.mktemp("openenv")) as url:
        yield url


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
async def test_what_goes_wrong_is_an_env_failure(stub: str, options: Any, action: str, complaint: str) -> None:
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
