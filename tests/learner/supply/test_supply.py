"""The learner's supply against a real buffer, with the actors' work done by hand."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import Fork, Outcome
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.supply.curriculum import task_index
from slipstream.learner.supply.supply import Supply, SupplyDried
from slipstream.replay.records.ledger import Ledger
from slipstream.replay.records.ticket import Lease
from slipstream.replay.run.diagnosis import FEWEST_EPISODES, Diagnosis
from tests.replay.records.attempts import Views, earning, ids, leased, make_buffer, turn, verdict_on

SYNCHRONOUS = ("replay.target_lag=0", "replay.max_lag=0", "learner.steps=9")


def config(*overrides: str) -> Config:
    """Groups of two, two groups a step, one step ahead."""
    sizes = ["replay.group_size=2", "replay.groups_per_step=2", "replay.target_lag=1", "env.num_train_tasks=50"]
    return load_config(None, [*sizes, "learner.claim_timeout_s=20", *overrides])


def work(buffer: Views, *, returns: Callable[[int], tuple[float, float]]) -> list[Lease]:
    """Do what actors do with all that is queued: the members of group `id` earn `returns(id)`."""
    leases = []
    while (lease := buffer.actor.lease("a")) is not None:
        buffer.earn(lease, *returns(lease.ticket.group_id))
        leases.append(lease)
    return leases


def ahead_of(step: int, version: int = 0) -> Progress:
    """A learner about to make `step` with the weights of `version`, which it has published."""
    return Progress(step=step - 1, policy_version=version, highest_published=version, next_group_id=0, tokens_trained=0)


class Scene:
    """A buffer, its actors' work and the supplies of its learner."""

    def __init__(self, buffer: Views, run_id: str, shutdown: Shutdown) -> None:
        self.buffer, self.learner, self.actor = buffer, buffer.learner, buffer.actor
        self.run_id, self.shutdown = run_id, shutdown

    def supply(self, *overrides: str, first: int = 0, **named: Any) -> Supply:
        return Supply(self.learner, config(*overrides), first_group_id=first, **named)

    def admitted(self, *overrides: str, version: int = 0, **named: Any) -> Supply:
        """A supply that has opened the groups of step 1."""
        supply = self.supply(*overrides, **named)
        supply.admit(1, [], published_version=version)
        return supply

    def work(self, returns: Callable[[int], tuple[float, float]] = lambda group_id: (0.0, 1.0)) -> list[Lease]:
        return work(self.buffer, returns=returns)

    def batch(self, supply: Supply, step: int = 1, version: int = 0) -> Batch:
        return supply.next_batch(ahead_of(step, version), self.shutdown)

    def dries(self, supply: Supply, step: int = 1, version: int = 0, match: str | None = None) -> None:
        with pytest.raises(SupplyDried, match=match):
            self.batch(supply, step, version)

    @property
    def ledger(self) -> Ledger:
        return self.learner.ledger()

    @property
    def under_way(self) -> int:
        return self.ledger.queued + self.ledger.leased + self.ledger.ready


@pytest.fixture
def scene(buffer: Views, run_id: str, shutdown: Shutdown) -> Scene:
    return Scene(buffer, run_id, shutdown)


@pytest.mark.parametrize("steps_since", [0, 2, 3])
def test_what_was_reopened_ages_by_steps_since_a_resume_not_by_skipped_numbers(scene: Scene, steps_since: int) -> None:
    """Four groups by version 0, the checkpoint's; 9 were published, so the learner came back as version 10."""
    scene.admitted()
    scene.work()
    begun = Progress(step=0, policy_version=0, highest_published=9, next_group_id=4, tokens_trained=0)
    at = msgspec.structs.replace(begun.resumed_as(10), step=steps_since, policy_version=10 + steps_since)
    supply = scene.supply("replay.max_lag=2", "learner.claim_timeout_s=0.3", first=at.next_group_id)
    if steps_since <= 2:
        assert len(supply.next_batch(at, scene.shutdown).groups) == 2 and scene.ledger.dropped == {}
    else:
        with pytest.raises(SupplyDried):
            supply.next_batch(at, scene.shutdown)
        assert scene.ledger.dropped == {"too_old": 4}


