"""A planner, an actor and a critic in one agent, all played by the policy, with notes for one episode.

`env.name=agent` with `env.options.agent=docs.examples.modules_agent:play`, from the repository's folder.
"""

from typing import Any

import openai

from slipstream import Task
from slipstream.envhub.shop.shop import ShopEnv


async def play(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    async def ask(*lines: str) -> str:
        content = "\n".join(lines)
        answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])
        return answer.choices[0].message.content or ""

    shop, notes = ShopEnv(profile="small"), list[str]()
    seen = await shop.reset(Task(env="shop", split=task["split"], index=task["index"]))
    goal = seen.messages[-1].content
    while not seen.done:
        now = [f"Task: {goal}", "Notes:", *notes, f"You see: {seen.messages[-1].content}"]
        plan = await ask("You plan. What comes next?", *now)
        action = await ask("You act. Write one action.", *now, f"Plan: {plan}")
        seen = await shop.step(action)
        outcome = f"{action}: {seen.messages[-1].content}"
        notes.append(await ask("You review. What is to be remembered?", *now, outcome))
    return seen.score or 0.0
