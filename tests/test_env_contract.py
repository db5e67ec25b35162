"""What every environment must do: one suite over all of them and their options."""

import asyncio
import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.trajectory import Task
from envhub.catalogue import ENVS, env_class, make_env
from envhub.env import Env, EnvError, Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One environment with options, and what is known of it."""

    name: str
    max_turns: int  # generous: for an expert that three times in ten is made to do something else
    noisy_success: float  # of that expert, at least; 1.0 where no mistake is final
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Env:
        return make_env(self.name, self.options)

    def task(self, split: str, index: int) -> Task:
        return Task(env=self.name, split=split, index=index)


CASES = [
    Case(name="shop", max_turns=40, noisy_success=0.6),
    Case(name="shop", max_turns=60, noisy_success=0.6, options={"profile": "full"}),
    Case(name="household", max_turns=100, noisy_success=0.99),
    Case(name="household", max_turns=150, noisy_success=0.99, options={"profile": "full"}),
    Case(name="household", max_turns=100, noisy_success=0.99, options={"task_types": ["pick_two_obj"]}),
]
GARBAGE = [
    "",
    " ",
    "hello",
    "search[",
    "click[]",
    "search[]",
    "click[nothing]",
    "go to",
    "take mug 1",
    "\x00",
    "[" * 5000,
    "click[buy now",
    "🙂",
    "go to fridge 99999999999999999999",
    "search[a]click[b]",
    "OPEN",
    "<action>look</action>",
]

every_env = pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.name}-{'-'.join(map(str, case.options.values()))}"
)


async def rollout(env: Env, task: Task, rng: random.Random, *, noise: float, max_turns: int) -> list[Observation]:
    observations = [await env.reset(task)]
    while not observations[-1].done and len(observations) <= max_turns:
        actions = env.admissible()
        assert actions is not None
        action = rng.choice(actions) if rng.random() < noise else env.expert()
        observations.append(await env.step(action))
        assert observations[-1].valid_action, f"{action!r} was offered, and not understood"
    return observations


async def do_all(env: Env, task: Task, actions: list[str]) -> list[Observation]:
    return [await env.reset(task), *[await env.step(action) for action in actions]]


async def some_actions(env: Env, task: Task, rng: random.Random, count: int) -> list[str]:
    """Random admissible actions that leave the episode unfinished."""
    await env.reset(task)
    actions: list[str] = []
    while len(actions) < count:
        offered = [action for action in env.admissible() or [] if action != "click[buy now]"]
        action = rng.choice(offered)
        if (await env.step(action)).done:
            return await some_actions(env, task, rng, count)
        actions.append(action)
    return actions


def texts(observations: list[Observation]) -> str:
    return "\n".join(message.content for observation in observations for message in observation.messages)


@every_env
def test_the_same_task_and_actions_give_the_same_episode_on_every_instance(case: Case) -> None:
    env, fresh, rng = case.make(), case.make(), random.Random(1)
    for index in range(10):
        task = case.task("train", index)
        actions = asyncio.run(some_actions(env, task, rng, 8))
        first = asyncio.run(do_all(env, task, actions))
        assert asyncio.run(do_all(env, task, actions)) == first
        assert asyncio.run(do_all(fresh, task, actions)) == first


@every_env
def test_reset_leaves_nothing_of_the_episode_before(case: Case) -> None:
    used, fresh, rng = case.make(), case.make(), random.Random(2)
    for index in range(10):
        asyncio.run(some_actions(used, case.task("train", 100 + index), rng, 10))
        task = case.task("train", index)
        assert asyncio.run(used.reset(task)) == asyncio.run(fresh.reset(task))
        assert used.state_key() == fresh.state_key()
        assert used.admissible() == fresh.admissible()
        assert used.snapshot() == fresh.snapshot()


@every_env
def test_train_and_held_out_tasks_share_no_text(case: Case) -> None:
    env = case.make()
    openings = {
        split: {texts([asyncio.run(env.reset(case.task(split, index)))]) for index in range(300)}
        for split in ("train", "held_out")
    }
    assert not openings["train"] & openings["held_out"]
    # The smallest world has 1190 held-out texts, of which 300 draws meet 265 or so.
    assert min(len(opening) for opening in openings.values()) > 250


@every_env
def test_an_unknown_split_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="split must be train or held_out, got 'test'"):
        asyncio.run(case.make().reset(case.task("test", 0)))


@every_env
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_expert_solves_its_tasks(case: Case, split: str) -> None:
    env, rng = case.make(), random.Random(3)
    ends = [asyncio.run(rollout(env, case.task(split, index), rng, noise=0, max_turns=20))[-1] for index in range(100)]
    assert sum(end.success for end in ends) >= 95


@every_env
def test_the_expert_recovers_from_any_unfinished_state(case: Case) -> None:
    env, rng = case.make(), random.Random(4)
    solved = 0
    for index in range(50):
        asyncio.run(some_actions(env, case.task("train", index), rng, 6))
        observation = Observation(messages=(), rewards={})
        for _ in range(20):
            observation = asyncio.run(env.step(env.expert()))
            if observation.done:
                break
        solved += observation.success
    assert solved >= 48


@every_env
def test_the_expert_copes_with_its_own_mistakes(case: Case) -> None:
    env, rng = case.make(), random.Random(5)
    ends = [
        asyncio.run(rollout(env, case.task("train", index), rng, noise=0.3, max_turns=case.max_turns))[-1]
        for index in range(100)
    ]
    assert all(end.done for end in ends)
    assert sum(end.success for end in ends) >= 100 * case.noisy_success


@every_env
def test_a_restored_snapshot_goes_on_as_the_original(case: Case) -> None:
    env, other, rng = case.make(), case.make(), random.Random(6)
    for index in range(10):
        task = case.task("train", index)
        actions = asyncio.run(some_actions(env, task, rng, 10))
        observations = asyncio.run(do_all(env, task, actions[:5]))
        state = env.snapshot()
        rest = [asyncio.run(env.step(action)) for action in actions[5:]]
        for continued in (env, other):
            assert continued.restore(state) == observations[-1]
            assert continued.snapshot() == state
            assert [asyncio.run(continued.step(action)) for action in actions[5:]] == rest
        assert env.state_key() == other.state_key()


@every_env
def test_snapshots_of_the_start_and_of_the_end_restore(case: Case) -> None:
    env, rng = case.make(), random.Random(7)
    start = asyncio.run(env.reset(case.task("train", 0)))
    state = env.snapshot()
    asyncio.run(env.step(env.expert()))
    assert env.restore(state) == start
    end = asyncio.run(rollout(env, case.task("train", 0), rng, noise=0, max_turns=20))[-1]
    other = case.make()
    assert other.restore(env.snapshot()) == end
    with pytest.raises(EnvError, match="is over; call reset first"):
        asyncio.run(other.step("look"))


@every_env
def test_bytes_that_are_no_snapshot_are_refused_and_change_nothing(case: Case) -> None:
    env, rng = case.make(), random.Random(8)
    asyncio.run(some_actions(env, case.task("train", 0), rng, 5))
    state, key = env.snapshot(), env.state_key()
    for garbage in (
        b"",
        b"garbage",
        state[:-1],
        state + b"x",
        rng.randbytes(200),
        b"SL\x02\x00\xff\xff\xff\xff" + state,
    ):
        with pytest.raises(ValueError, match=r"frame|shorter|magic"):
            env.restore(garbage)
    for _ in range(200):
        position = rng.randrange(len(state))
        flipped = state[:position] + bytes([state[position] ^ (1 << rng.randrange(8))]) + state[position + 1 :]
        try:
            env.restore(flipped)
        except ValueError:
            continue
        assert env.admissible() is not None  # a flip may spell another valid state; it must then be whole
        env.restore(state)
    assert env.state_key() == key


@every_env
def test_a_snapshot_of_other_options_is_refused(case: Case) -> None:
    env = case.make()
    asyncio.run(env.reset(case.task("train", 0)))
    other = make_env(case.name, {"profile": "small" if case.options.get("profile") == "full" else "full"})
    with pytest.raises(ValueError, match="cannot go on in a"):
        other.restore(env.snapshot())


@every_env
def test_a_random_policy_never_breaks_it_and_every_turn_says_what_it_earned(case: Case) -> None:
    env, rng = case.make(), random.Random(9)
    for index in range(100):
        observations = asyncio.run(rollout(env, case.task("train", index), rng, noise=1.0, max_turns=25))
        for observation in observations[1:]:
            assert len(observation.rewards) == 1
            assert all(math.isfinite(reward) for reward in observation.rewards.values())
            assert 0.0 <= observation.score <= 1.0
            assert observation.success == (observation.score == 1.0)
            assert observation.done or observation.score == 0.0
            assert observation.messages and all(message.content for message in observation.messages)


@every_env
def test_garbage_is_an_observation_and_leaves_the_state_alone(case: Case) -> None:
    env, rng = case.make(), random.Random(10)
    for index in range(50):
        asyncio.run(some_actions(env, case.task("train", index), rng, rng.randrange(5)))
        key, offered = env.state_key(), env.admissible()
        noise = "".join(chr(rng.randrange(32, 0x3000)) for _ in range(rng.randrange(40)))
        for action in (*GARBAGE, noise):
            observation = asyncio.run(env.step(action))
            assert not observation.valid_action
            assert not observation.done
            assert list(observation.rewards.values()) == [0.0]
        assert (env.state_key(), env.admissible()) == (key, offered)


@every_env
def test_a_state_has_one_key_however_long_ago_it_was_reached(case: Case) -> None:
    """No step counters: what was done in between leaves no trace in the key of a state that is there again."""
    env, rng = case.make(), random.Random(14)
    for index in range(10):
        asyncio.run(some_actions(env, case.task("train", index), rng, 6))
        state, key = env.snapshot(), env.state_key()
        asyncio.run(env.step(rng.choice([action for action in env.admissible() or [] if "buy" not in action])))
        env.restore(state)
        assert env.state_key() == key
        for _ in range(3):
            asyncio.run(env.step("no such action"))
        assert env.state_key() == key != ""


@every_env
def test_members_of_a_group_meet_the_same_states_again(case: Case) -> None:
    """What GiGPO compares: two wanderers in one task, and every state that both were in."""
    keys: list[set[str]] = []
    for seed in range(2):
        env, rng = case.make(), random.Random(seed)
        asyncio.run(env.reset(case.task("train", 3)))
        met = {env.state_key()}
        for _ in range(30):
            offered = [action for action in env.admissible() or [] if "buy" not in action]
            if not offered:
                break
            asyncio.run(env.step(rng.choice(offered)))
            met.add(env.state_key())
        keys.append(met)
    assert len(keys[0] & keys[1]) >= 2
    assert len(keys[0]) > 2


@every_env
def test_every_admissible_action_is_understood(case: Case) -> None:
    env, rng = case.make(), random.Random(11)
    for index in range(10):
        asyncio.run(some_actions(env, case.task("train", index), rng, 5))
        state, offered = env.snapshot(), env.admissible() or []
        assert len(set(offered)) == len(offered) > 0
        for action in offered:
            env.restore(state)
            assert asyncio.run(env.step(action)).valid_action, action


@every_env
def test_white_space_around_words_and_brackets_is_free(case: Case) -> None:
    env, rng = case.make(), random.Random(12)
    actions = asyncio.run(some_actions(env, case.task("train", 0), rng, 5))
    expected = asyncio.run(do_all(env, case.task("train", 0), actions))
    spaced = [action.replace("[", " [ ").replace("]", " ] ").replace(" ", "  ") for action in actions]
    assert asyncio.run(do_all(env, case.task("train", 0), spaced)) == expected


@every_env
def test_step_before_reset_is_an_error(case: Case) -> None:
    with pytest.raises(EnvError, match="call reset first"):
        asyncio.run(case.make().step("look"))


@every_env
def test_step_after_the_end_is_an_error(case: Case) -> None:
    env, rng = case.make(), random.Random(13)
    assert asyncio.run(rollout(env, case.task("train", 1), rng, noise=0, max_turns=20))[-1].done
    assert env.admissible() == []
    with pytest.raises(EnvError, match="is over; call reset first"):
        asyncio.run(env.step("look"))


@every_env
def test_close_may_be_called_twice_and_a_closed_one_starts_again(case: Case) -> None:
    env = case.make()
    start = asyncio.run(env.reset(case.task("train", 0)))
    asyncio.run(env.close())
    asyncio.run(env.close())
    assert asyncio.run(env.reset(case.task("train", 0))) == start


@every_env
def test_the_opening_gives_the_rules_to_the_system_and_the_task_to_the_user(case: Case) -> None:
    observation = asyncio.run(case.make().reset(case.task("train", 0)))
    roles = ["system", "user"] if case.options.get("profile") == "full" else ["user"]
    assert [message.role for message in observation.messages] == roles
    assert observation.rewards == {}


class Corridor:
    """A user's own environment, whole."""

    replay_only = True

    async def reset(self, task: Task) -> Observation:
        raise NotImplementedError

    async def step(self, action: str) -> Observation:
        raise NotImplementedError

    async def close(self) -> None:
        pass

    def snapshot(self) -> bytes:
        raise NotImplementedError

    def restore(self, state: bytes) -> Observation:
        raise NotImplementedError

    def admissible(self) -> None:
        return None

    def state_key(self) -> str:
        return ""

    def expert(self) -> str:
        return "go"