@pytest.mark.parametrize(
    ("lag", "steps", "admitted", "num_under_way"),
    [
        (2, 100, (1, 1), 6),  # 2 groups a step, for this one and two ahead
        (2, 10, (10,), 2),  # a run that ends soon admits no more than it needs
        (2, 10, (10, 9), 4),
        (0, 10, (1,), 2),  # synchronous
    ],
)
def test_as_many_groups_are_admitted_as_the_lag_allows(
    scene: Scene, lag: int, steps: int, admitted: tuple[int, ...], num_under_way: int
) -> None:
    supply = scene.supply(f"replay.target_lag={lag}", f"learner.steps={steps}")
    for step in admitted:
        supply.admit(step, [], published_version=0)
    assert scene.under_way + scene.ledger.claimed == num_under_way


def test_every_state_but_trained_and_dropped_takes_up_room(scene: Scene) -> None:
    supply = scene.admitted("replay.target_lag=2", "learner.steps=100")
    leases = scene.work()
    assert scene.ledger.ready == 6
    supply.admit(1, [], published_version=0)
    assert scene.ledger.queued == 0
    kept = scene.learner.claim(1, 2, policy_version=0, max_lag=4)
    supply.admit(1, kept, published_version=0)  # the two are this step's own, and still count
    assert scene.ledger.queued == 0
    scene.learner.drop([leases[2].ticket.group_id], reason="zero_variance")
    supply.admit(1, kept, published_version=0)
    assert scene.ledger.queued == 1
    supply.admit(2, [], published_version=0)  # the next step: what was claimed is behind it
    assert scene.ledger.queued == 3


def test_tickets_say_what_the_configuration_says(scene: Scene) -> None:
    supply = scene.supply("run.seed=5", "sampling.temperature=0.7", "sampling.max_turn_tokens=9", first=40)
    supply.admit(3, [], published_version=6)
    ticket = leased(scene.buffer).ticket
    assert (ticket.group_id, ticket.num_members, ticket.seed, ticket.min_policy_version) == (40, 2, 5, 5)
    assert (ticket.task.env, ticket.task.split) == ("shop", "train")
    assert (ticket.sampling.temperature, ticket.sampling.max_turn_tokens) == (0.7, 9)


def test_a_batch_is_whole_and_in_order_of_ids(scene: Scene) -> None:
    supply = scene.admitted()
    first = leased(scene.buffer, "straggler")
    assert first.ticket.min_policy_version == 0, "none is asked for below it"
    scene.work()  # 1, 2 and 3
    scene.buffer.earn(first, 0.0, 1.0)
    batch = scene.batch(supply)
    assert (ids(batch.groups), batch.num_dropped, batch.next_group_id) == ([1, 2], {}, 4)
    assert [[member.total_reward for member in group.trajectories] for group in batch.groups] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(("lag", "num_steps", "num_opened", "num_ready"), [(1, 9, 10, 2), (0, 4, 4, 0)])
def test_groups_that_are_used_twice_are_half_as_many_and_counted_once(
    scene: Scene, lag: int, num_steps: int, num_opened: int, num_ready: int
) -> None:
    """Actors always keep up. With a lag, the last two groups had one step left to be used in."""
    supply = scene.supply("replay.max_uses=2", f"replay.target_lag={lag}", f"learner.steps={num_steps}")
    batches = []
    for step in range(1, num_steps + 1):
        supply.admit(step, [], published_version=0)
        scene.work()
        batches.append(ids(scene.batch(supply, step).groups))
        scene.work()
        scene.learner.settle(step)
    assert batches[:4] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    ledger = scene.ledger
    assert (ledger.opened, ledger.ready, ledger.dropped) == (num_opened, num_ready, {})
    assert ledger.trained == num_opened - num_ready and scene.buffer.audit() == []
    assert list(supply._taught) == [True] * num_opened, "the share of groups that teach counts none twice"


