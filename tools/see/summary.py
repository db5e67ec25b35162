"""The table that sums up a finished run."""

from typing import Any

from slipstream.common.process.headline import wilson


def summary_rows(summary: dict[str, Any]) -> dict[str, str]:
    """The rows of the table that sums up a finished run."""
    rows = {}
    for name, result in summary["eval"].items():
        low, high = wilson(result["sampled"], result["num_tasks"])
        rows[f"held-out success, {name.replace('_', ' ')}"] = (
            f"{result['sampled']:.1%} ({low:.0%} to {high:.0%}) sampled, {result['greedy']:.1%} greedy, of "
            f"{result['num_tasks']} tasks"
        )
    if summary["eval_during"]:
        rows["held-out success, by step"] = ", ".join(
            f"{result['step']}: {result['sampled']:.1%}" for result in summary["eval_during"]
        )
    if newest := summary["produced"]:
        rows[f"success of the last {newest['num_episodes']} episodes"] = (
            f"{newest['success']:.1%}, between {newest['low']:.1%} and {newest['high']:.1%} (95 %)"
        )
    ledger = summary["ledger"]
    lost = ", ".join(f"{count} {reason}" for reason, count in ledger["dropped_trajectories"].items()) or "none"
    first_reward, cost = summary["first_reward_s"], summary["cost"]
    wasted = ", ".join(f"{tokens} {reason}" for reason, tokens in cost["wasted_tokens"].items()) or "none"
    if cost["dollars_per_million_tokens"] is not None:
        rows["actors cost"] = (
            f"${cost['dollars']:.2f}, ${cost['dollars_per_million_tokens']:.2f} per million trained tokens"
        )
    return rows | {
        "trajectories produced": str(ledger["inserted"]),
        "trajectories trained": str(ledger["trained_trajectories"]),
        "trajectories dropped": lost,
        "ledger": "balanced" if ledger["balanced"] else "NOT BALANCED",
        "lag (optimizer steps: trajectories)": ", ".join(f"{lag}: {n}" for lag, n in summary["lag"].items()),
        "tokens per second": f"{summary['tokens_per_s']['generated']:.0f} generated, "
        f"{summary['tokens_per_s']['trained']:.0f} trained",
        "tokens wasted": f"{wasted}; {cost['tokens_trained']} trained",
        "first reward line": f"after {first_reward:.0f} s" if first_reward is not None else "none",
        "whole run": f"{summary['wall_s']:.0f} s",
        "run directory": summary["run_dir"],
    }
