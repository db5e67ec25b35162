"""The reward functions in the wheels of TRL and verl, unmodified: `make test-adapters-rewards`.

The packages lie beside ours in an environment that runs this file. verl's `sandbox_fusion` asks a server: it is left
out. open-r1 is on no package index: see `test_open_r1.py`.
"""

import json
import pkgutil
from typing import Any

import pytest

from slipstream.envhub.env import EnvError
from tests.envhub.rewards.test_functions import CHAT, TEXT, replied
from tests.envhub.rewards.test_rewards import reward_of

trl_rewards = pytest.importorskip("trl.rewards", reason="the package trl is not installed")
verl_scores = pytest.importorskip("verl.utils.reward_score", reason="the package verl is not installed")

MADE = "tests.adapters.rewards.made"
SCORE = "verl.utils.reward_score:default_compute_score"
HALF = {"solution": r"\frac{1}{2}"}
CALL = '<tool_call>\n{"name": "add", "parameters": {"a": 2}}\n</tool_call>'
THOUGHT_OF = f"<think>t</think>\n{CALL}"
CODE = "```python\nprint(int(input()) + 1)\n```"
CASES = json.dumps({"inputs": ["1\n", "4\n"], "outputs": ["2\n", "5\n"]})


def of_verl(source: str, truth: Any, **extra_info: Any) -> dict[str, Any]:
    return {"data_source": source, "reward_model": {"ground_truth": truth, "style": "rule"}, "extra_info": extra_info}


TRL = [
    ("trl.rewards:accuracy_reward", r"\boxed{0.5}", HALF, 1.0),
    ("trl.rewards:accuracy_reward", r"\boxed{\frac{1}{3}}", HALF, 0.0),
    ("trl.rewards:accuracy_reward", r"\boxed{0.5}", {"solution": "no number"}, None),
    ("trl.rewards:reasoning_accuracy_reward", r"<think>\boxed{3}</think>\boxed{0.5}", HALF, 1.0),
    ("trl.rewards:reasoning_accuracy_reward", r"<think>\boxed{0.5}", HALF, 0.0),
    ("trl.rewards:think_format_reward", "<think>\na\n</think>\n5", {}, 1.0),
    ("trl.rewards:think_format_reward", "5", {}, 0.0),
    # The episodes have the three tokens 3, 1, 4.
    (f"{MADE}:cosine", r"\boxed{0.5}", HALF, pytest.approx(0.75)),
    (f"{MADE}:cosine", r"\boxed{0.6}", HALF, pytest.approx(-0.75)),
    (f"{MADE}:repeats", "5", {}, 0.0),
    (f"{MADE}:too_long", "5", {}, -0.5),
]
VERL = [
    (of_verl("openai/gsm8k", "72"), {"#### 72": 1.0, "#### 71": 0.0}),
    (of_verl("HuggingFaceH4/MATH-500", r"\frac{1}{2}"), {r"\boxed{\frac12}": 1.0, r"\boxed{2}": 0.0}),
    (of_verl("math_dapo", "34"), {"Answer: 34": 1.0, "Answer: 35": -1.0}),
    (of_verl("numina_olympiads", "7"), {r"Step 2: \boxed{7}": 1.0, r"\boxed{8}": 0.0}),
    (of_verl("apps", CASES), {CODE: 1.0, CODE.replace("+ 1", "* 2"): 0.5}),
    (of_verl("hiyouga/geometry3k", "12"), {r"<think>a</think>\boxed{12}": 1.0, r"\boxed{12}": 0.9, "12": 0.0}),
    (of_verl("searchR1_nq", {"target": ["Bern"]}), {"<answer>bern</answer>": 1.0, "<answer>Rome</answer>": 0.0}),
    (of_verl("rlla", THOUGHT_OF, experiment_name="qwen"), {THOUGHT_OF: 4.0, "5": -3.0}),
    (of_verl("verified", r"\frac{1}{2}"), {r"\boxed{0.5}": 1.0, r"\boxed{2}": 0.0}),
    (of_verl("batches", "5"), {r"\boxed{5}": 1.0, r"\boxed{6}": 0.0}),
]
# Sources that `default_compute_score` doesn't know, and the function that a user names for them.
NAMED = {
    "rlla": "verl.utils.reward_score.rlla:compute_score",
    "verified": f"{MADE}:verified",
    "batches": "verl.utils.reward_score.math_batch:compute_score_batched",
}


def value_of(function: str, reply: str, prompts: Any, columns: dict[str, Any]) -> float | None:
    episode = replied(reply, prompts, **columns)
    return reward_of({"own": {"part": function}}, episode, timeout_s=500).values.get("own")  # verl is slow to import


@pytest.mark.parametrize("prompts", [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize(("function", "reply", "columns", "expected"), TRL)
def test_a_function_of_trl_gives_what_it_gives_trl(
    function: str, reply: str, columns: dict[str, Any], expected: float | None, prompts: Any
) -> None:
    assert value_of(function, reply, prompts, columns) == expected


@pytest.mark.parametrize("prompts", [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize(("columns", "replies"), VERL, ids=lambda given: given.get("data_source", "replies"))
def test_a_function_of_verl_gives_what_it_gives_verl(
    columns: dict[str, Any], replies: dict[str, float], prompts: Any
) -> None:
    function = NAMED.get(columns["data_source"], SCORE)
    assert {reply: value_of(function, reply, prompts, columns) for reply in replies} == replies


def test_verl_refuses_a_source_that_it_does_not_know() -> None:
    with pytest.raises(EnvError, match=r"raised NotImplementedError at __init__\.py:\d+: Reward function is not"):
        value_of(SCORE, "5", TEXT, of_verl("unheard", "5"))


def test_no_function_of_the_wheels_is_left_out() -> None:
    ran = {function.rpartition(":")[2] for function, *_ in TRL}
    makers = {"get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"}
    assert {name for names in trl_rewards._import_structure.values() for name in names} == makers | {
        name for name in ran if name.endswith("_reward")
    }
    assert {module.name for module in pkgutil.iter_modules(verl_scores.__path__)} == {
        *("gsm8k", "math_reward", "math_dapo", "prime_math", "prime_code", "geo3k", "search_r1_like_qa_em"),
        *("rlla", "math_verify", "math_batch", "sandbox_fusion"),
    }