def test_no_group_is_used_twice_in_one_step(scene: Scene) -> None:
    scene.admitted("replay.max_uses=2")
    scene.work(lambda group_id: (0.0, float(group_id > 0)))
    assert scene.ledger.ready == 2  # 0, which teaches nothing, and 1
    twice = ["replay.max_uses=2", "objective.allocation=per_turn", "learner.claim_timeout_s=0.2"]
    scene.dries(scene.supply(*twice, first=2))
    ledger = scene.ledger
    assert (ledger.dropped, ledger.ready, ledger.ready_uses) == ({"zero_variance": 1}, 1, 1)
    assert ledger.queued >= 1 and scene.buffer.audit() == []  # another for this step: 1 has been used in it


def test_groups_without_variance_are_dropped_and_replaced(scene: Scene) -> None:
    scene.admitted()
    equal = {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (0.5, 0.5 + 1e-9)}
    scene.work(lambda group_id: equal.get(group_id, (0.0, 1.0)))
    # The useless ones come with the first claim, although 3 alone is no batch; no actor plays their replacements yet.
    scene.dries(scene.supply("learner.claim_timeout_s=0.2", first=4))
    # Beside 3, three must teach, and 40 % are expected to: two as if before the first, and none of three.
    ledger = scene.ledger
    assert (ledger.dropped, ledger.claimed, ledger.ready, ledger.queued) == ({"zero_variance": 3}, 0, 1, 8)
    assert ledger.balanced and scene.buffer.audit() == []


@pytest.mark.parametrize(
    ("settings", "num_opened"),
    [
        ((), 4),  # of the four ready groups, two teach: as many must still be found
        (("replay.drop_zero_variance=false",), 2),
        (("objective.allocation=per_turn",), 2),  # not known of a ready group; none was found that does not, so far
    ],
)
def test_ready_groups_count_as_far_as_they_teach(scene: Scene, settings: tuple[str, ...], num_opened: int) -> None:
    """Six groups are played while a step is made, and every second one has equal returns."""
    supply = scene.admitted("replay.target_lag=2", *settings)
    scene.work(lambda group_id: (0.0, float(group_id % 2 or group_id < 2)))
    assert scene.batch(supply) is not None
    assert (scene.ledger.ready, scene.ledger.ready_equal) == (4, 2)
    supply.admit(2, [], published_version=1)
    assert scene.ledger.opened - 6 == num_opened and scene.buffer.audit() == []


def test_groups_that_are_not_urgent_prefer_the_newest_weights(scene: Scene) -> None:
    """The first groups may be played by any version that the lag allows; a step that has its groups is in no hurry."""
    supply = scene.admitted("replay.target_lag=2", "learner.steps=9", version=3)
    tickets = [lease.ticket for lease in scene.work()]
    assert {(each.min_policy_version, each.preferred_policy_version) for each in tickets} == {(1, 1)}
    scene.batch(supply, 1, 4)
    supply.admit(2, [], published_version=5)  # the groups of this step are ready
    tickets = [lease.ticket for lease in scene.work()]
    assert {(each.min_policy_version, each.preferred_policy_version) for each in tickets} == {(3, 5)}


def test_gigpo_keeps_groups_of_equal_returns_in_which_one_came_sooner(scene: Scene) -> None:
    """Both members of groups 0 and 1 earn 1, from the same state; one of group 1 with the first of its two turns."""
    supply = scene.admitted("objective.advantage=gigpo", "objective.gamma=0.9", "learner.claim_timeout_s=0.2")
    while (lease := scene.actor.lease("a")) is not None:
        for member in (0, 1):
            attempt = scene.buffer.attempt(lease, member)
            sooner = member == 1 and lease.ticket.group_id == 1
            turns = [turn(2, 3, float(sooner), state="start"), turn(3, 4, float(not sooner), state="next")]
            scene.actor.insert(lease, msgspec.structs.replace(attempt, turns=turns))
    scene.dries(supply)
    assert (scene.ledger.dropped, scene.ledger.claimed) == ({"zero_variance": 3}, 1)


