"""AgentGym in both directions, as recorded: our client with strict servers, and their clients' requests to ours.

Their client package is not on PyPI (`agentenv` there is an empty one), so none of theirs was run.
"""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Env, EnvError, Observation
from tests.envhub.env_hosts import EnvHost, env_host, stub_server, wait_until

TASK = Task(env="agentgym", split="train", index=1)
FORMS = ("webshop", "alfworld", "sciworld", "textcraft", "wordle", "weather", "webarena")
UNRULY = "tests.envhub.unruly:UnrulyEnv"


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stub_server("tests.envhub.remote.agentgym_stub", tmp_path_factory.mktemp("agentgym")) as url:
        yield url


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    settings = [f"--names=kg,shop,household,craft,{UNRULY}", "--max-episodes=2", "--lease-s=6"]
    with env_host(tmp_path_factory.mktemp("envs"), *settings) as running:
        yield running


def counting(stub: str, server: str, **options: Any) -> Env:
    return make_env("agentgym", {"url": f"{stub}/{server}", "server": server, "train": [0, 3], **options})


def said(observation: Observation) -> str:
    return observation.messages[-1].content


def asked(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.mark.parametrize("server", FORMS)
def test_an_episode_there_is_counted_down_to_the_end(stub: str, server: str) -> None:
    async def play() -> None:
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

    asyncio.run(play())


def test_further_fields_of_a_servers_reply_are_shown(stub: str) -> None:
    async def play() -> None:
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

    asyncio.run(play())


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


def test_an_environment_that_cannot_be_closed_is_used_again_and_others_are_closed(stub: str) -> None:
    async def episode(server: str) -> None:
        env = counting(stub, server)
        await env.reset(TASK)
        await env.close()

    before = {server: asked(f"{stub}/{server}/tally") for server in ("webshop", "textcraft")}
    for _ in range(3):
        for server in before:
            asyncio.run(episode(server))
    webshop, textcraft = (asked(f"{stub}/{server}/tally") for server in before)
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
def test_what_goes_wrong_is_an_env_failure(stub: str, action: str, complaint: str) -> None:
    async def play() -> None:
        env = counting(stub, "textcraft")
        await env.reset(TASK)
        with pytest.raises(EnvError, match=complaint):
            await env.step(action)
        with pytest.raises(EnvError, match="call reset first"):
            await env.step("3")
        await env.reset(TASK)
        await env.close()

    asyncio.run(play())


def test_a_server_of_another_kind_than_configured_is_an_environment_failure(stub: str) -> None:
    env = make_env("agentgym", {"url": f"{stub}/textcraft", "server": "webshop", "train": [0, 3]})
    with pytest.raises(EnvError, match="malformed reply of an AgentGym server"):
        asyncio.run(env.reset(TASK))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"url": "localhost"}, "`env.options.url` must be http://HOST:PORT of an AgentGym server"),
        ({"server": "chess"}, "`env.options.server` must be webshop or alfworld or"),
        ({"train": [3]}, r"`env.options.train` must be the first and the last number of its tasks, such as \[0, 99\]"),
        ({"held_out": [5, 4]}, r"`env.options.held_out` must be .* got \[5, 4\]"),
    ],
)
def test_options_that_cannot_be_meant_are_explained(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_env("agentgym", {"url": "http://127.0.0.1:1", "server": "webshop", "train": [0, 3], **options})


def expert_episode(name: str, index: int) -> tuple[Observation, list[tuple[str, Observation]]]:
    env = make_env(name, {})
    start, turns = asyncio.run(env.reset(Task(env=name, split="train", index=index))), []
    while not turns or not turns[-1][1].done:
        action = env.expert()
        turns.append((action, asyncio.run(env.step(action))))
    return start, turns


def test_a_textcraft_client_plays_our_recipes(host: EnvHost) -> None:
    start, turns = expert_episode("craft", 2)
    base = f"{host.url}/agentgym/textcraft/craft"
    created = asked(f"{base}/create", {"minecraft_dir": "agentenv_textcraft/", "commands": None, "goal": None})
    number = created["id"]
    assert {"id", "observation", "reward", "done"} <= set(created)
    told = asked(f"{base}/reset", {"id": number, "data_idx": 2})
    assert (told["observation"], told["reward"], told["done"]) == (start.messages[0].content, 0, False)
    for action, turn in turns:
        told = asked(f"{base}/step", {"id": number, "action": action})
        assert (told["observation"], told["reward"], told["done"]) == (turn.messages[0].content, turn.score, turn.done)
    assert asked(f"{base}/observation?id={number}") == turns[-1][1].messages[0].content
    assert told["reward"] == 1.0
    assert asked(f"{base}/step", {"id": number, "action": "x"})["error"].endswith("call reset first")
    assert asked(f"{base}/close", {"id": number})["closed"]
    assert "no environment has the number" in asked(f"{base}/step", {"id": number, "action": "x"})["error"]
    assert host.health()["episodes"] == 0


def test_a_webshop_client_plays_our_shop(host: EnvHost) -> None:
    start, turns = expert_episode("shop", 4)
    base = f"{host.url}/agentgym/webshop/shop"
    number = asked(f"{base}/create", {})
    assert isinstance(number, int)
    assert asked(f"{base}/reset", {"env_idx": number, "session_id": 4}) == [start.messages[0].content, None]
    assert asked(f"{base}/observation?env_idx={number}") == start.messages[0].content
    for action, turn in turns:
        told = asked(f"{base}/step", {"env_idx": number, "action": action})
        assert (told["state"], told["reward"], told["done"]) == (turn.messages[0].content, turn.score, turn.done)
    host.wait_until(lambda health: health["episodes"] == 0, "the end of the lease, as these clients close nothing")


@pytest.mark.parametrize(("server", "name"), [("alfworld", "household"), ("weather", "kg"), ("webarena", "kg")])
def test_our_client_plays_our_server_in_every_form(host: EnvHost, server: str, name: str) -> None:
    async def play() -> tuple[str, Observation]:
        env = counting(host.url, server, url=f"{host.url}/agentgym/{server}/{name}")
        start = await env.reset(Task(env=name, split="train", index=2))
        turn = await env.step("look" if name == "household" else "answer(#1)")
        assert (env.admissible() is None) == (name == "kg")
        await env.close()
        return said(start), turn

    start, turn = asyncio.run(play())
    assert start.startswith(expert_episode(name, 2)[0].messages[0].content)
    assert not turn.done and turn.rewards == {"agentgym": 0.0}
    host.wait_until(lambda health: health["episodes"] == 0, "the slot")


def test_an_environment_in_use_is_kept_and_a_full_server_replies_503(host: EnvHost) -> None:
    base = f"{host.url}/agentgym/textcraft/kg"
    numbers = [asked(f"{base}/create", {"split": "held_out", "options": {"hops": 3}})["id"] for _ in range(2)]
    with pytest.raises(urllib.error.HTTPError, match="503"):
        asked(f"{base}/create", {})
    for number in numbers:
        asked(f"{base}/reset", {"id": number, "data_idx": 6})
    looks = 0

    def only_one_is_left() -> bool:
        nonlocal looks
        looks += 1
        assert "error" not in asked(f"{base}/step", {"id": numbers[0], "action": "?"})
        return bool(host.health()["episodes"] == 1)

    wait_until(only_one_is_left, "the end of the other's lease")
    assert looks > 1
    assert asked(f"{base}/close", {"id": numbers[0]})["closed"]


def test_what_goes_wrong_here_is_an_error_object(host: EnvHost) -> None:
    base = f"{host.url}/agentgym/textcraft/{UNRULY}"
    number = asked(f"{base}/create", {})["id"]
    asked(f"{base}/reset", {"id": number, "data_idx": 0})
    assert asked(f"{base}/step", {"id": number, "action": "fail"}) == {"error": "the database is gone"}
    crashed = asked(f"{base}/step", {"id": number, "action": "crash"})
    assert crashed == {"error": "the environment is lost: its process ended with -6"}
    assert "no environment has the number" in asked(f"{base}/reset", {"id": number, "data_idx": 0})["error"]
    wrong = {"options": {"hops": 9}}
    kg = f"{host.url}/agentgym/textcraft/kg"
    assert "`env.options.hops` must be" in asked(f"{kg}/create", wrong)["error"]
    assert host.health()["episodes"] == 0


def test_a_number_of_more_than_64_bits_is_an_error_for_its_client_alone(host: EnvHost) -> None:
    base = f"{host.url}/agentgym/textcraft/kg"
    number = asked(f"{base}/create", {})["id"]
    assert "2**64" in asked(f"{base}/create", {"options": {"hops": 10**20}})["error"]
    assert "2**64" in asked(f"{base}/reset", {"id": number, "data_idx": 10**20})["error"]
    assert "no environment has the number" in asked(f"{base}/observation?id={'9' * 5000}")["error"]
    assert "error" not in asked(f"{base}/reset", {"id": number, "data_idx": 0})
    assert asked(f"{base}/close", {"id": number})["closed"] and host.health()["episodes"] == 0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("textcraft/kg/create", [], 422),
        ("textcraft/kg/step", {"id": "x", "action": "y"}, 422),
        ("textcraft/kg/step", {"action": "y"}, 422),
        ("textcraft/sqldb/create", {}, 404),
        ("chess/kg/create", {}, 404),
        ("textcraft/kg/dance", {}, 404),
    ],
)
def test_malformed_requests_are_refused(host: EnvHost, path: str, body: object, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError, match=str(status)):
        asked(f"{host.url}/agentgym/{path}", body)
