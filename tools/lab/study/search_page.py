"""The tables of the study of searches: tasks solved within tokens, and the success of the episodes that are chosen."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.tools.lab.study.page import markdown
from slipstream.tools.play.eval_attempt import WAYS, Played, certainty

CHAIN = "chain"
UNGUIDED = "tree of thoughts"  # arms that begin with it do not look at the outcome
UNITS = (1, 2, 4, 8)  # tokens of so many mean episodes
CERTAIN = 0.9  # of a majority, when attempts are played by difficulty
MAX_ATTEMPTS = UNITS[-1]
Numbers = npt.NDArray[np.float64]


class OnTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an arm did on one task."""

    tokens: int  # that it sampled
    solved_by: int | None  # the tokens that were sampled when the first success ended; None also for the chain
    episodes: list[Played]


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one environment, seed and arm."""

    env: str
    seed: int
    arm: str
    tasks: list[OnTask]


Cells = Mapping[tuple[str, int, str], Cell]  # by environment, seed and arm


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Success of the chosen episode of each task, and the mean tokens of a task."""

    success: Numbers
    tokens: float


Line = Callable[[float], Numbers]  # the success of each task at so many tokens


def tables(cells: Cells) -> str:
    """In Markdown, for each environment: tasks solved within tokens, and success of a choice."""
    envs = list(dict.fromkeys(env for env, _, _ in cells))
    parts = []
    for env in envs:
        chains = [cell for cell in cells.values() if cell.env == env and cell.arm == CHAIN]
        unit = statistics.fmean(map(unit_of, chains))
        head = [f"`{env}`, solved within", *(f"{size * unit:.0f} tokens" for size in UNITS)]
        parts.append(markdown(head, _solved_rows(cells, env)))
    for env in envs:
        head = [f"`{env}`, chosen by", "tokens", "success", "less that of best-of-n, at equal tokens"]
        parts.append(markdown(head, _chosen_rows(cells, env)))
    return "\n".join(parts)


def unit_of(chain: Cell) -> float:
    """The mean tokens of an independent episode."""
    return statistics.fmean(each.num_written for task in chain.tasks for each in task.episodes)


def _solved_rows(cells: Cells, env: str) -> list[list[str]]:
    rows = []
    for arm in _arms(cells, env):
        row = [arm]
        for size in UNITS:
            solved, against = [], []
            for seed in _seeds(cells, env, arm):
                chain = cells[env, seed, CHAIN]
                most = size * unit_of(chain)
                solved.append(solved_within(cells[env, seed, arm], most))
                against.append(solved_within(chain, most))
            row.append(_rate(solved) if arm == CHAIN else f"{_rate(solved)}, {_gain(solved, against)}")
        rows.append(row)
    return rows


def _arms(cells: Cells, env: str) -> list[str]:
    return list(dict.fromkeys(arm for name, _, arm in cells if name == env))


def _seeds(cells: Cells, env: str, arm: str) -> list[int]:
    """Those that have the arm, and the chain to compare it with."""
    return [seed for name, seed, other in cells if (name, other) == (env, arm) and (env, seed, CHAIN) in cells]


def solved_within(cell: Cell, most: float) -> Numbers:
    """By task: whether a success ended within `most` sampled tokens.

    Independent episodes have no order: the share of all places in their circle from which it would have been so.
    """
    if cell.arm == CHAIN:
        return np.array([_share_solved(task.episodes, most) for task in cell.tasks])
    return np.array([float(task.solved_by is not None and task.solved_by <= most) for task in cell.tasks])


def _share_solved(episodes: Sequence[Played], most: float) -> float:
    def from_place(start: int) -> bool:
        tokens = 0
        for episode in (*episodes[start:], *episodes[:start]):
            tokens += episode.num_written
            if tokens > most or episode.success:
                break
        return tokens <= most and episode.success

    return statistics.fmean(map(from_place, range(len(episodes))))


