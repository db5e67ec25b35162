"""Chooses the environment of each group, for a run that learns in several environments."""

import random
from collections import deque
from collections.abc import Iterable

from common.env_config import EnvConfig
from common.trajectory import Task
from learner.task_order import task_index
from replay.ticket import Group

WINDOW = 32  # groups of one environment; its success is their mean
FEWEST = 8  # groups of one environment before it may get less weight: fewer are too noisy


class Curriculum:
    """Distributes groups over the entries of `env.mixture` by weight; what is too hard or too easy gets less.

    It measures success on all claimed groups, including those that teach nothing. A restarted learner begins with no
    measurements, and has them again after a few groups of each environment.
    """

    def __init__(self, config: EnvConfig, *, seed: int) -> None:
        self._config = config
        self._entries = config.entries()
        self._seed = seed
        self._success = {label: deque[float](maxlen=WINDOW) for label in self._entries}

    def observe(self, groups: Iterable[Group]) -> None:
        """Add the success of `groups` to what is measured of their environments."""
        for group in groups:
            measured = self._success.get(group.ticket.task.env)
            if measured is not None:  # None for a group from before a restart, of another mixture
                measured.append(sum(trajectory.success for trajectory in group.trajectories) / len(group.trajectories))

    def weights(self) -> dict[str, float]:
        """The current weight of each environment; the weights need not add up to 1."""
        return {
            label: entry.weight * (self._config.aside_weight if self._is_aside(label) else 1)
            for label, entry in self._entries.items()
        }

    def task(self, group_id: int) -> Task:
        """The train task of a group. The same ids and observed groups give the same tasks.

        No task of an environment is repeated before all of them have been visited.
        """
        index = task_index(group_id, self._config.num_train_tasks, self._seed)
        return Task(env=self.label(group_id), split="train", index=index)

    def label(self, number: int) -> str:
        """The environment of item `number`, drawn by the current weights."""
        weights = self.weights()
        (label,) = random.Random(f"{self._seed}/{number}").choices(list(weights), list(weights.values()))
        return label

    def _is_aside(self, label: str) -> bool:
        measured = self._success[label]
        if len(measured) < FEWEST:
            return False
        return not self._config.min_success <= sum(measured) / len(measured) <= self._config.max_success