def test_what_was_sampled_otherwise_than_the_learner_reckons_is_dropped(scene: Scene) -> None:
    scene.admitted("sampling.temperature=0.7")
    scene.work()
    supply = scene.supply("learner.claim_timeout_s=0.2", first=4)
    scene.dries(supply)
    assert scene.ledger.dropped == {"other_sampling": 4}
    scene.work()
    assert {group.ticket.sampling.temperature for group in scene.batch(supply).groups} == {1.0}


@pytest.mark.parametrize("advantage", ["group_standardised", "gigpo", "gae", "reinforce_pp"])
def test_groups_of_trees_are_dropped_where_an_objective_counts_tokens_twice(scene: Scene, advantage: str) -> None:
    scene.admitted("replay.group_size=3", "replay.trees=random:2", "objective.advantage=tree")
    while (lease := scene.actor.lease("a")) is not None:
        for member in range(3):
            attempt = earning(scene.buffer.attempt(lease, member), float(member))
            (whole,) = attempt.turns
            turns = [msgspec.structs.replace(whole, stop=3), msgspec.structs.replace(whole, start=3)]
            fork = Fork(parent=0, num_turns=1) if member == 2 and lease.ticket.group_id else None
            scene.actor.insert(lease, msgspec.structs.replace(attempt, turns=turns, fork=fork))
    other = config("replay.group_size=3", "learner.claim_timeout_s=0.2")
    other.objective.advantage = advantage
    scene.dries(Supply(scene.learner, other, first_group_id=4))
    assert (scene.ledger.dropped, scene.ledger.claimed) == ({"other_sampling": 3}, 1), "only group 0 has no fork"


def test_a_step_takes_the_oldest_groups_whatever_they_earned_where_none_is_dropped(scene: Scene) -> None:
    supply = scene.admitted("replay.drop_zero_variance=false", "learner.steps=9")
    scene.work(lambda group_id: (float(group_id == 1), 0.0))  # only in group 1 do returns differ
    batch = scene.batch(supply)
    assert (ids(batch.groups), batch.num_dropped) == ([0, 1], {})
    ledger = scene.ledger
    assert (ledger.opened, ledger.dropped, ledger.balanced) == (4, {}, True), "a step ahead, and no more"


def test_a_batch_counts_what_was_dropped_on_its_way(scene: Scene) -> None:
    supply = scene.admitted()
    scene.work(lambda group_id: (0.0, float(group_id >= 2)))
    batch = scene.batch(supply)
    assert (ids(batch.groups), batch.num_dropped, batch.dropped_returns) == ([2, 3], {"zero_variance": 2}, [0.0] * 4)
    # Two more must teach, and two of three are expected to: two as if before the first, and two of four.
    assert [lease.ticket.group_id for lease in scene.work()] == [4, 5, 6]


def test_the_last_steps_leave_no_group_over(scene: Scene) -> None:
    """Two of three groups teach nothing; three times as many are opened, but not for the last steps."""

    def play(_: float = 0.0) -> None:
        scene.work(lambda group_id: (0.0, float(group_id % 3 == 0)))

    supply, opened = scene.supply("learner.steps=12", sleep=play), []
    for step in range(1, 13):
        assert scene.batch(supply, step) is not None
        opened.append(scene.ledger.opened)
    assert opened[9] - opened[8] == pytest.approx(6, abs=3), "a step needs two that teach"
    assert (scene.ledger.claimed, scene.under_way) == (24, 0)


