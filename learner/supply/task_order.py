"""The order in which tasks are visited."""

import functools

import numpy as np
import numpy.typing as npt


def task_index(position: int, num_tasks: int, seed: int) -> int:
    """The task at `position` of an endless order that visits all `num_tasks` once before any twice."""
    lap, place = divmod(position, num_tasks)
    return int(_order(num_tasks, seed, lap)[place])


@functools.lru_cache(maxsize=2)
def _order(num_tasks: int, seed: int, lap: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, lap)).permutation(num_tasks)
