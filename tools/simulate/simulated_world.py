"""A run in simulated time: a learner, actors, and the groups between them, by the rules of the real ones.

    admission -> queue -> lease -> episodes -> ready -> claim -> optimizer step -> publish -> refresh

The rules are those of `slipstream.learner.supply.supply` and `slipstream.actors.host.act`. Episodes, step times and the
engine's speed are a calibration's. Redis takes no time here: `Outcome.requests_per_s` is what it would have to answer.
"""

import math
import random
import statistics
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from slipstream.learner.supply.haste import Haste
from slipstream.tools.simulate.calibration import Calibration, PlayedTurn
from slipstream.tools.simulate.outcome import Outcome, Tally
from slipstream.tools.simulate.simulated_engine import SimulatedEngine
from slipstream.tools.simulate.simulated_run import Plan

Process = Generator[simpy.Event, Any, None]

WARM_UP_STEPS = 10  # not measured


@dataclass(kw_only=True, slots=True)
class Member:
    """One attempt: what it still plays, and the tokens that each version sampled."""

    turns: Sequence[PlayedTurn]
    num_played: int = 0
    sampled: list[tuple[int, int]] = field(default_factory=list)  # (policy version, tokens) of each turn


@dataclass(kw_only=True, slots=True, eq=False)
class Group:
    min_version: int
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
    ended: bool = False


