"""The episodes of one task as a tree of turns, for a search. Tokens are shared, and never sampled or encoded twice.

A state is reached by replaying its turns into a fresh environment, as a preempted episode is gone on with, so that it
needs no snapshots, and every end is a trajectory like any other.
"""

import asyncio
import itertools
import logging
from dataclasses import dataclass, field, replace

from actors.group import Stage
from actors.resume import resumed_tape
from actors.rollout import EpisodeFailed
from actors.stretch import Stretch, play_stretch
from actors.tape import Attempt, Tape
from actors.tree_search import START, State
from common.chat import Chat
from common.trajectory import Trajectory, Turn

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Collected:
    """What has come of the episodes of all tasks so far."""

    trajectories: list[Trajectory] = field(default_factory=list)  # of episodes that are over
    num_turns: int = 0  # generated
    num_failed: int = 0  # stretches that ended by no doing of the policy
    num_tasks: int = 0  # that are done


class EpisodeTree:
    """actors.tree_search.Tree of `attempt`'s task. What comes to its end is in `collected` at once.

    Every stretch has a member number of its own, in the order in which they begin, and so a seed of its own. `room` is
    for as many stretches as the engine may have at a time.
    """

    def __init__(self, attempt: Attempt, *, stage: Stage, room: asyncio.Semaphore, collected: Collected) -> None:
        self._attempt, self._stage, self._room, self._collected = attempt, stage, room, collected
        self._members = itertools.count()
        self._partials: dict[State, Trajectory] = {}  # of the states that are not over, but for the start
        self._reached: set[tuple[str, ...]] = set()
        self._num_turns = 0
        self.has_ended = False  # an episode of this task came to its end

    @property
    def num_turns(self) -> int:
        """How many turns were generated so far; a stretch that failed counts one more than it has whole ones."""
        return self._num_turns

    @property
    def best(self) -> State:
        """Of the states that are not over, the one with the highest return so far, and of equal ones the deepest."""
        return max(self._partials, key=lambda state: (state.total_reward, len(state.actions)), default=START)

    async def expand(self, state: State, *, width: int) -> list[State]:
        """Sample `width` actions in `state`, one turn each; return the states behind them that are new to the tree."""
        played = await asyncio.gather(*(self._play(state, num_turns=1) for _ in range(width)))
        children = []
        for stretch in (each for each in played if each is not None):
            child = self._state(stretch, before=state)
            if child.actions not in self._reached:
                self._keep(child, stretch)
                children.append(child)
        return children

    async def play_out(self, state: State, *, max_turns: int) -> State | None:
        """Play one episode from `state` to its end, or for `max_turns`; None where it failed by no doing of its own."""
        stretch = await self._play(state, num_turns=max_turns)
        if stretch is None:
            return None
        reached = self._state(stretch, before=state)
        if stretch.is_over:
            self._end(stretch)
        else:
            self._keep(reached, stretch)
        return reached

    async def _play(self, state: State, *, num_turns: int) -> Stretch | None:
        attempt = replace(self._attempt, member=next(self._members))
        partial = self._partials.get(state)
        tape = resumed_tape(attempt, partial) if partial else Tape(attempt=attempt)
        num_failed = 0
        try:
            async with self._room:
                return await play_stretch(tape, stage=self._stage, num_turns=num_turns)
        except EpisodeFailed as failure:
            num_failed = 1
            log.warning(
                "%s member %d is left out: %s: %s", attempt.task.task_id, attempt.member, failure.outcome.value, failure
            )
            return None
        finally:
            num_played = len(tape.turns) - len(state.actions) + num_failed
            self._num_turns += num_played
            self._collected.num_turns += num_played
            self._collected.num_failed += num_failed

    def _keep(self, state: State, stretch: Stretch) -> None:
        self._reached.add(state.actions)
        if stretch.is_over:
            self._end(stretch)
        else:
            self._partials[state] = stretch.record

    def _end(self, stretch: Stretch) -> None:
        self._collected.trajectories.append(stretch.record)
        self.has_ended = True

    def _state(self, stretch: Stretch, *, before: State) -> State:
        record = stretch.record
        last = record.turns[-1]
        return State(
            actions=before.actions + tuple(self._action(record, turn) for turn in record.turns[len(before.actions) :]),
            total_reward=record.total_reward,
            mean_logprob=float(record.behaviour_logprob_array()[last.start : last.stop].mean()),
            is_over=stretch.is_over,
            success=record.success,
        )

    def _action(self, record: Trajectory, turn: Turn) -> str:
        """What the environment was told in `turn`."""
        written = record.token_array()[turn.start : turn.stop].tolist()
        return self._stage.action_format.parse(Chat(self._stage.tokenizer).reply(written)).text
