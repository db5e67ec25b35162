"""The simulator, against runs that can be computed by hand."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import simpy

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Trajectory, Turn, VersionSpan, pack_tokens
from slipstream.tools.simulate import calibration, simulate
from slipstream.tools.simulate.calibration import Calibration, PlayedTurn, StepTime
from slipstream.tools.simulate.outcome import Outcome
from slipstream.tools.simulate.simulate import limit_of
from slipstream.tools.simulate.simulate_options import SimulateOptions
from slipstream.tools.simulate.simulated_engine import Host, SimulatedEngine, TokenTime
from slipstream.tools.simulate.simulated_world import World
from tests.replay.records.attempts import attempt_at, lease_of, ticket


def settings(**replay: int) -> Config:
    config = Config()
    config.replay = dataclasses.replace(config.replay, **replay)  # type: ignore[arg-type]
    return config


SECOND = [PlayedTurn(num_tokens=10, env_s=0.0)]  # an episode of 1 s, by the engine of FACTS
STEP = StepTime(of_batch_s=1.0, rest_s=0.0)
NO_STEP = StepTime(of_batch_s=0.0, rest_s=0.0)
GROUPS: dict[str, Any] = {"config": settings(groups_per_step=1, group_size=1), "groups": [[SECOND]]}
SIZES: dict[str, Any] = {"member_tokens": (1.0, 1.0), "eval_episodes": 0, "num_actors": 1, "num_cores": 0}
TIMES: dict[str, Any] = {"token_time": TokenTime(fixed_s=0.1, per_request_s=0.0), "step_times": [STEP]}
NOTHING = dict.fromkeys(("first_tokens", "failed_share", "steps_per_hour", "tokens_per_s", "lag"), 0.0)
FACTS = Calibration(**GROUPS, **SIZES, **TIMES, **NOTHING, useful_share=1.0, refresh_s=0.5)


def outcome(
    facts: Calibration = FACTS, *, max_episodes: int = 1, eval_every: int = 0, seed: int = 0, **more: Any
) -> Outcome:
    """Of a run at 1 $ an actor's hour; `more` are settings of `replay`, options of the simulation, or of its world."""
    replay = {key: more.pop(key) for key in list(more) if hasattr(FACTS.config.replay, key)}
    config = settings(**{"groups_per_step": 1, "group_size": 1, "target_lag": 0} | replay)
    config.actors.max_episodes, config.actors.price_per_hour = max_episodes, 1.0
    config.eval.every, config.run.seed = eval_every, seed
    options = SimulateOptions(**{key: more.pop(key) for key in list(more) if hasattr(SimulateOptions, key)})
    return World(config, facts, options=options, **{"num_actors": 1} | more).run()


def with_episodes(*episodes: Sequence[PlayedTurn], **changes: float) -> Calibration:
    return dataclasses.replace(FACTS, groups=[list(episodes)], **changes)  # type: ignore[arg-type]


def ends_of(env: simpy.Environment, *requests: tuple[SimulatedEngine, float, int]) -> list[float]:
    """When each request ends: of an engine, from a time on, of so many tokens."""
    ends = [0.0] * len(requests)

    def request(place: int, engine: SimulatedEngine, at: float, tokens: int):  # type: ignore[no-untyped-def]
        yield env.timeout(at)
        yield engine.generate(tokens)
        ends[place] = env.now

    for place, given in enumerate(requests):
        env.process(request(place, *given))
    env.run()
    return ends


def test_requests_share_the_iterations_of_an_engine() -> None:
    """Iterations take 2 s with one request and 3 s with two. The first wants 4, the second 1, from second 4 on.

    0 to 4: two iterations for the first alone; 4 to 7: one for both, the second ends; 7 to 9: the last one.
    """
    env = simpy.Environment()
    engine = SimulatedEngine(env, TokenTime(fixed_s=1.0, per_request_s=1.0), Host(num_cores=1))
    assert ends_of(env, (engine, 0.0, 4), (engine, 4.0, 1)) == pytest.approx([9.0, 7.0])


def test_engines_with_requests_share_the_cores_of_their_host() -> None:
    """Two engines on one core, 1 s for a token: the first alone until 1, both at half the speed until 5, then alone."""
    env, host = simpy.Environment(), Host(num_cores=1)
    one, other = (SimulatedEngine(env, TokenTime(fixed_s=1.0, per_request_s=0.0), host) for _ in range(2))
    assert ends_of(env, (one, 0.0, 4), (other, 1.0, 2)) == pytest.approx([6.0, 5.0])


