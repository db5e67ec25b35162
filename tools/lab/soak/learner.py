"""A stand-in for the learner: it calls every verb of a learner, and has a file instead of weights.

The model is the file of steps: each step is a line with the attempts that it learned from. A checkpoint records how
many bytes of the file are durable. A resumed learner truncates the rest, as a learner that loads older weights loses
what came after. So the file has what is in the surviving model, and can be compared with the ledger. Two learners of
one file exclude each other: the later one reads the checkpoint after it has fenced out the earlier one, and not while
that one writes.
"""

import contextlib
import fcntl
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from slipstream.common.process.connection import connect
from slipstream.common.process.output import write_whole
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import Sampling, Task
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.records.ticket import Group, Ticket
from slipstream.tools.lab.soak.actor import VOCAB_SIZE, Work, digest, replay_of

GROUP_SIZE = 4
GROUPS_PER_STEP = 4
GROUPS_AHEAD = 12
DROPPED_SHARE = 0.05
IDLE_S = 0.02
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=1 << 12)


class Learned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The attempt at one member that the model learned from."""

    attempt: int
    digest: str


class StepLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step: the members of each of its groups, in order."""

    step: int
    groups: dict[int, list[Learned]]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many bytes of the file of steps are durable."""

    step: int
    num_bytes: int
    next_group_id: int


class Model:
    """The file of steps and its checkpoint."""

    def __init__(self, steps: Path) -> None:
        """Restore the newest checkpoint of the file, or begin an empty model.

        Earlier learners must have been fenced out before.
        """
        self._checkpoint = steps.with_suffix(".checkpoint")
        self._file = steps.open("ab")
        self.restored = Checkpoint(step=0, num_bytes=0, next_group_id=0)
        with self.held():
            if self._checkpoint.exists():
                self.restored = msgspec.json.decode(self._checkpoint.read_bytes(), type=Checkpoint)
            self._file.truncate(self.restored.num_bytes)
        self._unsaved = b""  # buffered, so that a fenced-out learner does not write into the file of its successor
        self.step = self.saved_step = self.restored.step

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Exclude other learners from the file."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def learn(self, groups: list[Group]) -> None:
        """Make one step on `groups`."""
        self.step += 1
        line = StepLine(
            step=self.step,
            groups={
                group.ticket.group_id: [Learned(attempt=t.attempt, digest=digest(t)) for t in group.trajectories]
                for group in groups
            },
        )
        self._unsaved += msgspec.json.encode(line) + b"\n"

    def save(self, next_group_id: int) -> None:
        """Make every step so far durable. The caller must have entered `held`."""
        self._file.write(self._unsaved)
        self._unsaved = b""
        self._file.flush()
        os.fsync(self._file.fileno())
        saved = Checkpoint(step=self.step, num_bytes=self._file.tell(), next_group_id=next_group_id)
        write_whole(self._checkpoint, msgspec.json.encode(saved).decode())
        self.saved_step = self.step


def read_steps(steps: Path) -> list[StepLine]:
    """The steps that the checkpoint covers."""
    durable = msgspec.json.decode(steps.with_suffix(".checkpoint").read_bytes(), type=Checkpoint).num_bytes
    return [msgspec.json.decode(line, type=StepLine) for line in steps.read_bytes()[:durable].splitlines()]


def learn(buffer: LearnerBuffer, steps: Path, shutdown: Shutdown, *, checkpoint_every: int) -> None:
    """Make steps until a shutdown is requested. Raises FencedOut once another learner has taken over."""
    buffer.acquire_epoch()
    model = Model(steps)
    buffer.settle(model.step)
    buffer.reopen(model.step)
    next_group_id = max(model.restored.next_group_id, buffer.ledger().last_group_id + 1)
    chance = random.Random()
    batch: list[Group] = []
    while not shutdown.requested.is_set():
        next_group_id = _admit(buffer, next_group_id, num_claimed=len(batch))
        claimed = buffer.claim(model.step + 1, GROUPS_PER_STEP - len(batch), policy_version=0, max_lag=0)
        for group in claimed:
            if chance.random() < DROPPED_SHARE:
                buffer.drop([group.ticket.group_id], "zero_variance")
            else:
                batch.append(group)
        if len(batch) == GROUPS_PER_STEP:
            model.learn(batch)
            batch = []
            if model.step % checkpoint_every == 0:
                _save(buffer, model, next_group_id)
        elif not claimed:
            time.sleep(IDLE_S)
    # Groups claimed for an unfinished step become ready again, now or when the next learner acquires the epoch.
    _save(buffer, model, next_group_id)
    buffer.reopen(model.step)


def _save(buffer: LearnerBuffer, model: Model, next_group_id: int) -> None:
    with model.held():
        buffer.settle(model.saved_step)  # raises if another learner has taken over, which voids this one's steps
        model.save(next_group_id)
    buffer.settle(model.step)


def _admit(buffer: LearnerBuffer, next_group_id: int, *, num_claimed: int) -> int:
    """Open tickets until enough groups are in flight; return the next group id."""
    ledger = buffer.ledger()
    room = GROUPS_AHEAD - (ledger.queued + ledger.leased + ledger.ready + num_claimed)
    if room <= 0:
        return next_group_id
    buffer.open(
        Ticket(
            group_id=group_id,
            task=Task(env="shop", split="train", index=group_id),
            num_members=GROUP_SIZE,
            min_policy_version=0,
            sampling=SAMPLING,
            seed=0,
        )
        for group_id in range(next_group_id, next_group_id + room)
    )
    return next_group_id + room


def main(command: str) -> int:
    """Learn with the settings in the JSON `command`; return the exit code."""
    work = msgspec.convert(json.loads(command), Work)
    shutdown = Shutdown()
    with connect(work.url) as client:
        learn(
            LearnerBuffer(client, work.run_id, replay_of(work), vocab_size=VOCAB_SIZE),
            Path(work.journal),
            shutdown,
            checkpoint_every=work.checkpoint_every,
        )
    return shutdown.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
