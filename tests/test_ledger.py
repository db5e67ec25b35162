"""The books balance after any action by anyone, and an audit finds what contradicts them."""

import os
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from common.trajectory import Outcome
from replay.audit import audit
from replay.buffer import Buffer
from replay.keys import FencedOut, epoch_key, key
from replay.ledger import read_ledger
from replay.ticket import InsertResult, Lease
from tests.attempts import attempt_at, make_buffer, ticket

NUM_EXAMPLES = int(os.environ.get("SLIPSTREAM_LEDGER_EXAMPLES", "150"))
MAX_ATTEMPTS = 3


@dataclass
class ModelGroup:
    """What a group should be, in plain Python."""

    num_members: int
    state: str = "queued"
    attempts: Counter[int] = field(default_factory=Counter)
    stored: dict[int, tuple[int, int]] = field(default_factory=dict)  # member -> (attempt, fence)
    oldest: int = 1 << 30
    finished: int = 0
    step: int = 0

    def missing(self) -> dict[int, int]:
        return {member: self.attempts[member] for member in range(self.num_members) if member not in self.stored}


class Books(RuleBasedStateMachine):
    """Three actors and two learners do anything at any time; a model says what should have come of it."""

    client: redis.Redis
    num_runs = 0

    def __init__(self) -> None:
        super().__init__()
        Books.num_runs += 1
        self.run_id = f"books-{os.getpid()}-{Books.num_runs}"
        for stale in self.client.scan_iter(f"slipstream:{{{self.run_id}}}:*"):
            self.client.delete(stale)
        self.learners = [make_buffer(self.client, self.run_id, max_attempts=MAX_ATTEMPTS) for _ in range(2)]
        self.actor_side = make_buffer(self.client, self.run_id, max_attempts=MAX_ATTEMPTS)
        self.newest = 0
        self.learners[0].acquire_epoch()
        self.groups: dict[int, ModelGroup] = {}
        self.leases: list[tuple[str, Lease]] = []  # every lease ever given, zombies included
        self.fences: dict[int, int] = {}  # group -> the fence that holds it
        self.trained = self.inserted = self.trained_trajectories = self.num_finished = self.settled_step = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_trajectories: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def teardown(self) -> None:
        for name in self.client.scan_iter(f"slipstream:{{{self.run_id}}}:*"):
            self.client.delete(name)

    @property
    def learner(self) -> Buffer:
        return self.learners[self.newest]

    def in_state(self, *states: str) -> list[int]:
        return sorted(group_id for group_id, group in self.groups.items() if group.state in states)

    def ready_in_order(self) -> list[int]:
        return sorted(self.in_state("ready"), key=lambda group_id: self.groups[group_id].finished)

    def close(self, group_id: int, reason: str) -> None:
        group = self.groups.pop(group_id)
        self.fences.pop(group_id, None)
        if reason == "trained":
            self.trained += 1
            self.trained_trajectories += len(group.stored)
        else:
            self.dropped[reason] += 1
            self.dropped_trajectories[reason] += len(group.stored)

    # --- Learners.

    @rule(num_groups=st.integers(1, 3), num_members=st.integers(1, 3), repeat=st.booleans())
    def open(self, num_groups: int, num_members: int, repeat: bool) -> None:
        first = self.counts["opened"]
        tickets = [ticket(group_id, num_members=num_members) for group_id in range(first, first + num_groups)]
        assert self.learner.open(tickets) == num_groups
        if repeat:
            assert self.learner.open(tickets) == 0
        for new in tickets:
            self.groups[new.group_id] = ModelGroup(num_members=num_members)
        self.counts["opened"] += num_groups

    @rule()
    def take_over(self) -> None:
        self.newest = 1 - self.newest
        self.learner.acquire_epoch()
        claimed = self.in_state("claimed")
        assert self.learner.reopen(self.settled_step) == len(claimed)
        for group_id in claimed:
            self.groups[group_id].state = "ready"

    @rule()
    def zombie_learner(self) -> None:
        zombie = self.learners[1 - self.newest]
        refusals = 0
        for verb in (
            lambda: zombie.open([ticket(1 << 20)]),
            lambda: zombie.claim(1, 1, policy_version=0, max_lag=0),
            lambda: zombie.drop([0], "zombie"),
            lambda: zombie.settle(1 << 20),
            lambda: zombie.reopen(-1),
        ):
            try:
                verb()
            except FencedOut:
                refusals += 1
        assert refusals == 5

    @rule(num_groups=st.integers(1, 3), policy_version=st.integers(0, 6), max_lag=st.integers(0, 4))
    def claim(self, num_groups: int, policy_version: int, max_lag: int) -> None:
        for group_id in self.in_state("ready"):
            if policy_version - self.groups[group_id].oldest > max_lag:
                self.close(group_id, "too_old")
        ready = self.ready_in_order()
        expected = ready[:num_groups] if len(ready) >= num_groups else []
        step = self.settled_step + num_groups
        claimed = self.learner.claim(step, num_groups, policy_version=policy_version, max_lag=max_lag)
        assert [group.ticket.group_id for group in claimed] == expected
        for group in claimed:
            model = self.groups[group.ticket.group_id]
            assert {t.member: t.attempt for t in group.trajectories} == {m: a for m, (a, _) in model.stored.items()}
            model.state, model.step = "claimed", step

    @rule(data=st.data(), repeat=st.booleans())
    @precondition(lambda self: self.groups)
    def drop(self, data: st.DataObject, repeat: bool) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.groups)))
        self.learner.drop([group_id], "zero_variance")
        if repeat:
            self.learner.drop([group_id], "zero_variance")
        self.close(group_id, "zero_variance")

    @rule(advance=st.integers(0, 3))
    def settle(self, advance: int) -> None:
        self.settled_step += advance
        done = [group_id for group_id in self.in_state("claimed") if self.groups[group_id].step <= self.settled_step]
        assert self.learner.settle(self.settled_step) == len(done)
        for group_id in done:
            self.close(group_id, "trained")

    # --- Actors.

    @rule(actor=st.sampled_from("abc"))
    def lease(self, actor: str) -> None:
        queued = self.in_state("queued")
        lease = self.actor_side.lease(actor)
        if not queued:
            assert lease is None
            return
        assert lease is not None and lease.ticket.group_id == queued[0]
        group = self.groups[queued[0]]
        assert lease.missing == group.missing()
        group.state = "leased"
        self.fences[queued[0]] = lease.fence
        self.leases.append((actor, lease))

    def draw_lease(self, data: st.DataObject) -> tuple[str, Lease, bool]:
        actor, lease = data.draw(st.sampled_from(self.leases))
        return actor, lease, self.fences.get(lease.ticket.group_id) == lease.fence

    @rule(data=st.data(), policy_version=st.integers(0, 6))
    @precondition(lambda self: self.leases)
    def insert(self, data: st.DataObject, policy_version: int) -> None:
        actor, lease, held = self.draw_lease(data)
        member = data.draw(st.sampled_from(sorted(lease.missing)))
        trajectory = attempt_at(lease, member, run_id=self.run_id, policy_version=policy_version, actor=actor)
        result = self.actor_side.insert(lease, trajectory)
        group = self.groups.get(lease.ticket.group_id)
        if group is not None and group.stored.get(member) == (trajectory.attempt, lease.fence):
            assert result is InsertResult.DUPLICATE
            self.counts["dedup_hits"] += 1
        elif group is None or not held or group.missing().get(member) != trajectory.attempt:
            assert result is InsertResult.FENCED
            self.counts["fenced_inserts"] += 1
        else:
            assert result is InsertResult.STORED
            self.store(lease, member, policy_version)

    def store(self, lease: Lease, member: int, policy_version: int) -> None:
        group_id = lease.ticket.group_id
        group = self.groups[group_id]
        group.stored[member] = (lease.missing[member], lease.fence)
        group.oldest = min(group.oldest, policy_version)
        self.inserted += 1
        if not group.missing():
            self.num_finished += 1
            group.state, group.finished = "ready", self.num_finished
            del self.fences[group_id]

    @rule(data=st.data(), policy_versions=st.lists(st.integers(0, 6), min_size=3, max_size=3))
    @precondition(lambda self: self.fences)
    def finish(self, data: st.DataObject, policy_versions: list[int]) -> None:
        """Random single inserts seldom finish a group, and the learner needs finished ones."""
        group_id = data.draw(st.sampled_from(sorted(self.fences)))
        actor, lease = next(held for held in self.leases if held[1].fence == self.fences[group_id])
        lease = msgspec.structs.replace(lease, missing=self.groups[group_id].missing())
        for member, policy_version in zip(list(lease.missing), policy_versions, strict=False):
            trajectory = attempt_at(lease, member, run_id=self.run_id, policy_version=policy_version, actor=actor)
            assert self.actor_side.insert(lease, trajectory) is InsertResult.STORED
            self.store(lease, member, policy_version)

    @rule(data=st.data(), repeat=st.booleans())
    @precondition(lambda self: self.leases)
    def fail(self, data: st.DataObject, repeat: bool) -> None:
        _, lease, held = self.draw_lease(data)
        member, group_id = data.draw(st.sampled_from(sorted(lease.missing))), lease.ticket.group_id
        attempt = lease.missing[member]
        current = self.groups[group_id].missing().get(member) if held else None
        if current is None:
            expected = None
        elif current != attempt:
            expected = current
        elif attempt + 1 < MAX_ATTEMPTS:
            expected = self.groups[group_id].attempts[member] = attempt + 1
            self.counts["redone_members"] += 1
        else:
            expected = None
            self.close(group_id, "env_failure")
        for _ in range(1 + repeat):
            found = self.actor_side.fail(lease, member, attempt=attempt, outcome=Outcome.ENV_FAILURE, reason="why")
            assert found == expected

    @rule(data=st.data())
    @precondition(lambda self: self.leases)
    def release(self, data: st.DataObject) -> None:
        _, lease, held = self.draw_lease(data)
        self.actor_side.release(lease)
        if held:
            self.groups[lease.ticket.group_id].state = "queued"
            del self.fences[lease.ticket.group_id]

    @rule(actor=st.sampled_from("abc"))
    def heartbeat(self, actor: str) -> None:
        mine = [lease for owner, lease in self.leases if owner == actor]
        held = {lease.ticket.group_id for lease in mine if self.fences.get(lease.ticket.group_id) == lease.fence}
        assert self.actor_side.heartbeat(actor, mine) == held

    @rule(data=st.data())
    @precondition(lambda self: self.fences)
    def time_passes_a_deadline(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.fences)))
        self.client.zadd(key(self.run_id, "train", "leased"), {str(group_id): 1})
        self.actor_side.heartbeat("somebody else", [])
        del self.fences[group_id]
        group = self.groups[group_id]
        self.counts["expired_leases"] += 1
        for member in group.missing():
            group.attempts[member] += 1
            self.counts["redone_members"] += 1
        if any(attempt >= MAX_ATTEMPTS for attempt in group.missing().values()):
            self.close(group_id, "lease_expired")
        else:
            group.state = "queued"

    # ---

    @invariant()
    def the_audit_finds_nothing(self) -> None:
        assert audit(self.client, self.run_id) == []

    @invariant()
    def the_books_agree_with_the_model(self) -> None:
        ledger = read_ledger(self.client, self.run_id)
        assert ledger.balanced
        assert (ledger.opened, ledger.trained, ledger.dropped) == (self.counts["opened"], self.trained, self.dropped)
        for state in ("queued", "leased", "ready", "claimed"):
            assert getattr(ledger, state) == len(self.in_state(state)), state
        assert (ledger.inserted, ledger.trained_trajectories) == (self.inserted, self.trained_trajectories)
        assert ledger.dropped_trajectories == +self.dropped_trajectories
        for name in ("dedup_hits", "fenced_inserts", "expired_leases", "redone_members"):
            assert getattr(ledger, name) == self.counts[name], name


