"""The parts of a reward: what each measures, how they compose, and the functions of the user's."""

import asyncio
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.episode import Episode, EpisodeTurn
from slipstream.envhub.rewards.measures import MEASURES
from slipstream.envhub.rewards.part import Composed, composed, parts_of, reward_parts
from tests.envhub.rewards.own import OWN, Own, own

__all__ = ["own"]  # a fixture


def turn_of(
    reply: str, *, answer: str = "", valid: bool = True, reward: float = 0.0, state: str = "", num_tokens: int = 4
) -> EpisodeTurn:
    return EpisodeTurn(
        reply=reply,
        action=reply.strip(),
        valid_action=valid,
        answer=answer,
        rewards={"solved": reward},
        state_key=state,
        num_tokens=num_tokens,
        finish_reason="stop",
    )


def episode_of(*turns: EpisodeTurn, success: bool = False, columns: dict[str, Any] | None = None) -> Episode:
    prompt = [{"role": "user", "content": "say"}]
    messages = list(prompt)
    for turn in turns:
        messages += [{"role": "assistant", "content": turn.reply}, {"role": "user", "content": "on"}]
    return Episode(
        task=Task(env="shop", split="train", index=0),
        columns=columns or {},
        prompt=prompt,
        messages=messages[:-1],
        ending=[],
        turns=list(turns),
        max_turns=8,
        score=float(success),
        success=success,
        stop_reason="done",
        completion_ids=[3, 1, 4],
    )


def reward_of(rewards: dict[str, Any], episode: Episode, *, timeout_s: float = 60.0) -> Composed:
    parts = parts_of("env.rewards", rewards)

    async def measure() -> list[Any]:
        return [await part.values(episode, timeout_s=timeout_s) for part in parts]

    return composed(episode, parts, asyncio.run(measure()))


def own_reward(own: Own, function: Any, *, episode: Episode | None = None, **settings: Any) -> Composed:
    """The reward of `episode`, or else of `TWO`, with this function of the user's as the only part."""
    own.given = function
    return reward_of({"own": {"part": f"{OWN}:given", **settings}}, episode or episode_of(*TWO))


TWO = (turn_of("look", valid=False, state="a"), turn_of("look", reward=1.0, state="a"))
BAD = [[], [1.0, 2.0, 3.0], ["1"], "1", math.nan, {}, [[1.0]], [10**400], np.zeros(3), [1.0, None], [math.inf, 1]]
MEASURED: list[tuple[dict[str, Any], Any]] = [
    ({"part": "goal"}, [0.0, 1.0]),
    ({"part": "goal", "component": "solved"}, [0.0, 1.0]),
    ({"part": "length", "budget_tokens": 4}, 1.0),
    ({"part": "length", "budget_tokens": 100}, 0.0),
    ({"part": "length", "budget_turns": 1, "max": 0.5}, 0.5),
    ({"part": "format"}, 0.5),
    ({"part": "efficiency"}, 0.75),
    ({"part": "efficiency", "only_if": "failure"}, None),
    ({"part": "invalid_actions"}, [1.0, 0.0]),
    ({"part": "invalid_actions", "max": 0.25}, [0.25, 0.0]),
    ({"part": "repetition"}, [0.0, 1.0]),
    ({"part": "prediction"}, [0.0, 0.0]),
]


@pytest.mark.parametrize(("settings", "expected"), MEASURED, ids=str)
def test_a_measure_gives_what_it_says(settings: dict[str, Any], expected: Any) -> None:
    (part,) = parts_of("env.rewards", {"x": settings})
    assert asyncio.run(part.values(episode_of(*TWO, success=True), timeout_s=60)) == expected


def test_every_measure_is_tried() -> None:
    assert {settings["part"] for settings, _ in MEASURED} == set(MEASURES)


def test_parts_are_added_to_the_environments_own_rewards_and_change_neither_score_nor_success() -> None:
    rewards = {"format": {"weight": 0.5}, "seen": {"part": "length", "budget_tokens": 4, "weight": 0}}
    result = reward_of(rewards, episode_of(*TWO, success=True))
    assert result.rewards == [{"solved": 0.0, "format": 0.0, "seen": 0.0}, {"solved": 1.0, "format": 0.25, "seen": 0.0}]
    assert result.values == {"format": 0.5, "seen": 1.0}, "a part with weight 0 is recorded only"
    assert (result.score, result.success) == (1.0, True)


