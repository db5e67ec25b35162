"""An agent on the OpenAI Agents SDK that shops with a tool."""

from typing import Any

import openai
from agents import (
    Agent,
    FunctionToolResult,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
)

from slipstream.common.records.trajectory import Task
from slipstream.envhub.shop.shop import ShopEnv


async def play(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    shop = ShopEnv(profile="small")
    seen = await shop.reset(Task(env="shop", split=task["split"], index=task["index"]))

    @function_tool
    async def act(action: str) -> str:
        """Do one action."""
        nonlocal seen
        if not seen.done:
            seen = await shop.step(action)
        return seen.messages[-1].content

    def until_bought(context: RunContextWrapper[Any], results: list[FunctionToolResult]) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(is_final_output=seen.done, final_output="bought")

    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    shopper = Agent(name="shopper", model=model, tools=[act], tool_use_behavior=until_bought)
    await Runner.run(shopper, seen.messages[-1].content, max_turns=50, run_config=RunConfig(tracing_disabled=True))
    return seen.score
