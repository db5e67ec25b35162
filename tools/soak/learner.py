"""A stand-in for the learner, for soaks: every verb of a learner, and a file in the place of weights.

The model is the file of steps: a step is a line that names the very attempts it learned from. A checkpoint says how
many of its bytes are durable; a learner that comes back cuts the rest off, as one that loads older weights forgets what
came after. So the file holds what is in the surviving model, and may be compared with the books.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import msgspec

from common.connection import connect
from common.run_dir import write_whole
from common.shutdown import Shutdown
from common.trajectory import Sampling, Task
from replay.buffer import Buffer
from replay.ticket import Group, Ticket
from tools.soak.actor import Work, digest, make_buffer

GROUP_SIZE = 4
GROUPS_PER_STEP = 4
GROUPS_AHEAD = 12
DROPPED_SHARE = 0.05
IDLE_S = 0.02
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=1 << 12)


class Learned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one member gave."""

    attempt: int
    digest: str


class StepLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step: for each of its groups, the members in order."""

    step: int
    groups: dict[int, list[Learned]]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of the file of steps is durable."""

    step: int
    num_bytes: int
    next_group_id: int


class Model:
    """The file of steps and its checkpoint."""

    def __init__(self, steps: Path) -> None:
        """What the newest checkpoint of the file holds; an empty one where there is none."""
        self._checkpoint = steps.with_suffix(".checkpoint")
        self.restored = Checkpoint(step=0, num_bytes=0, next_group_id=0)
        if self._checkpoint.exists():
            self.restored = msgspec.json.decode(self._checkpoint.read_bytes(), type=Checkpoint)
        self._file = steps.open("ab")
        self._file.truncate(self.restored.num_bytes)
        self._unsaved = b""  # a learner that is fenced out leaves no trace in the file of the one that came after
        self.step = self.saved_step = self.restored.step

    def learn(self, groups: list[Group]) -> None:
        """One step."""
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
        """Make every step so far durable."""
        self._file.write(self._unsaved)
        self._unsaved = b""
        self._file.flush()
        os.fsync(self._file.fileno())
        saved = Checkpoint(step=self.step, num_bytes=self._file.tell(), next_group_id=next_group_id)
        write_whole(self._checkpoint, msgspec.json.encode(saved).decode())
        self.saved_step = self.step


def read_steps(steps: Path) -> list[StepLine]:
    """The surviving steps: those that the checkpoint covers."""
    durable = msgspec.json.decode(steps.with_suffix(".checkpoint").read_bytes(), type=Checkpoint).num_bytes
    return [msgspec.json.decode(line, type=StepLine) for line in steps.read_bytes()[:durable].splitlines()]


def learn(buffer: Buffer, model: Model, shutdown: Shutdown, *, checkpoint_every: int, seed: int) -> None:
    """Step after step, until it is told to leave. Raises FencedOut once another learner has taken over."""
    buffer.acquire_epoch()
    buffer.settle(model.step)
    buffer.reopen(model.step)
    next_group_id = max(model.restored.next_group_id, buffer.ledger().last_group_id + 1)
    chance = random.Random(f"{seed}-{os.getpid()}")
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
    # What was claimed for a step that is not made goes back: by the epoch of whoever comes next, or now.
    _save(buffer, model, next_group_id)
    buffer.reopen(model.step)


def _save(buffer: Buffer, model: Model, next_group_id: int) -> None:
    buffer.settle(model.saved_step)  # raises where another learner has taken over: this one's steps are void
    model.save(next_group_id)
    buffer.settle(model.step)


def _admit(buffer: Buffer, next_group_id: int, *, num_claimed: int) -> int:
    """Open tickets until enough groups are under way; return the next group id."""
    ledger = buffer.ledger()
    room = GROUPS_AHEAD - (ledger.queued + ledger.leased + ledger.ready + num_claimed)
    if room <= 0:
        return next_group_id
    buffer.open(
        Ticket(
            group_id=group_id,
            task=Task(env="soak", split="train", index=group_id),
            num_members=GROUP_SIZE,
            min_policy_version=0,
            sampling=SAMPLING,
            seed=0,
        )
        for group_id in range(next_group_id, next_group_id + room)
    )
    return next_group_id + room


def main(command: str) -> int:
    """Learn as the JSON `command` says; return the exit code."""
    work = msgspec.convert(json.loads(command), Work)
    shutdown = Shutdown()
    with connect(work.url) as client:
        learn(
            make_buffer(client, work),
            Model(Path(work.journal)),
            shutdown,
            checkpoint_every=work.checkpoint_every,
            seed=work.seed,
        )
    return shutdown.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
