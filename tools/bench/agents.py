"""`make bench-agents`: agents on the endpoint beside the built-in loop, with the same episodes and parsers.

A scripted engine writes what an expert does: a thought, and the action as a call of a tool, which vLLM's parsers read.
docs/benchmarks.md has the method.
"""

import asyncio
import json
import logging
import os
import random
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import openai
from transformers import PreTrainedTokenizerBase

from actors.rollout import Allowance, rollout
from actors.scripted_engine import Schedule, ScriptedEngine
from actors.tape import Attempt, Tape
from actors.vllm_environment import vllm_environment
from common.action_format import ACT, ToolCalls
from common.env_config import EnvConfig
from common.log import log_to_stderr
from common.tool_call import ParsedAnswer
from common.trajectory import Provenance, Sampling, Task, Trajectory
from envhub.catalogue import make_any_env
from envhub.driving import Parse
from envhub.shop.shop import ShopEnv
from tools.bench.benchmark import Row, Run, cost_of
from tools.prepare import vocabulary_texts
from tools.study.tiny_caller import CLOSING, OPENING, THOUGHT, THOUGHT_END, add_calls
from tools.tiny_model import END_OF_TURN, tiny_tokenizer

NUM_EPISODES = 64  # at once
NUM_THOUGHT_WORDS = 100  # of each answer
SCHEDULE = Schedule(prefill_s=0.05, token_time_s=0.02)  # about that of an 8B model on one GPU
ALLOWANCE = Allowance(max_turns=16, max_tokens=4096, step_timeout_s=600.0, episode_timeout_s=600.0)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=256)
REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What the expert writes in each task, by the tokens of the first message."""

    tokenizer: PreTrainedTokenizerBase
    parse: Parse
    tasks: list[Task]
    answers: dict[tuple[int, ...], list[list[int]]]

    @property
    def num_turns(self) -> int:
        return sum(map(len, self.answers.values()))

    def engine(self) -> ScriptedEngine:
        assistant, end = self.tokenizer.convert_tokens_to_ids(["<|assistant|>", END_OF_TURN])

        def write(prompt: list[int], seed: int | None) -> list[int]:
            return self.answers[tuple(prompt[: prompt.index(end)])][prompt.count(assistant) - 1]

        return ScriptedEngine(write, policy_version=0, schedule=SCHEDULE, max_tokens=ALLOWANCE.max_tokens)


def main() -> int:
    """Measure, print, and write docs/benchmarks/agents.json; return 0 if every goal holds, else 1."""
    log_to_stderr(logging.WARNING)
    os.environ.update(vllm_environment())
    measuring, script = Run("agents"), asyncio.run(_script())
    pairs = [(cost_of(_all(_as_agent, script)), cost_of(_all(_built_in, script))) for _ in range(REPEATS)]
    per_turn = 1e3 / script.num_turns
    rows = [
        Row.of(
            f"{NUM_EPISODES} agents: wall clock, against the built-in loop",
            [agents.wall_s for agents, _ in pairs],
            unit="s",
            against=[loop.wall_s for _, loop in pairs],
            goal="ratio <= 1.05",
        ),
        Row.of(
            f"{NUM_EPISODES} agents: CPU a call, client included, beside that of a turn of the built-in loop",
            [per_turn * agents.cpu_s for agents, _ in pairs],
            unit="ms",
            against=[per_turn * loop.cpu_s for _, loop in pairs],
        ),
    ]
    return measuring.end(rows, versions={"openai": openai.__version__})


async def plays(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """The agent, on OpenAI's SDK."""
    shop = ShopEnv(profile="small")
    seen = await shop.reset(Task(env="shop", split=task["split"], index=task["index"]))
    messages: list[Any] = [{"role": "user", "content": seen.messages[-1].content}]
    while not seen.done:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[ACT])  # type: ignore[list-item]
        message = answer.choices[0].message
        (call,) = message.tool_calls or []
        assert call.type == "function"
        seen = await shop.step(json.loads(call.function.arguments)["action"])
        result = {"role": "tool", "tool_call_id": call.id, "content": seen.messages[-1].content}
        messages += [message, result]
    return float(seen.score)


