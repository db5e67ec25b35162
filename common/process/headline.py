"""The headline numbers of a run: reward and success of the newest finished episodes, those of dropped groups too."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUM_EPISODES = 100  # more would be of older versions; enough to know the success rate to within 0.1
Z = 1.96  # 95 % of a normal distribution lie within this many standard deviations


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """The means over the newest `num_episodes`; `low` to `high` is the 95 % interval of `success`."""

    num_episodes: int
    reward: float
    success: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"success {self.success:.3f} ({self.low:.2f} to {self.high:.2f})  reward {self.reward:.3f}"


def headline(
    records: Sequence[Mapping[str, float]], *, wanted: int = NUM_EPISODES, until: float = math.inf
) -> Headline | None:
    """The means over the newest of a run's `records`, as many as contain `wanted` episodes together.

    Over all records if they contain fewer; None if no episode has ended. Records of steps after `until`, a run's
    `last_full_step`, count only if there are no others.
    """
    ended = [record for record in records if "produced/success" in record]
    num_episodes, rewards, successes = 0.0, 0.0, 0.0
    for record in reversed([record for record in ended if record.get("step", 0) <= until] or ended):
        if num_episodes >= wanted:
            break
        count = record["produced/episodes"]
        num_episodes += count
        rewards += count * record["produced/reward"]
        successes += count * record["produced/success"]
    if not num_episodes:
        return None
    success = successes / num_episodes
    low, high = wilson(success, round(num_episodes))
    return Headline(
        num_episodes=round(num_episodes), reward=rewards / num_episodes, success=success, low=low, high=high
    )


def wilson(rate: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a probability, from the observed `rate` in `count` independent trials (Wilson, 1927).

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    9 of 10: 0.596 to 0.982. 0 of 10: 0 to 0.278. A rate outside of [0, 1], which is damage, counts as the nearest end.
    """
    square, rate = Z * Z / count, min(max(rate, 0.0), 1.0)
    middle = rate + square / 2
    reach = math.sqrt(square * (rate * (1 - rate) + square / 4))
    return (middle - reach) / (1 + square), (middle + reach) / (1 + square)


def interval(rate: float, count: int) -> str:
    """The rate with its 95 % interval, as text: "0.940 (0.88 to 0.97)"."""
    low, high = wilson(rate, count)
    return f"{rate:.3f} ({low:.2f} to {high:.2f})"


def held_out_success(record: Mapping[str, float]) -> str:
    """The sampled success of an evaluation's record, with its 95 % interval where the number of tasks is known."""
    sampled, count = record["eval/success_sampled"], record.get("eval/num_tasks")
    return interval(sampled, round(count)) if count else f"{sampled:.3f}"


def held_out(record: Mapping[str, float]) -> str:
    return f"{held_out_success(record)} sampled, {record['eval/success_greedy']:.3f} greedy"


def progress_line(records: Sequence[Mapping[str, Any]]) -> str:
    """The newest of a run's `records` as one line of text."""
    record = records[-1]
    if "trained/reward" not in record:
        return f"step {record['step']:4d}  held-out success {held_out(record)}"
    return (
        f"step {record['step']:4d}  {headline(records) or 'no episode has finished'}  "
        f"trained success {record['trained/success']:.3f}  "
        f"lag {record['lag/mean']:.1f}  ready {record['replay/ready']:.0f}  "
        f"tokens/s {record['fleet/generated_tokens_per_s']:.0f} generated {record['perf/trained_tokens_per_s']:.0f} "
        f"trained  learner busy {record['perf/learner_busy']:.0%}"
    )
