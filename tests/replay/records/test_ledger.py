"""The books balance after any action by anyone."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.common.process.connection import connect
from slipstream.common.records.trajectory import Outcome
from slipstream.replay.buffer.audit import audit
from slipstream.replay.buffer.bulk import Bulk
from slipstream.replay.buffer.judge_buffer import Judging
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.records import scripts
from slipstream.replay.records.keys import FencedOut, key
from slipstream.replay.records.ledger import read_ledger
from slipstream.replay.records.ticket import InsertResult, Lease
from slipstream.tools.lab.loopback_server import start_server
from tests.replay.records.attempts import Views, attempt_at, make_buffer, partial_of, ticket, verdict_on
from tests.replay.records.replay_model import Model

NUM_EXAMPLES = int(os.environ.get("SLIPSTREAM_LEDGER_EXAMPLES", "300"))
BATCH = 2000  # hypothesis remembers every example of a run: 50,000 in one take many gigabytes
MAX_ATTEMPTS, MAX_QUARANTINED = 3, 2
ZOMBIE_VERBS: dict[str, Callable[[LearnerBuffer], Any]] = {
    "open": lambda zombie: zombie.open([ticket(1 << 20)]),
    "claim": lambda zombie: zombie.claim(1, 1, policy_version=0, max_lag=0),
    "drop": lambda zombie: zombie.drop(range(99), "zombie"),
    "settle": lambda zombie: zombie.settle(1 << 20),
    "reopen": lambda zombie: zombie.reopen(0),
}
VERSIONS = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple)  # of the members of a group
LATE_VERBS = "acquire_epoch claim claim drop fail fail_judging lease lease_judging open release_judging"
FAILURES = (Outcome.ENV_FAILURE, Outcome.REPLAY_MISMATCH)


class LossyRedis(redis.Redis):
    """A client that loses every reply while `losing` is set, and sends the same commands again, as redis-py does."""

    loses_replies = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.answered: list[tuple[Any, ...]] = []  # scripts that were run, and had something to say

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        reply = super().execute_command(*arguments, **options)
        if self.loses_replies:
            reply = super().execute_command(*arguments, **options)
        if arguments[0] == "EVALSHA" and reply is not None:
            self.answered.append(arguments)
        return reply

    def deliver_again(self, command: tuple[Any, ...]) -> None:
        """What happens to a copy that was held up on its way; its answer is lost."""
        with contextlib.suppress(redis.ResponseError):
            super().execute_command(*command)


class LossyBulk(Bulk):
    """The bulk path of a LossyRedis."""

    def exchange(self, requests: Iterable[bytes], *, num_replies: int) -> list[list[Any]]:
        sent = list(requests)
        replies = super().exchange(sent, num_replies=num_replies)
        return super().exchange(sent, num_replies=num_replies) if self._client.loses_replies else replies


class Books(RuleBasedStateMachine):
    """Three actors, two learners and a person do anything at any time, and any reply may be lost."""

    client: LossyRedis  # of a database of its own

    def __init__(self) -> None:
        super().__init__()
        self.client.flushdb()
        self.client.answered.clear()
        self.run_id = "books"
        self.learner, self.zombie = self.new_learner(), self.new_learner()
        views = self.views()
        self.actor, self.judge, self.person = views.actor, views.judge, views.people
        self.last_fence = 0  # of leases of actors and judges
        self.epoch, self.num_epochs = self.learner.acquire_epoch(), 1
        self.step = self.settled_step = 0
        self.leases: list[tuple[str, Lease]] = []  # every lease ever given, zombies included
        self.judgings: list[tuple[str, Judging]] = []  # the same of judges

    def views(self) -> Views:
        return make_buffer(self.client, self.run_id, max_attempts=MAX_ATTEMPTS)

    def new_learner(self) -> LearnerBuffer:
        return self.views().learner

    @initialize(
        max_uses=st.integers(1, 3), versions=st.lists(VERSIONS, min_size=1, max_size=4), num_queued=st.integers(1, 3)
    )
    def begin(self, max_uses: int, versions: list[tuple[int, ...]], num_queued: int) -> None:
        self.model = Model(max_attempts=MAX_ATTEMPTS, max_quarantined=MAX_QUARANTINED, max_uses=max_uses)
        self.produce(versions)
        self.open(num_queued, 2, lost=False)

    def losing(self, lost: bool, verb: Callable[[], Any]) -> Any:
        """Call `verb`, where `lost` with every reply lost and every command sent twice."""
        self.client.loses_replies = lost
        try:
            return verb()
        finally:
            self.client.loses_replies = False

    def draw_groups(self, data: st.DataObject, *states: str) -> list[int]:
        """One or two groups, closed ones among them where no state is asked for."""
        known = self.model.in_state(*states) if states else range(self.model.counts["opened"])
        return data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True))

    # --- Learners.

    @rule(num_groups=st.integers(1, 3), num_members=st.integers(1, 3), is_judged=st.booleans(), lost=st.booleans())
    def open(self, num_groups: int, num_members: int, lost: bool, is_judged: bool = False) -> None:
        ids = self.model.open(num_groups, num_members, is_judged=is_judged)
        tickets = [ticket(group_id, num_members=num_members, is_judged=is_judged) for group_id in ids]
        assert self.losing(lost, lambda: self.learner.open(tickets)) == (0 if lost else num_groups)

    @rule(lost=st.booleans())
    def take_over(self, lost: bool) -> None:
        """The learner is killed, or stalls; another continues from its newest checkpoint."""
        self.zombie, self.learner = self.learner, self.new_learner()
        epoch = self.losing(lost, self.learner.acquire_epoch)
        self.num_epochs += 1
        assert epoch > self.epoch
        self.epoch = epoch
        num_reopened = self.model.take_over(self.settled_step)
        assert self.losing(lost, lambda: self.learner.reopen(self.settled_step)) in (num_reopened, 0 if lost else -1)
        self.step = self.settled_step

    @rule(verb=st.sampled_from(sorted(ZOMBIE_VERBS)))
    @precondition(lambda self: self.num_epochs > 1)
    def act_as_a_zombie(self, verb: str) -> None:
        with pytest.raises(FencedOut):
            ZOMBIE_VERBS[verb](self.zombie)

    @rule(
        new_step=st.booleans(),
        num_groups=st.integers(1, 3),
        policy_version=st.integers(0, 6),
        max_lag=st.sampled_from([6, 3, 6, 0, 6]),
        beside_equal=st.booleans(),
        poison=st.sampled_from([False, False, False, True]),
        lost=st.booleans(),
    )
    def claim(
        self, new_step: bool, num_groups: int = 1, poison: bool = False, lost: bool = False, **asked: Any
    ) -> None:
        if poison:
            self.poison(self.model.in_state("ready")[-1:])
        self.step = max(self.step + new_step, self.settled_step + 1)
        expected = self.model.claim(self.step, num_groups, **asked)
        max_uses = self.model.max_uses
        claimed = self.losing(lost, lambda: self.learner.claim(self.step, num_groups, max_uses=max_uses, **asked))
        assert [group.ticket.group_id for group in claimed] == expected
        for group in claimed:
            model = self.model.groups[group.ticket.group_id]
            assert {t.member: t.attempt for t in group.trajectories} == {m: a for m, (a, _) in model.stored.items()}
            assert group.num_uses == len(model.uses)
            assert group.ticket.num_members == len(group.trajectories)
            marks = [t.part_values.get("liked") for t in group.trajectories]
            assert marks == [float(m) if model.is_judged else None for m in range(len(marks))]

    @rule(num_steps=st.integers(2, 4), settled=st.booleans())
    def train(self, num_steps: int, settled: bool) -> None:
        """Some steps on end, so that groups come again."""
        for _ in range(num_steps):
            self.claim(True, policy_version=6, max_lag=6)
        if settled:
            self.settle(1, lost=False)

    def poison(self, group_ids: list[int]) -> None:
        """Turn a payload of each into something that is no trajectory."""
        for group_id in group_ids:
            group = self.model.groups[group_id]
            group.poisoned = True
            member, (attempt, fence) = min(group.stored.items())
            blob = key(self.run_id, "train", "blob", group_id, member, attempt, fence)
            assert self.client.set(blob, b"garbage", xx=True)

    @rule(data=st.data(), lost=st.booleans())
    @precondition(lambda self: self.model.groups)
    def drop(self, data: st.DataObject, lost: bool) -> None:
        ids = self.draw_groups(data)
        self.model.drop(ids, "zero_variance")
        self.losing(lost, lambda: self.learner.drop(ids, "zero_variance"))

    @rule(steps_back=st.integers(0, 2), lost=st.booleans())
    def settle(self, steps_back: int, lost: bool) -> None:
        """A checkpoint is durable that covers what was claimed up to some step."""
        self.settled_step = max(self.settled_step, self.step - steps_back)
        num_trained = self.model.settle(self.settled_step)
        assert self.losing(lost, lambda: self.learner.settle(self.settled_step)) == (0 if lost else num_trained)

    @rule(data=st.data(), verb=st.sampled_from(LATE_VERBS.split()))
    @precondition(lambda self: self.client.answered)
    def deliver_late(self, data: st.DataObject, verb: str) -> None:
        """A copy of a call from long ago arrives, and nothing comes of it."""
        sha = scripts.load(self.client, "prelude", "leases", "begin", verb).sha
        copies = [command for command in self.client.answered if command[1] == sha]
        if copies:
            self.client.deliver_again(data.draw(st.sampled_from(copies)))

    # --- People.

    @rule(data=st.data(), lost=st.booleans())
    @precondition(lambda self: self.model.groups)
    def quarantine(self, data: st.DataObject, lost: bool) -> None:
        group_id, *_ = self.draw_groups(data)
        expected = self.model.quarantine(group_id)
        assert self.losing(lost, lambda: self.person.quarantine(group_id, "looks odd")) == expected

    @rule(data=st.data(), lost=st.booleans())
    @precondition(lambda self: self.model.groups)
    def requeue(self, data: st.DataObject, lost: bool) -> None:
        ids = self.draw_groups(data)
        expected = self.model.requeue(ids)
        assert self.losing(lost, lambda: self.person.requeue(ids)) == expected

    # --- Actors.

    @rule(actor=st.sampled_from("abc"), lost=st.booleans())
    @precondition(lambda self: self.model.in_state("queued"))
    def lease(self, actor: str, lost: bool) -> None:
        lease = self.losing(lost, lambda: self.actor.lease(actor))
        group_id = self.model.lease(lease.fence if lease else 0)
        if group_id is None:
            assert lease is None
            return
        assert lease is not None and lease.ticket.group_id == group_id and lease.fence > self.last_fence
        self.last_fence = lease.fence
        group = self.model.groups[group_id]
        assert lease.missing == group.missing()
        partials = {member: partial.attempt for member, partial in lease.partials.items()}
        assert partials == {member: attempt for member, (attempt, _) in group.partials.items()}
        self.leases.append((actor, lease))

    def lease_of(self, group_id: int) -> tuple[str, Lease]:
        """The lease that holds a group, and its actor."""
        fence = self.model.groups[group_id].fence
        return next(pair for pair in self.leases if pair[1].fence == fence)

    def draw_lease(self, data: st.DataObject) -> tuple[str, Lease, int]:
        """A lease that somebody was given some time, and one of its members."""
        held = [pair for pair in self.leases if self.model.holds(pair[1].ticket.group_id, pair[1].fence)]
        anyone = not held or data.draw(st.sampled_from([False, False, True]))
        actor, lease = data.draw(st.sampled_from(self.leases if anyone else held))
        return actor, lease, data.draw(st.sampled_from(sorted(lease.missing)))

    @rule(data=st.data(), policy_version=st.integers(0, 6), reward=st.sampled_from([1.0, 1.0, 0.0]), lost=st.booleans())
    @precondition(lambda self: self.leases)
    def insert(self, data: st.DataObject, policy_version: int, reward: float, lost: bool) -> None:
        actor, lease, member = self.draw_lease(data)
        trajectory = attempt_at(
            lease, member, run_id=self.run_id, policy_version=policy_version, actor=actor, reward=reward
        )
        result = self.losing(lost, lambda: self.actor.insert(lease, trajectory))
        for _ in range(1 + lost):
            expected = self.model.insert(
                trajectory.group_id, member, trajectory.attempt, lease.fence, policy_version, reward
            )
        assert result is expected

    @rule(data=st.data(), policy_version=st.integers(0, 6))
    @precondition(lambda self: self.model.in_state("leased"))
    def finish(self, data: st.DataObject, policy_version: int) -> None:
        """Random single inserts seldom finish a group, and the learner needs finished ones."""
        group_id, *_ = self.draw_groups(data, "leased")
        group = self.model.groups[group_id]
        actor, lease = self.lease_of(group_id)
        self.play(msgspec.structs.replace(lease, missing=group.missing()), itertools.repeat(policy_version), actor)

    @rule(versions=st.lists(VERSIONS, min_size=1, max_size=3))
    def produce(self, versions: list[tuple[int, ...]]) -> None:
        """Groups from ticket to ready, each with a member of each version; what was queued before them is leased."""
        while self.model.in_state("queued"):
            self.lease("b", lost=False)
        for group_versions in versions:
            self.open(1, len(group_versions), lost=False)
            self.lease("c", lost=False)
            self.play(self.leases[-1][1], group_versions)

    def play(self, lease: Lease, versions: Iterable[int], actor: str = "c") -> None:
        """Insert the members that `lease` lacks, each of its version."""
        for (member, attempt), policy_version in zip(lease.missing.items(), versions, strict=False):
            trajectory = attempt_at(lease, member, run_id=self.run_id, policy_version=policy_version, actor=actor)
            assert self.actor.insert(lease, trajectory) is InsertResult.STORED
            self.model.insert(trajectory.group_id, member, attempt, lease.fence, policy_version)

    @rule(data=st.data(), lost=st.booleans())
    @precondition(lambda self: self.leases)
    def hand_in(self, data: st.DataObject, lost: bool) -> None:
        _, lease, member = self.draw_lease(data)
        partial = partial_of(lease, member, run_id=self.run_id)
        result = self.losing(lost, lambda: self.actor.hand_in(lease, partial))
        for _ in range(1 + lost):
            expected = self.model.hand_in(partial.group_id, member, partial.attempt, lease.fence)
        assert result is expected

    @rule(data=st.data(), leased_again=st.booleans())
    @precondition(lambda self: self.model.in_state("leased"))
    def preempt(self, data: st.DataObject, leased_again: bool) -> None:
        """An actor leaves: it hands in what it has and gives the rest back."""
        group_id, *_ = self.draw_groups(data, "leased")
        group = self.model.groups[group_id]
        _, lease = self.lease_of(group_id)
        lease = msgspec.structs.replace(lease, missing=group.missing())
        for member, attempt in lease.missing.items():
            expected = self.model.hand_in(group_id, member, attempt, lease.fence)
            assert self.actor.hand_in(lease, partial_of(lease, member, run_id=self.run_id)) is expected
        self.model.release(group_id, lease.fence)
        self.actor.release(lease)
        if leased_again:
            self.lease("b", lost=False)

    @rule(data=st.data(), outcome=st.sampled_from(FAILURES), lost=st.booleans())
    @precondition(lambda self: self.leases)
    def fail(self, data: st.DataObject, outcome: Outcome, lost: bool) -> None:
        _, lease, member = self.draw_lease(data)
        attempt = lease.missing[member]
        expected = self.model.fail(lease.ticket.group_id, member, attempt, lease.fence, outcome.value)
        failed = self.losing(
            lost, lambda: self.actor.fail(lease, member, attempt=attempt, outcome=outcome, reason="why")
        )
        assert failed == expected

    @rule(data=st.data(), death=st.sampled_from(["", "exit code -6"]), lost=st.booleans())
    @precondition(lambda self: self.leases)
    def release(self, data: st.DataObject, death: str, lost: bool) -> None:
        _, lease, _ = self.draw_lease(data)
        self.model.release(lease.ticket.group_id, lease.fence, died=bool(death))
        self.losing(lost, lambda: self.actor.release(lease, death=death))

    @rule(num_deaths=st.integers(1, 5), lost=st.booleans())
    @precondition(lambda self: self.model.in_state("queued"))
    def kill_engines(self, num_deaths: int, lost: bool) -> None:
        """One after another plays the oldest group."""
        for _ in range(num_deaths):
            if self.model.in_state("queued"):
                self.lease("b", lost=False)
                _, lease = self.leases[-1]
                self.model.release(lease.ticket.group_id, lease.fence, died=True)
                self.losing(lost, lambda lease=lease: self.actor.release(lease, death="exit code -6"))

    @rule(actor=st.sampled_from("abc"), lost=st.booleans())
    def heartbeat(self, actor: str, lost: bool) -> None:
        mine = [lease for owner, lease in self.leases if owner == actor]
        held = {lease.ticket.group_id for lease in mine if self.model.holds(lease.ticket.group_id, lease.fence)}
        assert self.losing(lost, lambda: self.actor.heartbeat(actor, mine)) == held

    @rule(data=st.data(), everyone=st.booleans(), noticed_by=st.sampled_from(["nobody", "a", "b", "lease", "claim"]))
    @precondition(lambda self: self.model.in_state("leased"))
    def time_passes(self, data: st.DataObject, everyone: bool, noticed_by: str) -> None:
        """Deadlines pass; the next heartbeat, lease or claim notices, and an actor that beats first keeps its own."""
        late = self.model.in_state("leased") if everyone else self.draw_groups(data, "leased")
        self.client.zadd(key(self.run_id, "train", "leased"), dict.fromkeys(map(str, late), 1))
        saved = {group_id for group_id in late if self.lease_of(group_id)[0] == noticed_by}
        self.model.expire([group_id for group_id in late if group_id not in saved])
        match noticed_by:
            case "lease":
                self.lease("c", lost=False)
            case "claim":
                self.claim(False, policy_version=0, max_lag=6)
            case _:
                mine = [lease for owner, lease in self.leases if owner == noticed_by]
                assert saved <= self.actor.heartbeat(noticed_by, mine)

    # --- Judges.

    @rule(num_members=st.integers(1, 3), policy_version=st.integers(0, 6))
    def produce_for_a_judge(self, num_members: int, policy_version: int) -> None:
        while self.model.in_state("queued"):
            self.lease("b", lost=False)
        self.open(1, num_members, lost=False, is_judged=True)
        self.lease("c", lost=False)
        _, lease = self.leases[-1]
        self.play(lease, itertools.repeat(policy_version))
        assert lease.ticket.group_id in self.model.in_state("judging")

    @rule(judge=st.sampled_from("jk"), lost=st.booleans())
    @precondition(lambda self: self.model.in_state("judging"))
    def lease_judging(self, judge: str, lost: bool) -> None:
        judging = self.losing(lost, lambda: self.judge.lease(judge))
        waiting = self.model.lease_judging(judging.fence if judging else 0)
        if judging is None:
            assert waiting == []
            return
        group_id = judging.ticket.group_id
        assert group_id in waiting and judging.fence > self.last_fence
        self.last_fence = judging.fence
        assert judging.num_judgings == self.model.groups[group_id].num_judgings
        assert [t.member for t in judging.trajectories] == sorted(self.model.groups[group_id].stored)
        self.model.begin_judging(group_id, judging.fence)
        self.judgings.append((judge, judging))

    def draw_judging(self, data: st.DataObject) -> Judging:
        """A judge's lease of some time."""
        held = [pair for pair in self.judgings if self.model.judges(pair[1].ticket.group_id, pair[1].fence)]
        anyone = not held or data.draw(st.sampled_from([False, False, True]))
        return data.draw(st.sampled_from(self.judgings if anyone else held))[1]

    @rule(data=st.data(), lost=st.booleans())
    @precondition(lambda self: self.judgings)
    def judged(self, data: st.DataObject, lost: bool) -> None:
        judging = self.draw_judging(data)
        verdict = verdict_on(judging, *range(len(judging.trajectories)))
        result = self.losing(lost, lambda: self.judge.store(judging, verdict))
        for _ in range(1 + lost):
            expected = self.model.judged(judging.ticket.group_id, judging.fence)
        assert result is expected

    @rule(data=st.data(), lost=st.booleans())
    @precondition(lambda self: self.judgings)
    def fail_judging(self, data: st.DataObject, lost: bool) -> None:
        judging = self.draw_judging(data)
        expected = self.model.fail_judging(judging.ticket.group_id, judging.fence)
        failed = self.losing(lost, lambda: self.judge.fail(judging, wait_s=0, reason="why"))
        assert failed == (expected and not lost)

    @rule(data=st.data(), lost=st.booleans())
    @precondition(lambda self: self.judgings)
    def release_judging(self, data: st.DataObject, lost: bool) -> None:
        judging = self.draw_judging(data)
        self.model.release_judging(judging.ticket.group_id, judging.fence)
        self.losing(lost, lambda: self.judge.release(judging))

    @rule(data=st.data(), renewed_by=st.sampled_from(["nobody", "j", "k"]))
    @precondition(lambda self: self.model.in_state("judging"))
    def a_judge_is_late(self, data: st.DataObject, renewed_by: str) -> None:
        """Deadlines pass, and a judge that renews before anybody notices keeps its own."""
        name, held = key(self.run_id, "train", "judging"), self.draw_groups(data, "judging")
        new = [group_id for group_id in held if group_id not in self.model.expired_judgings]
        late = [i for i in self.model.expired_judgings + new if self.model.judged_by(i)]
        if late:
            self.client.zadd(name, {str(group_id): place + 1 for place, group_id in enumerate(late)})
        mine = [judging for judge, judging in self.judgings if judge == renewed_by]
        valid = {j.ticket.group_id for j in mine if self.model.judges(j.ticket.group_id, j.fence)}
        assert self.judge.renew(renewed_by, mine) == valid
        self.model.expired_judgings = [group_id for group_id in late if group_id not in valid]

    # ---

    @invariant()
    def the_books_agree_with_the_model_and_with_what_is_stored(self) -> None:
        ledger = read_ledger(self.client, self.run_id)
        assert ledger == self.model.ledger()
        assert ledger.balanced
        assert audit(self.client, self.run_id) == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("start", range(0, NUM_EXAMPLES, BATCH))
def test_the_books_balance_after_any_action_of_actors_learners_and_people(
    start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.replay.buffer.verbs.MAX_QUARANTINED", MAX_QUARANTINED)
    monkeypatch.setattr("slipstream.replay.buffer.payloads.Bulk", LossyBulk)
    # A server of its own that writes nothing to a disk: what survives its end is other tests' matter.
    with start_server(tmp_path) as server, connect(server.admin_url) as client:
        client.config_set("appendonly", "no")
        Books.client = LossyRedis(connection_pool=client.connection_pool)
        stateful.run_state_machine_as_test(
            Books,
            settings=settings(
                max_examples=min(BATCH, NUM_EXAMPLES - start),
                derandomize=False,  # else every batch would be the same
                stateful_step_count=30,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            ),
        )
