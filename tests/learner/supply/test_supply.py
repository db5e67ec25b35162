"""The learner's supply against a real buffer, with the actors' work done by hand."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import redis

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import Fork, Outcome
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.supply.supplies import Supplies, merged
from slipstream.learner.supply.supply import Supply, SupplyDried
from slipstream.learner.supply.task_order import task_index
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.records.ticket import InsertResult, Lease
from slipstream.replay.run.diagnosis import FEWEST_EPISODES, Diagnosis
from tests.replay.records.attempts import Views, attempt_at, earning, group_earning, make_buffer, verdict_on


@pytest.fixture
def shutdown() -> Iterator[Shutdown]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield Shutdown()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Views:
    buffer = make_buffer(redis_client, run_id)
    buffer.learner.acquire_epoch()
    return buffer


def config(*overrides: str) -> Config:
    """Groups of two, two groups a step, one step ahead."""
    sizes = ["replay.group_size=2", "replay.groups_per_step=2", "replay.target_lag=1", "env.num_train_tasks=50"]
    return load_config(None, [*sizes, "learner.claim_timeout_s=20", *overrides])


def work(buffer: ActorBuffer, run_id: str, *, returns: Callable[[int], tuple[float, float]]) -> list[Lease]:
    """Do what actors do with all that is queued: the members of group `id` earn `returns(id)`."""
    leases = []
    while (lease := buffer.lease("a")) is not None:
        for member, reward in enumerate(returns(lease.ticket.group_id)):
            attempt = earning(attempt_at(lease, member, run_id=run_id), reward)
            assert buffer.insert(lease, attempt) is InsertResult.STORED
        leases.append(lease)
    return leases


def differ(group_id: int) -> tuple[float, float]:
    return (0.0, 1.0)


def under_way(buffer: Views) -> int:
    ledger = buffer.learner.ledger()
    return ledger.queued + ledger.leased + ledger.ready + ledger.claimed


def resumed(buffer: Views, run_id: str, *, steps_since: int) -> tuple[Supplies, Progress]:
    """Four groups by version 0, the checkpoint's; 9 were published, so the learner came back as version 10."""
    settings = config("replay.max_lag=2", "learner.claim_timeout_s=0.3")
    Supply(buffer.learner, settings, first_group_id=0).admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=differ)
    begun = Progress(step=0, policy_version=0, highest_published=9, next_group_id=4, tokens_trained=0)
    at = msgspec.structs.replace(begun.resumed_as(10), step=steps_since, policy_version=10 + steps_since)
    return Supplies.begin({0: buffer.learner}, settings, progress=at), at


@pytest.mark.parametrize("steps_since", [0, 2])
def test_what_was_reopened_is_not_too_old_for_the_numbers_that_a_resume_leaves_out(
    buffer: Views, run_id: str, shutdown: Shutdown, steps_since: int
) -> None:
    supplies, at = resumed(buffer, run_id, steps_since=steps_since)
    batch = supplies.next_batch(at, shutdown)
    assert batch is not None and len(batch.groups) == 2
    assert buffer.learner.ledger().dropped == {}