def test_a_synchronous_step_waits_for_its_weights_and_its_episodes() -> None:
    """1 s for the step, 0.5 s until the actor has its weights, 1 s for the episode: 2.5 s, of which it learns 1 s."""
    found = outcome()
    assert found.steps_per_hour == pytest.approx(3600 / 2.5, rel=0.02)
    assert found.learner_busy == pytest.approx(0.4, rel=0.02)
    assert found.lag == 0 and found.masked_share == 0


def test_each_turn_takes_a_while_until_its_first_token() -> None:
    """Two turns of 0.25 s and 5 tokens of 0.1 s each: 1.5 s, after 1 s for the step and 0.5 s for its weights."""
    facts = with_episodes([PlayedTurn(num_tokens=5, env_s=0.0)] * 2, first_tokens=2.5)
    assert outcome(facts).steps_per_hour == pytest.approx(3600 / 3.0, rel=0.02)


def test_the_version_of_a_turn_is_that_of_its_first_token() -> None:
    """Opened when version k begins its step, which is served 0.5 s later; the first token comes after 0.6 s."""
    facts = with_episodes([PlayedTurn(num_tokens=3, env_s=0.0)], first_tokens=6.0)
    assert outcome(facts, target_lag=1, num_actors=4).lag == 1


def test_a_step_takes_as_much_longer_as_its_batch_is_larger() -> None:
    """Three groups of two where the run had one of one, of a learner twice as fast: 6 s and a rest of 1 s become 3.5 s
    for the step, then 0.5 s for its weights, 1 s for the episodes.
    """
    facts = dataclasses.replace(FACTS, step_times=[StepTime(of_batch_s=1.0, rest_s=1.0)])
    found = outcome(facts, groups_per_step=3, group_size=2, num_actors=3, learner_speed=2.0)
    assert found.steps_per_hour == pytest.approx(3600 / 5.0, rel=0.02)
    assert found.tokens_per_s == pytest.approx(6 * 10 / 5.0, rel=0.02)


def test_members_that_share_a_prompt_cost_the_learner_what_is_their_own() -> None:
    """Of groups of two, one that shares a prompt of 6 tokens: 10 for its first member, 4 for each further one.

    In groups of four these are 22 tokens beside 14, not twice as many.
    """
    facts = dataclasses.replace(FACTS, config=settings(groups_per_step=1, group_size=2), member_tokens=(10.0, 4.0))
    assert facts.batch_scale(settings(groups_per_step=3, group_size=4).replay) == pytest.approx(3 * 22 / 14)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[[7, 7, 1, 2], [7, 7, 1, 3, 4], [7, 7, 5]]], (4.0, (2 + 1) / 2)),  # they share 3 and 2 tokens
        ([[[7, 7, 1], [7, 7, 2]], [[8, 8, 1, 1, 1], [9, 9, 1]]], (4.0, (1 + 3) / 2)),
        ([[[7, 7, 1, 2]], [[8, 8, 1]]], (3.5, 1.5)),  # groups of one: after the prompt of 2 tokens
    ],
)
def test_the_learner_computes_what_siblings_share_once(groups: list[list[list[int]]], expected: Any) -> None:
    attempt = attempt_at(lease_of(ticket(0)), 0, run_id="run")
    played = [[msgspec.structs.replace(attempt, tokens=pack_tokens(tokens)) for tokens in group] for group in groups]
    assert calibration.member_tokens(played) == pytest.approx(expected)


def test_a_learner_and_engines_without_gpus_share_the_cores_of_their_host() -> None:
    """With one core and a lag of one, the episode of 1 s and the step of 1 s take 2 s together, as they do in turns."""
    facts = dataclasses.replace(FACTS, num_cores=1, refresh_s=0.0)
    found = outcome(facts, target_lag=1)
    assert found.steps_per_hour == pytest.approx(1800, rel=0.02)
    assert limit_of(found, facts, num_actors=1) == "the 1 cores that learner and engines share; use other hosts"


def test_an_evaluation_takes_slots_and_keeps_its_weights() -> None:
    """After each fourth step four episodes of 10 s, one after another in one of four slots.

    With a lag of one only groups that were opened for the kept weights or the next are played: three steps at 10, 20
    and 30 s, and the fourth at 50 s.
    """
    facts = with_episodes([PlayedTurn(num_tokens=100, env_s=0.0)], step_times=[NO_STEP], refresh_s=0.0, eval_episodes=4)
    alone = outcome(facts, target_lag=1, max_episodes=4, group_size=4, num_steps=60)
    assert alone.steps_per_hour == pytest.approx(360, rel=0.02)
    beside = outcome(facts, target_lag=1, max_episodes=4, group_size=4, eval_every=4, num_steps=60)
    assert beside.steps_per_hour == pytest.approx(288, rel=0.02)