def test_a_synchronous_step_opens_and_trains_the_same_groups_whichever_are_fast(scene: Scene) -> None:
    """Two actors finish them in opposite orders. The first ones by id are trained."""

    def batches(run: Scene, *, reverse: bool) -> list[list[int]]:
        def play(_: float = 0.0) -> None:
            leases = list(iter(lambda: run.actor.lease("a"), None))
            for lease in reversed(leases) if reverse else leases:
                run.buffer.earn(lease, 0.0, float(lease.ticket.group_id // 5 % 2))

        supply = run.supply(*SYNCHRONOUS, sleep=play)
        found = [ids(run.batch(supply, step).groups) for step in range(1, 7)]
        assert run.ledger.balanced and run.under_way == 0
        assert set(run.ledger.dropped) == {"zero_variance", "surplus"}, "some steps opened more than they needed"
        return [*found, [run.ledger.opened]]

    other_id = f"{scene.run_id}-other"
    other = make_buffer(scene.buffer.client, other_id)
    other.learner.acquire_epoch()
    assert batches(scene, reverse=False) == batches(Scene(other, other_id, scene.shutdown), reverse=True)


def test_a_synchronous_step_replaces_a_group_while_later_ones_are_played_and_waits_for_no_surplus(scene: Scene) -> None:
    leases, under_way = dict[int, Lease](), list[tuple[int, int]]()

    def end_one(_: float = 0.0) -> None:
        """End the group of the lowest id that is played; groups 0 and 2 teach nothing."""
        while (lease := scene.actor.lease("a")) is not None:
            leases[lease.ticket.group_id] = lease
        under_way.append((min(leases), max(leases)))
        lease = leases.pop(min(leases))
        scene.buffer.earn(lease, 0.0, float(lease.ticket.group_id not in (0, 2)))

    batch = scene.batch(scene.supply(*SYNCHRONOUS, sleep=end_one))
    # Two are opened; after group 0 two of three are expected to teach, so two more are; after group 2 one more is.
    assert (ids(batch.groups), under_way) == ([1, 3], [(0, 1), (1, 3), (2, 3), (3, 4)])
    assert batch.num_dropped == {"zero_variance": 2, "surplus": 1} == scene.ledger.dropped
    assert leases.keys() == {4} and scene.under_way == 0


def test_a_synchronous_step_waits_for_no_group_that_has_failed_for_good(scene: Scene) -> None:
    def play(_: float = 0.0) -> None:
        while (lease := scene.actor.lease("a")) is not None:
            if lease.ticket.group_id == 0:
                for attempt in range(3):
                    scene.actor.fail(lease, 0, attempt=attempt, outcome=Outcome.ENV_FAILURE, reason="it broke")
                continue
            scene.buffer.earn(lease, 0.0, 1.0)

    batch = scene.batch(scene.supply(*SYNCHRONOUS, sleep=play))
    assert (ids(batch.groups), scene.ledger.dropped) == ([1, 2], {"env_failure": 1})


def test_a_resumed_synchronous_learner_awaits_the_groups_of_the_one_before_it(scene: Scene) -> None:
    """Four groups are played for step 1 when its learner is killed, and the later ones are finished first."""
    killed = scene.supply(*SYNCHRONOUS)
    killed._taught += [False, False]
    killed.admit(1, [], published_version=0)
    leases = [leased(scene.buffer) for _ in range(4)]

    after = make_buffer(scene.buffer.client, scene.run_id).learner
    after.acquire_epoch()
    sleep = lambda _: scene.buffer.earn(leases.pop(), 0.0, 1.0)  # noqa: E731
    batch = scene.batch(Supply(after, config(*SYNCHRONOUS), first_group_id=0, sleep=sleep))
    assert ids(batch.groups) == [0, 1]
    ledger = after.ledger()
    assert (ledger.queued, ledger.leased, ledger.ready) == (0, 0, 0), "none is left for the next step"
    assert ledger.dropped == {"surplus": 2} == batch.num_dropped


def test_a_synchronous_step_leaves_a_quarantined_group_in_quarantine(scene: Scene) -> None:
    """Groups 0 and 2 teach nothing, so that five are opened. Group 4 is finished first, and its payload is poison."""
    leases = dict[int, Lease]()

    def finish_one(_: float) -> None:
        leases.update({lease.ticket.group_id: lease for lease in iter(lambda: scene.actor.lease("a"), None)})
        group_id = 4 if 4 in leases else min(leases)
        scene.buffer.earn(leases.pop(group_id), 0.0, float(group_id not in (0, 2)))
        if group_id == 4:
            for name in scene.buffer.names("blob:4"):
                scene.buffer.client.set(name, b"garbage")

    batch = scene.batch(scene.supply(*SYNCHRONOUS, sleep=finish_one))
    assert ids(batch.groups) == [1, 3]
    assert [found.group_id for found in scene.buffer.quarantined()] == [4]
    assert (scene.ledger.quarantined, scene.ledger.dropped) == (1, batch.num_dropped)
    assert scene.buffer.audit() == []


def test_groups_that_grew_too_old_are_dropped_and_replaced(scene: Scene) -> None:
    supply = scene.admitted("learner.claim_timeout_s=0.2", "replay.max_lag=1")
    scene.work()
    scene.dries(supply, 3, 2)
    assert (scene.ledger.dropped, scene.ledger.queued) == ({"too_old": 4}, 4)


def test_a_dry_supply_says_what_the_buffer_holds(scene: Scene) -> None:
    supply = scene.supply("learner.claim_timeout_s=0.1")
    scene.dries(supply, 7, match=r"step 7: no complete batch within .*are actors running.*4 groups queued")


def test_an_earlier_failure_is_not_blamed(redis_client: redis.Redis, run_id: str, shutdown: Shutdown) -> None:
    scene = Scene(make_buffer(redis_client, run_id, lease_ttl_s=0.05), run_id, shutdown)
    scene.learner.acquire_epoch()
    supply = scene.admitted("learner.claim_timeout_s=0.3")
    lease = leased(scene.buffer)
    scene.actor.fail(lease, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="the sun shone")
    scene.actor.release(lease)
    before = "No attempt has failed since this wait began; 1 failed before it, the last one: env_failure: the sun shone"
    scene.dries(supply, match=rf"are actors running, and do their episodes end\? {before} \(")

    def fails_meanwhile(_: float) -> None:
        if (lease := scene.actor.lease("a")) is not None:
            scene.actor.fail(lease, 1, attempt=0, outcome=Outcome.ENV_FAILURE, reason="it rained")

    supply = scene.supply("learner.claim_timeout_s=0.3", first=4, sleep=fails_meanwhile)
    expired = r"leases expired: an actor stopped sending heartbeats .*; \d+ attempts failed; the last one: .*"
    scene.dries(supply, match=expired)


@pytest.mark.parametrize(
    ("returns", "reason"),
    [
        ((0.0, 0.0), "0 on average.*; no episode earns anything: use"),
        ((0.5, 0.5), r"0\.5 on .*; siblings earn the same"),
    ],
)
def test_hopeless_tasks_and_equal_siblings_end_the_run(scene: Scene, returns: tuple[float, float], reason: str) -> None:
    with pytest.raises(SupplyDried, match=rf"in \d+ groups all members had the same return, {reason}"):
        batch_of_equals(scene, returns=returns)


def test_where_all_tasks_are_solved_the_deadline_ends_the_run_as_finished(scene: Scene) -> None:
    batch = batch_of_equals(scene, returns=(1.0, 1.0))
    assert batch.groups == [] and batch.num_dropped["zero_variance"] >= FEWEST_EPISODES / 2
    assert scene.ledger.claimed == 0 and scene.buffer.audit() == []


def test_an_actor_that_is_gone_is_no_sign_of_solved_tasks(scene: Scene) -> None:
    dead = Diagnosis(cause="no actor is alive", evidence="none sends heartbeats", next_step="start one")
    with pytest.raises(SupplyDried, match=r"no actor is alive: none sends heartbeats; start one; in \d+ groups all"):
        batch_of_equals(scene, returns=(1.0, 1.0), found=lambda: dead)


def batch_of_equals(scene: Scene, *, returns: tuple[float, float], **of_supply: Any) -> Batch:
    """The next batch of a supply whose groups all have members with these returns, and of which some are left."""
    rounds = iter(range(20))

    def sleep(_: float) -> None:
        if next(rounds, None) is not None:
            scene.work(lambda _: returns)
        else:
            time.sleep(0.05)

    return scene.batch(scene.supply("learner.claim_timeout_s=3", sleep=sleep, **of_supply))


def test_a_learner_that_was_asked_to_stop_gets_no_batch(scene: Scene) -> None:
    scene.shutdown.requested.set()
    assert scene.batch(scene.supply()) is None


def test_the_order_of_tasks_visits_all_before_any_twice_and_follows_the_seed() -> None:
    first_lap = [task_index(position, 50, 7) for position in range(50)]
    second_lap = [task_index(position, 50, 7) for position in range(50, 100)]
    assert sorted(first_lap) == sorted(second_lap) == list(range(50))
    assert first_lap != second_lap and first_lap != list(range(50))
    assert [task_index(position, 50, 7) for position in range(50)] == first_lap
    assert [task_index(position, 50, 8) for position in range(50)] != first_lap


def test_a_resumed_supply_continues_with_the_tasks_that_were_not_opened_yet(scene: Scene) -> None:
    scene.admitted()
    earlier = [lease.ticket.task.index for lease in scene.work()]
    scene.learner.drop(range(4), reason="zero_variance")
    scene.admitted(first=4)
    later = [lease.ticket.task.index for lease in scene.work()]
    assert earlier + later == [task_index(position, 50, 0) for position in range(8)]


def test_of_a_steps_candidates_those_whose_returns_differ_most_are_kept(scene: Scene) -> None:
    supply = scene.admitted("replay.keep_fraction=0.5", "objective.advantage=gae", "learner.steps=2")
    assert scene.ledger.queued == 8  # four candidates for each of two steps
    spread = {0: 0.1, 1: 0.4, 2: 0.0, 3: 0.4}
    scene.work(lambda group_id: (0.0, spread.get(group_id, 1.0)))
    batches = []
    for step in (1, 2):
        batch = scene.batch(supply, step)
        batches.append(ids(batch.groups))
        assert batch.num_dropped == {"low_variance": 2}
    assert batches == [[1, 3], [4, 5]]  # of those that differ alike the older ones
    ledger = scene.ledger
    assert (ledger.dropped, ledger.claimed, ledger.queued, ledger.opened) == ({"low_variance": 4}, 4, 0, 8)
    assert scene.buffer.audit() == []


def test_groups_that_wait_for_a_judge_take_up_room_and_are_named_when_the_supply_dries(scene: Scene) -> None:
    """The environment gives all siblings the same, and the judge's marks differ."""
    judge = "{part: judge, url: 'http://127.0.0.1:1/v1', model: m, compare: listwise, rubric: "
    judge += "{text: x, scale: [0, 1], criteria: {a: b}}}"
    supply = scene.admitted(f"env.rewards.better={judge}", "replay.target_lag=0", "learner.claim_timeout_s=0.2")
    scene.work(lambda group_id: (1.0, 1.0))
    assert scene.ledger.judging == 2
    scene.dries(supply, match=r"2 groups wait for their judge: is `slipstream serve judge` running")
    supply._config.env.rewards["better"] |= {"url": "actors", "model": ""}
    scene.dries(supply, match=r"2 groups wait for their judge: the actors judge them: are any running\?")
    assert scene.ledger.queued == 0, "nothing is opened in their place"
    while (judging := scene.buffer.judge.lease("j")) is not None:
        scene.buffer.judge.store(judging, verdict_on(judging, 0.25, 0.75))
    batch = scene.batch(supply)
    assert [[t.total_reward for t in group.trajectories] for group in batch.groups] == [[1.5, 2.5]] * 2
