"""Small valid tickets and trajectories for the tests of replay."""

from typing import Any, Self

import msgspec
import redis

from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.wire import SCHEMA
from slipstream.common.records.trajectory import (
    OUTCOME_OF,
    Provenance,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
    pack_logprobs,
    pack_mask,
    pack_tokens,
)
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.buffer.audit import audit
from slipstream.replay.buffer.judge_buffer import JudgeBuffer, Judging
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.buffer.people_buffer import PeopleBuffer
from slipstream.replay.records.failures import Quarantined, read_quarantined
from slipstream.replay.records.keys import key
from slipstream.replay.records.ledger import Ledger
from slipstream.replay.records.ticket import Group, InsertResult, Lease, Marks, Ticket, Verdict

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=8)


class Views:
    """The buffer of one stream as its learner, an actor, a judge and people use it, for tests of all of them."""

    def __init__(
        self, client: redis.Redis, run_id: str, replay: ReplayConfig, *, vocab_size: int, stream: str = "train"
    ) -> None:
        self.client, self.run_id = client, run_id
        self.base = key(run_id, stream)
        self.learner = LearnerBuffer(client, run_id, replay, vocab_size=vocab_size, stream=stream)
        self.actor = ActorBuffer(client, run_id, replay, vocab_size=vocab_size, stream=stream)
        self.judge = JudgeBuffer(client, run_id, replay, vocab_size=vocab_size)
        self.people = PeopleBuffer(client, run_id, stream=stream)
        self._stream = stream

    @property
    def ledger(self) -> Ledger:
        return self.learner.ledger()

    def start(self, *tickets: Ticket) -> Self:
        """Become the run's learner, and open these groups."""
        self.learner.acquire_epoch()
        self.learner.open(tickets)
        return self

    def begin(self, *tickets: Ticket, actor: str = "a") -> Lease:
        """Open these groups, and lease the first that is queued."""
        self.learner.open(tickets)
        return leased(self, actor)

    def attempt(self, lease: Lease, member: int, **named: Any) -> Trajectory:
        return attempt_at(lease, member, run_id=self.run_id, **named)

    def partial(self, lease: Lease, member: int, **named: Any) -> Trajectory:
        return partial_of(lease, member, run_id=self.run_id, **named)

    def insert(self, lease: Lease, *members: int, **named: Any) -> None:
        """Insert attempts of `members`, or of all that are missing; each is stored."""
        for member in members or lease.missing:
            assert self.actor.insert(lease, self.attempt(lease, member, **named)) is InsertResult.STORED

    def earn(self, lease: Lease, *rewards: float, **named: Any) -> None:
        """Insert attempts of the first members, each of which earns its reward."""
        for member, reward in enumerate(rewards):
            attempt = earning(self.attempt(lease, member, **named), reward)
            assert self.actor.insert(lease, attempt) is InsertResult.STORED

    def play(self, *group_ids: int, policy_version: int = 0) -> None:
        """Open these groups, and insert all of their members."""
        self.learner.open([ticket(group_id) for group_id in group_ids])
        for _ in group_ids:
            self.insert(leased(self), policy_version=policy_version)

    def claim(
        self, step: int = 1, num_groups: int = 1, *, policy_version: int = 0, max_lag: int = 0, **named: Any
    ) -> list[int]:
        """The ids of the groups that the learner gets."""
        return ids(self.learner.claim(step, num_groups, policy_version=policy_version, max_lag=max_lag, **named))

    def names(self, kind: str) -> list[bytes]:
        """The keys of the stream that begin with `kind`."""
        return list(self.client.scan_iter(f"{self.base}:{kind}:*"))

    def audit(self) -> list[str]:
        return audit(self.client, self.run_id, stream=self._stream)

    def quarantined(self) -> list[Quarantined]:
        return read_quarantined(self.client, self.base)


def make_buffer(
    client: redis.Redis, run_id: str, *, lease_ttl_s: float = 600.0, stream: str = "train", **settings: Any
) -> Views:
    replay = ReplayConfig(**{"max_attempts": 3} | settings)
    replay.lease_ttl_s = lease_ttl_s  # afterwards, so that it may be shorter than a configuration allows
    return Views(client, run_id, replay, vocab_size=100, stream=stream)


