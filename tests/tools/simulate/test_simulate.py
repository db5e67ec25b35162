"""The simulator, against runs that can be computed by hand."""

import dataclasses
from collections.abc import Sequence

import pytest
import simpy

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Turn
from slipstream.tools.simulate.calibration import Calibration, PlayedTurn, token_time, turn_time
from slipstream.tools.simulate.outcome import Outcome, requests_per_s
from slipstream.tools.simulate.simulate import limit_of, plan_of
from slipstream.tools.simulate.simulate_options import SimulateOptions
from slipstream.tools.simulate.simulated_engine import SimulatedEngine, TokenTime
from slipstream.tools.simulate.simulated_run import Plan
from slipstream.tools.simulate.simulated_world import World

SECOND = [PlayedTurn(num_tokens=10, env_s=0.0)]  # an episode of 1 s, by the engine of FACTS
FACTS = Calibration(
    episodes=[SECOND],
    turn_s=0.0,
    token_time=TokenTime(fixed_s=0.1, per_request_s=0.0),
    step_s=[1.0],
    groups_per_step=1,
    group_size=1,
    useful_share=1.0,
    failed_share=0.0,
    refresh_s=0.5,
    num_actors=1,
    steps_per_hour=0.0,
    lag=0.0,
)
PLAN = Plan(
    num_actors=1,
    max_episodes=1,
    group_size=1,
    groups_per_step=1,
    step_scale=1.0,
    num_shards=1,
    target_lag=0,
    max_lag=8,
    steps=100,
    price_per_hour=0.0,
    preemptions_per_hour=0.0,
    restart_s=5.0,
    seed=0,
)


def outcome(facts: Calibration = FACTS, **changes: float) -> Outcome:
    return World(dataclasses.replace(PLAN, **changes), facts).run()  # type: ignore[arg-type]


def with_episodes(*episodes: Sequence[PlayedTurn], **changes: float) -> Calibration:
    return dataclasses.replace(FACTS, episodes=list(episodes), **changes)  # type: ignore[arg-type]


def test_requests_share_the_iterations_of_an_engine() -> None:
    """Iterations take 2 s with one request and 3 s with two. The first wants 4, the second 1, from second 4 on.

    0 to 4: two iterations for the first alone; 4 to 7: one for both, the second ends; 7 to 9: the last one.
    """
    env, ends = simpy.Environment(), dict[str, float]()
    engine = SimulatedEngine(env, TokenTime(fixed_s=1.0, per_request_s=1.0))

    def request(name: str, *, at: float, tokens: int):  # type: ignore[no-untyped-def]
        yield env.timeout(at)
        yield engine.generate(tokens)
        ends[name] = env.now

    env.process(request("first", at=0.0, tokens=4))
    env.process(request("second", at=4.0, tokens=1))
    env.run()
    assert ends == {"first": pytest.approx(9.0), "second": pytest.approx(7.0)}


def test_a_synchronous_step_waits_for_its_weights_and_its_episodes() -> None:
    """1 s for the step, 0.5 s until the actor has its weights, 1 s for the episode: 2.5 s, of which it learns 1 s."""
    found = outcome()
    assert found.steps_per_hour == pytest.approx(3600 / 2.5, rel=0.02)
    assert found.learner_busy == pytest.approx(0.4, rel=0.02)
    assert found.lag == 0 and found.masked_share == 0


def test_each_turn_takes_a_while_until_its_first_token() -> None:
    """Two turns of 0.25 s and 5 tokens of 0.1 s each: 1.5 s, after 1 s for the step and 0.5 s for its weights."""
    facts = with_episodes([PlayedTurn(num_tokens=5, env_s=0.0)] * 2, turn_s=0.25)
    assert outcome(facts).steps_per_hour == pytest.approx(3600 / 3.0, rel=0.02)


def test_the_version_of_a_turn_is_that_of_its_first_token() -> None:
    """Opened when version k begins its step, which is served 0.5 s later; the first token comes after 0.6 s."""
    facts = with_episodes([PlayedTurn(num_tokens=3, env_s=0.0)], turn_s=0.6)
    assert outcome(facts, target_lag=1, num_actors=4).lag == 1


