"""Tool calls and thoughts that vLLM samples and parses: every log-probability is what the learner computes."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import Qwen3ForCausalLM

from slipstream.actors.engine.vllm_engine import VllmEngine
from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.common.records.trajectory import Trajectory, check
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.envhub.catalogue import make_any_env
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.actors.engine.test_logprob_parity import recomputed, save_changed, versions_of_turns
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, rollout_of
from tests.actors.forward_pass import TOLERANCE
from tests.actors.tool_parsing import LOOK
from tests.actors.vllm_engines import MAX_TOKENS, Offers, Policies, started
from tests.tools.run.tiny_model import FLOAT32

MOST_CHANGES = 8  # of the weights, in search of a call in which they change
LIMITS = replace(ALLOWANCE, max_tokens=MAX_TOKENS, max_turns=12, step_timeout_s=60.0)

# Each is one token, so that a model that knows nothing writes calls and thoughts. The template writes other spaces.
CALL = '<tool_call>{"name":"look","arguments":{"at":"sky"}}</tool_call>'
MARKS = [CALL, '<tool_call>{"name":', "<think>", "</think>"]
TEMPLATE = (
    "{% for tool in tools or [] %}<|system|>{{ tool['function']['name'] }}<|end|>{% endfor %}"
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message.get('reasoning_content') %}<think>{{ message['reasoning_content'] }}</think>{% endif %}"
    "{{ message['content'] }}{% for call in message.get('tool_calls') or [] %}"
    '<tool_call>{"name": {{ call["function"]["name"] | tojson }}, "arguments": '
    "{{ call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The policies, and the same as the learner holds them; version 0 is the folder's."""

    policies: Policies
    learners: list[PackedModel]


@pytest.fixture(scope="module")
def versions(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    root = tmp_path_factory.mktemp("model")
    folder = root / "tiny"
    make_tiny_model(folder, texts=["look sky go hm no"], shape=TinyShape(), max_tokens=MAX_TOKENS, seed=3)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(MARKS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    save_changed(folder, root / "changed", seed=1)
    folders = [folder, root / "changed"]
    models = [Qwen3ForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in folders]
    assert len(tokenizer) <= models[0].config.vocab_size
    return Versions(
        policies=Policies(folder=folder, models=dict(enumerate(models))),
        learners=[load_model(each, ranks=ranks, settings=FLOAT32) for each in folders],
    )


@pytest.fixture(scope="module")
def engine(versions: Versions) -> Iterator[VllmEngine]:
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    engine = started(versions.policies.folder, kv_policy="recompute", model=parsers)
    yield engine
    asyncio.run(engine.close())


async def explores(task: dict[str, Any], client: openai.AsyncOpenAI) -> dict[str, float]:
    return {"calls": float(await _explores(client, n=1, drops_thoughts=False))}


async def delegates(task: dict[str, Any], client: openai.AsyncOpenAI) -> dict[str, float]:
    """An agent with two sub-agents at the same time, of which one drops thoughts and chooses among two answers."""
    both = _explores(client, n=1, drops_thoughts=False), _explores(client, n=2, drops_thoughts=True)
    return {"calls": float(sum(await asyncio.gather(*both)))}


async def _explores(client: openai.AsyncOpenAI, *, n: int, drops_thoughts: bool) -> int:
    messages: list[Any] = [{"role": "user", "content": "go"}]
    num_calls = 0
    for _ in range(4):
        response = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOK], n=n)
        message = response.choices[-1].message.model_dump(exclude_none=True)
        if drops_thoughts:
            message.pop("reasoning_content", None)
        calls = message.get("tool_calls", [])
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": json.loads(call["function"]["arguments"])["at"]}
            for call in calls
        ] or [{"role": "user", "content": "no"}]
        num_calls += len(calls)
    return num_calls


