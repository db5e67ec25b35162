"""open-r1's reward functions as a user names them: its `rewards.py` of the checkout OPEN_R1, unmodified.

Only servers that run code are asked through `open_r1.utils`, which imports all that open-r1 trains with: these names
stand for it.
"""

import os
import sys
from types import ModuleType

sys.path.append(f"{os.environ['OPEN_R1']}/src")
for name, parts in {
    "open_r1.utils": (),
    "open_r1.utils.code_providers": ("get_provider",),
    "open_r1.utils.competitive_programming": (
        *("SubtaskResult", "add_includes", "get_morph_client_from_env", "get_piston_client_from_env"),
        *("patch_code", "score_submission", "score_subtask"),
    ),
}.items():
    sys.modules[name] = ModuleType(name)
    for part in parts:
        setattr(sys.modules[name], part, None)

from open_r1.rewards import (  # noqa: E402 - after what stands for its utils
    accuracy_reward,
    format_reward,
    get_code_format_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    len_reward,
    reasoning_steps_reward,
    tag_count_reward,
)

__all__ = ["accuracy_reward", "format_reward", "len_reward", "reasoning_steps_reward", "tag_count_reward"]
code_format = get_code_format_reward("python")
cosine = get_cosine_scaled_reward(-1.0, -0.5, 0.5, 1.0, 1000)
repeats = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
too_long = get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)