def test_goal_replaces_the_rewards_that_it_names_and_no_other_part_may_have_the_name_of_one() -> None:
    both = replace(turn_of("x"), rewards={"solved": 1.0, "price": -0.5})
    assert reward_of({"goal": {"weight": 2}}, episode_of(both)).rewards == [{"goal": 1.0}]
    renamed = {"won": {"part": "goal", "component": "solved", "weight": 2}}
    assert reward_of(renamed, episode_of(both)).rewards == [{"price": -0.5, "won": 2.0}]
    in_place = {"solved": {"part": "goal", "component": "solved", "weight": 0}}
    assert reward_of(in_place, episode_of(both)).rewards == [{"price": -0.5, "solved": 0.0}]
    with pytest.raises(ValueError, match=r"the environment gave no reward 'sold', only price, solv"):
        reward_of({"won": {"part": "goal", "component": "sold"}}, episode_of(both))
    with pytest.raises(EnvError, match=r"`env\.rewards\.solved`: the environment has a reward of this name"):
        reward_of({"solved": {"part": "format"}}, episode_of(*TWO))


def test_a_part_applies_under_its_condition_and_is_not_measured_otherwise(own: Own) -> None:
    def never(episode: Episode) -> float:
        raise AssertionError("a judge would have been asked for nothing")

    won = episode_of(turn_of("x", reward=1.0), success=True)
    lost = episode_of(turn_of("x"))
    for only_if, episode in (("success", lost), ("failure", won), ("goal", lost)):
        result = own_reward(own, never, episode=episode, only_if=only_if)
        assert (result.values, result.rewards[0]["own"]) == ({}, 0.0)
    for only_if, episode in (("success", won), ("failure", lost), ("goal", won), ("always", lost)):
        with pytest.raises(AssertionError):
            own_reward(own, never, episode=episode, only_if=only_if)


def test_a_part_may_be_the_score_where_an_environment_has_none(own: Own) -> None:
    result = own_reward(own, lambda episode: 0.8, episode=episode_of(turn_of("x")), success_from=0.7)
    assert (result.score, result.success) == (0.8, True)
    result = own_reward(own, lambda episode: -3, episode=episode_of(turn_of("x")), success_from=0.7)
    assert (result.score, result.success, result.rewards[0]["own"]) == (0.0, False, -3.0)


def test_a_function_gets_the_whole_episode_and_may_answer_for_each_turn(own: Own) -> None:
    seen = list[Episode]()

    async def steps(episode: Episode) -> list[float]:
        seen.append(episode)
        return [0.25, 0.5]

    episode = episode_of(*TWO)
    result = own_reward(own, steps, episode=episode, weight=2)
    assert [turn["own"] for turn in result.rewards] == [0.5, 1.0] and result.values == {"own": 0.75}
    assert seen == [episode]
    assert [message["content"] for message in episode.messages] == ["say", "look", "on", "look"]


@pytest.mark.parametrize("result", [0.25, [0.25], (0.25,), [np.float32(0.25)], np.array([0.25]), np.float64(0.25)])
def test_a_number_may_be_of_any_kind(own: Own, result: Any) -> None:
    assert own_reward(own, lambda episode: result).values == {"own": 0.25}


def test_a_function_that_does_not_apply_is_not_recorded(own: Own) -> None:
    for nothing in (None, [None]):
        result = own_reward(own, lambda episode, nothing=nothing: nothing)
        assert (result.values, result.rewards[1]["own"]) == ({}, 0.0)


@pytest.mark.parametrize("result", BAD, ids=str)
def test_a_function_that_returns_no_number_fails_the_attempt(own: Own, result: Any) -> None:
    with pytest.raises(EnvError, match=r"must return one finite number \(in a list or not\)"):
        own_reward(own, lambda episode: result)


def test_a_number_beyond_any_reward_and_a_slow_function_fail_the_attempt(own: Own) -> None:
    async def slow(episode: Episode) -> float:
        await asyncio.sleep(3600)
        return 0.0

    with pytest.raises(EnvError, match=r"1e\+300 with weight 1 is beyond 1e\+12; set min and max"):
        own_reward(own, lambda episode: 1e300)
    assert own_reward(own, lambda episode: 1e300, max=3).values == {"own": 3.0}
    own.slow = slow
    with pytest.raises(EnvError, match=r"no answer within `env\.step_timeout_s` = 0\.1 s"):
        reward_of({"own": {"part": f"{OWN}:slow"}}, episode_of(*TWO), timeout_s=0.1)


