"""Actors in virtual time: they lease and insert on a real buffer, and only their episodes are simulated.

An episode is one turn with a duration that its task determines. Its tokens come evenly over that time, each from the
version that is published then, as with actors that refresh while they generate. Nothing sleeps or reads a clock.
"""

import bisect
import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field

from slipstream.common.process.wire import SCHEMA
from slipstream.common.records.trajectory import (
    OUTCOME_OF,
    Provenance,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
    pack_logprobs,
    pack_mask,
    pack_tokens,
)
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.records.ticket import InsertResult, Lease, Ticket

TOKENS_PER_UNIT = 40  # of virtual time
NUM_PROMPT_TOKENS = 1
SPREAD = 0.05  # of the logarithm of an episode's duration, around that of its task


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """The durations of episodes, in units of virtual time; an episode of a short task takes 1."""

    long: float  # the duration of an episode of a long task
    long_share: float  # share of long tasks
    seed: int

    def is_long(self, task_index: int) -> bool:
        return random.Random(f"{self.seed}/{task_index}").random() < self.long_share

    def of(self, ticket: Ticket, member: int) -> float:
        """The duration of one episode; those of siblings differ randomly."""
        factor = random.Random(f"{self.seed}/{ticket.group_id}/{member}").lognormvariate(0, SPREAD)
        return factor * (self.long if self.is_long(ticket.task.index) else 1.0)


@dataclass(kw_only=True, slots=True)
class Actor:
    """Plays up to `num_slots` concurrent episodes; leases another group while a slot is free."""

    num_slots: int
    num_playing: int = 0
    waiting: deque[tuple[Lease, int]] = field(default_factory=deque)  # members of leased groups without a slot


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Ending:
    """A running episode, ordered by the time of its end."""

    at: float
    number: int  # breaks ties
    began: float = field(compare=False)
    actor: Actor = field(compare=False)
    lease: Lease = field(compare=False)
    member: int = field(compare=False)


class VirtualActors:
    """All actors of a run, and its virtual clock."""

    def __init__(
        self, buffer: ActorBuffer, run_id: str, durations: Durations, *, num_actors: int, num_slots: int
    ) -> None:
        self.now = 0.0
        self.finished: dict[int, list[Trajectory]] = {}  # groups whose last member was inserted
        self._buffer = buffer
        self._run_id = run_id
        self._durations = durations
        self._actors = [Actor(num_slots=num_slots) for _ in range(num_actors)]
        self._endings: list[Ending] = []
        self._numbers = itertools.count()
        self._members: dict[int, list[Trajectory]] = {}  # of groups that are being played
        self._published_at = [0.0]  # when each of these versions came
        self._versions = [0]

    def publish(self, policy_version: int) -> None:
        """Sample tokens with this version from now on."""
        self._published_at.append(self.now)
        self._versions.append(policy_version)

    def play_until(self, time: float) -> None:
        """Advance the clock to `time`; episodes begin and end meanwhile."""
        self._begin()
        while self._endings and self._endings[0].at <= time:
            self._end_one()
        self.now = time

    def play_on(self) -> None:
        """Advance the clock until another group is finished: before that, a claim finds no more groups."""
        num_finished = len(self.finished)
        while len(self.finished) == num_finished:
            self._begin()
            self._end_one()

    def _end_one(self) -> None:
        ending = heapq.heappop(self._endings)
        self.now = ending.at
        ending.actor.num_playing -= 1
        self._insert(ending)
        self._begin()

    def _begin(self) -> None:
        """Fill the free slots while there is work."""
        for actor in self._actors:
            while actor.num_playing < actor.num_slots:
                if not actor.waiting:
                    lease = self._buffer.lease(f"actor-{id(actor)}")
                    if lease is None:
                        return
                    actor.waiting.extend((lease, member) for member in lease.missing)
                self._play(actor, *actor.waiting.popleft())

    def _play(self, actor: Actor, lease: Lease, member: int) -> None:
        lasts = self._durations.of(lease.ticket, member)
        actor.num_playing += 1
        ending = Ending(
            at=self.now + lasts, number=next(self._numbers), began=self.now, actor=actor, lease=lease, member=member
        )
        heapq.heappush(self._endings, ending)

    def _insert(self, ending: Ending) -> None:
        ticket = ending.lease.ticket
        trajectory = self._trajectory(ending)
        assert self._buffer.insert(ending.lease, trajectory) is InsertResult.STORED
        members = self._members.setdefault(ticket.group_id, [])
        members.append(trajectory)
        if len(members) == ticket.num_members:
            self.finished[ticket.group_id] = self._members.pop(ticket.group_id)

    def _spans(self, ending: Ending, num_sampled: int) -> list[VersionSpan]:
        """The version that sampled each token: the newest one when the token came."""
        rate = num_sampled / (ending.at - ending.began)
        first = bisect.bisect_right(self._published_at, ending.began) - 1
        spans, start = [], 0
        for place in range(first, len(self._versions)):
            is_last = place + 1 == len(self._versions) or self._published_at[place + 1] >= ending.at
            stop = num_sampled if is_last else round(rate * (self._published_at[place + 1] - ending.began))
            if stop > start:
                spans.append(
                    VersionSpan(
                        start=NUM_PROMPT_TOKENS + start,
                        stop=NUM_PROMPT_TOKENS + stop,
                        policy_version=self._versions[place],
                    )
                )
            start = stop
            if is_last:
                break
        return spans

    def _trajectory(self, ending: Ending) -> Trajectory:
        """The record of an episode. Returns alternate between 0 and 1 among siblings, so every group is useful."""
        ticket, reward = ending.lease.ticket, float(ending.member % 2)
        num_sampled = max(1, round(TOKENS_PER_UNIT * (ending.at - ending.began)))
        num_tokens = NUM_PROMPT_TOKENS + num_sampled
        turn = Turn(
            start=NUM_PROMPT_TOKENS,
            stop=num_tokens,
            state_key="",
            rewards={"task": reward},
            finish_reason="stop",
            valid_action=True,
            generate_s=ending.at - ending.began,
            env_s=0.0,
        )
        return Trajectory(
            schema=SCHEMA,
            run_id=self._run_id,
            task=ticket.task,
            group_id=ticket.group_id,
            member=ending.member,
            attempt=ending.lease.missing[ending.member],
            fork=None,
            actor="virtual",
            turns=[turn],
            tokens=pack_tokens([0] * num_tokens),
            behaviour_logprobs=pack_logprobs([0.0] * NUM_PROMPT_TOKENS + [-1.0] * num_sampled),
            loss_mask=pack_mask([False] * NUM_PROMPT_TOKENS + [True] * num_sampled),
            kept=None,
            branch_starts=[0],
            version_spans=self._spans(ending, num_sampled),
            stop_reason=StopReason.DONE,
            outcome=OUTCOME_OF[StopReason.DONE],
            score=reward,
            success=reward > 0,
            part_values={},
            shown="",
            sampling=ticket.sampling,
            started_at_s=ending.began,
            duration_s=ending.at - ending.began,
            scoring_s=0.0,
            provenance=Provenance(host="virtual", instance_kind="reserved", price_per_hour=0.0),
        )
