"""Chat templates of eight families, 20 turns of tool calls: vLLM's parser of the family reads them, no token drifts."""

# ruff: noqa: RUF001  DeepSeek's special tokens have such characters

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.records.trajectory import check
from tests.actors.episode.episodes import ALLOWANCE, apart, attempt_on, engine_of, rollout_of, turns_of
from tests.actors.tool_parsing import LOOK, parsing
from tests.common.text.chat_templates import family_tokenizer

TURNS = 20
LONG = replace(ALLOWANCE, max_turns=TURNS, max_tokens=20_000, step_timeout_s=60.0)
CALL = '{"name":"look","arguments":{"at":"ab a"}}'
JSON = f"<tool_call>\n{CALL}\n</tool_call>"
GLM = "\n{}\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>ab a</arg_value>\n</tool_call>"
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"at":"ab a"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)


@dataclass(frozen=True)
class Case:
    """What a policy of the family writes, with other spaces than its template, and the branches that follow from it."""

    family: str
    parser: str
    text: str
    end: str
    num_branches: int = 0
    added: tuple[str, ...] = ()  # tokens that the parser needs


CASES = {
    "qwen2.5": Case("qwen2.5", "hermes", JSON, "<|im_end|>"),
    "qwen2.5 with content": Case("qwen2.5", "hermes", f"I look.\n\n{JSON}", "<|im_end|>"),
    "qwen3": Case("qwen3", "hermes", JSON, "<|im_end|>"),
    "llama3": Case(
        "llama3", "llama3_json", CALL.replace("arguments", "parameters"), "<|eot_id|>", added=("<|python_tag|>",)
    ),
    "mistral": Case("mistral", "mistral", f"[TOOL_CALLS][{CALL}]", "</s>"),
    "glm": Case("glm", "glm45", GLM.format("<think></think>"), "<|observation|>"),
    # Its template adds the empty thought that the policy did not write.
    "glm without a thought": Case("glm", "glm45", GLM.format(""), "<|observation|>", num_branches=TURNS - 1),
    "deepseek-v3": Case("deepseek-v3", "deepseek_v3", DEEPSEEK, "<｜end▁of▁sentence｜>"),
    "granite4": Case("granite4", "granite4", JSON, "<|end_of_text|>"),
    # Its template leaves out the mark before the call.
    "phi4-mini": Case("phi4-mini", "phi4_mini_json", f"functools[{CALL}]", "<|end|>", num_branches=TURNS - 1),
}


async def looks(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(TURNS):
        response = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOK])
        message = response.choices[0].message
        (call,) = message.tool_calls or []
        assert json.loads(call.function.arguments) == {"at": "ab a"}
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "ab"}]
    return 1.0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_20_tool_calls_keep_their_tokens_and_each_branch_is_explained(case: Case, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(case.family, tmp_path)
    tokenizer.add_tokens(list(case.added), special_tokens=True)
    written: list[tuple[list[int], list[int]]] = []

    def write(prompt: list[int], seed: int | None) -> list[int]:
        written.append((prompt, apart(tokenizer, case.text + case.end)))
        return written[-1][1]

    engine = engine_of(write, max_tokens=LONG.max_tokens)
    entry = MixtureEntry(name="agent", options={"agent": "tests.actors.episode.test_tool_call_families:looks"})
    record = EpisodeRecord(attempt=attempt_on(max_turn_tokens=400))
    async with fresh_env({"shop": entry}, record.attempt.task, timeout_s=60.0) as env:
        parse = parsing(case.parser, tokenizer=tokenizer)
        trajectory = await rollout_of(env, engine, record=record, tokenizer=tokenizer, allowance=LONG, parse=parse)
    check(trajectory, vocab_size=len(tokenizer))
    assert len(trajectory.branch_starts) == 1 + case.num_branches
    assert all(turn.valid_action for turn in trajectory.turns)
    assert turns_of(trajectory) == written
