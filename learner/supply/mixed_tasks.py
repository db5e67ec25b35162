"""Remembers the tasks on which attempts differed, and chooses those to repeat."""

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from slipstream.learner.checkpoint.sealed_file import NotWhole, read_sealed, write_sealed
from slipstream.learner.objective.advantage import RETURN_RESOLUTION

_SCHEMA = 1
KEPT = 256  # tasks of one environment; older ones are forgotten, as the policy has changed since

log = logging.getLogger(__name__)


class _Saved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    variances: dict[str, dict[int, float]]  # by environment and task index


class MixedTasks:
    """The tasks of one environment whose last group had different returns, with the variance of these returns.

    A group teaches by comparison, so a task teaches in proportion to the variance of its returns: p (1 - p) where a
    share p of attempts succeeds, which is largest at p = 1/2. The next group of a task that had mixed returns has mixed
    returns more often than that of a new task. The measure is that of Rutherford et al., "No Regrets: Investigating and
    Improving Regret Approximations for Curriculum Discovery" (2024); to repeat what taught is "Prioritized Level
    Replay" (Jiang et al., 2021).
    """

    def __init__(self, variances: Mapping[int, float] | None = None) -> None:
        """`variances` by task index, the task that was observed first in front."""
        self._variances = dict(variances or {})

    def observe(self, index: int, returns: Sequence[float]) -> None:
        """Remember the variance of the returns of a group; forget a task on which all attempts were equal."""
        self._variances.pop(index, None)
        mean = sum(returns) / len(returns)
        variance = sum((each - mean) ** 2 for each in returns) / len(returns)
        if max(returns) - min(returns) > RETURN_RESOLUTION:
            self._variances[index] = variance
        if len(self._variances) > KEPT:
            self.forget(next(iter(self._variances)))

    def take(self, dice: random.Random) -> int | None:
        """A task drawn in proportion to its variance; None if none is known.

        It is forgotten until its next group is observed, so that no task has two groups at a time.
        """
        if not self._variances:
            return None
        (index,) = dice.choices(list(self._variances), list(self._variances.values()))
        self.forget(index)
        return index

    def forget(self, index: int) -> None:
        self._variances.pop(index, None)

    def to_dict(self) -> dict[int, float]:
        """The variances by task index, the task that was observed first in front."""
        return dict(self._variances)


def save(variances: dict[str, dict[int, float]], path: Path) -> None:
    """Replace the file `path`; `variances` are those of `MixedTasks.to_dict`, by environment."""
    write_sealed(path, _Saved(variances=variances), schema=_SCHEMA)


def load(path: Path) -> dict[str, dict[int, float]]:
    """What `save` wrote; nothing if the file is missing or damaged, as a run can do without."""
    if not path.exists():
        return {}
    try:
        return read_sealed(path, _Saved, schema=_SCHEMA).variances
    except NotWhole as error:
        log.warning("no task is known as worth repeating yet: %s", error)
        return {}
