"""The episodes of one task as a tree of turns, for a search. Shared tokens are never sampled or encoded twice.

A state is reached by restoring its snapshot in a fresh environment. Without snapshots its turns are replayed, just as a
preempted episode is resumed. Every finished episode is an ordinary trajectory in both cases.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord, Exchange
from slipstream.actors.episode.resume import resumed_record
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.search.stretch import Stretch, play_stretch
from slipstream.actors.search.tree_search import START, State
from slipstream.common.records.trajectory import Trajectory

# The lines of a hint, which shows failed attempts at a task to the policy.
INTRODUCTION = "You have attempted this task before."
REQUEST = "Attempt the task again from the start. Learn from these attempts."
FAILED = "This attempt failed."

log = logging.getLogger(__name__)

# Of the state after the last turn of a record: a probability of success, or an expected return. Raises EpisodeFailed.
Values = Callable[[Trajectory], Awaitable[float]]


@dataclass(kw_only=True, slots=True)
class Collected:
    """The results of all tasks so far."""

    trajectories: list[Trajectory] = field(default_factory=list)  # of finished episodes
    num_turns: int = 0  # generated
    num_sampled: int = 0  # tokens of those turns
    num_failed: int = 0  # stretches that failed for a reason other than the policy
    num_tasks: int = 0  # that are done
    labels: dict[tuple[int, int], list[float | None]] = field(default_factory=dict)  # of `EpisodeTree.label`
    sampled_by: list[int] = field(default_factory=list)  # `num_sampled` when each of the `trajectories` had ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Playthrough:
    """One episode, with every state on its way."""

    states: list[State]  # after each turn
    record: Trajectory


class EpisodeTree:
    """The Tree of `attempt`'s task. Finished episodes are added to `collected` at once.

    Every stretch has its own member number, in the order in which they begin, and so its own seed. `room` limits the
    stretches that run in the engine at a time. With `values`, every state has a value.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        setup: EpisodeSetup,
        room: asyncio.Semaphore,
        collected: Collected,
        values: Values | None = None,
    ) -> None:
        self._attempt, self._setup, self._room, self._collected = attempt, setup, room, collected
        self._values = values
        self._members = itertools.count()
        self._stretches: dict[State, Stretch] = {}  # by the state in which they end; none ends at the start
        self._reached: set[tuple[str, ...]] = set()
        self.num_turns = 0  # generated so far; a failed stretch counts its unfinished turn too
        self.has_ended = False  # whether an episode of this task has finished

    @property
    def best(self) -> State:
        """The unfinished state with the highest value and return so far; among equal ones, the deepest."""
        return max(
            (state for state in self._stretches if not state.is_over),
            key=lambda state: (state.value or 0.0, state.total_reward, len(state.actions)),
            default=START,
        )

    async def expand(self, state: State, *, width: int) -> list[State]:
        played = await asyncio.gather(*(self._play(state, num_turns=1) for _ in range(width)))
        reached = [each for each in played if each is not None]
        counts = Counter(child.actions for child, _ in reached)
        children = []
        for child, stretch in reached:
            if child.actions not in self._reached:
                children.append(replace(child, share=counts[child.actions] / len(reached)))
                self._keep(children[-1], stretch)
        return children

    async def play_out(self, state: State, *, max_turns: int) -> State | None:
        played = await self._play(state, num_turns=max_turns)
        if played is None:
            return None
        reached, stretch = played
        if stretch.is_over:
            self._end(stretch)
        else:
            self._keep(reached, stretch)
        return reached

    async def revise(self, ends: Sequence[State]) -> State | None:
        hint = _hint_of([self._stretches[end].exchanges for end in ends])
        played = await self._play(START, num_turns=self._setup.allowance.max_turns, hint=hint)
        if played is None:
            return None
        end, stretch = played
        self._keep(end, stretch)
        return end

    async def walk(self) -> Playthrough | None:
        """Play one episode turn by turn; None if it failed."""
        states = [START]
        while True:
            played = await self._play(states[-1], num_turns=1)
            if played is None:
                return None
            state, stretch = played
            states.append(state)
            self._keep(state, stretch)
            if stretch.is_over:
                return Playthrough(states=states[1:], record=stretch.record)

    async def label(self, played: Playthrough, *, num_completions: int, max_turns: int) -> None:
        """Label each turn of an episode with the share of completions from there that succeed. arXiv 2312.08935.

        After 3 successes in 4 completions, a turn has the label 0.75. The label of the last turn is the episode's own
        success. Completions that fail for another reason than the policy are left out; without any other, the label is
        None.
        """
        labels: list[float | None] = []
        for state in played.states[:-1]:
            ends = await asyncio.gather(*(self.play_out(state, max_turns=max_turns) for _ in range(num_completions)))
            succeeded = [end.success for end in ends if end is not None]
            labels.append(sum(succeeded) / len(succeeded) if succeeded else None)
        labels.append(float(played.states[-1].success))
        self._collected.labels[played.record.group_id, played.record.member] = labels

    async def _play(self, state: State, *, num_turns: int, hint: str = "") -> tuple[State, Stretch] | None:
        """Play from `state`; return where that led, or None if the environment, the engine or the values failed."""
        attempt = replace(self._attempt, member=next(self._members))
        before = self._stretches.get(state)
        record = resumed_record(attempt, before.record) if before else EpisodeRecord(attempt=attempt)
        num_failed, sampled_before = 0, sum(record.loss_mask)
        try:
            async with self._room:
                begin = before.saved if before else None
                stretch = await play_stretch(record, setup=self._setup, num_turns=num_turns, begin=begin, hint=hint)
            return await self._state(stretch), stretch  # without a place in the engine: values may be slow
        except EpisodeFailed as failure:
            num_failed = 1
            log.warning(
                "%s member %d failed and is left out: %s: %s",
                attempt.task.task_id,
                attempt.member,
                failure.outcome.value,
                failure,
            )
            return None
        finally:
            num_played = len(record.turns) - len(state.actions) + num_failed
            self.num_turns += num_played
            self._collected.num_turns += num_played
            self._collected.num_sampled += sum(record.loss_mask) - sampled_before
            self._collected.num_failed += num_failed

    def _keep(self, state: State, stretch: Stretch) -> None:
        self._reached.add(state.actions)
        self._stretches[state] = stretch
        if stretch.is_over:
            self._end(stretch)

    def _end(self, stretch: Stretch) -> None:
        self._collected.trajectories.append(stretch.record)
        self._collected.sampled_by.append(self._collected.num_sampled)
        self.has_ended = True

    async def _state(self, stretch: Stretch) -> State:
        record = stretch.record
        last = record.turns[-1]
        return State(
            actions=stretch.actions,
            total_reward=record.total_reward,
            mean_logprob=float(record.behaviour_logprob_array()[last.start : last.stop].mean()),
            is_over=stretch.is_over,
            success=record.success,
            value=await self._values(record) if self._values else None,
        )


def _hint_of(attempts: Sequence[Sequence[Exchange]]) -> str:
    """Every action of the attempts and its answer; "" without attempts."""
    if not attempts:
        return ""
    parts = [INTRODUCTION]
    for number, exchanges in enumerate(attempts, start=1):
        parts.append(f"Attempt {number}:")
        for exchange in exchanges:
            parts += [f"> {exchange.action}", *(message.content for message in exchange.answer)]
        parts.append(FAILED)
    return "\n".join([*parts, REQUEST])
