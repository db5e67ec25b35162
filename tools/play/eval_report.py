"""The numbers of an evaluation, from its episodes: means, intervals and pass@k.

Attempts at one task are alike, so an interval is over tasks: each task gives one number, the mean of its attempts.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from slipstream.common.process.headline import Z, interval, wilson
from slipstream.tools.play.eval_attempt import WAYS, Played, chosen


def report(episodes: Sequence[Played]) -> dict[str, Any]:
    """Return the numbers of one format, environment and way of sampling, from at least one episode."""
    tasks = _by_task(episodes)
    success = fmean(_rate(attempts) for attempts in tasks.values())
    low, high = wilson(success, len(tasks))
    fewest, most = (number(map(len, tasks.values())) for number in (min, max))
    more: dict[str, Any] = {}
    if fewest > 1:
        more["pass_at"] = {str(size): _passed(tasks, size) for size in _powers(fewest)}
    if most > 1:
        more["best_of"] = _best_of(tasks, sizes=sorted({*_powers(fewest), most}))
    return {
        "num_tasks": len(tasks),
        "num_episodes": len(episodes),
        "success": success,
        "success_low": low,
        "success_high": high,
        "score": fmean(episode.score for episode in episodes),
        "turns": fmean(episode.num_turns for episode in episodes),
        "invalid_actions": fmean(episode.num_invalid / episode.num_turns for episode in episodes),
        "tokens": fmean(episode.num_tokens for episode in episodes),
        "tokens_written": fmean(episode.num_written for episode in episodes),
        **more,
    }


def compared(episodes_of: Mapping[str, Sequence[Played]]) -> tuple[list[str], list[list[str]]]:
    """Return a table of formats or searches: its head, and a row for each, with 95 % intervals.

    The last column is the difference of success to the first one, over the tasks that both have played.
    """
    first, *_ = episodes_of
    head = ["way", "tasks", "success", "invalid actions", "tokens written", f"success less that of {first}"]
    rows = []
    for name, episodes in episodes_of.items():
        tasks = _by_task(episodes)
        success = fmean(_rate(attempts) for attempts in tasks.values())
        invalid = [fmean(each.num_invalid / each.num_turns for each in attempts) for attempts in tasks.values()]
        written = [fmean(each.num_written for each in attempts) for attempts in tasks.values()]
        others = _by_task(episodes_of[first])
        gains = [_rate(tasks[index]) - _rate(others[index]) for index in tasks.keys() & others.keys()]
        measured = [interval(success, len(tasks)), spread(invalid, digits=3), spread(written, digits=1)]
        gained = "" if name == first else spread(gains, digits=3, sign="+")
        rows.append([name, str(len(tasks)), *measured, gained])
    return head, rows


def spread(values: Sequence[float], *, digits: int, sign: str = "") -> str:
    """Return the mean with its normal 95 % interval: "0.100 (-0.02 to 0.22)"; only the mean of a single value.

    z * s / sqrt(n), with the standard deviation s of the n values.
    """
    if not values:
        return "no common task"
    mean = fmean(values)
    if len(values) == 1:
        return f"{mean:{sign}.{digits}f}"
    reach = Z * stdev(values) / math.sqrt(len(values))
    shown = max(digits - 1, 0)
    return f"{mean:{sign}.{digits}f} ({mean - reach:{sign}.{shown}f} to {mean + reach:{sign}.{shown}f})"


def pass_at(size: int, *, num_attempts: int, num_solved: int) -> float:
    """Return the probability that at least one of `size` attempts succeeds, estimated without bias.

        1 - C(n - c, k) / C(n, k)        Chen et al. 2021, https://arxiv.org/abs/2107.03374

    2 of 4 attempts, k = 2: 1 - 1 / 6 = 0.833.
    """
    return 1.0 - math.comb(num_attempts - num_solved, size) / math.comb(num_attempts, size)


def _rated(values: Sequence[float]) -> dict[str, float]:
    """The mean of one number a task, with its 95 % interval."""
    rate = fmean(values)
    low, high = wilson(rate, len(values))
    return {"rate": rate, "low": low, "high": high}


def _passed(tasks: Mapping[int, Sequence[Played]], size: int) -> dict[str, float]:
    solved = [(len(attempts), sum(each.success for each in attempts)) for attempts in tasks.values()]
    return _rated([pass_at(size, num_attempts=number, num_solved=good) for number, good in solved])


def _powers(most: int) -> list[int]:
    return [1 << place for place in range(most.bit_length())]


def _best_of(tasks: Mapping[int, Sequence[Played]], *, sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """By way to choose and number of attempts: success of the choice, and the tokens that were written for a task."""
    every = [each for attempts in tasks.values() for each in attempts]
    has_numbers = {
        "likelihood": any(each.mean_logprob for each in every),  # a server sends none
        "majority": True,
        "reward_model": all(each.value is not None for each in every),
    }
    ways = [way for way in WAYS if has_numbers[way]]
    return {way: {str(size): _choice(tasks, way=way, size=size) for size in sizes} for way in ways}


def _choice(tasks: Mapping[int, Sequence[Played]], *, way: str, size: int) -> dict[str, float]:
    results = [chosen(attempts, way=way, size=size) for attempts in tasks.values()]
    return _rated([success for success, _ in results]) | {"tokens_written": fmean(tokens for _, tokens in results)}


def _by_task(episodes: Sequence[Played]) -> dict[int, list[Played]]:
    tasks: dict[int, list[Played]] = {}
    for episode in episodes:
        tasks.setdefault(episode.index, []).append(episode)
    return tasks


def _rate(attempts: Sequence[Played]) -> float:
    return fmean(float(each.success) for each in attempts)