def test_a_step_takes_as_much_longer_as_its_batch_is_larger() -> None:
    """Six groups where the run had one, of a learner twice as fast: 3 s for the step instead of 1 s, 0.5 s for its
    weights, 1 s for the episodes.
    """
    config = Config()
    config.replay.groups_per_step = 6
    plan = plan_of(config, SimulateOptions(learner_speed=2.0), FACTS, num_actors=6)
    assert plan.step_scale == 3.0
    found = outcome(groups_per_step=6, num_actors=6, step_scale=plan.step_scale)
    assert found.steps_per_hour == pytest.approx(3600 / 4.5, rel=0.02)


@pytest.mark.parametrize(
    ("num_actors", "by_hand"),
    [
        (100, 100 * (3 + 10) + 10 * 50 + 2 * 8 / 4),
        (10_000, 10_000 * (3 / 2 + 1 / 2) + 10 / 2 + 2 * 8 / 4),  # 5,000 a second of each kind
    ],
)
def test_the_requests_to_redis_follow_the_intervals_of_the_actors(num_actors: int, by_hand: float) -> None:
    plan = dataclasses.replace(PLAN, num_actors=num_actors, num_shards=4)
    assert requests_per_s(plan, num_free=10, episodes_per_s=8) == pytest.approx(by_hand)


def test_with_a_lag_of_one_the_slower_side_sets_the_pace() -> None:
    found = outcome(with_episodes([PlayedTurn(num_tokens=5, env_s=1.5)]), target_lag=1, num_actors=1)
    assert found.steps_per_hour == pytest.approx(3600 / 2.0, rel=0.02)  # an episode of 2 s, one at a time
    assert found.learner_busy == pytest.approx(0.5, rel=0.02) and found.slots_used == pytest.approx(1.0, abs=0.05)
    assert limit_of(PLAN, found) == "actors; add some"
    found = outcome(with_episodes([PlayedTurn(num_tokens=9, env_s=0.0)]), target_lag=1, num_actors=4)
    assert found.steps_per_hour == pytest.approx(3600, rel=0.04) and found.learner_busy == pytest.approx(1.0, abs=0.04)
    # Opened when version k begins its step, played with k - 1, as k is served 0.5 s later; claimed for step k + 1. In
    # one of nine steps the actors try what waiting for k would cost: the learner waits.
    assert found.lag == pytest.approx(2, abs=0.2)
    assert limit_of(PLAN, found) == "the learner; use more learner.ranks, or fewer actors"


def test_groups_that_teach_nothing_are_replaced_and_count_as_waste() -> None:
    facts = dataclasses.replace(FACTS, useful_share=0.5, refresh_s=0.0, step_s=[0.0])
    found = outcome(facts, target_lag=2, groups_per_step=4, steps=400)
    assert found.wasted_share == pytest.approx(0.5, abs=0.05)
    assert found.steps_per_hour == pytest.approx(3600 / 8, rel=0.1)  # eight episodes of 1 s, one after another


def test_tokens_older_than_the_cap_are_masked() -> None:
    """Episodes of 10 s and steps of 1 s that wait for none of them: the tokens are some ten steps old."""
    facts = with_episodes([PlayedTurn(num_tokens=100, env_s=0.0)], refresh_s=0.0)
    found = outcome(facts, target_lag=20, max_episodes=20, max_lag=8)
    assert found.lag > 8 and found.masked_share > 0.9
    assert outcome(facts, target_lag=20, max_episodes=20, max_lag=40).masked_share == 0


def test_preempted_actors_cost_the_time_until_they_are_replaced_and_no_episode() -> None:
    """Episodes of ten turns of 1 s. Half a minute is the mean life of an actor."""
    facts = with_episodes([PlayedTurn(num_tokens=10, env_s=0.0)] * 10, refresh_s=0.0, step_s=[0.1])
    unhurt = outcome(facts, target_lag=2, num_actors=4, steps=300)
    preempted = outcome(facts, target_lag=2, num_actors=4, steps=300, preemptions_per_hour=120.0, price_per_hour=1.0)
    assert unhurt.wasted_share == preempted.wasted_share == 0
    assert preempted.dollars_per_hour == pytest.approx(4 * 30 / 35, rel=0.1)  # 5 s of 35 are free of charge
    assert preempted.steps_per_hour < unhurt.steps_per_hour


def test_failed_attempts_are_repeated() -> None:
    facts = dataclasses.replace(FACTS, failed_share=0.5, refresh_s=0.0, step_s=[0.0])
    assert outcome(facts, target_lag=1, steps=1000).steps_per_hour == pytest.approx(1800, rel=0.1)


