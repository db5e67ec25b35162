"""An agent on OpenAI's SDK that shops with a tool."""

import json
from typing import Any

import openai

from slipstream.common.records.trajectory import Task
from slipstream.common.text.action_format import ACT
from slipstream.envhub.shop.shop import ShopEnv


async def play(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    shop = ShopEnv(profile="small")
    seen = await shop.reset(Task(env="shop", split=task["split"], index=task["index"]))
    messages: list[Any] = [{"role": "user", "content": seen.messages[-1].content}]
    while not seen.done:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[ACT])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            if not seen.done:
                seen = await shop.step(str(json.loads(call.function.arguments).get("action")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": seen.messages[-1].content})
    return seen.score
