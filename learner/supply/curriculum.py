"""Chooses the environment and the task of each group."""

import functools
import random
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from slipstream.common.config.env_config import EnvConfig
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import num_train_tasks
from slipstream.replay.records.ticket import Group

MIN_SUCCESS, MAX_SUCCESS = 0.02, 0.95  # outside, an environment is too hard for now, or too easy by now
WINDOW = 32  # groups of one environment; its success is their mean
ASIDE_WEIGHT = 0.2  # of its own, that what is too hard or too easy keeps: some groups, so that a change is seen
FEWEST = 8  # groups of one environment before it may get less weight: fewer are too noisy


class Curriculum:
    """Distributes groups over the entries of `env.mixture` by weight; with `env.curriculum`, unfit ones get less.

    It measures success on all claimed groups, including those that teach nothing. A restarted learner begins with no
    measurements, and has them again after a few groups of each environment.
    """

    def __init__(self, config: EnvConfig, *, seed: int) -> None:
        self._config = config
        self._entries = config.entries()
        self._num_tasks = num_train_tasks(config)
        self._seed = seed
        self._success = {label: deque[float](maxlen=WINDOW) for label in self._entries}

    def observe(self, groups: Iterable[Group]) -> None:
        """Add the success of `groups` to what is known of their environments.

        A group that an earlier step has used is known already. Forks are left out: a search begins them where it pays.
        """
        for group in groups:
            env, trajectories = group.ticket.task.env, group.trajectories[: group.ticket.num_trees or None]
            if group.num_uses > 1 or env not in self._entries:  # of another mixture, from before a restart
                continue
            self._success[env].append(sum(each.success for each in trajectories) / len(trajectories))

    def weights(self) -> dict[str, float]:
        """The current weight of each environment; the weights need not add up to 1."""
        return {
            label: entry.weight * (ASIDE_WEIGHT if self._is_aside(label) else 1)
            for label, entry in self._entries.items()
        }

    def choose(self, group_id: int) -> Task:
        """The train task of a group. The same ids, in the same order among observed groups, give the same tasks.

        No task of an environment is visited twice before all of them had their turn.
        """
        label = self.label(group_id)
        return Task(env=label, split="train", index=task_index(group_id, self._num_tasks[label], self._seed))

    def label(self, number: int) -> str:
        """The environment of item `number`, drawn by the current weights."""
        weights = self.weights()
        (label,) = random.Random(f"{self._seed}/{number}").choices(list(weights), list(weights.values()))
        return label

    def _is_aside(self, label: str) -> bool:
        measured = self._success[label]
        if not self._config.curriculum or len(measured) < FEWEST:
            return False
        return not MIN_SUCCESS <= sum(measured) / len(measured) <= MAX_SUCCESS


def task_index(position: int, num_tasks: int, seed: int) -> int:
    """The task at `position` of an endless order that visits all `num_tasks` once before any twice."""
    lap, place = divmod(position, num_tasks)
    return int(_order(num_tasks, seed, lap)[place])


@functools.lru_cache(maxsize=2)
def _order(num_tasks: int, seed: int, lap: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, lap)).permutation(num_tasks)
