"""A run in simulated time: a learner, actors, and the groups between them, by the rules of the real ones.

    admission -> queue -> lease -> episodes -> ready -> claim -> optimizer step -> publish -> refresh

The rules are those of `slipstream.learner.supply.supply` and `slipstream.actors.host.act`. Episodes, step times and the
engine's speed are a calibration's.
"""

import math
import random
import statistics
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from slipstream.common.config.config import Config
from slipstream.learner.supply.haste import Haste
from slipstream.replay.run.equal_returns import useful_share
from slipstream.tools.simulate.calibration import Calibration, PlayedTurn
from slipstream.tools.simulate.outcome import Outcome, Tally
from slipstream.tools.simulate.simulate_options import SimulateOptions
from slipstream.tools.simulate.simulated_engine import Host, SimulatedEngine, TokenTime

Process = Generator[simpy.Event, Any, None]

WARM_UP_STEPS, NUM_STEPS = 10, 300  # optimizer steps before those that are measured, and those
RESTART_S = 120.0  # until a lost actor is replaced: a new spot instance boots and loads its model
EVAL_SHARE = 0.25  # of an actor's episodes are an evaluation's, as in `slipstream.actors.host.act`


@dataclass(kw_only=True, slots=True)
class Member:
    """One attempt: what it still plays, and the tokens that each version sampled."""

    turns: Sequence[PlayedTurn]
    num_played: int = 0
    sampled: list[tuple[int, int]] = field(default_factory=list)  # (policy version, tokens) of each turn


@dataclass(kw_only=True, slots=True, eq=False)
class Group:
    min_version: int
    preferred_version: int  # of actors that play no evaluation
    teaches: bool  # else all members have the same return
    members: list[Member]
    unfinished: set[int] = field(default_factory=set)
    dropped: bool = False  # as the surplus of a synchronous step, perhaps while it is played

    @property
    def num_tokens(self) -> int:
        return sum(tokens for member in self.members for _, tokens in member.sampled)


@dataclass(kw_only=True, slots=True, eq=False)
class Actor:
    """One life of an actor; a replacement is another one."""

    engine: SimulatedEngine
    version: int
    changed: simpy.Event  # triggered, and replaced, when a slot is free or newer weights have come
    groups: dict[Group, None] = field(default_factory=dict)  # in the order in which they were leased
    num_running: int = 0
    num_left: int = 0  # of its episodes of an evaluation, which keeps its weights until they have ended
    num_evaluated: int = 0  # of them, that run
    ended: bool = False

    @property
    def is_pinned(self) -> bool:
        return self.num_left + self.num_evaluated > 0


