"""A stand-in for an actor: it calls every verb of an actor on a real buffer, without an engine.

It starts in half a second, so it can be killed every few seconds. It appends each acknowledged insert to its journal
before it continues.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.connection import connect
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.process.wire import SCHEMA
from slipstream.common.records.trajectory import (
    OUTCOME_OF,
    Outcome,
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
from slipstream.replay.records.ticket import InsertResult, Lease

VOCAB_SIZE = 1000
NUM_PROMPT_TOKENS = 8
IDLE_S = 0.02
EPISODE_S = 0.005  # the pause before each insert
FULL_RETRY_S = 0.1
FAILED_SHARE = 0.03
LEAVING_SHARE = 0.02


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a stand-in, actor or learner: JSON on its command line."""

    url: str
    run_id: str
    name: str = ""
    journal: str = ""  # the file that it appends to
    lease_ttl_s: float = 3.0
    num_tokens: int = 256  # the maximum of sampled tokens in a trajectory
    checkpoint_every: int = 5  # steps of the learner


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a journal: the result of one insert."""

    group: int
    member: int
    attempt: int
    digest: str
    result: InsertResult


def replay_of(work: Work) -> ReplayConfig:
    """The settings of the buffer that all stand-ins share."""
    # Kills must not use up the attempts at a group.
    return ReplayConfig(lease_ttl_s=work.lease_ttl_s, max_attempts=10_000)


def digest(trajectory: Trajectory) -> str:
    """Hash the bytes that the learner would train on."""
    return xxhash.xxh3_64_hexdigest(trajectory.tokens + trajectory.behaviour_logprobs + trajectory.loss_mask)


def append(journal: Path, record: msgspec.Struct) -> None:
    """Append one line in one write, so that a kill leaves either the whole line or nothing."""
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, msgspec.json.encode(record) + b"\n")
    finally:
        os.close(descriptor)


def read_journal(journal: Path) -> Iterator[Acknowledged]:
    """Its whole lines: beside its writer, a part of the last one can be read."""
    for line in journal.read_bytes().rpartition(b"\n")[0].splitlines():
        yield msgspec.json.decode(line, type=Acknowledged)


def an_attempt(
    work: Work, lease: Lease, member: int, attempt: int, stop_reason: StopReason, *, chance: random.Random
) -> Trajectory:
    """A trajectory with random tokens, so that attempts cannot be confused."""
    num_sampled = chance.randint(8, work.num_tokens)
    num_tokens = NUM_PROMPT_TOKENS + num_sampled
    tokens = [chance.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
    turn = Turn(
        start=NUM_PROMPT_TOKENS,
        stop=num_tokens,
        state_key="",
        rewards={"task": float(chance.random() < 0.5)},
        finish_reason="stop",
        valid_action=True,
        generate_s=EPISODE_S,
        env_s=0.0,
    )
    return Trajectory(
        schema=SCHEMA,
        run_id=work.run_id,
        task=lease.ticket.task,
        group_id=lease.ticket.group_id,
        member=member,
        attempt=attempt,
        fork=None,
        actor=work.name,
        turns=[turn],
        tokens=pack_tokens(tokens),
        behaviour_logprobs=pack_logprobs([0.0] * NUM_PROMPT_TOKENS + [-0.5] * num_sampled),
        loss_mask=pack_mask([False] * NUM_PROMPT_TOKENS + [True] * num_sampled),
        kept=None,
        branch_starts=[0],
        version_spans=[VersionSpan(start=NUM_PROMPT_TOKENS, stop=num_tokens, policy_version=0)],
        stop_reason=stop_reason,
        outcome=OUTCOME_OF[stop_reason],
        score=1.0,
        success=True,
        part_values={},
        shown="",
        sampling=lease.ticket.sampling,
        started_at_s=time.time(),
        duration_s=EPISODE_S,
        scoring_s=0.0,
        provenance=Provenance(host="stand-in", instance_kind="spot", price_per_hour=0.0),
    )


class StandIn:
    """One actor: leases a group and inserts its missing members; sometimes it fails, or hands in a partial episode."""

    def __init__(self, buffer: ActorBuffer, work: Work, shutdown: Shutdown) -> None:
        self._buffer = buffer
        self._work = work
        self._shutdown = shutdown
        self._random = random.Random()

    def act(self) -> None:
        """Play groups until a shutdown is requested."""
        while not self._shutdown.requested.is_set():
            lease = self._buffer.lease(self._work.name)
            if lease is None:
                time.sleep(IDLE_S)
            else:
                self._play(lease)

    def _play(self, lease: Lease) -> None:
        for member, attempt in lease.missing.items():
            if self._shutdown.requested.is_set() or self._random.random() < LEAVING_SHARE:
                self._buffer.hand_in(lease, self._attempt(lease, member, attempt, StopReason.PREEMPTED))
                break
            if not self._buffer.heartbeat(self._work.name, [lease]):
                break
            time.sleep(self._random.expovariate(1 / EPISODE_S))
            if not self._play_member(lease, member, attempt):
                break
        self._buffer.release(lease)

    def _play_member(self, lease: Lease, member: int, attempt: int | None) -> bool:
        """Play one member; return whether the lease is still valid."""
        while attempt is not None and self._random.random() < FAILED_SHARE:
            attempt = self._buffer.fail(lease, member, attempt=attempt, outcome=Outcome.ENV_FAILURE, reason="simulated")
        if attempt is None:
            return False
        trajectory = self._attempt(lease, member, attempt, StopReason.DONE)
        result = self._insert(lease, trajectory)
        while result is InsertResult.FULL and not self._shutdown.requested.wait(FULL_RETRY_S):
            if not self._buffer.heartbeat(self._work.name, [lease]):
                return False
            result = self._insert(lease, trajectory)
        return result in (InsertResult.STORED, InsertResult.DUPLICATE)

    def _attempt(self, lease: Lease, member: int, attempt: int, stop_reason: StopReason) -> Trajectory:
        return an_attempt(self._work, lease, member, attempt, stop_reason, chance=self._random)

    def _insert(self, lease: Lease, trajectory: Trajectory) -> InsertResult:
        result = self._buffer.insert(lease, trajectory)
        line = Acknowledged(
            group=trajectory.group_id,
            member=trajectory.member,
            attempt=trajectory.attempt,
            digest=digest(trajectory),
            result=result,
        )
        append(Path(self._work.journal), line)
        return result


def main(command: str) -> int:
    """Act with the settings in the JSON `command`; return the exit code."""
    work = msgspec.convert(json.loads(command), Work)
    shutdown = Shutdown()
    with connect(work.url) as client:
        buffer = ActorBuffer(client, work.run_id, replay_of(work), vocab_size=VOCAB_SIZE)
        StandIn(buffer, work, shutdown).act()
    return shutdown.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