def test_a_function_that_changes_its_columns_changes_no_task(own: Own) -> None:
    own.emptied = lambda completions, words: float(len(words[0])) + len(words[0].pop())
    columns = {"words": ["one", "two"]}
    for _ in range(2):
        rewards = {"own": {"part": f"{OWN}:emptied"}}
        assert reward_of(rewards, episode_of(*TWO, columns=columns)).values == {"own": 5.0}


@pytest.mark.parametrize(
    ("rewards", "complaint"),
    [
        ({"lenght": {"budget_turns": 1}}, "`env.rewards.lenght`: a part is goal, length, format"),
        ({"lenght": {"budget_turns": 1}}, "got 'lenght'; did you mean length?"),
        ({"a b": {"part": "format"}}, "`env.rewards.a b`: a name has letters, digits and '_'"),
        ({"format": 0.5}, "`env.rewards.format` must be a mapping"),
        ({"format": {"wieght": 1}}, "`env.rewards.format`: got an unexpected keyword argument 'wieght'; the keys of"),
        ({"format": {"weight": "1"}}, "`env.rewards.format.weight` must be a finite number, got '1'"),
        ({"format": {"weight": math.inf}}, "`env.rewards.format.weight` must be a finite number, got inf"),
        ({"format": {"max": 10**400}}, "`env.rewards.format.max` must be a finite number, got 1000"),
        ({"reward_model": {"url": "http://a:1", "deadline_s": 10**400}}, "deadline_s must be above 0, got 1000"),
        ({"format": {"min": 1, "max": 0}}, "`env.rewards.format.min` must be at most max = 0, got 1"),
        ({"format": {"only_if": "won"}}, "`env.rewards.format.only_if` must be always, success, failure, goal"),
        ({"format": {"success_from": 0}}, "`env.rewards.format.success_from` must be above 0, at most 1, got 0"),
        ({"format": {"success_from": 1.5}}, "must be above 0, at most 1, got 1.5"),
        ({"format": {"success_from": 1, "only_if": "success"}}, "each episode needs a score"),
        ({"format": {"only_if": ["success"]}}, "`env.rewards.format.only_if` must be always, success, failure, goal"),
        ({"format": {"part": ["format"]}}, "`env.rewards.format`: a part is goal, length, format"),
        ({"goal": {"component": ["solved"]}}, "`env.rewards.goal`: `component` must be the name of a reward"),
        ({"length": {}}, "`env.rewards.length`: give either budget_tokens or budget_turns"),
        ({"length": {"budget_tokens": 0}}, "`env.rewards.length`: `budget_tokens` must be a whole number >= 1, got 0"),
        ({"x": {"part": "nowhere:f"}}, "`env.rewards.x.part` 'nowhere:f': cannot import nowhere"),
        ({"x": {"part": "math:sqrt", "budget": 1}}, "`env.rewards.x` has unknown keys budget; a function takes no"),
        ({"goal": {}, "g": {"part": "goal", "component": "solved"}}, "two parts of kind goal replace the same reward"),
        ({"a": {"part": "format", "success_from": 1}, "format": {"success_from": 1}}, "only one part can have success"),
    ],
)
def test_a_malformed_part_is_named(rewards: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parts_of("env.rewards", rewards)


def test_a_later_file_changes_the_keys_of_a_part_that_it_sets_and_makes_no_other_part_of_it() -> None:
    def part_of(*files: dict[str, Any]) -> Any:
        presets = [{"env": {"rewards": {"long": settings}}} for settings in files]
        (part,) = reward_parts(load_config(None, [], presets=presets).env.entries())["shop"]
        return part

    first = {"part": "length", "budget_turns": 2, "max": 1}
    changed = part_of(first, {"weight": -0.5})
    assert (changed.kind, changed.high, changed.weight) == ("length", 1, -0.5)
    with pytest.raises(ConfigError, match=r"`env\.rewards\.long`: got an unexpected keyword argument 'budget_turns'"):
        part_of(first, {"part": "format"})


def test_every_environment_of_a_mixture_has_its_own_parts() -> None:
    mixed = ["env.mixture.a.name=grid", "env.mixture.b.name=shop", "env.mixture.b.rewards.format.weight=0.5"]
    parts = reward_parts(load_config(None, mixed).env.entries())
    keys = {label: [part.key for part in of_env] for label, of_env in parts.items()}
    assert keys == {"a": [], "b": ["env.mixture.b.rewards.format"]}
    with pytest.raises(ConfigError, match=r"`env\.rewards` must be empty with env\.mixture"):
        load_config(None, [*mixed, "env.rewards.format.weight=1"])
