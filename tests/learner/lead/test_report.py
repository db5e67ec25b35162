"""What a step reports: hand-made batches, and numbers worked out by hand."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from slipstream.common.process.metrics import Metrics
from slipstream.common.records.trajectory import Task, Trajectory, VersionSpan
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.lead.cost import cost_of
from slipstream.learner.lead.report import add_cost, add_fleet, add_flow, add_produced, step_metrics
from slipstream.learner.lead.tally import Tally
from slipstream.learner.model.flops import Flops, flops_of
from slipstream.learner.model.packed_model import load_model
from slipstream.learner.objective.guard import Evidence
from slipstream.learner.objective.lag import LagMetrics
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.replay.fleet.fleet import Census, Member
from slipstream.replay.records.ledger import Ledger, ledger_of
from slipstream.replay.records.ticket import Group
from tests.replay.buffer.every_verb import MEMBER
from tests.replay.records.attempts import attempt_at, lease_of, ticket
from tests.tools.run.tiny_model import FLOAT32, save_tiny_model

OF_TYPE: dict[Any, Any] = {int: 2, float: 0.5, bool: False}  # else None
OLD = LagMetrics(fraction=0.25, ratio_mean=1.5, effective_sample_size=0.8, clip_fraction=0.1, masked_fraction=1.0)
WHOLE = Evidence(weight_mean=1.0, token_ess=1.0, trajectory_ess=1.0)
STEP = StepMetrics(
    **{field.name: OF_TYPE.get(field.type) for field in dataclasses.fields(StepMetrics) if field.name != "losses"}
    | {"num_computed_tokens": 6, "num_pairs": 17, "by_lag": {"5_8": OLD}}
    | {"evidence": WHOLE, "trajectory_ratios": [1.0, 1.25]}
)
BEFORE = Progress(step=7, policy_version=7, highest_published=7, next_group_id=0, tokens_trained=0)
TIMES_S = {"wait": 3.0, "forward": 0.5, "backward": 0.25, "checkpoint": 0.25}
UNKNOWN = Flops(per_token=1.0, per_pair=1.0, peak=None)


def made(member: int, *, versions: tuple[int, int] = (7, 7), **rewards: float) -> Trajectory:
    """Two prompt tokens and two sampled ones, the second by the second of `versions`."""
    attempt = attempt_at(lease_of(ticket(0, num_members=3)), member, run_id="run")
    turn = msgspec.structs.replace(attempt.turns[0], rewards=rewards)
    spans = [VersionSpan(start=place, stop=place + 1, policy_version=each) for place, each in enumerate(versions, 2)]
    return msgspec.structs.replace(attempt, turns=[turn], version_spans=spans)


def batch_of(*trajectories: Trajectory, num_uses: int = 1) -> Batch:
    group = Group(ticket=ticket(0), num_uses=num_uses, trajectories=list(trajectories))
    return Batch(groups=[group], num_dropped={"zero_variance": 3}, next_group_id=1)


def report(batch: Batch, *, flops: Flops = UNKNOWN, tally: Tally | None = None) -> Metrics:
    return step_metrics(batch, STEP, before=BEFORE, times_s=TIMES_S, flops=flops, tally=tally or Tally())


def test_rewards_are_means_over_trajectories_by_component_too_and_parts_over_those_to_which_they_applied() -> None:
    judged, other = made(0, task=1.0, style=0.5), made(1, task=0.5)
    judged = msgspec.structs.replace(judged, part_values={"clear": 0.5, "long": 2.0}, scoring_s=3.0)
    other = msgspec.structs.replace(other, part_values={"long": 0.0}, scoring_s=1.0)
    means = report(batch_of(judged, other)).means()
    assert means["trained/reward"] == 1.0
    assert (means["trained/reward_of_task"], means["trained/reward_of_style"]) == (0.75, 0.25)
    assert (means["trained/value_of_clear"], means["trained/value_of_long"]) == (0.5, 1.0)
    assert means["trained/scoring_s"] == 2.0
    assert "trained/success_in_shop" not in means


def test_success_is_recorded_for_each_environment_of_a_mixture() -> None:
    household = Task(env="household", split="train", index=0)
    other = msgspec.structs.replace(made(1, task=0.0), task=household, success=False)
    means = report(batch_of(made(0, task=1.0), other)).means()
    assert (means["trained/success_in_shop"], means["trained/success_in_household"]) == (1.0, 0.0)


def test_lag_is_recorded_of_the_oldest_and_the_newest_token_and_reward_by_the_oldest() -> None:
    tally = Tally()
    batch = batch_of(made(0, task=1.0), made(1, task=0.5, versions=(3, 6)), made(2, task=0.0, versions=(4, 7)))
    metrics = report(batch, tally=tally)
    means = metrics.means()
    assert (means["lag/mean"], means["lag/max"], means["lag/newest_mean"]) == (pytest.approx(7 / 3), 4, 1 / 3)
    assert metrics.histograms == {
        "lag/oldest_token": [0, 4, 3],
        "lag/newest_token": [0, 1, 0],
        "trained/return": [1.0, 0.5, 0.0],
        "trained/tokens": [4, 4, 4],
        "mismatch/ratio_of_trajectory": [1.0, 1.25],
    }
    assert (means["trained/reward_at_lag_0"], means["trained/reward_at_lag_3_4"]) == (1.0, 0.25)
    assert (means["lag/fraction_at_0"], means["lag/fraction_at_3_4"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert (means["lag/fraction_at_1"], means["lag/fraction_at_33_up"]) == (0.0, 0.0)
    assert tally.lag == {"0": 1, "3": 1, "4": 1}


def test_what_a_resumed_learner_skipped_is_no_lag() -> None:
    """Versions 3 to 6 were lost: 7 has the weights of 2, one step after 1."""
    before = msgspec.structs.replace(BEFORE, policy_version=2).resumed_as(7)
    batch = batch_of(made(0, task=1.0, versions=(1, 2)))
    tally = Tally()
    means = step_metrics(batch, STEP, before=before, times_s=TIMES_S, flops=UNKNOWN, tally=tally).means()
    assert (means["lag/max"], means["lag/newest_mean"], tally.lag) == (1, 0, {"1": 1})


def test_each_bucket_of_token_lag_has_metrics_and_only_those_with_tokens() -> None:
    means = report(batch_of(made(0, task=1.0))).means()
    assert [name for name in means if name.startswith("lag/tokens_at")] == ["lag/tokens_at_5_8"]
    assert means["lag/tokens_at_5_8"] == 0.25
    assert means["mismatch/ratio_mean_at_lag_5_8"] == 1.5
    assert means["mismatch/effective_sample_size_at_lag_5_8"] == 0.8
    assert (means["optim/clip_fraction_at_lag_5_8"], means["optim/masked_fraction_at_lag_5_8"]) == (0.1, 1.0)


def test_the_parts_of_the_time_are_its_whole() -> None:
    tally = Tally()
    means = report(batch_of(made(0, task=1.0), made(1, task=0.0)), tally=tally).means()
    assert means["perf/step_s"] == 4.0 == sum(means[f"time/{part}_s"] for part in TIMES_S)
    assert (means["perf/learner_busy"], means["perf/trained_tokens_per_s"]) == (0.25, 2.0)
    assert (tally.seconds, tally.tokens_trained) == (4.0, 8)


def test_a_clock_leaves_nothing_out_and_adds_up_repeated_parts() -> None:
    clock = Clock(torch.device("cpu"))
    begun = clock._last
    for part in ("forward", "backward", "forward"):
        clock.lap(part)
    first = clock.take()
    clock.lap("wait")
    second = clock.take()
    assert (set(first), set(second)) == ({"forward", "backward"}, {"wait"})
    assert sum(first.values()) + sum(second.values()) == pytest.approx(clock._last - begun, rel=1e-6)


def test_utilisation_counts_matrix_products_of_computed_tokens_against_the_wall_clock() -> None:
    """Two sequences of 4 tokens that share 2: 6 * 100 + 17 * 3 = 651 operations, in 4 s that could have made 4,000."""
    batch = batch_of(made(0, task=1.0), made(1, task=0.0))
    means = report(batch, flops=Flops(per_token=100.0, per_pair=3.0, peak=1000.0)).means()
    assert means["perf/mfu"] == pytest.approx(651 / 4000)
    assert means["learner/computed_fraction"] == 0.75
    assert "perf/mfu" not in report(batch).means()


@pytest.mark.parametrize("tie", [True, False])
def test_flops_are_those_of_the_model(tie: bool, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(save_tiny_model(tmp_path, tie=tie), ranks=ranks, settings=FLOAT32)
    assert flops_of(model, device=torch.device("cpu"), num_ranks=3).peak is None
    monkeypatch.setattr("slipstream.learner.model.flops._known_peak", lambda device: 2.0)
    flops = flops_of(model, device=torch.device("cpu"), num_ranks=3)
    # By hand: q, k, v, o of 64 x 64, two norms of 64 and two of a head's 32, an MLP of three 64 x 128; twice.
    layers = 2 * (4 * 64 * 64 + 2 * 64 + 2 * 32 + 3 * 64 * 128)
    looked_up_and_multiplied = 200 * 64
    assert flops.per_token == 6 * (layers + 64 + looked_up_and_multiplied)
    assert flops.per_pair == 12 * 2 * 2 * 32
    assert flops.peak == 6e12


NO_BOOKS = ledger_of({})


def books(counters: str) -> Ledger:
    """The ledger of `name=value` pairs."""
    return ledger_of(dict(counter.encode().split(b"=") for counter in counters.split()))


def added(add: Callable[..., None], *values: Any, **named: Any) -> dict[str, float]:
    """What `add` adds to a record."""
    metrics = Metrics()
    add(metrics, *values, **named)
    return metrics.means()


def test_what_was_produced_and_dropped_since_the_last_record_is_measured() -> None:
    before = books(
        "trajectories:inserted=8 tokens:produced=800 turns:produced=40 duration_ms:produced=9000 tokens:trained=300"
        " trajectories:dropped:too_old=2 tokens:dropped:too_old=100"
    )
    now = books(
        "trajectories:inserted=12 tokens:produced=1000 turns:produced=52 duration_ms:produced=13000 tokens:trained=900"
        " trajectories:dropped:too_old=4 tokens:dropped:too_old=110 turns:dropped:too_old=10"
        " trajectories:dropped:poison=1 tokens:dropped:poison=14 duration_ms:dropped:poison=6000"
    )
    batch = batch_of(made(0, task=1.0), made(1, task=0.0))
    means = added(add_flow, batch, before, now)
    assert (means["replay/produced_tokens"], means["replay/produced_turns"], means["replay/produced_s"]) == (50, 3, 1)
    assert means["replay/dropped_tokens"] == 8.0  # 10 + 14 of three
    assert (means["replay/dropped_turns"], means["replay/dropped_s"]) == (pytest.approx(10 / 3), 2.0)
    assert means["perf/goodput"] == 8 / (8 + 24)
    again = added(add_flow, batch_of(*batch.groups[0].trajectories, num_uses=2), before, now)
    assert again["perf/goodput"] == 0.0  # what is used again was counted when it was used first


def test_nothing_produced_and_nothing_dropped_says_nothing() -> None:
    assert added(add_flow, batch_of(made(0, task=1.0)), NO_BOOKS, NO_BOOKS) == {"perf/goodput": 1.0}
    assert added(add_produced, NO_BOOKS, NO_BOOKS) == {"produced/episodes": 0.0}


def test_what_the_policy_earned_is_of_every_episode_since_the_last_record() -> None:
    before = books("trajectories:inserted=8 episodes:shop=8 successes:shop=2 returns:shop=3.5")
    now = books("trajectories:inserted=12 episodes:shop=12 successes:shop=5 returns:shop=6.75")
    expected = {"produced/episodes": 4, "produced/success": 0.75, "produced/reward": 0.8125}
    assert added(add_produced, before, now) == expected


def test_rewards_are_recorded_by_environment_in_a_mixture() -> None:
    """Six of the shop and two of the grid: each weighs what it is, and the grid earns more."""
    now = books(
        "trajectories:inserted=8 episodes:shop=6 successes:shop=3 returns:shop=3"
        " episodes:grid=2 successes:grid=2 returns:grid=20"
    )
    assert added(add_produced, NO_BOOKS, now) == {
        "produced/episodes": 8,
        "produced/success": 5 / 8,
        "produced/reward": 23 / 8,
        "produced/success_in_shop": 0.5,
        "produced/reward_in_shop": 0.5,
        "produced/share_of_shop": 0.75,
        "produced/success_in_grid": 1.0,
        "produced/reward_in_grid": 10.0,
        "produced/share_of_grid": 0.25,
    }
    assert added(add_produced, now, now) == {"produced/episodes": 0.0}


@pytest.mark.parametrize("books_now", [(7, 1, 0), (9, 0, 9), (9, 7, 9)])
def test_a_server_that_came_back_with_less_tells_no_rate_beyond_0_and_1(books_now: tuple[int, int, int]) -> None:
    """Of 8 episodes and 4 successes it lost some, and played others since."""
    episodes, successes, returns = books_now
    before = books("trajectories:inserted=8 episodes:shop=8 successes:shop=4 returns:shop=4")
    of_shop = f"episodes:shop={episodes} successes:shop={successes} returns:shop={returns}"
    now = books(f"trajectories:inserted={episodes} {of_shop}")
    assert added(add_produced, before, now) == {"produced/episodes": max(0, episodes - 8)}


def member(name: str, **changes: Any) -> Member:
    return msgspec.structs.replace(MEMBER, **({"price_per_hour": 0.0, "served_s": 0.0} | changes), name=name)


def test_the_cost_is_the_price_of_everyone_who_ever_served_and_spot_and_reserved_actors_are_shown_apart() -> None:
    """Half an hour at 2 $, 40 minutes at 3 $ and a quarter of an hour at 4 $ make 4 $, for half a million tokens."""
    everyone = [
        member("a", price_per_hour=2.0, served_s=1800, generated_tokens=50, kept_tokens=10),
        member("own", price_per_hour=3.0, served_s=2400, instance_kind="reserved"),
        member("gone", price_per_hour=4.0, served_s=900, generated_tokens=100, kept_tokens=75),
    ]
    books_of_all = books("tokens:dropped:too_old=70 tokens:discarded:poison=8 tokens:trained=900 tokens:produced=1000")
    cost = cost_of(Census(everyone[:2], everyone), ledger=books_of_all, tokens_trained=500_000)
    assert added(add_cost, cost) == {
        "fleet/cost_dollars": 4.0,
        "fleet/dollars_per_hour": 5.0,
        "fleet/dollars_per_hour_of_spot": 2.0,
        "fleet/dollars_per_hour_of_reserved": 3.0,
        "fleet/dollars_per_million_tokens": 8.0,
        "fleet/wasted_tokens_too_old": 70.0,
        "fleet/wasted_tokens_poison": 8.0,
        "fleet/wasted_tokens_preempted": 25.0,
    }
    assert [dataclasses.asdict(share) for share in cost.shares] == [
        {"instance_kind": kind, "price_per_hour": price, "num_actors": 1, "hours": hours, "dollars": dollars}
        for kind, price, hours, dollars in (("reserved", 3, 2 / 3, 2), ("spot", 2, 0.5, 1), ("spot", 4, 0.25, 1))
    ]


def test_without_prices_there_is_no_cost() -> None:
    serving = [member("a", served_s=1800)]
    cost = cost_of(Census(serving, serving), ledger=NO_BOOKS, tokens_trained=500_000)
    assert added(add_cost, cost) == {} and cost.dollars_per_million_tokens is None


def test_the_fleet_is_its_actors() -> None:
    ledger = books("ready=2 dropped:too_old=3 failed:env_failure=4")
    means = added(add_fleet, ledger=ledger, actors=[member("a"), member("b")])
    of_fleet = [means[f"fleet/{name}"] for name in ("num_actors", "num_episodes", "generated_tokens_per_s")]
    of_books = [means[f"replay/{name}"] for name in ("ready", "total_dropped_too_old", "total_failed_env_failure")]
    assert (of_fleet, of_books) == ([2, 16, 25], [2, 3, 4])
