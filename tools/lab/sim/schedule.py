"""One schedule of faults: drawn from its seed, played in virtual time, and checked.

A schedule has at least three kinds of fault, one of which restarts the learner. Afterwards every process is started
again, one more step must become durable, the learner is asked to end, and what everyone saw is compared.
"""

import json
import os
import random
import re
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from slipstream.learner.checkpoint.checkpoint import latest_checkpoint
from slipstream.replay.buffer.audit import audit
from slipstream.replay.records.keys import FencedOut, RunForgotten
from slipstream.replay.records.ledger import STATES, read_ledger
from slipstream.replay.run.archive import Archive, ArchiveError
from slipstream.tools.lab.sim import disk
from slipstream.tools.lab.sim.bugs import NO_BUG, Bug
from slipstream.tools.lab.sim.cast import RUN, Cast, LearnerProcess, in_world
from slipstream.tools.lab.sim.disk import Disk
from slipstream.tools.lab.sim.store import Patches
from slipstream.tools.lab.sim.world import BEGIN_US, Client, Process, World

NUM_ACTORS = 2
LASTS_S = 1.6
RECOVERS_S = 20.0
LOST_S = 1.0  # of its newest writes, at most, that a server loses when it restarts
REASONS = {"zero_variance", "too_old", "surplus"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault, and when it strikes."""

    kind: str
    at_s: float
    value: float  # from 0 to 1: how long, or how much

    def __str__(self) -> str:
        return f"{self.kind} at {self.at_s:.3f} s ({self.value:.3f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a schedule."""

    violations: list[str]
    num_verbs: int
    events: list[tuple[int, tuple[Any, ...]]]  # when, in us since the beginning, and what
    own: re.Pattern[str]  # what differs from one play to the next

    @property
    def trace(self) -> list[str]:
        words = [
            (at_us, [each if isinstance(each, str) else repr(each) for each in what]) for at_us, what in self.events
        ]
        return [self.own.sub("", f"{at_us / 1e6:.6f} {' '.join(what)}") for at_us, what in words]

    @property
    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest("\n".join(self.trace).encode())


def drawn(seed: int) -> list[Fault]:
    """The faults of the schedule of this seed, in the order of time."""
    chance = random.Random(f"faults {seed}")
    kinds = [chance.choice(RESTARTS)]
    others = [kind for kind in FAULTS if kind not in kinds]
    kinds += chance.sample(others, chance.randint(2, 5))
    if "clock is set back" in kinds:  # what a server loses then is not promised: see docs/promises.md
        kinds = [kind for kind in kinds if not kind.startswith("server loses")]
        kinds += [kind for kind in ("late requests", "requests sent twice") if kind not in kinds]
    faults = [Fault(kind=kind, at_s=0.1 + chance.random() * LASTS_S, value=chance.random()) for kind in kinds]
    return sorted(faults, key=lambda fault: fault.at_s)


class Play:
    """One schedule in one world."""

    def __init__(self, seed: int, root: Path, patches: Patches) -> None:
        random.seed(seed)
        self.world = World(f"world {seed}", patches)
        self.disk = Disk(self.world, root)
        self.cast = Cast(self.world, root)
        self.is_over = False
        self.was_full = False  # the disk was
        self._num_learners = 0
        self.learners: list[LearnerProcess] = []
        self.actors: list[Process] = []

    def play(self, faults: Sequence[Fault]) -> Outcome:
        world = self.world
        for fault in faults:
            world.at(fault.at_s, partial(self._strike, fault))
        self.start_learner()
        self.actors = [self.cast.actor(f"actor-{number}") for number in range(NUM_ACTORS)]
        world.at(0.1, self._tend)
        world.run(max([LASTS_S, *(fault.at_s for fault in faults)]) + 0.3)
        self._heal()
        step = self._durable_step()
        if not world.run(RECOVERS_S, lambda: world.num_verbs > 200 and self._durable_step() > step):
            self.fail(f"no step became durable in {RECOVERS_S:.0f} s after the last fault")
        else:
            self._end()
        for process in [*self.learners, *self.actors]:
            if process.is_running:
                world.kill(process)
        own = re.compile(
            rf"{re.escape(str(self.disk.root))}| process {os.getpid()} on {re.escape(socket.gethostname())}"
        )
        return Outcome(
            violations=[own.sub("", line) for line in self.cast.seen.violations],
            num_verbs=world.num_verbs,
            events=[(at_us - BEGIN_US, what) for at_us, what in world.trace],
            own=own,
        )

    def fail(self, line: str) -> None:
        self.cast.seen.violations.append(line)

    def start_learner(self) -> None:
        self._num_learners += 1
        self.learners.append(self.cast.learner(f"learner-{self._num_learners}"))

    @property
    def learner(self) -> LearnerProcess:
        return self.learners[-1]

    def window(self, seconds: float, begin: Callable[[], None], end: Callable[[], None]) -> None:
        begin()
        self.world.at(seconds, end)

    def _strike(self, fault: Fault) -> None:
        self.world.note(f"FAULT {fault}")
        FAULTS[fault.kind](self, fault.value)

    def _tend(self) -> None:
        """Start again what has ended, as supervisors do."""
        if self.is_over:
            return
        self._judge_all()
        if not any(learner.is_running for learner in self.learners):
            self.start_learner()
        for number, actor in enumerate(self.actors):
            if not actor.is_running:
                self.actors[number] = self.cast.actor(actor.name)
        self.world.at(0.1, self._tend)

    def _judge_all(self) -> None:
        for process in [*self.learners, *self.actors]:
            if process.error is not None:
                self._judge(process)

    def _judge(self, process: Process) -> None:
        """Whether a process may have ended with this error."""
        error, process.error = process.error, None
        may = isinstance(error, FencedOut) and self._num_learners > 1
        may |= isinstance(error, RunForgotten) and self.cast.seen.is_partial
        may |= (
            isinstance(error, ArchiveError | ValueError | OSError) and "No space left" in str(error) and self.was_full
        )
        if not may:
            self.fail(f"{process.name.rstrip('-0123456789')} ended with {type(error).__name__}: {error}")

    def _heal(self) -> None:
        self.world.note("the faults are over")
        self.world.chances.clear()
        self.disk.is_full, self.disk.kill_at = False, -1

    def _durable_step(self) -> int:
        running = [each.learner for each in self.learners if each.is_running and each.learner]
        return max((learner.checkpoint_step for learner in running), default=-1)

    def _end(self) -> None:
        self.is_over, is_settled = True, False
        while not is_settled:
            self._judge_all()
            self.learners = [learner for learner in self.learners if learner.is_running]
            if not self.learners:  # a late request of a dead learner fenced it out: the next one settles what it left
                self.start_learner()
                self.world.run(2.0)
            for learner in self.learners:
                learner.shutdown.requested.set()
            if not self.world.run(20.0, lambda: not any(learner.is_running for learner in self.learners)):
                return self.fail("a learner did not end")
            is_settled = not any(isinstance(learner.error, FencedOut) for learner in self.learners)
        self._judge_all()
        for actor in self.actors:
            if actor.is_running:
                self.world.kill(actor)
        self.world.run(5.0)  # the last late requests arrive
        self._check()

    def _check(self) -> None:
        self.disk._is_own = True
        probe = Process("check")
        self.world.spawn(probe, lambda: self._compare(Client(self.world, probe)))
        self.world.run(5.0)
        if probe.error:
            self.fail(f"the comparison ended with {type(probe.error).__name__}: {probe.error}")

    def _compare(self, client: Client) -> None:
        seen, newest = self.cast.seen, latest_checkpoint(self.cast.run_dir.checkpoints)
        if newest is None:
            return self.fail("no checkpoint is whole")
        names = json.loads((newest / "shard").read_bytes())
        archive, durable = Archive(self.cast.run_dir.trajectories, RUN), len(names)
        for step in range(1, durable + 1):
            found = archive.group_ids(step, max_group_bytes=1 << 20)
            if found != [int(name.split(".")[0]) for name in names[step - 1][::2]]:
                self.fail(f"the archive of step {step} has groups {found}, the model {names[step - 1]}")
        uses = Counter(name for step in names for name in step)
        for name, num_uses in uses.items():
            if num_uses > 1 and (not seen.is_partial or len(set(seen.learned_by[name])) < num_uses):
                self.fail(f"{name} was trained {num_uses} times")
        for line in audit(client, RUN):
            # A payload in flight has an end by the server's clock: set back, it stays for longer, and is named.
            if not (self.world.skew_us < 0 and line.endswith("belongs to no group")):
                self.fail(f"audit: {line}")
        self._compare_accounts(client, uses)

    def _compare_accounts(self, client: Any, uses: Counter[str]) -> None:
        base, seen, ledger = f"slipstream:{{{RUN}}}:train", self.cast.seen, read_ledger(client, RUN)
        held = {int(group) for state in STATES for group in client.zrange(f"{base}:{state}", 0, -1)}
        trained = {int(name.split(".")[0]) for name in uses}
        if ledger.repairs:
            self.fail(f"the books were repaired {ledger.repairs} times")
        for reason in sorted(ledger.dropped.keys() - REASONS):
            self.fail(f"groups were dropped for {reason}")
        if self.cast.seen.is_partial:
            return
        if held & trained:
            self.fail(f"groups {sorted(held & trained)} are trained and still held")
        if ledger.trained != len(trained):
            self.fail(f"the books have {ledger.trained} trained groups, the model {len(trained)}")
        num_gone = ledger.opened - len(held | trained)
        if num_gone != sum(ledger.dropped.values()) or ledger.opened != ledger.last_group_id + 1:
            self.fail(f"{num_gone} groups of {ledger.opened} are gone, the books have dropped {ledger.dropped}")
        if ledger.trained_trajectories != len(uses):
            self.fail(f"the books have {ledger.trained_trajectories} trained trajectories, the model {len(uses)}")
        for name in sorted(seen.acknowledged.keys() - uses.keys()):
            group, member, attempt = name.split(" ")[0].split(".")
            if int(group) in trained:
                self.fail(f"{name} was acknowledged, and another attempt was trained")
            record = client.hget(f"{base}:group:{group}", f"member:{member}") if int(group) in held else None
            if int(group) in held and (record is None or record.split(b":")[0] != attempt.encode()):
                self.fail(f"{name} was acknowledged, and {record!r} is stored")


# The faults. Each gets a number from 0 to 1.


def _chance(name: str) -> Callable[[Play, float], None]:
    def strike(play: Play, value: float) -> None:
        chances = play.world.chances
        play.window(0.2 + value, lambda: chances.update({name: 0.1 + 0.2 * value}), lambda: chances.update({name: 0.0}))

    return strike


def _restart_server(play: Play, value: float) -> None:
    world = play.world
    world.down_until_us = world.now_us + int(value * 0.5e6)
    world.store.restart(world.store.save())


def _lose(play: Play, value: float, *, lost_s: float) -> None:
    """The server restarts without its newest writes. It saves what it will have then now."""
    saved = play.world.store.save()

    def restart() -> None:
        play.world.note("the server restarts without its newest writes")
        play.world.down_until_us = play.world.now_us + 100_000
        play.world.store.restart(saved)
        play.cast.seen.is_partial = True

    play.world.at(lost_s * value, restart)


def _empty(play: Play, _: float) -> None:
    play.world.store.restart(None)
    play.cast.seen.is_partial = True


def _kill_learner(play: Play, _: float) -> None:
    for learner in play.learners:
        if learner.is_running:
            play.world.kill(learner)


def _kill_at_change(play: Play, value: float) -> None:
    play.disk.kill_at = 1 + int(40 * value)
    play.world.at(1.0, lambda: _kill_learner(play, value) if play.disk.kill_at > 0 else None)


def _lose_power(play: Play, value: float) -> None:
    _kill_learner(play, value)
    play.disk.lose_power(random.Random(value))


def _take_over(play: Play, value: float) -> None:
    """A learner stands still, another one takes over, and the first one continues."""
    play.learner.paused_until_us = play.world.now_us + int((0.3 + value) * 1e6)
    play.start_learner()


def _kill_actor(play: Play, value: float) -> None:
    play.world.kill(play.actors[int(value * NUM_ACTORS)])


def _pause_actor(play: Play, value: float) -> None:
    """Its leases expire meanwhile."""
    play.actors[int(value * NUM_ACTORS)].paused_until_us = play.world.now_us + int((1.5 + 2 * value) * 1e6)


def _cut(play: Play, value: float) -> None:
    process: Any = [play.learner, *play.actors][int(value * (1 + NUM_ACTORS))]
    process.cut_until_us = play.world.now_us + int((0.2 + value) * 1e6)


def _fill_disk(play: Play, value: float) -> None:
    play.was_full = True
    play.window(
        0.1 + 0.3 * value, lambda: setattr(play.disk, "is_full", True), lambda: setattr(play.disk, "is_full", False)
    )


def _shift(seconds: float) -> Callable[[Play, float], None]:
    return lambda play, value: setattr(play.world, "skew_us", int(seconds * value * 1e6))


RESTARTS = ["learner killed", "learner killed at a change of the disk", "power lost", "learner replaced"]
FAULTS: dict[str, Callable[[Play, float], None]] = {
    "learner killed": _kill_learner,
    "learner killed at a change of the disk": _kill_at_change,
    "power lost": _lose_power,
    "learner replaced": _take_over,
    "actor killed": _kill_actor,
    "actor stopped": _pause_actor,
    "link cut": _cut,
    "lost requests": _chance("lost request"),
    "lost replies": _chance("lost reply"),
    "late requests": _chance("late request"),
    "requests sent twice": _chance("sent twice"),
    "server restarts": _restart_server,
    "server loses its newest writes": lambda play, value: _lose(play, value, lost_s=LOST_S),
    "server loses everything": _empty,
    "disk full": _fill_disk,
    "clock is set ahead": _shift(3600),
    "clock is set back": _shift(-3600),
}


def play(seed: int, faults: Sequence[Fault] | None = None, *, bug: Bug = NO_BUG) -> Outcome:
    """Play the schedule of a seed, or only these of its faults."""
    root = Path(tempfile.mkdtemp(prefix="slipstream-sim-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        game = Play(seed, root, bug.scripts)
        disk.use(game.disk)
        with in_world(game.world), bug.planted():
            return game.play(drawn(seed) if faults is None else faults)
    finally:
        disk.use(None)
        shutil.rmtree(root)


def shrunk(seed: int, *, bug: Bug = NO_BUG) -> list[Fault]:
    """The faults of a failing schedule without those that it does not need to fail."""
    faults = drawn(seed)
    for fault in list(faults):
        fewer = [each for each in faults if each is not fault]
        if play(seed, fewer, bug=bug).violations:
            faults = fewer
    return faults