def _chosen_rows(cells: Cells, env: str) -> list[list[str]]:
    seeds = _seeds(cells, env, CHAIN)
    chains = [cells[env, seed, CHAIN] for seed in seeds]
    rows = []
    for way in ("likelihood", "majority"):
        for size in UNITS:
            results = [best_of(chain, way=way, size=size) for chain in chains]
            rows.append([f"best of {size}, {way}", *_shown(results)])
    results = [by_difficulty(chain) for chain in chains]
    lines = [line_of(chain, "majority") for chain in chains]
    rows.append([f"majority, until it is {CERTAIN:.0%} certain", *_shown(results, lines)])
    for arm in (arm for arm in _arms(cells, env) if arm.startswith(UNGUIDED)):
        played = _seeds(cells, env, arm)
        results = [_of_search(cells[env, seed, arm]) for seed in played]
        lines = [line_of(cells[env, seed, CHAIN], "likelihood") for seed in played]
        rows.append([f"{arm}, likelihood", *_shown(results, lines)])
    return rows


def best_of(chain: Cell, *, way: str, size: int) -> Choice:
    """The choice among `size` independent episodes: the mean over the disjoint parts of the pool."""
    success, tokens = [], []
    for task in chain.tasks:
        parts = [task.episodes[start : start + size] for start in range(0, len(task.episodes), size)]
        success.append(statistics.fmean(WAYS[way](part).success for part in parts))
        tokens.append(statistics.fmean(sum(each.num_written for each in part) for part in parts))
    return Choice(success=np.array(success), tokens=statistics.fmean(tokens))


def by_difficulty(chain: Cell) -> Choice:
    """The majority of as many attempts as make it CERTAIN: the mean over the parts of MAX_ATTEMPTS of the pool."""
    success, tokens = [], []
    for task in chain.tasks:
        found = []
        for start in range(0, len(task.episodes), MAX_ATTEMPTS):
            part = task.episodes[start : start + MAX_ATTEMPTS]
            sizes = range(1, len(part) + 1)
            enough = next((size for size in sizes if certainty(part[:size]) >= CERTAIN), len(part))
            found.append(part[:enough])
        success.append(statistics.fmean(WAYS["majority"](part).success for part in found))
        tokens.append(statistics.fmean(sum(each.num_written for each in part) for part in found))
    return Choice(success=np.array(success), tokens=statistics.fmean(tokens))


def line_of(chain: Cell, way: str) -> Line:
    """Best-of-n at any number of tokens, on the line through the sizes; the ends count beyond them."""
    choices = [best_of(chain, way=way, size=size) for size in UNITS]
    places = [choice.tokens for choice in choices]
    by_task = list(zip(*(choice.success.tolist() for choice in choices), strict=True))
    return lambda tokens: np.array([np.interp(tokens, places, each) for each in by_task])


def _of_search(cell: Cell) -> Choice:
    """The likeliest of the episodes that ended; none counts as a failure."""
    success = [float(bool(task.episodes) and WAYS["likelihood"](task.episodes).success) for task in cell.tasks]
    return Choice(success=np.array(success), tokens=statistics.fmean(task.tokens for task in cell.tasks))


def _shown(results: Sequence[Choice], lines: Sequence[Line] = ()) -> list[str]:
    tokens = statistics.fmean(each.tokens for each in results)
    success = [each.success for each in results]
    against = [line(each.tokens) for line, each in zip(lines, results, strict=True)] if lines else []
    return [f"{tokens:.0f}", _rate(success), _gain(success, against) if against else ""]


def _rate(seeds: Sequence[Numbers]) -> str:
    """In percent."""
    return f"{100 * np.concatenate(seeds).mean():.1f}"


def _gain(seeds: Sequence[Numbers], against: Sequence[Numbers]) -> str:
    """The difference in points: mean, 95 % interval over tasks and seeds, and the mean of each seed."""
    differences = [100 * (ours - theirs) for ours, theirs in zip(seeds, against, strict=True)]
    every = np.concatenate(differences)
    half = 1.96 * every.std(ddof=1) / math.sqrt(len(every))
    return f"{every.mean():+.1f} ± {half:.1f} ({', '.join(f'{each.mean():+.0f}' for each in differences)})"
