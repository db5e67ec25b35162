"""Chooses the environment and the task of each group."""

import random
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slipstream.common.config.env_config import EnvConfig
from slipstream.common.records.trajectory import Task
from slipstream.learner.supply.mixed_tasks import MixedTasks
from slipstream.learner.supply.task_order import task_index
from slipstream.replay.records.ticket import Group

WINDOW = 32  # groups of one environment; its success is their mean
FEWEST = 8  # groups of one environment before it may get less weight: fewer are too noisy


class Choice(NamedTuple):
    """The task of a group."""

    task: Task
    is_repeat: bool  # chosen because attempts at it differed, so its success says nothing about all tasks
    variance: float | None = None  # of the returns of its last group; forgotten until this group is observed


class Curriculum:
    """Distributes groups over the entries of `env.mixture` by weight; what is too hard or too easy gets less.

    It measures success on all claimed groups of new tasks, including those that teach nothing. A restarted learner
    begins with no measurements, and has them again after a few groups of each environment. A share `env.repeat` of the
    groups repeats tasks of `MixedTasks`.
    """

    def __init__(self, config: EnvConfig, *, seed: int) -> None:
        self._config = config
        self._entries = config.entries()
        self._seed = seed
        self._success = {label: deque[float](maxlen=WINDOW) for label in self._entries}
        self._mixed = {label: MixedTasks() for label in self._entries}

    def observe(self, groups: Iterable[Group]) -> None:
        """Add the success and the returns of `groups` to what is known of their environments and tasks.

        A group that an earlier step has used is known already.
        """
        for group in groups:
            task, trajectories = group.ticket.task, group.trajectories
            if group.num_uses > 1 or task.env not in self._entries:  # of another mixture, from before a restart
                continue
            if self._config.repeat:
                self._mixed[task.env].observe(task.index, [trajectory.total_reward for trajectory in trajectories])
            if not group.ticket.is_repeat:
                self._success[task.env].append(sum(each.success for each in trajectories) / len(trajectories))

    def weights(self) -> dict[str, float]:
        """The current weight of each environment; the weights need not add up to 1."""
        return {
            label: entry.weight * (self._config.aside_weight if self._is_aside(label) else 1)
            for label, entry in self._entries.items()
        }

    def choose(self, group_id: int) -> Choice:
        """The train task of a group. The same ids, in the same order among observed groups, give the same tasks.

        Unless it is a repeat, no task of an environment is visited twice before all of them had their turn.
        """
        label, dice = self.label(group_id), random.Random(f"{self._seed}/{group_id}/repeat")
        variances = self._mixed[label].to_dict()
        repeated = self._mixed[label].take(dice) if dice.random() < self._config.repeat else None
        if repeated is None:
            index = task_index(group_id, self._config.num_train_tasks, self._seed)
            self._mixed[label].forget(index)
        else:
            index = repeated
        task = Task(env=label, split="train", index=index)
        return Choice(task, is_repeat=repeated is not None, variance=variances.get(index))

    def take_back(self, choice: Choice) -> None:
        """Remember again what was known of the task: its group is dropped before it is observed."""
        label, index = choice.task.env, choice.task.index
        if choice.variance is not None:
            self._mixed[label] = MixedTasks({index: choice.variance} | self._mixed[label].to_dict())

    def mixed_tasks(self) -> dict[str, dict[int, float]]:
        """What `restore` needs, by environment."""
        return {label: tasks.to_dict() for label, tasks in self._mixed.items()}

    def restore(self, mixed_tasks: Mapping[str, Mapping[int, float]]) -> None:
        """Continue with the tasks of an earlier learner; those of environments that the mixture lacks are ignored."""
        self._mixed = {label: MixedTasks(mixed_tasks.get(label)) for label in self._entries}

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
