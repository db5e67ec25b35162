"""Tool calls that vLLM samples and parses: every log-probability is that of a forward pass."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch
from transformers import Qwen3ForCausalLM

from actors.tape import Tape
from actors.vllm_engine import VllmEngine
from common.model_config import TinyModelConfig
from common.tokenizer import load_tokenizer
from common.trajectory import Trajectory, check
from envhub.catalogue import make_any_env
from tests.episodes import ALLOWANCE, attempt_on, rollout_of
from tests.tool_parsing import LOOK
from tests.vllm_engines import MAX_TOKENS, TOLERANCE, Policies, forward_logprobs, started
from tools.tiny_model import make_tiny_model

# Each is one token, so that a model that knows nothing writes calls. The template writes them with other spaces.
CALL = '<tool_call>{"name":"look","arguments":{"at":"sky"}}</tool_call>'
CALLS = [CALL, '<tool_call>{"name":']
TEMPLATE = (
    "{% for tool in tools or [] %}<|system|>{{ tool['function']['name'] }}<|end|>{% endfor %}"
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] }}{% for call in message.get('tool_calls') or [] %}"
    '<tool_call>{"name": {{ call["function"]["name"] | tojson }}, "arguments": '
    "{{ call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(folder, texts=["look sky go hm no"], config=TinyModelConfig(), max_tokens=MAX_TOKENS, seed=3)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(CALLS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert len(tokenizer) <= model.config.vocab_size
    return Policies(folder=folder, models={0: model})


@pytest.fixture(scope="module")
def engine(policies: Policies) -> Iterator[VllmEngine]:
    engine = started(policies, kv_policy="keep", tool_parser="hermes")
    yield engine
    asyncio.run(engine.close())


async def explores(task: dict[str, Any], client: openai.AsyncOpenAI) -> dict[str, float]:
    """An agent that answers every call, and asks on where there is none."""
    messages: list[Any] = [{"role": "user", "content": "go"}]
    num_calls = 0
    for _ in range(4):
        response = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOK])
        message = response.choices[0].message
        calls = message.tool_calls or []
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": json.loads(call.function.arguments)["at"]}
            for call in calls
        ] or [{"role": "user", "content": "no"}]
        num_calls += len(calls)
    return {"calls": float(num_calls)}


def branch_of(trajectory: Trajectory, place: int) -> int:
    """Where the branch of the token at `place` begins."""
    return max(start for start in trajectory.branch_starts if start < place)


def test_tool_calls_have_the_log_probabilities_of_a_forward_pass(engine: VllmEngine, policies: Policies) -> None:
    tokenizer = load_tokenizer(policies.folder)

    async def episode(index: int) -> Trajectory:
        return await rollout_of(
            make_any_env("agent", {"agent": "tests.test_vllm_tool_calls:explores"}),  # type: ignore[arg-type]
            engine,
            tape=Tape(attempt=attempt_on(index, max_turn_tokens=24, seed=index)),
            tokenizer=tokenizer,
            allowance=replace(ALLOWANCE, max_tokens=MAX_TOKENS, step_timeout_s=60.0),
            parse=engine.parse,
        )

    async def episodes() -> list[Trajectory]:
        return await asyncio.gather(*map(episode, range(16)))

    trajectories = asyncio.run(episodes())
    worst, num_tokens = 0.0, 0
    for trajectory in trajectories:
        check(trajectory, vocab_size=16)
        tokens, logprobs = trajectory.token_array().tolist(), trajectory.behaviour_logprob_array()
        for turn in trajectory.turns:
            start = branch_of(trajectory, turn.start)
            expected = forward_logprobs(policies.models[0], tokens[start : turn.start], tokens[turn.start : turn.stop])
            differences = torch.tensor(logprobs[turn.start : turn.stop]) - expected
            worst, num_tokens = max(worst, float(differences.abs().max())), num_tokens + len(differences)
    num_calls = sum(trajectory.total_reward for trajectory in trajectories)
    num_invalid = sum(not turn.valid_action for trajectory in trajectories for turn in trajectory.turns)
    num_branches = sum(len(trajectory.branch_starts) - 1 for trajectory in trajectories)
    print(f"{num_tokens} tokens, {num_calls:.0f} calls, {num_invalid} malformed, {num_branches} branches: {worst:.1e}")
    assert num_calls >= 5 and num_invalid >= 5
    assert worst < TOLERANCE
    assert num_branches == 0  # the template writes calls with other spaces, and they are continued as sampled