class World:
    """One simulated run."""

    def __init__(self, plan: Plan, facts: Calibration) -> None:
        self._env = simpy.Environment()
        self._plan, self._facts = plan, facts
        self._random = random.Random(plan.seed)
        self._queue = simpy.Store(self._env)
        self._num_leased = 0
        self._ready = deque[Group]()
        self._open = list[Group]()  # of a synchronous step, in the order of opening, not claimed yet
        self._finished = self._env.event()  # triggered, and replaced, when a group becomes ready
        self._actors = dict[Actor, None]()  # no set: its order would differ from one process to the next
        self._version = 0  # of the learner
        self._served = 0  # that actors can have
        self._taught = deque[bool](maxlen=64)
        self._haste = Haste()
        self._tally = Tally()
        self._started_s = 0.0

    def run(self) -> Outcome:
        for _ in range(self._plan.num_actors):
            self._env.process(self._host())
        learner = self._env.process(self._learn())
        self._env.process(self._sample_load())
        self._env.run(until=learner)
        return self._tally.outcome(self._plan, lasted_s=self._env.now - self._started_s)

    # The learner.

    def _learn(self) -> Process:
        plan, facts = self._plan, self._facts
        for step in range(WARM_UP_STEPS + plan.steps):
            if step == WARM_UP_STEPS:
                self._tally, self._started_s = Tally(), self._env.now
            began, batch, waited = self._env.now, list[Group](), False
            while len(batch) < plan.groups_per_step:
                self._admit(step, len(batch))
                claimed = self._claim(plan.groups_per_step - len(batch))
                if not claimed:
                    waited = True
                    yield self._finished
                batch += self._sorted_out(claimed)
            self._drop_surplus()
            self._haste.after_step(waited=waited)
            self._admit(step, len(batch))
            self._tally.wait_s += self._env.now - began
            self._count(batch)
            yield self._env.timeout(self._random.choice(facts.step_s) * plan.step_scale)
            self._version += 1
            self._env.process(self._publish(self._version))

    def _admit(self, step: int, num_kept: int) -> None:
        """Open groups until as much is in progress as the lag allows, as `slipstream.learner.supply.supply` does."""
        plan = self._plan
        ahead = min(plan.target_lag + 1, WARM_UP_STEPS + plan.steps - step)
        # A synchronous learner counts the ready groups among those that may teach.
        num_sure = sum(group.teaches for group in self._ready) if plan.target_lag else 0
        unsure = len(self._queue.items) + self._num_leased + (0 if plan.target_lag else len(self._ready))
        wanted = plan.groups_per_step * ahead - num_kept - num_sure
        has_its_groups = num_kept + num_sure >= plan.groups_per_step
        oldest = self._version if has_its_groups and not self._haste else max(0, self._version - plan.target_lag)
        for _ in range(math.ceil(wanted / self._useful_share()) - unsure):
            group = Group(
                min_version=oldest,
                teaches=self._random.random() < self._facts.useful_share,
                members=[Member(turns=self._random.choice(self._facts.episodes)) for _ in range(plan.group_size)],
                unfinished=set(range(plan.group_size)),
            )
            self._queue.put(group)
            if plan.target_lag == 0:
                self._open.append(group)

    def _useful_share(self) -> float:
        first = self._plan.groups_per_step
        return max((first + sum(self._taught)) / (first + len(self._taught)), 1 / 8)

    def _claim(self, num_missing: int) -> list[Group]:
        """The oldest ready groups, and those that do not teach. Of a synchronous step the next one.

        If fewer than `num_missing` teach, only those that do not.
        """
        if self._plan.target_lag == 0:
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
        for group in groups:
            self._tally.num_wasted += group.num_tokens

    def _count(self, batch: Sequence[Group]) -> None:
        for group in batch:
            for member in group.members:
                self._tally.lags.append(self._version - min(version for version, _ in member.sampled))
                for version, tokens in member.sampled:
                    self._tally.num_trained += tokens
                    self._tally.num_masked += tokens * (self._version - version > self._plan.max_lag)

    def _publish(self, version: int) -> Process:
        yield self._env.timeout(self._facts.refresh_s)
        self._served = max(self._served, version)
        for actor in self._actors:
            actor.version = self._served
            self._wake(actor)

    # The actors.

    def _host(self) -> Process:
        """Keep one actor running: each life ends by chance, and another begins after a while."""
        plan = self._plan
        losses_per_s = plan.preemptions_per_hour / 3600
        while True:
            actor = self._begin_actor()
            if not losses_per_s:
                return
            yield self._env.timeout(self._random.expovariate(losses_per_s))
            self._end_actor(actor)
            yield self._env.timeout(plan.restart_s)

    def _begin_actor(self) -> Actor:
        """Begin the life of an actor, which serves the newest weights that actors can have."""
        actor = Actor(
            engine=SimulatedEngine(self._env, self._facts.token_time), version=self._served, changed=self._env.event()
        )
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
        """Lease a group while a slot is free, as `slipstream.actors.host.act` does."""
        while not actor.ended:
            if actor.num_running >= self._plan.max_episodes:
                yield actor.changed
                continue
            group = yield self._queue.get()
            if actor.ended:
                self._queue.put(group)
                return
            self._num_leased += 1
            actor.groups[group] = None
            actor.num_running += len(group.unfinished)
            self._env.process(self._play(actor, group))

    def _play(self, actor: Actor, group: Group) -> Process:
        while actor.version < group.min_version and not actor.ended:
            yield actor.changed
        for number in sorted(group.unfinished):
            self._env.process(self._rollout(actor, group, number))

    def _rollout(self, actor: Actor, group: Group, number: int) -> Process:
        member = group.members[number]
        while member.num_played < len(member.turns) and not group.dropped:
            turn = member.turns[member.num_played]
            yield self._env.timeout(self._facts.turn_s)
            version = actor.version
            yield actor.engine.generate(turn.num_tokens)
            if not actor.ended and turn.env_s:
                yield self._env.timeout(turn.env_s)
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

    def _end(self, actor: Actor, group: Group, number: int) -> None:
        self._tally.num_episodes += not group.dropped
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
            yield self._env.timeout(statistics.fmean(self._facts.step_s) / 2 + 0.01)
            slots = len(self._actors) * self._plan.max_episodes
            used = sum(min(actor.num_running, self._plan.max_episodes) for actor in self._actors)
            free = sum(actor.num_running < self._plan.max_episodes for actor in self._actors)
            if slots:
                self._tally.slots_used.append(used / slots)
            self._tally.free_actors.append(free)
            self._tally.num_actors.append(len(self._actors))