def test_what_was_reopened_is_too_old_once_the_resumed_learner_has_made_more_steps_than_max_lag(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    supplies, at = resumed(buffer, run_id, steps_since=3)
    with pytest.raises(SupplyDried):
        supplies.next_batch(at, shutdown)
    assert buffer.learner.ledger().dropped == {"too_old": 4}


def test_as_many_groups_are_admitted_as_the_lag_allows(buffer: Views, run_id: str) -> None:
    supply = Supply(buffer.learner, config("replay.target_lag=2", "learner.steps=100"), first_group_id=0)
    supply.admit(1, [], published_version=0)
    assert under_way(buffer) == 6  # 2 groups a step, for this one and two ahead
    supply.admit(1, [], published_version=0)
    assert under_way(buffer) == 6


def test_every_state_but_trained_and_dropped_takes_up_room(buffer: Views, run_id: str) -> None:
    supply = Supply(buffer.learner, config("replay.target_lag=2", "learner.steps=100"), first_group_id=0)
    supply.admit(1, [], published_version=0)
    leases = work(buffer.actor, run_id, returns=differ)
    assert buffer.learner.ledger().ready == 6
    supply.admit(1, [], published_version=0)
    assert buffer.learner.ledger().queued == 0
    kept = buffer.learner.claim(1, 2, policy_version=0, max_lag=4)
    supply.admit(1, kept, published_version=0)  # the two are this step's own, and still count
    assert buffer.learner.ledger().queued == 0
    buffer.learner.drop([leases[2].ticket.group_id], reason="zero_variance")
    supply.admit(1, kept, published_version=0)
    assert buffer.learner.ledger().queued == 1
    supply.admit(2, [], published_version=0)  # the next step: what was claimed is behind it
    assert buffer.learner.ledger().queued == 3


def test_a_run_that_ends_soon_admits_no_more_than_it_needs(buffer: Views, run_id: str) -> None:
    supply = Supply(buffer.learner, config("replay.target_lag=2", "learner.steps=10"), first_group_id=0)
    supply.admit(10, [], published_version=0)
    assert under_way(buffer) == 2
    supply.admit(9, [], published_version=0)
    assert under_way(buffer) == 4


def test_synchronous_training_admits_one_step(buffer: Views, run_id: str) -> None:
    supply = Supply(buffer.learner, config("replay.target_lag=0", "learner.steps=10"), first_group_id=0)
    supply.admit(1, [], published_version=0)
    assert under_way(buffer) == 2


def test_tickets_say_what_the_configuration_says(buffer: Views, run_id: str) -> None:
    settings = config("run.seed=5", "sampling.temperature=0.7", "sampling.max_turn_tokens=9")
    Supply(buffer.learner, settings, first_group_id=40).admit(3, [], published_version=6)
    lease = buffer.actor.lease("a")
    assert lease is not None
    ticket = lease.ticket
    assert (ticket.group_id, ticket.num_members, ticket.seed, ticket.min_policy_version) == (40, 2, 5, 5)
    assert (ticket.task.env, ticket.task.split) == ("shop", "train")
    assert (ticket.sampling.temperature, ticket.sampling.max_turn_tokens) == (0.7, 9)


def test_the_first_tickets_ask_for_no_version_below_0(buffer: Views, run_id: str) -> None:
    Supply(buffer.learner, config(), first_group_id=0).admit(1, [], published_version=0)
    lease = buffer.actor.lease("a")
    assert lease is not None and lease.ticket.min_policy_version == 0


def test_a_batch_is_whole_and_in_order_of_ids(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    supply = Supply(buffer.learner, config(), first_group_id=0)
    supply.admit(1, [], published_version=0)
    first = buffer.actor.lease("straggler")
    assert first is not None
    work(buffer.actor, run_id, returns=differ)  # 1, 2 and 3
    for member in (0, 1):
        attempt = attempt_at(first, member, run_id=run_id, reward=float(member))
        assert buffer.actor.insert(first, attempt) is InsertResult.STORED
    batch = supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    assert batch is not None
    assert [group.ticket.group_id for group in batch.groups] == [1, 2]
    assert [[member.total_reward for member in group.trajectories] for group in batch.groups] == [[0, 1], [0, 1]]
    assert batch.num_dropped == {}
    assert batch.next_group_id == 4


def train(supply: Supply, buffer: Views, run_id: str, shutdown: Shutdown, *, steps: int) -> list[list[int]]:
    """Whose groups each step learns from, when actors always keep up."""
    batches = []
    for step in range(1, steps + 1):
        supply.admit(step, [], published_version=0)
        work(buffer.actor, run_id, returns=differ)
        batch = supply.next_batch(step, policy_version=0, published_version=0, shutdown=shutdown)
        assert batch is not None
        batches.append([group.ticket.group_id for group in batch.groups])
        work(buffer.actor, run_id, returns=differ)
        buffer.learner.settle(step)
    return batches


def test_groups_that_are_used_twice_are_half_as_many(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    supply = Supply(buffer.learner, config("replay.max_uses=2", "learner.steps=9"), first_group_id=0)
    batches = train(supply, buffer, run_id, shutdown, steps=9)
    assert batches[:5] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5]]
    ledger = buffer.learner.ledger()
    # The last two groups had one step left to be used in.
    assert (ledger.opened, ledger.trained, ledger.ready, ledger.dropped) == (10, 8, 2, {})
    assert buffer.audit() == []


def test_synchronous_training_with_reuse_has_enough_groups_for_each_step(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    settings = config("replay.max_uses=2", "replay.target_lag=0", "learner.steps=4")
    batches = train(Supply(buffer.learner, settings, first_group_id=0), buffer, run_id, shutdown, steps=4)
    assert batches == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert buffer.learner.ledger().opened == 4


def test_the_share_of_groups_that_teach_counts_no_group_twice(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    supply = Supply(buffer.learner, config("replay.max_uses=2", "replay.max_lag=9"), first_group_id=0)
    supply.admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=differ)
    for step in (1, 2):
        supply.next_batch(step, policy_version=0, published_version=0, shutdown=shutdown)
    assert list(supply._taught) == [True, True]


def test_no_group_is_used_twice_in_one_step(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    supply = Supply(buffer.learner, config("replay.max_uses=2"), first_group_id=0)
    supply.admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=lambda group_id: (0.0, float(group_id > 0)))
    assert buffer.learner.ledger().ready == 2  # 0, which teaches nothing, and 1
    with pytest.raises(SupplyDried):
        settings = config("replay.max_uses=2", "objective.allocation=per_turn", "learner.claim_timeout_s=0.2")
        Supply(buffer.learner, settings, first_group_id=2).next_batch(
            1, policy_version=0, published_version=0, shutdown=shutdown
        )
    ledger = buffer.learner.ledger()
    assert (ledger.dropped, ledger.ready, ledger.ready_uses) == ({"zero_variance": 1}, 1, 1)
    assert ledger.queued >= 1  # another for this step: 1 has been used in it
    assert buffer.audit() == []


def test_groups_without_variance_are_dropped_and_replaced(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    supply = Supply(buffer.learner, config(), first_group_id=0)
    supply.admit(1, [], published_version=0)
    equal = {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (0.5, 0.5 + 1e-9)}
    work(buffer.actor, run_id, returns=lambda group_id: equal.get(group_id, (0.0, 1.0)))
    # The useless ones come with the first claim, although 3 alone is no batch; no actor plays their replacements yet.
    settings = config("learner.claim_timeout_s=0.2")
    with pytest.raises(SupplyDried):
        Supply(buffer.learner, settings, first_group_id=4).next_batch(
            1, policy_version=0, published_version=0, shutdown=shutdown
        )
    ledger = buffer.learner.ledger()
    assert ledger.dropped == {"zero_variance": 3}
    # Beside 3, three must teach, and 40 % are expected to: two as if before the first, and none of three.
    assert (ledger.claimed, ledger.ready, ledger.queued) == (0, 1, 8)
    assert ledger.balanced
    assert buffer.audit() == []


@pytest.mark.parametrize(
    ("settings", "num_opened"),
    [
        ((), 4),  # of the four ready groups, two teach: as many must still be found
        (("replay.drop_zero_variance=false",), 2),
        (("objective.allocation=per_turn",), 2),  # not known of a ready group; none was found that does not, so far
    ],
)
def test_ready_groups_count_as_far_as_they_teach(
    buffer: Views, run_id: str, shutdown: Shutdown, settings: tuple[str, ...], num_opened: int
) -> None:
    """Six groups are played while a step is made, and every second one has equal returns."""
    supply = Supply(buffer.learner, config("replay.target_lag=2", *settings), first_group_id=0)
    supply.admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=lambda group_id: (0.0, float(group_id % 2 or group_id < 2)))
    assert supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown) is not None
    ledger = buffer.learner.ledger()
    assert (ledger.ready, ledger.ready_equal) == (4, 2)
    supply.admit(2, [], published_version=1)
    assert buffer.learner.ledger().opened - 6 == num_opened
    assert buffer.audit() == []


def test_groups_that_are_not_urgent_prefer_the_newest_weights(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    """The first groups may be played by any version that the lag allows; a step that has its groups is in no hurry."""
    supply = Supply(buffer.learner, config("replay.target_lag=2", "learner.steps=9"), first_group_id=0)
    supply.admit(1, [], published_version=3)
    first = work(buffer.actor, run_id, returns=differ)
    assert {(lease.ticket.min_policy_version, lease.ticket.preferred_policy_version) for lease in first} == {(1, 1)}
    supply.next_batch(1, policy_version=4, published_version=4, shutdown=shutdown)
    supply.admit(2, [], published_version=5)  # the groups of this step are ready
    then = work(buffer.actor, run_id, returns=differ)
    assert {(lease.ticket.min_policy_version, lease.ticket.preferred_policy_version) for lease in then} == {(3, 5)}


def test_gigpo_keeps_groups_of_equal_returns_in_which_one_came_sooner(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    """Both members of groups 0 and 1 earn 1, from the same state; one of group 1 with the first of its two turns."""
    settings = config("objective.advantage=gigpo", "objective.gamma=0.9", "learner.claim_timeout_s=0.2")
    supply = Supply(buffer.learner, settings, first_group_id=0)
    supply.admit(1, [], published_version=0)
    while (lease := buffer.actor.lease("a")) is not None:
        for member in (0, 1):
            attempt = attempt_at(lease, member, run_id=run_id)
            sooner = member == 1 and lease.ticket.group_id == 1
            turns = [
                msgspec.structs.replace(
                    attempt.turns[0], start=start, stop=start + 1, state_key=state, rewards={"task": float(earns)}
                )
                for start, state, earns in ((2, "start", sooner), (3, "next", not sooner))
            ]
            buffer.actor.insert(lease, msgspec.structs.replace(attempt, turns=turns))
    with pytest.raises(SupplyDried):
        supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    ledger = buffer.learner.ledger()
    assert ledger.dropped == {"zero_variance": 3}
    assert ledger.claimed == 1


def test_what_was_sampled_otherwise_than_the_learner_reckons_is_dropped(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    Supply(buffer.learner, config("sampling.temperature=0.7"), first_group_id=0).admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=differ)
    supply = Supply(buffer.learner, config("learner.claim_timeout_s=0.2"), first_group_id=4)
    with pytest.raises(SupplyDried):
        supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    assert buffer.learner.ledger().dropped == {"other_sampling": 4}
    work(buffer.actor, run_id, returns=differ)
    batch = supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    assert batch is not None
    assert {group.ticket.sampling.temperature for group in batch.groups} == {1.0}


@pytest.mark.parametrize("advantage", ["group_standardised", "gigpo", "gae", "reinforce_pp"])
def test_groups_of_trees_are_dropped_where_a_resumed_objective_would_count_shared_tokens_again(
    buffer: Views, run_id: str, shutdown: Shutdown, advantage: str
) -> None:
    trees = config("replay.group_size=3", "replay.num_trees=2", "objective.advantage=tree", "replay.max_fork_turn=1")
    Supply(buffer.learner, trees, first_group_id=0).admit(1, [], published_version=0)
    while (lease := buffer.actor.lease("a")) is not None:
        for member in range(3):
            attempt = earning(attempt_at(lease, member, run_id=run_id), float(member))
            (turn,) = attempt.turns
            turns = [msgspec.structs.replace(turn, stop=3), msgspec.structs.replace(turn, start=3)]
            fork = Fork(parent=0, num_turns=1) if member == 2 and lease.ticket.group_id else None
            buffer.actor.insert(lease, msgspec.structs.replace(attempt, turns=turns, fork=fork))
    other = config("replay.group_size=3", "learner.claim_timeout_s=0.2")
    other.objective.advantage = advantage
    with pytest.raises(SupplyDried):
        Supply(buffer.learner, other, first_group_id=4).next_batch(
            1, policy_version=0, published_version=0, shutdown=shutdown
        )
    ledger = buffer.learner.ledger()
    assert (ledger.dropped, ledger.claimed) == ({"other_sampling": 3}, 1), "only group 0 has no fork"


def test_the_temperature_follows_its_schedule_and_old_groups_of_it_are_trained(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    schedule = ["sampling.temperature=1.2", "sampling.final_temperature=0.6", "learner.steps=4"]
    settings = config(*schedule, "replay.target_lag=1", "learner.claim_timeout_s=5")
    supply = Supply(buffer.learner, settings, first_group_id=0)
    temperatures = []
    for step in (1, 2, 3, 4):
        supply.admit(step, [], published_version=step - 1)
        work(buffer.actor, run_id, returns=differ)
        batch = supply.next_batch(step, policy_version=step - 1, published_version=step - 1, shutdown=shutdown)
        assert batch is not None
        temperatures.append([group.ticket.sampling.temperature for group in batch.groups])
        assert all(each.sampling == group.ticket.sampling for group in batch.groups for each in group.trajectories)
    # Two groups a step, and those of one more step are in progress: opened in steps 1, 1, 2 and 3.
    assert temperatures == [pytest.approx([opened] * 2) for opened in (1.2, 1.2, 1.0, 0.8)]
    assert buffer.learner.ledger().dropped == {}


def test_the_schedule_of_the_temperature_is_linear_and_ends_with_the_run() -> None:
    sampling = config("sampling.temperature=1.2", "sampling.final_temperature=0.6").sampling
    assert [sampling.temperature_at(step, num_steps=4) for step in (1, 2, 3, 4)] == pytest.approx([1.2, 1.0, 0.8, 0.6])
    assert [sampling.could_be(value) for value in (1.2, 0.9, 0.6, 1.21, 0.59)] == [True, True, True, False, False]
    constant = config("sampling.temperature=0.7").sampling
    assert constant.temperature_at(3, num_steps=4) == 0.7 and not constant.could_be(0.71)
    assert sampling.temperature_at(1, num_steps=1) == 1.2


def test_a_batch_counts_what_was_dropped_on_its_way(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    supply = Supply(buffer.learner, config(), first_group_id=0)
    supply.admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=lambda group_id: (0.0, float(group_id >= 2)))
    batch = supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    assert batch is not None
    assert [group.ticket.group_id for group in batch.groups] == [2, 3]
    assert batch.num_dropped == {"zero_variance": 2} and batch.dropped_returns == [0.0] * 4
    # Two more must teach, and two of three are expected to: two as if before the first, and two of four.
    assert [lease.ticket.group_id for lease in work(buffer.actor, run_id, returns=differ)] == [4, 5, 6]


def test_the_last_steps_leave_no_group_over(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    """Two of three groups teach nothing; three times as many are opened, but not for the last steps."""

    def play(_: float = 0.0) -> None:
        work(buffer.actor, run_id, returns=lambda group_id: (0.0, float(group_id % 3 == 0)))

    supply, opened = Supply(buffer.learner, config("learner.steps=12"), first_group_id=0, sleep=play), []
    for step in range(1, 13):
        assert supply.next_batch(step, policy_version=0, published_version=0, shutdown=shutdown) is not None
        opened.append(buffer.learner.ledger().opened)
    ledger = buffer.learner.ledger()
    assert opened[9] - opened[8] == pytest.approx(6, abs=3), "a step needs two that teach"
    assert (ledger.claimed, ledger.queued, ledger.leased, ledger.ready) == (24, 0, 0, 0)


def test_a_synchronous_step_opens_and_trains_the_same_groups_whichever_are_fast(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    """Two actors finish them in opposite orders. The first ones by id are trained."""

    def batches(run: Views, run_id: str, *, reverse: bool) -> list[list[int]]:
        def play(_: float = 0.0) -> None:
            leases = []
            while (lease := run.actor.lease("a")) is not None:
                leases.append(lease)
            for lease in reversed(leases) if reverse else leases:
                for member, reward in enumerate((0.0, float(lease.ticket.group_id // 5 % 2))):
                    attempt = earning(attempt_at(lease, member, run_id=run_id), reward)
                    assert run.actor.insert(lease, attempt) is InsertResult.STORED

        settings = config("replay.target_lag=0", "replay.max_lag=0", "learner.steps=9")
        supply, found = Supply(run.learner, settings, first_group_id=0, sleep=play), []
        for step in range(1, 7):
            batch = supply.next_batch(step, policy_version=0, published_version=0, shutdown=shutdown)
            assert batch is not None
            found.append([group.ticket.group_id for group in batch.groups])
        ledger = run.learner.ledger()
        assert ledger.balanced and ledger.queued + ledger.leased + ledger.ready == 0
        assert set(ledger.dropped) == {"zero_variance", "surplus"}, "some steps opened more than they needed"
        return [*found, [ledger.opened]]

    other_id = f"{run_id}-other"
    other = make_buffer(buffer.client, other_id)
    other.learner.acquire_epoch()
    assert batches(buffer, run_id, reverse=False) == batches(other, other_id, reverse=True)


def test_a_synchronous_step_replaces_a_group_while_later_ones_are_played_and_waits_for_no_surplus(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    settings = config("replay.target_lag=0", "replay.max_lag=0", "learner.steps=9")
    leases, under_way = dict[int, Lease](), list[tuple[int, int]]()

    def end_one(_: float = 0.0) -> None:
        """End the group of the lowest id that is played; groups 0 and 2 teach nothing."""
        while (lease := buffer.actor.lease("a")) is not None:
            leases[lease.ticket.group_id] = lease
        under_way.append((min(leases), max(leases)))
        lease = leases.pop(min(leases))
        for member, reward in enumerate((0.0, float(lease.ticket.group_id not in (0, 2)))):
            buffer.actor.insert(lease, earning(attempt_at(lease, member, run_id=run_id), reward))

    supply = Supply(buffer.learner, settings, first_group_id=0, sleep=end_one)
    batch = supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    assert batch is not None and [group.ticket.group_id for group in batch.groups] == [1, 3]
    # Two are opened; after group 0 two of three are expected to teach, so two more are; after group 2 one more is.
    assert under_way == [(0, 1), (1, 3), (2, 3), (3, 4)]
    assert leases.keys() == {4}
    assert batch.num_dropped == {"zero_variance": 2, "surplus": 1} == buffer.learner.ledger().dropped
    ledger = buffer.learner.ledger()
    assert ledger.queued + ledger.leased + ledger.ready == 0


def test_a_synchronous_step_waits_for_no_group_that_has_failed_for_good(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    settings = config("replay.target_lag=0", "replay.max_lag=0", "learner.steps=9")

    def play(_: float = 0.0) -> None:
        while (lease := buffer.actor.lease("a")) is not None:
            if lease.ticket.group_id == 0:
                for attempt in range(3):
                    buffer.actor.fail(lease, 0, attempt=attempt, outcome=Outcome.ENV_FAILURE, reason="it broke")
                continue
            for member, reward in enumerate((0.0, 1.0)):
                buffer.actor.insert(lease, earning(attempt_at(lease, member, run_id=run_id), reward))

    supply = Supply(buffer.learner, settings, first_group_id=0, sleep=play)
    batch = supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    assert batch is not None and [group.ticket.group_id for group in batch.groups] == [1, 2]
    assert buffer.learner.ledger().dropped == {"env_failure": 1}


def test_groups_that_grew_too_old_are_dropped_and_replaced(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    supply = Supply(buffer.learner, config("learner.claim_timeout_s=0.2", "replay.max_lag=1"), first_group_id=0)
    supply.admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=differ)
    with pytest.raises(SupplyDried):
        supply.next_batch(3, policy_version=2, published_version=2, shutdown=shutdown)
    assert buffer.learner.ledger().dropped == {"too_old": 4}
    assert buffer.learner.ledger().queued == 4


def test_a_dry_supply_says_what_the_buffer_holds(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    supply = Supply(buffer.learner, config("learner.claim_timeout_s=0.1"), first_group_id=0)
    with pytest.raises(SupplyDried, match=r"step 7: no complete batch within .*are actors running.*4 groups queued"):
        supply.next_batch(7, policy_version=0, published_version=0, shutdown=shutdown)


FAILED_BEFORE = (
    r"are actors running, and do their episodes end\? No attempt has failed since this wait began; 1 failed before it, "
    r"the last one: env_failure: the sun shone \("
)


def test_a_failure_from_before_the_wait_is_not_blamed_for_it(
    redis_client: redis.Redis, run_id: str, shutdown: Shutdown
) -> None:
    buffer = make_buffer(redis_client, run_id, lease_ttl_s=0.05)
    buffer.learner.acquire_epoch()
    supply = Supply(buffer.learner, config("learner.claim_timeout_s=0.3"), first_group_id=0)
    supply.admit(1, [], published_version=0)
    lease = buffer.actor.lease("a")
    assert lease is not None
    buffer.actor.fail(lease, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="the sun shone")
    buffer.actor.release(lease)
    with pytest.raises(SupplyDried, match=FAILED_BEFORE):
        supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)

    def fails_meanwhile(_: float) -> None:
        lease = buffer.actor.lease("a")
        if lease is not None:
            buffer.actor.fail(lease, 1, attempt=0, outcome=Outcome.ENV_FAILURE, reason="it rained")

    supply = Supply(buffer.learner, config("learner.claim_timeout_s=0.3"), first_group_id=4, sleep=fails_meanwhile)
    expired = r"leases expired: an actor stopped sending heartbeats .*; \d+ attempts failed; the last one: .*"
    with pytest.raises(SupplyDried, match=expired):
        supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)


def test_a_supply_of_groups_that_teach_nothing_says_so(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    supply = Supply(buffer.learner, config("learner.claim_timeout_s=0.3"), first_group_id=0)
    supply.admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=lambda _: (-0.15, -0.15))
    with pytest.raises(SupplyDried, match=r"in 4 groups all members had the same return, -0\.15 on .*warm start"):
        supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)


@pytest.mark.parametrize(
    ("returns", "reason"),
    [((0.0, 0.0), "no episode earns anything: use a warm start"), ((0.5, 0.5), "siblings earn the same: use easier")],
)
def test_hopeless_tasks_and_equal_siblings_end_the_run_with_an_error_each(
    buffer: Views, run_id: str, shutdown: Shutdown, returns: tuple[float, float], reason: str
) -> None:
    with pytest.raises(SupplyDried, match=reason):
        batch_of_equals(buffer, run_id, shutdown, returns=returns)


def test_where_all_tasks_are_solved_the_deadline_ends_the_run_as_finished(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    batch = batch_of_equals(buffer, run_id, shutdown, returns=(1.0, 1.0))
    assert batch is not None and batch.groups == []
    assert batch.num_dropped["zero_variance"] >= FEWEST_EPISODES / 2
    assert buffer.learner.ledger().claimed == 0 and buffer.audit() == []
    assert merged([batch, msgspec.structs.replace(batch, groups=[group_earning(0.5, 0.5)])]).groups == []


def test_an_actor_that_is_gone_is_no_sign_of_solved_tasks(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    dead = Diagnosis(cause="no actor is alive", evidence="none sends heartbeats", next_step="start one")
    with pytest.raises(SupplyDried, match="no actor is alive"):
        batch_of_equals(buffer, run_id, shutdown, returns=(1.0, 1.0), found=lambda: dead)


def batch_of_equals(
    buffer: Views, run_id: str, shutdown: Shutdown, *, returns: tuple[float, float], **of_supply: Any
) -> Batch | None:
    """The next batch of a supply whose groups all have members with these returns, and of which some are left."""
    rounds = iter(range(40))

    def sleep(_: float) -> None:
        if next(rounds, None) is not None:
            work(buffer.actor, run_id, returns=lambda _: returns)
        else:
            time.sleep(0.05)

    settings = config("learner.claim_timeout_s=3")
    supply = Supply(buffer.learner, settings, first_group_id=0, sleep=sleep, **of_supply)
    return supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)


def test_what_is_wrong_with_the_run_comes_before_what_its_groups_lack(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    dead = Diagnosis(cause="no actor is alive", evidence="none sends heartbeats", next_step="start one")
    supply = Supply(buffer.learner, config("learner.claim_timeout_s=0.5"), first_group_id=0, found=lambda: dead)
    supply.admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=lambda _: (0.0, 0.0))
    with pytest.raises(SupplyDried, match=r"no actor is alive: none sends heartbeats; start one; in \d+ groups all"):
        supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)


def test_a_learner_that_was_asked_to_stop_gets_no_batch(buffer: Views, run_id: str, shutdown: Shutdown) -> None:
    shutdown.requested.set()
    supply = Supply(buffer.learner, config(), first_group_id=0)
    assert supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown) is None


def test_the_order_of_tasks_visits_all_before_any_twice_and_follows_the_seed() -> None:
    first_lap = [task_index(position, 50, 7) for position in range(50)]
    second_lap = [task_index(position, 50, 7) for position in range(50, 100)]
    assert sorted(first_lap) == sorted(second_lap) == list(range(50))
    assert first_lap != second_lap
    assert first_lap != list(range(50))
    assert [task_index(position, 50, 7) for position in range(50)] == first_lap
    assert [task_index(position, 50, 8) for position in range(50)] != first_lap


def test_a_resumed_supply_continues_with_the_tasks_that_were_not_opened_yet(buffer: Views, run_id: str) -> None:
    Supply(buffer.learner, config(), first_group_id=0).admit(1, [], published_version=0)
    earlier = [lease.ticket.task.index for lease in work(buffer.actor, run_id, returns=differ)]
    buffer.learner.drop(range(4), reason="zero_variance")
    Supply(buffer.learner, config(), first_group_id=4).admit(1, [], published_version=0)
    later = [lease.ticket.task.index for lease in work(buffer.actor, run_id, returns=differ)]
    assert earlier + later == [task_index(position, 50, 0) for position in range(8)]


@pytest.mark.parametrize("advantage", ["reinforce_pp", "gae"])
def test_equal_returns_teach_something_where_the_batch_or_a_critic_is_compared_with(
    buffer: Views, run_id: str, shutdown: Shutdown, advantage: str
) -> None:
    supply = Supply(buffer.learner, config(f"objective.advantage={advantage}"), first_group_id=0)
    supply.admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=lambda group_id: (1.0, 1.0))
    batch = supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    assert batch is not None
    assert [group.ticket.group_id for group in batch.groups] == [0, 1]
    assert batch.num_dropped == {} == buffer.learner.ledger().dropped


def test_of_a_steps_candidates_those_whose_returns_differ_most_are_kept(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    settings = config("replay.keep_fraction=0.5", "objective.advantage=gae", "learner.steps=2")
    supply = Supply(buffer.learner, settings, first_group_id=0)
    supply.admit(1, [], published_version=0)
    assert buffer.learner.ledger().queued == 8  # four candidates for each of two steps
    spread = {0: 0.1, 1: 0.4, 2: 0.0, 3: 0.4}
    work(buffer.actor, run_id, returns=lambda group_id: (0.0, spread.get(group_id, 1.0)))
    batches = []
    for step in (1, 2):
        batch = supply.next_batch(step, policy_version=0, published_version=0, shutdown=shutdown)
        assert batch is not None
        batches.append([group.ticket.group_id for group in batch.groups])
        assert batch.num_dropped == {"low_variance": 2}
    assert batches == [[1, 3], [4, 5]]  # of those that differ alike the older ones
    ledger = buffer.learner.ledger()
    assert (ledger.dropped, ledger.claimed, ledger.queued, ledger.opened) == ({"low_variance": 4}, 4, 0, 8)
    assert buffer.audit() == []


def test_groups_that_wait_for_a_judge_take_up_room_and_are_named_when_the_supply_dries(
    buffer: Views, run_id: str, shutdown: Shutdown
) -> None:
    """The environment gives all siblings the same, and the judge's marks differ."""
    judge = "{part: judge, url: 'http://127.0.0.1:1/v1', model: m, compare: listwise, rubric: "
    judge += "{text: x, scale: [0, 1], criteria: {a: b}}}"
    settings = config(f"env.rewards.better={judge}", "replay.target_lag=0", "learner.claim_timeout_s=0.2")
    supply = Supply(buffer.learner, settings, first_group_id=0)
    supply.admit(1, [], published_version=0)
    work(buffer.actor, run_id, returns=lambda group_id: (1.0, 1.0))
    assert buffer.learner.ledger().judging == 2
    with pytest.raises(SupplyDried, match=r"2 groups wait for their judge: is `slipstream serve judge` running"):
        supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    supply._config.env.rewards["better"] |= {"url": "actors", "model": ""}
    with pytest.raises(SupplyDried, match=r"2 groups wait for their judge: the actors judge them: are any running\?"):
        supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    assert buffer.learner.ledger().queued == 0, "nothing is opened in their place"
    while (judging := buffer.judge.lease("j")) is not None:
        buffer.judge.store(judging, verdict_on(judging, 0.25, 0.75))
    batch = supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    assert batch is not None
    assert [[t.total_reward for t in group.trajectories] for group in batch.groups] == [[1.5, 2.5]] * 2
