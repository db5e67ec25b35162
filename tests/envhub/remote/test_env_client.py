"""Environments played through a real server: they behave like local ones."""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.actors.episode.actions import Actions
from slipstream.actors.episode.answer import CheckedEnv
from slipstream.common.records.message import Message
from slipstream.common.text.action_format import FORMATS
from slipstream.common.text.chat import Chat
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Env, Observation
from slipstream.envhub.remote.env_client import EnvClient
from slipstream.envhub.remote.env_protocol import MAX_OPTIONS_BYTES
from tests.actors.search.test_search_env import any_action, ends_of, search
from tests.adapters.held import USUAL
from tests.common.text.small_tokenizer import shop_tokenizer
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case, do_all, some_actions, task_of
from tests.envhub.env_hosts import TASK, EnvHost, env_host, far, play_and_close
from tests.tools.play.test_collect import settings

SHOP_CASE = Case("shop", 40, 0.6)
NEAR_CASES = [
    Case("kg", 60, 0.4, {"hops": 3}),
    Case("sqldb", 40, 0.9, samples=("sql SELECT 1 UNION SELECT 2",)),
    Case("shell", 10, 0.4, samples=("bash touch mine",), max_walk=2),
]
HERE = {"url": "http://127.0.0.1:1"}
CONTRACT: list[Callable[[Case], None]] = [
    *USUAL,
    contract.test_snapshots_of_the_start_and_of_the_end_restore,
    contract.test_a_snapshot_of_other_options_is_refused,
    contract.test_a_random_policy_never_breaks_it_and_every_turn_says_what_it_earned,
    contract.test_a_state_has_one_key_however_long_ago_it_was_reached,
]


@dataclass(frozen=True, kw_only=True, slots=True)
class FarCase(Case):
    url: str
    made: list[EnvClient] = field(default_factory=list)

    def make(self) -> Env:
        self.made.append(far(self.url, self.name, **self.options))
        return self.made[-1]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    names = "--names=kg,grid,sqldb,shop,shell,dataset,tools,tests.guess:GuessEnv"
    with env_host(tmp_path_factory.mktemp("envs"), names) as running:
        yield running


@pytest.mark.parametrize("case", NEAR_CASES, ids=str)
def test_a_remote_environment_behaves_like_a_local_one(host: EnvHost, case: Case) -> None:
    near, there, rng = case.make(), far(host.url, case.name, **case.options), random.Random(1)
    for index in range(2):
        task = case.task("train", index)
        actions = [*asyncio.run(some_actions(near, case, task, rng, 5)), "no such action"]
        as_configured = msgspec.structs.replace(task, env="remote")
        assert asyncio.run(do_all(there, as_configured, actions)) == asyncio.run(do_all(near, task, actions))
        assert there.state_key() == near.state_key()
        assert there.admissible() == near.admissible()
        assert there.expert() == near.expert()
        assert there.snapshot() == near.snapshot()
    assert there.replay_only == near.replay_only
    asyncio.run(there.close())


async def test_the_columns_of_a_task_reach_the_actor(host: EnvHost, tmp_path: Path) -> None:
    """Parts of the reward are computed there."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2 + 3?", "answer": 5, "notes": {"kind": ["sum"]}}\n')
    there = far(host.url, "dataset", train=str(path), held_out=str(path), check="number")
    columns = (await there.reset(TASK)).columns
    assert columns == {"prompt": "2 + 3?", "answer": 5, "notes": {"kind": ["sum"]}, "prompts": "2 + 3?"}
    await there.close()


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__.removeprefix("test_"))
def test_a_remote_environment_keeps_the_contract(host: EnvHost, check: Callable[[Case], None]) -> None:
    case = FarCase(name="grid", max_turns=60, noisy_success=0.7, recovers=0.7, url=host.url, share=0.05)
    try:
        check(case)
    finally:
        for env in case.made:
            asyncio.run(env.close())
    assert case.made


def test_a_remote_environment_reports_that_it_is_replay_only(host: EnvHost) -> None:
    env = far(host.url, "tests.guess:GuessEnv")
    asyncio.run(env.reset(TASK))
    assert env.replay_only
    with pytest.raises(NotImplementedError, match="replay its actions"):
        env.snapshot()
    assert env.admissible() == ["black", "blue", "green", "red"]
    asyncio.run(env.close())


def test_options_that_cannot_be_meant_are_explained() -> None:
    for options, complaint in (
        ({"url": "127.0.0.1:1", "env": "kg"}, "must be http://HOST:PORT of `slipstream serve envs`, got '127.0.0.1:1'"),
        (HERE | {"env": "kg", "options": {"a": "x" * MAX_OPTIONS_BYTES}}, "cannot be sent: .* the limit is 65536"),
        (HERE | {"env": "kg", "options": {"a": 10**20}}, "`env.options.options` cannot be sent: malformed options"),
        (HERE | {"env": "kg", "key_file": "/nowhere"}, "`env.options.key_file` /nowhere"),
        (HERE, "missing a required argument: 'env'"),
    ):
        with pytest.raises(ValueError, match=complaint):
            make_env("remote", options)


def test_what_the_server_cannot_make_is_said(host: EnvHost) -> None:
    for env, options, complaint in (
        ("kg", {"hops": 9}, "`env.options.hops` must be a whole number from 1 to 4, got 9"),
        ("kg", {"hobs": 1}, "its options are: profile, hops"),
        ("household", {}, "the server has no environment 'household'; it serves kg, grid"),
        ("os:system", {}, "the server has no environment 'os:system'"),
    ):
        with pytest.raises(ValueError, match=complaint):
            asyncio.run(far(host.url, env, **options).reset(TASK))


def test_tools_and_admissible_actions_of_a_far_environment_are_those_of_a_near_one(host: EnvHost) -> None:
    def listed(env: Env) -> tuple[Message, ...]:
        checked = CheckedEnv(env, timeout_s=60.0)
        actions = Actions(env=checked, chat=Chat(shop_tokenizer()), action_format=FORMATS["plain"], shows=True)

        async def opening() -> tuple[Message, ...]:
            return await actions.opening(await checked.reset(task_of("grid")))

        return play_and_close(env, opening)

    def tools(env: Env) -> tuple[Mapping[str, Any], ...]:
        return play_and_close(env, lambda: env.reset(task_of("tools"))).tools

    near = listed(make_env("grid", {}))
    assert "Possible actions: " in near[-1].content and listed(far(host.url, "grid")) == near
    assert tools(far(host.url, "tools")) == tools(make_env("tools", {})) != ()


def test_a_search_restores_remote_snapshots(host: EnvHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn costs one step at the server, and the episodes are those of a search in a local environment."""
    steps, step = list[str](), EnvClient.step

    async def counted(env: EnvClient, action: str) -> Observation:
        steps.append(action)
        return await step(env, action)

    monkeypatch.setattr(EnvClient, "step", counted)
    limits = ("env.max_turns=3", "env.show_admissible=true")
    near = search(settings("env.name=shop", *limits), any_action(SHOP_CASE), tmp_path)
    remote = ("env.name=remote", f"env.options.url={host.url}", "env.options.env=shop")
    there = search(settings(*remote, *limits), any_action(SHOP_CASE), tmp_path)
    assert ends_of(there) == ends_of(near)
    assert len(steps) == there.num_turns > 6
