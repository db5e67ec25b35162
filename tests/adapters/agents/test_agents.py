"""An agent on the OpenAI Agents SDK plays on our endpoint, with a tool. `make test-adapters-agents`.

The package lies in an environment of its own, AGENTS_PYTHON, and this process has none of it.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.rollout import fresh_env
from actors.tape import Tape
from common.env_config import MixtureEntry
from common.trajectory import Trajectory, check
from tests.episodes import attempt_on, rollout_of
from tests.test_tool_calls import CALL, LONG, TOKENIZER, Writer, turns_of
from tests.tool_parsing import parsing

PYTHON = os.environ["AGENTS_PYTHON"]
AGENT = Path(__file__).with_name("looks.py")


async def starts_it(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """The agent as a process, which gets the endpoint as OpenAI's own."""
    endpoint = {"OPENAI_BASE_URL": str(client.base_url), "OPENAI_API_KEY": client.api_key}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | endpoint
    process = await asyncio.create_subprocess_exec(
        PYTHON, AGENT, *task["words"], stdout=asyncio.subprocess.PIPE, env=environment
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return float(json.loads(printed))


def play(words: list[str], writer: Writer, reasoning_parser: str, folder: Path) -> Trajectory:
    tasks = folder / "tasks.jsonl"
    tasks.write_text(json.dumps({"words": words}) + "\n")
    options = {"agent": "tests.adapters.agents.test_agents:starts_it", "train": str(tasks), "held_out": str(tasks)}

    async def played() -> Trajectory:
        tape = Tape(attempt=attempt_on(max_turn_tokens=400))
        entry = MixtureEntry(name="agent", options=options)
        async with fresh_env({"shop": entry}, tape.attempt.task, timeout_s=60.0) as env:
            parse = parsing(reasoning_parser=reasoning_parser)
            return await rollout_of(env, writer.engine(), tape=tape, tokenizer=TOKENIZER, allowance=LONG, parse=parse)

    trajectory = asyncio.run(played())
    check(trajectory, vocab_size=len(TOKENIZER))
    return trajectory


@pytest.mark.parametrize("words", [["responses"], ["responses", "stream"], ["chat_completions"]])
@pytest.mark.parametrize("text", [CALL, f"I look. {CALL}"])
def test_its_tool_calls_keep_their_sampled_tokens(words: list[str], text: str, tmp_path: Path) -> None:
    writer = Writer([text, "ab."])
    trajectory = play(words, writer, "", tmp_path)
    assert turns_of(trajectory) == writer.written and trajectory.branch_starts == [0]
    assert trajectory.total_reward == 1.0


@pytest.mark.parametrize(("api", "num_branches"), [("responses", 0), ("chat_completions", 1)])
def test_it_sends_thoughts_back_on_the_responses_api_only(api: str, num_branches: int, tmp_path: Path) -> None:
    writer = Writer([f"<think>ab?</think>{CALL}", "<think>ab!</think>ab."])
    trajectory = play([api], writer, "qwen3", tmp_path)
    assert turns_of(trajectory) == writer.written and len(trajectory.branch_starts) == 1 + num_branches
