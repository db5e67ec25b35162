"""Runs the cells of a study in worker processes, one thread each."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from slipstream.common.process.shutdown import die_with_parent
from slipstream.learner.ranks.ranks import Ranks, join_ranks

C = TypeVar("C")

_ranks: list[Ranks] = []  # of this worker process, which is the only rank of its group


def ranks() -> Ranks:
    """Those of this worker process."""
    return _ranks[0]


def run_cells(
    cells: Sequence[C],
    *,
    warm: Callable[[C], None],
    warm_name: Callable[[C], str],
    run: Callable[[C], str],
    workers: int,
) -> None:
    """Run `warm` for one cell of each `warm_name`, then `run` for every cell, and print what it returns.

    Both are functions of a module, as they are called in another process.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_join, initargs=(os.getpid(),)) as pool:
        list(pool.map(warm, {warm_name(cell): cell for cell in cells}.values()))
        done = [pool.submit(run, cell) for cell in cells]
        for number, future in enumerate(as_completed(done), start=1):
            print(f"{number} of {len(cells)}: {future.result()}", flush=True)


def _join(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    _ranks.append(join_ranks(timeout_s=60))
