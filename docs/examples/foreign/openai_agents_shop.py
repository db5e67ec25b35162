"""A clerk on the OpenAI Agents SDK, who looks up a price with a tool. Three statements were changed for Slipstream.

How to start it: foreign.yaml.
"""

from typing import Any

import openai
from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

PRICES = {"apples": 3, "pears": 4, "plums": 7, "figs": 9}


@function_tool
def price(what: str) -> str:
    """The price of a fruit in francs."""
    return str(PRICES.get(what, "unknown"))


async def play(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:  # changed: async def main() -> None
    wanted = sorted(PRICES)[task["index"] % len(PRICES)]
    clerk = Agent(
        name="clerk",
        instructions="Answer with the price, one number.",
        tools=[price],
        model=OpenAIChatCompletionsModel(model="policy", openai_client=client),  # changed: model="gpt-5-mini"
    )
    question = f"What do {wanted} cost?"
    result = await Runner.run(clerk, question, max_turns=4, run_config=RunConfig(tracing_disabled=True))
    return float(str(PRICES[wanted]) in str(result.final_output))  # changed: print(result.final_output)
