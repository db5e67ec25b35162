"""Small valid tickets and trajectories for the tests of replay."""

import redis

from common.trajectory import (
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
from common.wire import SCHEMA
from replay.buffer import Buffer
from replay.ticket import Lease, Ticket

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=8)


def make_buffer(
    client: redis.Redis,
    run_id: str,
    *,
    lease_ttl_s: float = 600.0,
    max_attempts: int = 3,
    max_bytes: int = 1 << 20,
    compress: bool = False,
    stream: str = "train",
) -> Buffer:
    return Buffer(
        client,
        run_id,
        vocab_size=100,
        lease_ttl_s=lease_ttl_s,
        max_attempts=max_attempts,
        max_trajectory_bytes=max_bytes,
        compress=compress,
        stream=stream,
    )


def ticket(group_id: int, *, num_members: int = 2, min_policy_version: int = 0) -> Ticket:
    return Ticket(
        group_id=group_id,
        task=Task(env="shop", split="train", index=group_id),
        num_members=num_members,
        min_policy_version=min_policy_version,
        sampling=SAMPLING,
        seed=7,
    )


def attempt_at(
    lease: Lease,
    member: int,
    *,
    run_id: str,
    policy_version: int = 0,
    actor: str = "a",
    num_sampled: int = 2,
    stop_reason: StopReason = StopReason.DONE,
) -> Trajectory:
    """Two prompt tokens and `num_sampled` that the policy sampled, in one turn."""
    num_tokens = 2 + num_sampled
    turn = Turn(
        start=2,
        stop=num_tokens,
        state_key="start",
        rewards={"task": 1.0},
        finish_reason="stop",
        valid_action=True,
        generate_s=0.1,
        env_s=0.0,
    )
    return Trajectory(
        schema=SCHEMA,
        run_id=run_id,
        task=lease.ticket.task,
        group_id=lease.ticket.group_id,
        member=member,
        attempt=lease.missing[member],
        actor=actor,
        turns=[turn],
        tokens=pack_tokens([5] * num_tokens),
        behaviour_logprobs=pack_logprobs([0.0, 0.0] + [-0.5] * num_sampled),
        loss_mask=pack_mask([False, False] + [True] * num_sampled),
        kept=None,
        branch_starts=[0],
        version_spans=[VersionSpan(start=2, stop=num_tokens, policy_version=policy_version)],
        stop_reason=stop_reason,
        outcome=OUTCOME_OF[stop_reason],
        score=1.0,
        success=True,
        sampling=lease.ticket.sampling,
        started_at_s=1.7e9,
        duration_s=0.1,
        provenance=Provenance(host="host", instance_kind="reserved", price_per_hour=0.0),
    )


def partial_of(lease: Lease, member: int, *, run_id: str, num_sampled: int = 2) -> Trajectory:
    """What a draining actor hands in: one whole turn, and the episode is not over."""
    return attempt_at(lease, member, run_id=run_id, num_sampled=num_sampled, stop_reason=StopReason.PREEMPTED)
