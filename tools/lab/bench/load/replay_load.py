"""The load of the replay benchmarks: trajectories of 53 KB, and groups to insert them into."""

from dataclasses import dataclass

import msgspec
import numpy as np
import redis

from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.wire import SCHEMA, encode
from slipstream.common.records.trajectory import (
    Outcome,
    Provenance,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.records.ticket import Lease, Ticket

RUN_ID = "bench"
NUM_TOKENS = 6260  # 53 KB in all
NUM_TURNS = 12
VOCAB_SIZE = 151_936  # Qwen's
GROUP_SIZE = 8
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=512)


def a_trajectory(*, num_tokens: int = NUM_TOKENS) -> Trajectory:
    """An episode in which the policy sampled half of the tokens.

    Token ids are distributed like words (Zipf), and log-probabilities like those of a trained policy. Zstd compresses
    them less than real text.
    """
    rng = np.random.default_rng(0)
    bounds = np.linspace(0, num_tokens, 2 * NUM_TURNS + 1, dtype=int).tolist()
    mask = np.zeros(num_tokens, dtype=np.bool_)
    turns, spans = [], []
    for start, stop in zip(bounds[1::2], bounds[2::2], strict=True):
        mask[start:stop] = True
        turns.append(
            Turn(
                start=start,
                stop=stop,
                state_key="",
                rewards={"task": 0.0},
                finish_reason="stop",
                valid_action=True,
                generate_s=1.0,
                env_s=0.1,
            )
        )
        spans.append(VersionSpan(start=start, stop=stop, policy_version=3))
    sure = rng.random(num_tokens) < 0.6
    surprise = rng.exponential(np.where(sure, 0.003, 1.2), num_tokens)
    return Trajectory(
        schema=SCHEMA,
        run_id=RUN_ID,
        task=Task(env="shop", split="train", index=0),
        group_id=0,
        member=0,
        attempt=0,
        fork=None,
        actor="actor",
        turns=turns,
        tokens=np.minimum(rng.zipf(1.3, num_tokens), VOCAB_SIZE - 1).astype("<i4").tobytes(),
        behaviour_logprobs=np.where(mask, -surprise, 0).astype("<f4").tobytes(),
        loss_mask=np.packbits(mask, bitorder="little").tobytes(),
        kept=None,
        branch_starts=[0],
        version_spans=spans,
        stop_reason=StopReason.DONE,
        outcome=Outcome.POLICY,
        score=1.0,
        success=True,
        part_values={},
        shown="",
        sampling=SAMPLING,
        started_at_s=1.7e9,
        duration_s=13.2,
        scoring_s=0.0,
        provenance=Provenance(host="host", instance_kind="spot", price_per_hour=1.0),
    )


TRAJECTORY = a_trajectory()
FRAME = encode(TRAJECTORY)


def attempts_at(lease: Lease) -> list[tuple[Lease, Trajectory]]:
    """The trajectories that an actor would insert for `lease`."""
    ticket = lease.ticket
    return [
        (lease, msgspec.structs.replace(TRAJECTORY, task=ticket.task, group_id=ticket.group_id, member=member))
        for member in lease.missing
    ]


@dataclass(kw_only=True, slots=True)
class Groups:
    """Opens and leases groups of a stream."""

    learner: LearnerBuffer  # with an epoch
    actor: ActorBuffer
    next_id: int

    def lease(self, num_groups: int) -> list[tuple[Lease, Trajectory]]:
        """Open and lease `num_groups`; return the trajectories to insert."""
        ids = range(self.next_id, self.next_id + num_groups)
        self.next_id += num_groups
        self.learner.open(
            Ticket(
                group_id=group_id,
                task=Task(env="shop", split="train", index=group_id),
                num_members=GROUP_SIZE,
                min_policy_version=0,
                sampling=SAMPLING,
                seed=0,
            )
            for group_id in ids
        )
        leases = [self.actor.lease("actor") for _ in ids]
        return [attempt for lease in leases if lease is not None for attempt in attempts_at(lease)]


def groups_of(client: redis.Redis, stream: str, *, compress: bool = False) -> Groups:
    """The groups of a stream, with a new epoch; their ids continue those that it has had."""
    replay = ReplayConfig(lease_ttl_s=60.0, max_attempts=2, compress=compress)
    learner = LearnerBuffer(client, RUN_ID, replay, vocab_size=VOCAB_SIZE, stream=stream)
    actor = ActorBuffer(client, RUN_ID, replay, vocab_size=VOCAB_SIZE, stream=stream)
    learner.acquire_epoch()
    return Groups(learner=learner, actor=actor, next_id=learner.ledger().opened + 1)
