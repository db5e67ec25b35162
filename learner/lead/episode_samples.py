"""Three episodes of a step as text: the best, the worst, and one at random."""

import random
import time
from collections.abc import Callable, Sequence

from slipstream.common.process.metrics import Sample
from slipstream.common.records.trajectory import Trajectory

EVERY = 10  # steps


def episode_samples(
    trajectories: Sequence[Trajectory], decode: Callable[[list[int]], str], *, step: int
) -> list[Sample]:
    """The samples of `step`: none except for every EVERY-th step and the first one."""
    if step != 1 and step % EVERY:
        return []
    chosen = {
        "best": max(trajectories, key=lambda trajectory: trajectory.total_reward),
        "worst": min(trajectories, key=lambda trajectory: trajectory.total_reward),
        "random": random.Random(step).choice(trajectories),
    }
    now_s = time.time()
    return [
        Sample(
            step=step,
            time=now_s,
            which=which,
            task_id=trajectory.task.task_id,
            total_reward=trajectory.total_reward,
            success=trajectory.success,
            num_turns=len(trajectory.turns),
            text=_text(trajectory, decode),
        )
        for which, trajectory in chosen.items()
    ]


def _text(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> str:
    head = (
        f"{trajectory.task.task_id}: group {trajectory.group_id}, member {trajectory.member}; "
        f"return {trajectory.total_reward:.4g}, {'success' if trajectory.success else 'no success'}, "
        f"{len(trajectory.turns)} turns, {trajectory.num_tokens} tokens, "
        f"versions {trajectory.oldest_policy_version} to {trajectory.newest_policy_version}"
    )
    return f"{head}\n\n{decode(trajectory.token_array().tolist())}"
