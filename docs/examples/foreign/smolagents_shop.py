"""A clerk on smolagents, who looks up a price with a tool. Three statements were changed for Slipstream.

How to start it: foreign.yaml.
"""

from typing import Any

import openai
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

PRICES = {"apples": 3, "pears": 4, "plums": 7, "figs": 9}


@tool
def price(what: str) -> str:
    """The price of a fruit in francs.

    Args:
        what: the fruit
    """
    return str(PRICES.get(what, "unknown"))


def play(task: dict[str, Any], client: openai.OpenAI) -> float:  # changed: def main() -> None
    wanted = sorted(PRICES)[task["index"] % len(PRICES)]
    # changed: OpenAIModel("gpt-5-mini"). A forced call is refused, so `tool_choice` is "auto".
    model = OpenAIModel("policy", api_base=str(client.base_url), api_key=client.api_key, tool_choice="auto")
    clerk = ToolCallingAgent(tools=[price], model=model, max_steps=3, verbosity_level=LogLevel.OFF)
    answer = clerk.run(f"What do {wanted} cost? Answer with the price, one number.")
    return float(str(PRICES[wanted]) == str(answer).strip())  # changed: print(answer)
