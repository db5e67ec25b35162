"""Lets an agent play on our endpoint; one on another framework as a process in the framework's environment."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import openai

from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.records.trajectory import Trajectory, check
from tests.actors.episode.episodes import attempt_on, rollout_of
from tests.actors.episode.test_tool_calls import LONG, TOKENIZER, Writer
from tests.actors.tool_parsing import parsing


async def starts_it(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """The agent as a process, which gets the endpoint as OpenAI's own."""
    endpoint = {"OPENAI_BASE_URL": str(client.base_url), "OPENAI_API_KEY": client.api_key}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | endpoint
    python, pipe = os.environ["AGENTS_PYTHON"], asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(python, *task["words"], stdout=pipe, env=environment)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return float(json.loads(printed))


def play(script: str, words: list[str], writer: Writer, reasoning_parser: str, folder: Path) -> Trajectory:
    """Play one episode of the agent in `script`, beside this file; `words` are its arguments."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text(json.dumps({"words": [str(Path(__file__).with_name(script)), *words]}) + "\n")
    options = {"agent": "tests.adapters.agents.playing:starts_it", "train": str(tasks), "held_out": str(tasks)}
    return episode_of(options, writer, reasoning_parser=reasoning_parser)


def episode_of(
    options: dict[str, str], writer: Writer, *, reasoning_parser: str = "", allowance: Allowance = LONG
) -> Trajectory:
    """Play one episode of the environment `agent` with these options."""
    settings: dict[str, Any] = {"tokenizer": TOKENIZER, "allowance": allowance}
    settings["parse"] = parsing(reasoning_parser=reasoning_parser)

    async def played() -> Trajectory:
        record = EpisodeRecord(attempt=attempt_on(max_turn_tokens=400))
        entry = MixtureEntry(name="agent", options=options)
        async with fresh_env({"shop": entry}, record.attempt.task, timeout_s=60.0) as env:
            return await rollout_of(env, writer.engine(), record=record, **settings)

    trajectory = asyncio.run(played())
    check(trajectory, vocab_size=len(TOKENIZER))
    return trajectory
