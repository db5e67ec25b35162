"""An agent on the OpenAI Agents SDK, as its documentation writes one. `python looks.py API [stream]`."""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def look(at: str) -> str:
    """Look somewhere."""
    return f"look {at}"


async def main(api: str, *, streamed: bool) -> None:
    set_tracing_disabled(True)  # else it reports to OpenAI
    set_default_openai_api(api)
    agent = Agent(name="looker", instructions="play", tools=[look], model="policy")
    if streamed:
        result = Runner.run_streamed(agent, "go")
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "go")
    print(json.dumps(float(result.final_output == "ab.")))


asyncio.run(main(sys.argv[1], streamed=sys.argv[2:] == ["stream"]))
