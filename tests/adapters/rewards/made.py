"""What a user writes around functions of TRL and verl, to name them in `env.rewards`."""

from typing import Any

from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment
from verl.utils.reward_score import math_verify

cosine = get_cosine_scaled_reward(max_len=6)
repeats = get_repetition_penalty_reward(ngram_size=2)
too_long = get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)


def verified(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Names the arguments of verl's Math-Verify, which keeps a pool of processes between calls."""
    return math_verify.compute_score(solution_str, ground_truth)