class Unfinished:
    replay_only = True

    async def reset(self, task: Task) -> Observation:
        raise NotImplementedError


class Inheritor(Env):
    """Inherits the protocol's own bodies, which do nothing."""

    replay_only = True


def test_the_environment_in_the_docs_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[1] / "docs" / "environments.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "counting.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env("counting:CountingEnv", {"largest": 5})
    task = Task(env="counting:CountingEnv", split="train", index=3)
    end = asyncio.run(rollout(env, task, random.Random(0), noise=0, max_turns=20))[-1]
    assert (end.success, end.rewards) == (True, {"counted": 1.0})


def test_the_catalogue_names_its_environments() -> None:
    assert list(ENVS) == ["shop", "household"]
    assert env_class("shop") is ENVS["shop"]


def test_a_users_own_class_is_imported() -> None:
    assert env_class(f"{__name__}:Corridor") is Corridor
    assert isinstance(make_env(f"{__name__}:Corridor", {}), Corridor)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("shpo", "`env.name` must be one of shop, household, got 'shpo'; did you mean shop?"),
        ("chess", "write module:Class for one of your own"),
        ("nowhere.maze:Maze", "cannot import nowhere.maze: No module named 'nowhere'; is its folder on PYTHONPATH?"),
        ("os; rm:Maze", "must be module:Class, such as my_envs.maze:MazeEnv"),
        ("module:", "must be module:Class"),
        (f"{__name__}:Coridor", "did you mean Corridor?"),
        (f"{__name__}:CASES", "CASES must be a class, got list"),
        (f"{__name__}:Unfinished", "lacks step, close, snapshot, restore, admissible, state_key, expert of"),
        (f"{__name__}:Inheritor", "lacks reset, step, close, snapshot, restore, admissible, state_key, expert of"),
    ],
)
def test_a_name_that_does_not_work_is_explained(name: str, complaint: str) -> None:
    with pytest.raises(ValueError) as raised:
        env_class(name)
    assert "`env.name`" in str(raised.value)
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        (
            "shop",
            {"profil": "small"},
            "do not fit shop: got an unexpected keyword argument 'profil'; its options are: profile",
        ),
        ("shop", {"profile": "tiny"}, "`env.options.profile` must be small or full, got 'tiny'"),
        ("household", {"profile": "tiny"}, "`env.options.profile` must be small or full, got 'tiny'"),
        ("household", {"task_types": ["dance"]}, "`env.options.task_types` must be some of pick_and_place, "),
        ("household", {"task_types": []}, "leave it out for all"),
        (f"{__name__}:Corridor", {"length": 3}, "its options are: none"),
    ],
)
def test_options_that_do_not_fit_are_explained(name: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError) as raised:
        make_env(name, options)
    assert complaint in str(raised.value)