def test_the_same_seed_gives_the_same_outcome() -> None:
    facts = with_episodes(SECOND, [PlayedTurn(num_tokens=50, env_s=0.3)], useful_share=0.7)
    first, again = (outcome(facts, target_lag=2, num_actors=3, preemptions_per_hour=60.0) for _ in range(2))
    assert first == again != outcome(facts, target_lag=2, num_actors=3, preemptions_per_hour=60.0, seed=1)


def turn(num_tokens: int, generate_s: float) -> Turn:
    said = {"state_key": "", "rewards": {"goal": 0.0}, "finish_reason": "stop", "valid_action": True}
    return Turn(start=7, stop=7 + num_tokens, generate_s=generate_s, env_s=0.0, **said)


def test_the_time_of_a_turn_is_a_line_over_its_tokens() -> None:
    """Half a second, and 0.1 s for each token: the middle turn is 0.1 s late, and the line goes through the mean."""
    found = turn_time([turn(5, 1.0), turn(10, 1.6), turn(15, 2.0)])
    assert found == pytest.approx((0.5 + 0.1 / 3, 0.1))
    assert turn_time([turn(4, 1.0), turn(4, 3.0)]) == (0.0, 0.5)  # no line
    assert turn_time([turn(4, 1.0), turn(8, 6.0)]) == (0.0, pytest.approx(7 / 12))  # it would begin at -4 s
    assert turn_time([turn(4, 3.0), turn(8, 1.0)]) == (0.0, pytest.approx(4 / 12))  # it would fall


def loaded(requests: float, rate: float) -> dict[str, float]:
    return {"fleet/num_episodes": requests, "fleet/num_actors": 2.0, "fleet/generated_tokens_per_s": rate}


def test_the_time_of_a_token_is_a_line_through_two_halves_of_the_records() -> None:
    """Two actors. With 4 requests each, a token takes 4 / 200 = 20 ms, with 16 each 16 / 400 = 40 ms."""
    records = [loaded(8, 400), loaded(32, 800)] * 5 + [loaded(0, 0)]
    found = token_time(records, generating_share=1.0)
    middle = 20 / 600  # of all: (4 + 16) requests, (200 + 400) tokens a second
    assert found.per_request_s == pytest.approx(0.02 / 12)
    assert found.fixed_s == pytest.approx(middle - 10 * 0.02 / 12)
    half = token_time(records, generating_share=0.5)  # the environment has the other half of the episodes
    assert half.of(5) == pytest.approx(middle / 2)


def test_loads_that_are_nearly_equal_say_nothing_about_their_speed() -> None:
    alike = [loaded(16, 400), loaded(18, 300)] * 5  # the second would have a time of 7.5 ms a request
    assert token_time(alike, generating_share=1.0) == TokenTime(fixed_s=pytest.approx(17 / 350), per_request_s=0.0)


def test_a_line_that_would_fall_is_flat_and_a_run_that_never_generated_is_refused() -> None:
    falling = [loaded(8, 200), loaded(32, 2000)] * 5
    assert token_time(falling, generating_share=1.0) == TokenTime(fixed_s=pytest.approx(20 / 1100), per_request_s=0.0)
    with pytest.raises(ConfigError, match="while actors generated"):
        token_time([loaded(0, 0)], generating_share=1.0)


def test_a_plan_has_the_settings_of_the_run_and_what_is_changed_of_them() -> None:
    config = Config()
    config.replay.target_lag, config.actors.price_per_hour = 5, 0.4
    config.replay.group_size = FACTS.group_size
    plan = plan_of(config, SimulateOptions(preemptions_per_hour=2.0), FACTS, num_actors=3)
    assert (plan.num_actors, plan.target_lag, plan.preemptions_per_hour) == (3, 5, 2.0)
    assert World(dataclasses.replace(plan, max_episodes=8), FACTS).run().dollars_per_hour == pytest.approx(1.2)


def test_another_size_of_groups_is_refused_where_some_teach_nothing() -> None:
    config = Config()
    config.replay.group_size = 4
    assert plan_of(config, SimulateOptions(), FACTS, num_actors=1).group_size == 4
    with pytest.raises(ConfigError, match=r"replay.group_size.*30% of the run's groups"):
        plan_of(config, SimulateOptions(), dataclasses.replace(FACTS, useful_share=0.7), num_actors=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"actors": ("x",)}, "--actors"), ({"learner_speed": 0.0}, "--learner-speed")],
)
def test_options_without_a_meaning_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SimulateOptions(**options)  # type: ignore[arg-type]
