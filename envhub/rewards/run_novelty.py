"""The count bonus over a run: how seldom all episodes of the run so far have been in the states of an episode."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.episode import Episode, Values
from slipstream.envhub.rewards.measures import count_bonus

Visits = Callable[[Task, Sequence[str]], list[int]]
"""How often stored episodes have been in each of these states of a task."""


@dataclass(kw_only=True, slots=True)
class RunNovelty:
    """1 / sqrt(n) for each turn, where n is how often its state has been visited in the run, this visit included.

    The bonus of Strehl & Littman 2008, https://doi.org/10.1016/j.jcss.2007.08.009. A turn whose state is unknown gives
    0. The second visit of a state that stored episodes visited 3 times, in one episode: 1 / sqrt(3 + 2) = 0.447.
    """

    visits: Visits | None = None  # None: no run counts

    async def __call__(self, episode: Episode) -> Values:
        """The bonus of each turn. Raises EnvError without a run."""
        if self.visits is None:
            raise EnvError("it counts the states of a run, and this episode has no run; leave the part out")
        states = [turn.state_key for turn in episode.turns]
        return count_bonus(states, await asyncio.to_thread(self.visits, episode.task, states))
