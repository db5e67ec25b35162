"""open-r1's reward functions, unmodified. It is on no package index: OPEN_R1 names a checkout of its repository.

Run with its commit 1416fa0. In CI are functions with its signatures and habits, in tests/envhub/rewards/others.py.
"""

import os
from typing import Any

import pytest

from tests.envhub.rewards.test_functions import CHAT, TEXT, replied
from tests.envhub.rewards.test_rewards import reward_of

pytestmark = pytest.mark.skipif("OPEN_R1" not in os.environ, reason="OPEN_R1 names no checkout of open-r1")

HALF = {"solution": r"$\frac{1}{2}$"}
TAGGED = "<think>\na\n</think>\n<answer>\n5\n</answer>"
CASES = [
    ("accuracy_reward", r"$\boxed{0.5}$", HALF, 1.0),
    ("accuracy_reward", r"$\boxed{\frac{1}{3}}$", HALF, 0.0),
    ("accuracy_reward", r"$\boxed{0.5}$", {"solution": "no number"}, None),
    ("format_reward", TAGGED, {}, 1.0),
    ("format_reward", "5", {}, 0.0),
    ("tag_count_reward", TAGGED, {}, 1.0),
    ("tag_count_reward", "<think>\na\n</think>\n5", {}, 0.5),
    ("reasoning_steps_reward", "Step 1: a\nStep 2: b\nStep 3: c", {}, 1.0),
    ("len_reward", r"$\boxed{0.5}$", HALF, 0.0),  # of one completion, which is the shortest and the longest
    ("code_format", "<think>\na\n</think>\n<answer>\n```python\nprint(1)\n```\n</answer>", {}, 1.0),
    ("cosine", r"$\boxed{0.5}$", HALF, pytest.approx(1.0, abs=0.01)),
    ("repeats", "one two one two one two", {}, pytest.approx(-0.6)),  # two of five pairs of words differ
    ("too_long", "5", {}, -0.5),  # the episodes have three tokens
]


@pytest.mark.parametrize("prompts", [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize(("function", "reply", "columns", "expected"), CASES)
def test_a_function_of_open_r1_gives_what_it_gives_open_r1(
    function: str, reply: str, columns: dict[str, Any], expected: float | None, prompts: Any
) -> None:
    part = {"part": f"tests.adapters.rewards.open_r1_made:{function}"}
    found = reward_of({"own": part}, replied(reply, prompts, **columns), timeout_s=300).values.get("own")
    assert found == expected