async def _script() -> Script:
    texts = await asyncio.to_thread(vocabulary_texts, EnvConfig(name="shop", options={"profile": "small"}), 400)
    tokenizer = tiny_tokenizer(texts, ALLOWANCE.max_tokens)
    add_calls(tokenizer)
    words, chance = sorted(word for word in tokenizer.get_vocab() if word.isalpha()), random.Random(0)
    tasks, answers, shop = list[Task](), dict[tuple[int, ...], list[list[int]]](), ShopEnv(profile="small")
    index = 0
    while len(tasks) < NUM_EPISODES:
        task = Task(env="shop", split="train", index=index)
        index += 1
        seen, written = await shop.reset(task), list[list[int]]()
        first = f"<|user|>{seen.messages[-1].content}"
        while not seen.done:
            thought, action = " ".join(chance.choices(words, k=NUM_THOUGHT_WORDS)), shop.expert()
            answer = f"{THOUGHT}{thought}{THOUGHT_END}{OPENING}{action}{CLOSING}{END_OF_TURN}"
            written.append(tokenizer.encode(answer, add_special_tokens=False))
            seen = await shop.step(action)
        key = tuple(tokenizer.encode(first, add_special_tokens=False))
        if key not in answers:  # another task may have the same instruction
            tasks.append(task)
            answers[key] = written
    return Script(tokenizer=tokenizer, parse=_parse(tokenizer), tasks=tasks, answers=answers)


def _parse(tokenizer: PreTrainedTokenizerBase) -> Parse:
    """vLLM's parsers in this process, where an actor has them in its engine's."""
    from actors.answer_parser import AnswerParser  # vLLM reads environment variables at import
    from actors.orders import Parse as Order

    parser = AnswerParser(tokenizer, tool_parser="hermes", reasoning_parser="qwen3", template_arguments={})

    async def parse(text: str, *, tokens: list[int], prompt: list[int], tools: list[dict[str, Any]]) -> ParsedAnswer:
        return parser.parsed(Order(call=0, prompt=prompt, tokens=tokens, text=text, tools=tools))

    return parse


async def _all(one: Callable[[Task, Script, ScriptedEngine], Coroutine[Any, Any, Trajectory]], script: Script) -> None:
    engine = script.engine()
    episodes = await asyncio.gather(*(one(task, script, engine) for task in script.tasks))
    assert all(episode.success and len(episode.branch_starts) == 1 for episode in episodes)
    assert sum(len(episode.turns) for episode in episodes) == script.num_turns


async def _built_in(task: Task, script: Script, engine: ScriptedEngine) -> Trajectory:
    return await _rolled_out(ShopEnv(profile="small"), task, script, engine)


async def _as_agent(task: Task, script: Script, engine: ScriptedEngine) -> Trajectory:
    return await _rolled_out(make_any_env("agent", {"agent": "tools.bench.agents:plays"}), task, script, engine)


async def _rolled_out(env: Any, task: Task, script: Script, engine: ScriptedEngine) -> Trajectory:
    attempt = Attempt(
        run_id="bench",
        task=task,
        group_id=task.index,
        member=0,
        attempt=0,
        actor="bench",
        sampling=SAMPLING,
        seed=0,
        provenance=Provenance(host="here", instance_kind="reserved", price_per_hour=0.0),
    )
    return await rollout(
        Tape(attempt=attempt),
        env=env,
        sampler=engine,
        tokenizer=script.tokenizer,
        action_format=ToolCalls(),
        allowance=ALLOWANCE,
        parse=script.parse,
    )


if __name__ == "__main__":
    sys.exit(main())
