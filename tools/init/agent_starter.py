"""An agent of your own: it asks the policy through OpenAI's API as often as it likes, and returns its reward."""

from typing import Any

from openai import AsyncOpenAI


async def play(task: dict[str, Any], client: AsyncOpenAI) -> dict[str, float]:
    """`task` is a row of NAME.jsonl. The first reward, 0 to 1, is the score; 1 is success."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    answer = ""
    for question in ("", "Are you sure? Say the number again."):
        if question:
            messages.append({"role": "user", "content": question})
        reply = await client.chat.completions.create(model="policy", messages=messages)
        answer = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
    return {"right": float(str(task["answer"]) in answer.split()), "brief": float(len(answer) < 20)}