def ticket(group_id: int, *, num_members: int = 2, min_policy_version: int = 0, env: str = "shop", **of: Any) -> Ticket:
    return Ticket(
        group_id=group_id,
        task=Task(env=env, split="train", index=group_id),
        num_members=num_members,
        min_policy_version=min_policy_version,
        sampling=SAMPLING,
        seed=7,
        **of,
    )


def turn(
    start: int, stop: int, reward: float = 0.0, *, state: str = "", rewards: dict[str, float] | None = None
) -> Turn:
    earned = rewards if rewards is not None else {"task": reward}
    ended = {"finish_reason": "stop", "valid_action": True, "generate_s": 0.1, "env_s": 0.0}
    return Turn(start=start, stop=stop, state_key=state, rewards=earned, **ended)


def attempt_at(
    lease: Lease,
    member: int,
    *,
    run_id: str,
    policy_version: int = 0,
    num_sampled: int = 2,
    stop_reason: StopReason = StopReason.DONE,
    reward: float = 1.0,
    **of: Any,
) -> Trajectory:
    """Two prompt tokens and `num_sampled` that the policy sampled, in one turn; `of` are fields that differ."""
    num_tokens = 2 + num_sampled
    scored = {"score": 1.0, "success": True, "part_values": {}, "shown": "", "scoring_s": 0.0}
    usual = Trajectory(
        schema=SCHEMA,
        run_id=run_id,
        task=lease.ticket.task,
        group_id=lease.ticket.group_id,
        member=member,
        attempt=lease.missing[member],
        fork=None,
        actor="a",
        turns=[turn(2, num_tokens, reward, state="start")],
        tokens=pack_tokens([5] * num_tokens),
        behaviour_logprobs=pack_logprobs([0.0, 0.0] + [-0.5] * num_sampled),
        loss_mask=pack_mask([False, False] + [True] * num_sampled),
        kept=None,
        branch_starts=[0],
        version_spans=[VersionSpan(start=2, stop=num_tokens, policy_version=policy_version)],
        stop_reason=stop_reason,
        outcome=OUTCOME_OF[stop_reason],
        sampling=lease.ticket.sampling,
        provenance=Provenance(host="host", instance_kind="reserved", price_per_hour=0.0),
        started_at_s=1.7e9,
        duration_s=0.1,
        **scored,
    )
    return msgspec.structs.replace(usual, **of)


def earning(attempt: Trajectory, reward: float) -> Trajectory:
    """The attempt with `reward` for its turn, and a success where that is 1."""
    earned = msgspec.structs.replace(attempt.turns[0], rewards={"task": reward})
    return msgspec.structs.replace(attempt, turns=[earned], success=reward == 1.0)


def lease_of(asked: Ticket) -> Lease:
    """A lease of all members, outside of any buffer."""
    return Lease(ticket=asked, fence=1, missing=dict.fromkeys(range(asked.num_members), 0), partials={}, ttl_s=1.0)


def group_earning(*rewards: float, asked: Ticket | None = None) -> Group:
    """A claimed group whose members earned `rewards`."""
    asked = asked or ticket(0, num_members=len(rewards))
    lease = lease_of(asked)
    members = [earning(attempt_at(lease, member, run_id="r"), reward) for member, reward in enumerate(rewards)]
    return Group(ticket=asked, num_uses=1, trajectories=members)


def partial_of(lease: Lease, member: int, *, run_id: str, num_sampled: int = 2) -> Trajectory:
    """What a draining actor hands in: one whole turn, and the episode is not over."""
    return attempt_at(lease, member, run_id=run_id, num_sampled=num_sampled, stop_reason=StopReason.PREEMPTED)


def leased(buffer: Views, actor: str = "a") -> Lease:
    lease = buffer.actor.lease(actor)
    assert lease is not None
    return lease


def ids(groups: list[Group]) -> list[int]:
    return [group.ticket.group_id for group in groups]


def verdict_on(judging: Judging, *marks: float, judge: str = "j") -> Verdict:
    """A verdict with a mark for each member, 0.5 without `marks`, which counts double."""
    numbers = marks or [0.5] * len(judging.trajectories)
    return Verdict(judge=judge, members=[Marks(values={"liked": x}, rewards={"liked": 2 * x}) for x in numbers])
