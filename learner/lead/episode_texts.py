"""Three episodes of a step as text, for TensorBoard: the best, the worst, and one at random."""

import random
from collections.abc import Callable, Sequence

from slipstream.common.records.trajectory import Trajectory

EVERY = 10  # steps


def episode_texts(
    trajectories: Sequence[Trajectory], decode: Callable[[list[int]], str], *, step: int
) -> dict[str, str]:
    """The texts by metric; empty except for every EVERY-th step and the first one."""
    if step != 1 and step % EVERY:
        return {}
    chosen = {
        "trained/best": max(trajectories, key=lambda trajectory: trajectory.total_reward),
        "trained/worst": min(trajectories, key=lambda trajectory: trajectory.total_reward),
        "trained/random": random.Random(step).choice(trajectories),
    }
    return {name: _text(trajectory, decode) for name, trajectory in chosen.items()}


def _text(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> str:
    head = (
        f"{trajectory.task.task_id}: group {trajectory.group_id}, member {trajectory.member}; "
        f"return {trajectory.total_reward:.4g}, {'success' if trajectory.success else 'no success'}, "
        f"{len(trajectory.turns)} turns, {trajectory.num_tokens} tokens, "
        f"versions {trajectory.oldest_policy_version} to {trajectory.newest_policy_version}"
    )
    return f"{head}\n\n{decode(trajectory.token_array().tolist())}"