class World:
    """One simulated run, with the settings of `config`: a learner and a fleet as fast as `facts`."""

    def __init__(
        self,
        config: Config,
        facts: Calibration,
        *,
        num_actors: int,
        options: SimulateOptions | None = None,
        num_steps: int = NUM_STEPS,
    ) -> None:
        self._env = simpy.Environment()
        self._config, self._facts, self._replay = config, facts, config.replay
        self._num_actors, self._last_step = num_actors, WARM_UP_STEPS + num_steps
        self._options = options or SimulateOptions()
        self._random = random.Random(config.run.seed)
        self._queue = simpy.Store(self._env)
        self._num_leased = 0
        self._ready = deque[Group]()
        self._open = list[Group]()  # of a synchronous step, in the order of opening, not claimed yet
        self._finished = self._env.event()  # triggered, and replaced, when a group becomes ready
        self._shared = Host(num_cores=facts.num_cores) if facts.num_cores else None
        self._learner = self._engine(TokenTime(fixed_s=1.0, per_request_s=0.0))
        self._actors = dict[Actor, None]()  # no set: its order would differ from one process to the next
        self._version = 0  # of the learner
        self._served = 0  # that actors can have
        self._taught = deque[bool](maxlen=64)
        self._haste = Haste()
        self._tally = Tally()
        self._started_s = 0.0

    def run(self) -> Outcome:
        for _ in range(self._num_actors):
            self._env.process(self._host())
        learner = self._env.process(self._learn())
        self._env.process(self._sample_load())
        self._env.run(until=learner)
        num_steps, lasted_s = self._last_step - WARM_UP_STEPS, self._env.now - self._started_s
        return self._tally.outcome(self._config, num_steps=num_steps, lasted_s=lasted_s)

    # The learner.

    def _learn(self) -> Process:
        replay, scale = self._replay, self._facts.batch_scale(self._replay)
        for step in range(self._last_step):
            if step == WARM_UP_STEPS:
                self._tally, self._started_s = Tally(), self._env.now
            began, batch, waited = self._env.now, list[Group](), False
            while len(batch) < replay.groups_per_step:
                self._admit(step, len(batch))
                claimed = self._claim(replay.groups_per_step - len(batch))
                if not claimed:
                    waited = True
                    yield self._finished
                batch += self._sorted_out(claimed)
            self._drop_surplus()
            self._haste.after_step(waited=waited)
            self._admit(step, len(batch))
            self._tally.wait_s += self._env.now - began
            self._count(batch)
            step_s = self._random.choice(self._facts.step_times).of(scale)
            yield self._learner.generate(step_s / self._options.learner_speed)
            self._version += 1
            self._env.process(self._publish(self._version))

    def _admit(self, step: int, num_kept: int) -> None:
        """Open groups until as much is in progress as the lag allows, as `slipstream.learner.supply.supply` does."""
        replay = self._replay
        ahead = min(replay.target_lag + 1, self._last_step - step)
        # A synchronous learner counts the ready groups among those that may teach.
        num_sure = sum(group.teaches for group in self._ready) if replay.target_lag else 0
        unsure = len(self._queue.items) + self._num_leased + (0 if replay.target_lag else len(self._ready))
        wanted = replay.groups_per_step * ahead - num_kept - num_sure
        has_its_groups = num_kept + num_sure >= replay.groups_per_step
        oldest = max(0, self._version - replay.target_lag)
        useful = useful_share(self._taught, assumed=self._replay.groups_per_step)
        for _ in range(math.ceil(wanted / useful) - unsure):
            group = Group(
                min_version=oldest,
                preferred_version=self._version if has_its_groups and not self._haste else oldest,
                teaches=self._random.random() < self._facts.useful_share,
                members=[Member(turns=turns) for turns in self._members()],
                unfinished=set(range(replay.group_size)),
            )
            self._queue.put(group)
            if replay.target_lag == 0:
                self._open.append(group)

    def _members(self) -> list[Sequence[PlayedTurn]]:
        """The episodes of a group, as they were played together: siblings last alike."""
        recorded, size = self._random.choice(self._facts.groups), self._replay.group_size
        return self._random.sample(list(recorded) * math.ceil(size / len(recorded)), size)

    def _claim(self, num_missing: int) -> list[Group]:
        """The oldest ready groups, and those that do not teach. Of a synchronous step the next one.

        If fewer than `num_missing` teach, only those that do not.
        """
        if self._replay.target_lag == 0:
            if not self._open or self._open[0] not in self._ready:
                return []
            self._ready.remove(self._open[0])
            return [self._open.pop(0)]
        taken, num_teach = list[Group](), 0
        while self._ready and num_teach < num_missing:
            taken.append(self._ready.popleft())
            num_teach += taken[-1].teaches
        if num_teach < num_missing:
            self._ready.extend(group for group in taken if group.teaches)
            return [group for group in taken if not group.teaches]
        return taken

    def _drop_surplus(self) -> None:
        """Drop what was opened for a synchronous step that is complete without it."""
        self._drop(self._open)
        for group in self._open:
            group.dropped = True
            if group in self._ready:
                self._ready.remove(group)
            elif group in self._queue.items:
                self._queue.items.remove(group)
            else:
                self._num_leased -= 1
        self._open.clear()

    def _sorted_out(self, claimed: Sequence[Group]) -> list[Group]:
        """The groups that teach; the others are dropped."""
        self._taught += [group.teaches for group in claimed]
        self._drop(group for group in claimed if not group.teaches)
        return [group for group in claimed if group.teaches]

    def _drop(self, groups: Iterable[Group]) -> None:
        self._tally.num_wasted += sum(group.num_tokens for group in groups)

    def _count(self, batch: Sequence[Group]) -> None:
        for group in batch:
            for member in group.members:
                self._tally.lags.append(self._version - min(version for version, _ in member.sampled))
                for version, tokens in member.sampled:
                    self._tally.num_trained += tokens
                    self._tally.num_masked += tokens * (self._version - version > self._replay.max_lag)

    def _publish(self, version: int) -> Process:
        yield self._env.timeout(self._facts.refresh_s)
        self._served = max(self._served, version)
        every = self._config.eval.every if self._facts.eval_episodes else 0
        for actor in self._actors:
            if not actor.is_pinned:
                actor.version = self._served
                self._wake(actor)
                if every and version % every == 0:
                    actor.num_left = math.ceil(self._facts.eval_episodes / len(self._actors))

    # The actors.

    def _engine(self, token_time: TokenTime) -> SimulatedEngine:
        return SimulatedEngine(self._env, token_time, self._shared or Host(num_cores=1))

    def _host(self) -> Process:
        """Keep one actor running: each life ends by chance, and another begins after a while."""
        while True:
            actor = self._begin_actor()
            if not self._options.preemptions_per_hour:
                return
            yield self._env.timeout(self._random.expovariate(self._options.preemptions_per_hour / 3600))
            self._end_actor(actor)
            yield self._env.timeout(RESTART_S)

    def _begin_actor(self) -> Actor:
        """Begin the life of an actor, which serves the newest weights that actors can have."""
        actor = Actor(engine=self._engine(self._facts.token_time), version=self._served, changed=self._env.event())
        self._actors[actor] = None
        self._env.process(self._serve(actor))
        return actor

    def _end_actor(self, actor: Actor) -> None:
        """End the life of `actor`, and queue its groups again: their episodes continue elsewhere."""
        actor.ended = True
        del self._actors[actor]
        for group in actor.groups:
            if not group.dropped:
                self._num_leased -= 1
                self._queue.put(group)

    def _serve(self, actor: Actor) -> Process:
        """Lease a group while a slot is free, as `slipstream.actors.host.act` does.

        An evaluation has its share of the slots first, and then those for which there is no group.
        """
        slots = self._config.actors.max_episodes
        while not actor.ended:
            if actor.num_running >= slots:
                yield actor.changed
                continue
            if actor.num_left and (actor.num_evaluated < EVAL_SHARE * slots or not self._queue.items):
                self._begin_evaluated(actor)
                continue
            group = yield self._queue.get()
            if actor.ended or (actor.is_pinned and actor.version < group.min_version):
                self._queue.put(group)
                if actor.num_left:
                    self._begin_evaluated(actor)
                else:
                    yield actor.changed
                continue
            self._num_leased += 1
            actor.groups[group] = None
            actor.num_running += len(group.unfinished)
            self._env.process(self._play(actor, group))

    def _begin_evaluated(self, actor: Actor) -> None:
        actor.num_left -= 1
        actor.num_evaluated += 1
        actor.num_running += 1
        self._env.process(self._evaluate(actor))

    def _evaluate(self, actor: Actor) -> Process:
        """Play an episode of an evaluation; after the last one the newest weights serve."""
        for turn in self._random.choice(self._random.choice(self._facts.groups)):
            yield from self._turn(actor, turn)
        actor.num_evaluated -= 1
        actor.num_running -= 1
        if not actor.is_pinned:
            actor.version = self._served
        self._wake(actor)

    def _play(self, actor: Actor, group: Group) -> Process:
        oldest = group.min_version if actor.is_pinned else group.preferred_version
        while actor.version < oldest and not actor.ended:
            yield actor.changed
        for number in sorted(group.unfinished):
            self._env.process(self._rollout(actor, group, number))

    def _rollout(self, actor: Actor, group: Group, number: int) -> Process:
        member = group.members[number]
        while member.num_played < len(member.turns) and not group.dropped:
            turn = member.turns[member.num_played]
            version = yield from self._turn(actor, turn)
            if actor.ended:
                return
            self._tally.num_sampled += turn.num_tokens
            member.sampled.append((version, turn.num_tokens))
            member.num_played += 1
            if group.dropped:
                self._tally.num_wasted += turn.num_tokens
            if member.num_played == len(member.turns) and self._random.random() < self._facts.failed_share:
                self._tally.num_wasted += sum(tokens for _, tokens in member.sampled)
                member.num_played, member.sampled = 0, []
        self._end(actor, group, number)

    def _turn(self, actor: Actor, turn: PlayedTurn) -> Generator[simpy.Event, Any, int]:
        """Return the version of its first token."""
        yield actor.engine.generate(self._facts.first_tokens)
        version = actor.version
        yield actor.engine.generate(turn.num_tokens)
        yield self._env.timeout(turn.env_s)
        return version

    def _end(self, actor: Actor, group: Group, number: int) -> None:
        group.unfinished.remove(number)
        actor.num_running -= 1
        self._wake(actor)
        if not group.unfinished:
            del actor.groups[group]
            if group.dropped:
                return
            self._num_leased -= 1
            self._ready.append(group)
            self._finished.succeed()
            self._finished = self._env.event()

    def _wake(self, actor: Actor) -> None:
        actor.changed.succeed()
        actor.changed = self._env.event()

    # What is measured.

    def _sample_load(self) -> Process:
        """Look at the load once in a while; the mean of such looks is the share of slots in use."""
        while True:
            yield self._env.timeout(0.01 + statistics.fmean(step.of(1.0) for step in self._facts.step_times) / 2)
            if self._actors:
                slots = self._config.actors.max_episodes
                used = [min(actor.num_running, slots) for actor in self._actors]
                self._tally.slots_used.append(statistics.fmean(used) / slots)
            self._tally.num_actors.append(len(self._actors))