def counts_of(trajectories: list[Trajectory], versions: Versions) -> dict[str, float]:
    """By name: `crossings` are calls in which the weights changed, and `worst` is how many nats the learner is off."""
    tokenizer = load_tokenizer(versions.policies.folder)
    thought = tokenizer.convert_tokens_to_ids("</think>")
    worst, num_tokens = 0.0, 0
    for trajectory in trajectories:
        check(trajectory, vocab_size=len(tokenizer))
        differences = np.abs(recomputed(versions.learners, trajectory) - trajectory.behaviour_logprob_array())
        checked = trajectory.loss_mask_array()
        worst, num_tokens = max(worst, float(differences[checked].max())), num_tokens + int(checked.sum())
    turns = [(turn, each.token_array()[turn.start : turn.stop]) for each in trajectories for turn in each.turns]
    assert num_tokens == sum(len(tokens) for _, tokens in turns)  # every sampled token is trained once
    return {
        "tokens": num_tokens,
        "calls": sum(trajectory.total_reward for trajectory in trajectories),
        "invalid": sum(not turn.valid_action for turn, _ in turns),
        "thoughts": sum(thought in tokens for _, tokens in turns),
        "branches": sum(len(trajectory.branch_starts) - 1 for trajectory in trajectories),
        "crossings": sum(count > 1 for trajectory in trajectories for count in versions_of_turns(trajectory)),
        "worst": worst,
    }


async def episode(agent: str, index: int, engine: VllmEngine, versions: Versions, **limits: int) -> Trajectory:
    return await rollout_of(
        make_any_env("agent", {"agent": f"tests.actors.engine.test_vllm_tool_calls:{agent}"}),  # type: ignore[arg-type]
        engine,
        record=EpisodeRecord(attempt=attempt_on(index, max_turn_tokens=24, seed=index)),
        tokenizer=load_tokenizer(versions.policies.folder),
        allowance=replace(LIMITS, **limits),
        parse=engine.parse,
    )


async def test_tool_calls_have_the_log_probabilities_of_the_learner(engine: VllmEngine, versions: Versions) -> None:
    played = (episode("explores", index, engine, versions) for index in range(16))
    found = counts_of(await asyncio.gather(*played), versions)
    print(found)
    assert found["calls"] >= 3 and found["invalid"] >= 3 and found["thoughts"] >= 5 and found["branches"] >= 5
    assert found["worst"] < TOLERANCE


@pytest.mark.long
async def test_so_they_have_where_long_thoughts_are_closed(engine: VllmEngine, versions: Versions) -> None:
    played = (episode("explores", index, engine, versions, max_thought_tokens=2) for index in range(48))
    trajectories = await asyncio.gather(*played)
    found = counts_of(trajectories, versions)
    closed = [trajectory.kept.count_array() for trajectory in trajectories if trajectory.kept]
    print(found, sum(int(each.sum()) for each in closed))
    assert sum(int(each.sum()) for each in closed) >= 2 and {int(each.max()) for each in closed} == {1}
    assert found["worst"] < TOLERANCE


@pytest.mark.long
def test_so_they_have_in_branches_and_under_new_weights(engine: VllmEngine, versions: Versions, server: Offers) -> None:
    """By chance no call runs when the weights change, most often on a busy machine: then they change again."""
    models = versions.policies.models.values()
    weights = [{name: value.detach() for name, value in each.named_parameters()} for each in models]
    alternating = replace(versions, learners=versions.learners * MOST_CHANGES)

    async def episodes(policy_version: int) -> list[Trajectory]:
        await engine.stage(server.offer_of(weights[policy_version % 2], policy_version=policy_version))
        playing = [asyncio.create_task(episode("delegates", index, engine, versions)) for index in range(16)]
        generated = engine.load().generated_tokens
        while engine.load().generated_tokens < generated + 300:  # noqa: ASYNC110 - the engine's thread counts
            await asyncio.sleep(0.005)
        while engine.load().num_running < 8:  # noqa: ASYNC110 - so that the commit falls into calls
            await asyncio.sleep(0.001)
        await engine.commit(policy_version)
        return await asyncio.gather(*playing)

    for policy_version in range(1, MOST_CHANGES):
        found = counts_of(asyncio.run(episodes(policy_version)), alternating)
        print(found)
        assert found["calls"] >= 3 and found["invalid"] >= 3 and found["thoughts"] >= 5 and found["branches"] >= 16
        assert found["worst"] < TOLERANCE
        if found["crossings"]:
            break
    assert found["crossings"] >= 1
