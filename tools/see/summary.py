"""Reads `summary.json`, which the learner writes at the end of a run, and makes rows of a table from it."""

from collections.abc import Mapping

import msgspec

from slipstream.common.process.headline import Headline, wilson
from slipstream.common.process.output import read_json
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.lead.cost import Cost
from slipstream.learner.lead.tally import EvalDuring, EvalResult
from slipstream.replay.records.ledger import Ledger


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second over the whole run."""

    generated: float
    trained: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    eval: dict[str, EvalResult]
    eval_during: list[EvalDuring]
    produced: Headline | None
    ledger: Ledger
    lag: dict[str, int]
    tokens_per_s: Speed
    cost: Cost
    first_reward_s: float | None
    wall_s: float


def read_summary(run_dir: RunDir) -> Summary | None:
    """The run's summary; None if the run has not finished. Raises ConfigError if it cannot be read."""
    return read_json(run_dir.summary, Summary, cure="remove it") if run_dir.summary.exists() else None


def summary_rows(summary: Summary) -> dict[str, str]:
    """The rows of the table that sums up a finished run."""
    rows = {}
    for name, result in summary.eval.items():
        low, high = wilson(result.sampled, result.num_tasks)
        rows[f"held-out success, {name.replace('_', ' ')}"] = (
            f"{result.sampled:.1%} ({low:.0%} to {high:.0%}) sampled, {result.greedy:.1%} greedy, of "
            f"{result.num_tasks} tasks"
        )
    if summary.eval_during:
        rows["held-out success, by step"] = ", ".join(
            f"{result.step}: {result.sampled:.1%}" for result in summary.eval_during
        )
    if newest := summary.produced:
        rows[f"success of {newest.num_episodes} episodes near the end"] = (
            f"{newest.success:.1%}, between {newest.low:.1%} and {newest.high:.1%} (95 %)"
        )
    cost, speed, first = summary.cost, summary.tokens_per_s, summary.first_reward_s
    if (each := cost.dollars_per_million_tokens) is not None:
        rows["actors cost"] = f"${cost.dollars:.2f}, ${each:.2f} per million trained tokens"
    rows |= ledger_rows(summary.ledger)
    return rows | {
        "lag (optimizer steps: trajectories)": ", ".join(f"{lag}: {count}" for lag, count in summary.lag.items()),
        "tokens per second": f"{speed.generated:.0f} generated, {speed.trained:.0f} trained",
        "tokens wasted": f"{counts(cost.wasted_tokens)}; {cost.tokens_trained} trained",
        "first reward line": f"after {first:.0f} s" if first is not None else "none",
        "whole run": f"{summary.wall_s:.0f} s",
    }


def ledger_rows(ledger: Ledger) -> dict[str, str]:
    """The rows that say where all trajectories are."""
    return {
        "trajectories produced": str(ledger.inserted),
        "trajectories trained": str(ledger.trained_trajectories),
        "trajectories dropped": counts(ledger.dropped_trajectories),
        "ledger": "balanced" if ledger.balanced else "NOT BALANCED",
    }


def counts(numbers: Mapping[str, int]) -> str:
    """As "20 zero_variance, 3 too_old"; "none" if there is no number."""
    return ", ".join(f"{number} {name}" for name, number in numbers.items()) or "none"