def test_with_a_lag_of_one_the_slower_side_sets_the_pace() -> None:
    found = outcome(with_episodes([PlayedTurn(num_tokens=5, env_s=1.5)]), target_lag=1, num_actors=1)
    assert found.steps_per_hour == pytest.approx(3600 / 2.0, rel=0.02)  # an episode of 2 s, one at a time
    assert found.learner_busy == pytest.approx(0.5, rel=0.02) and found.slots_used == pytest.approx(1.0, abs=0.05)
    assert limit_of(found, FACTS, num_actors=1) == "actors; add some"
    found = outcome(with_episodes([PlayedTurn(num_tokens=9, env_s=0.0)]), target_lag=1, num_actors=4)
    assert found.steps_per_hour == pytest.approx(3600, rel=0.04) and found.learner_busy == pytest.approx(1.0, abs=0.04)
    # Opened when version k begins its step, played with k - 1, as k is served 0.5 s later; claimed for step k + 1. In
    # one of nine steps the actors try what waiting for k would cost: the learner waits.
    assert found.lag == pytest.approx(2, abs=0.2)
    assert limit_of(found, FACTS, num_actors=4) == "the learner; use more learner.ranks, or fewer actors"


def test_groups_that_teach_nothing_are_replaced_and_count_as_waste() -> None:
    facts = dataclasses.replace(FACTS, useful_share=0.5, refresh_s=0.0, step_times=[NO_STEP])
    found = outcome(facts, target_lag=2, groups_per_step=4, num_steps=150)
    assert found.wasted_share == pytest.approx(0.5, abs=0.05)
    assert found.steps_per_hour == pytest.approx(3600 / 8, rel=0.1)  # eight episodes of 1 s, one after another


def test_tokens_older_than_the_cap_are_masked() -> None:
    """Episodes of 10 s and steps of 1 s that wait for none of them: the tokens are some ten steps old."""
    facts = with_episodes([PlayedTurn(num_tokens=100, env_s=0.0)], refresh_s=0.0)
    found = outcome(facts, target_lag=20, max_episodes=20, max_lag=8)
    assert found.lag > 8 and found.masked_share > 0.9
    assert outcome(facts, target_lag=20, max_episodes=20, max_lag=40).masked_share == 0


def test_preempted_actors_cost_the_time_until_they_are_replaced_and_no_episode() -> None:
    """Episodes of ten turns of 1 s. Five minutes are the mean life of an actor."""
    facts = with_episodes(SECOND * 10, refresh_s=0.0, step_times=[StepTime(of_batch_s=0.1, rest_s=0.0)])
    unhurt = outcome(facts, target_lag=2, num_actors=4, num_steps=300)
    preempted = outcome(facts, target_lag=2, num_actors=4, num_steps=300, preemptions_per_hour=12.0)
    assert unhurt.wasted_share == preempted.wasted_share == 0
    assert preempted.dollars_per_hour == pytest.approx(4 * 300 / 420, rel=0.1)  # 120 s of 420 are free of charge
    assert preempted.steps_per_hour < unhurt.steps_per_hour


def test_siblings_are_played_as_they_were_together() -> None:
    """A recorded group lasts 1 s, another 9 s: 5 s on average, where siblings of both would last 7 s."""
    groups = [[[PlayedTurn(num_tokens=10 * lasts, env_s=0.0)]] * 2 for lasts in (1, 9)]
    facts = dataclasses.replace(FACTS, groups=groups, refresh_s=0.0, step_times=[NO_STEP])
    found = outcome(facts, group_size=2, max_episodes=2, num_steps=400)
    assert found.steps_per_hour == pytest.approx(3600 / 5, rel=0.1)


def test_failed_attempts_are_repeated() -> None:
    facts = dataclasses.replace(FACTS, failed_share=0.5, refresh_s=0.0, step_times=[NO_STEP])
    assert outcome(facts, target_lag=1, num_steps=400).steps_per_hour == pytest.approx(1800, rel=0.1)


def test_the_same_seed_gives_the_same_outcome() -> None:
    facts = with_episodes(SECOND, [PlayedTurn(num_tokens=50, env_s=0.3)], useful_share=0.7)
    first, again = (outcome(facts, target_lag=2, num_actors=3, preemptions_per_hour=60.0) for _ in range(2))
    assert first == again != outcome(facts, target_lag=2, num_actors=3, preemptions_per_hour=60.0, seed=1)