def test_the_books_balance_after_any_action_of_actors_and_two_learners(redis_client: redis.Redis) -> None:
    Books.client = redis_client
    run_state_machine_as_test(
        Books,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Buffer:
    """Group 0 is ready, group 1 is leased with one of two members stored, group 2 is queued."""
    buffer = make_buffer(redis_client, run_id)
    buffer.acquire_epoch()
    buffer.open([ticket(0), ticket(1), ticket(2)])
    for members in ((0, 1), (0,)):
        lease = buffer.lease("a")
        assert lease is not None
        for member in members:
            buffer.insert(lease, attempt_at(lease, member, run_id=run_id))
    assert buffer.audit() == []
    return buffer


def test_a_ledger_in_words_says_whether_it_balances(buffer: Buffer) -> None:
    shown = buffer.ledger().to_dict()
    assert shown["balanced"] is True
    assert (shown["opened"], shown["ready"], shown["leased"], shown["queued"]) == (3, 1, 1, 1)
    assert (shown["inserted"], shown["held_trajectories"], shown["dropped"]) == (3, 3, {})


def test_an_empty_run_has_balanced_books(redis_client: redis.Redis, run_id: str) -> None:
    assert read_ledger(redis_client, run_id).balanced
    assert audit(redis_client, run_id) == []
    assert redis_client.exists(epoch_key(run_id)) == 0


def test_the_audit_names_a_counter_that_was_changed(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.hincrby(key(run_id, "train", "counters"), "ready", 1)
    found = buffer.audit()
    assert found[0] == "the books say 2 ready, a recount says 1"
    assert found[1].startswith("the books do not balance: {'opened': 3")


def test_the_audit_names_a_trajectory_counted_twice(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.hincrby(key(run_id, "train", "counters"), "trajectories:held", 1)
    assert buffer.audit()[0] == "the books say 4 held trajectories, a recount says 3"


def test_the_audit_names_a_lost_payload(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    blob = key(run_id, "train", "blob", 0, 1, 0, 1)
    assert redis_client.delete(blob) == 1
    assert buffer.audit() == [f"group 0 (ready) lost its payload {blob}"]


def test_the_audit_names_a_payload_about_to_expire(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    blob = key(run_id, "train", "blob", 0, 1, 0, 1)
    assert redis_client.expire(blob, 1000) == 1
    assert buffer.audit() == [f"group 0 (ready) will lose its payload {blob}"]


def test_the_audit_names_a_group_in_two_states(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.zadd(key(run_id, "train", "claimed"), {"0": 1})
    found = buffer.audit()
    assert "group 0 is in 2 states at once" in found
    assert "the books say 0 claimed, a recount says 1" in found


def test_the_audit_names_a_group_that_is_nowhere(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.zrem(key(run_id, "train", "queued"), "2")
    assert buffer.audit() == [
        "the books say 1 queued, a recount says 0",
        f"{key(run_id, 'train', 'group', 2)} belongs to no group",
    ]


def test_the_audit_names_a_group_that_does_not_exist(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.delete(key(run_id, "train", "group", 2))
    assert buffer.audit()[0] == "group 2 is queued and does not exist"


def test_the_audit_names_an_unfinished_group_that_is_ready(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    redis_client.zrem(key(run_id, "train", "leased"), "1")
    redis_client.zadd(key(run_id, "train", "ready"), {"1": 9})
    assert "group 1 (ready) has 1 of 2 members" in buffer.audit()


def test_the_audit_names_a_stray_payload(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    stray = key(run_id, "train", "blob", 5, 0, 0, 1)
    redis_client.set(stray, b"nobody's")
    assert buffer.audit() == [f"{stray} belongs to no group"]
