"""The agent of `make bench-agents`, on OpenAI's SDK; and a process that plays it for others.

`python -m slipstream.tools.lab.bench.load.shop_agent SOCKET` serves a Unix socket. A connection sends one line, the
task, the base URL and the key of an episode, and gets one line, its reward.
"""

import asyncio
import json
import os
import sys
from typing import Any

import openai

from slipstream.common.records.trajectory import Task
from slipstream.common.text.action_format import ACT
from slipstream.envhub.shop.shop import ShopEnv

SOCKET = "SLIPSTREAM_BENCH_AGENTS"  # the environment variable with its path


async def plays(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """The agent."""
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


async def plays_apart(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """The agent, played by the process that serves the socket."""
    reader, writer = await asyncio.open_unix_connection(os.environ[SOCKET])
    order = {"task": task, "url": str(client.base_url), "key": client.api_key}
    writer.write(json.dumps(order).encode() + b"\n")
    try:
        return float(await reader.readline())
    finally:
        writer.close()


async def serve(path: str) -> None:
    """Play what connections send, until the process is ended."""
    async with await asyncio.start_unix_server(_serve_one, path) as server:
        await server.serve_forever()


async def _serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    order = json.loads(await reader.readline())
    http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
    async with openai.AsyncOpenAI(base_url=order["url"], api_key=order["key"], http_client=http) as client:
        reward = await plays(order["task"], client)
    writer.write(f"{reward}\n".encode())
    writer.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