def played(at_s: float, *turns: tuple[int, float], switch: int = 0) -> Trajectory:
    """An episode of turns of so many tokens and seconds; `switch`: version 1 sampled from this token on, else 0."""
    said = {"state_key": "", "rewards": {"goal": 0.0}, "finish_reason": "stop", "valid_action": True, "env_s": 0.0}
    stops = list(itertools.accumulate(count for count, _ in turns))
    spans = [(0, switch, 0), (switch, stops[-1], 1)] if switch else [(0, stops[-1], 0)]
    return msgspec.structs.replace(
        attempt_at(lease_of(ticket(0)), 0, run_id="run"),
        turns=[
            Turn(start=stop - count, stop=stop, generate_s=lasts, **said)
            for stop, (count, lasts) in zip(stops, turns, strict=True)
        ],
        version_spans=[VersionSpan(start=start, stop=stop, policy_version=version) for start, stop, version in spans],
        started_at_s=at_s,
        duration_s=sum(lasts for _, lasts in turns),
    )


@pytest.mark.parametrize(
    ("episodes", "first_tokens", "fixed_s", "per_request_s"),
    [
        # Half a second and 0.1 s for each token: the middle turn is 0.1 s late, and the line goes through the mean.
        ([played(0.0, (5, 1.0), (10, 1.6), (15, 2.0))], 16 / 3, 0.1, 0.0),
        ([played(0.0, (4, 1.0), (4, 3.0))], 0.0, 0.5, 0.0),  # no line
        ([played(0.0, (4, 1.0), (8, 6.0))], 0.0, 7 / 12, 0.0),  # it would begin at -4 s
        ([played(0.0, (4, 3.0), (8, 1.0))], 0.0, 4 / 12, 0.0),  # it would fall
        # One alone, then two together: a token takes 0.1 s and 0.1 s for each request.
        ([played(0.0, (10, 2.0)), *[played(9.0, (10, 3.0))] * 2], 0.0, 0.1, 0.1),
        # It would fall: the two together are the fast ones.
        ([played(0.0, (10, 4.0)), *[played(9.0, (10, 3.0))] * 2], 0.0, 1 / 3, 0.0),
        # It would begin below 0: 0.1 s alone, 0.4 s of two.
        ([played(0.0, (10, 1.0)), *[played(9.0, (10, 4.0))] * 2], 0.0, 0.0, 0.3 / (5 / 3)),
    ],
)
def test_the_speed_of_an_engine_is_two_lines(
    episodes: list[Trajectory], first_tokens: float, fixed_s: float, per_request_s: float
) -> None:
    first, time = calibration.speed_of(episodes, share=1.0, slowdown=1.0)
    assert (first, time.fixed_s, time.per_request_s) == pytest.approx((first_tokens, fixed_s, per_request_s))


def test_an_engine_that_is_not_alone_is_slower_and_has_requests_that_no_archive_shows() -> None:
    episodes = [played(0.0, (10, 2.0)), *[played(9.0, (10, 3.0))] * 2]  # see above
    first, time = calibration.speed_of(episodes, share=0.5, slowdown=2.0)
    assert (first, time.fixed_s, time.per_request_s) == pytest.approx((0.0, 0.05, 0.025))


def test_loads_are_means_over_the_time_of_each() -> None:
    assert list(calibration.mean_loads(np.array([0.0, 0.5]), np.array([2.0, 1.5]))) == pytest.approx([1.5, 2.0])


def test_a_refresh_lasts_until_a_version_samples_within_a_turn() -> None:
    """Version 1 was made at 100 s, and comes into the middle of a turn that began at 101 s and lasts 4 s."""
    within, between_turns = (played(99.0, (5, 2.0), (10, 4.0), switch=switch) for switch in (10, 5))
    assert calibration.refresh_s([within], made_at_s={1: 100.0}) == pytest.approx(3.0)
    assert calibration.refresh_s([between_turns], made_at_s={1: 100.0}) == 0


def test_another_size_of_groups_is_refused_where_some_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "calibrate", lambda _: dataclasses.replace(FACTS, useful_share=0.7))
    with pytest.raises(ConfigError, match=r"replay.group_size.*30% of the run's groups"):
        simulate.simulate(settings(group_size=4), options=SimulateOptions())


def test_options_without_a_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="--actors"):
        SimulateOptions(actors=("x",))
    with pytest.raises(ConfigError, match="--learner-speed"):
        SimulateOptions(learner_speed=0.0)
