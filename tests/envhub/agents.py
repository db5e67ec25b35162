"""Agents as users write them, for the `agent` environment: against OpenAI's SDK, and as commands."""

import asyncio
import contextlib
import itertools
import socket
from typing import Any

import openai

WITH_URLLIB = """
import json, os, sys, urllib.request

def ask(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"model": "gpt-4o", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

task = json.loads(os.environ["SLIPSTREAM_TASK"])
messages = [{"role": "user", "content": task["question"]}]
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "sure?"}]
"""
REWARD = 'print("some log"); print("a warning", file=sys.stderr); print(json.dumps({"right": 1.0, "short": 0.5}))'
POSTED = """
body = json.dumps({"reward": 0.25}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/reward", body, headers))
print(1)
"""

Messages = list[dict[str, Any]]
LEFT_OPEN = list[socket.socket]()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def said(client: openai.AsyncOpenAI, messages: Messages, **settings: Any) -> str:
    response = await client.chat.completions.create(model="gpt-4o", messages=messages, **settings)
    messages.append(response.choices[0].message.model_dump(exclude_none=True))
    return response.choices[0].message.content


def opening(task: dict[str, Any]) -> Messages:
    return [{"role": "system", "content": "play"}, user(f"task {task['index']}")]


async def converses(client: openai.AsyncOpenAI, messages: Messages, *, num_turns: int = 3) -> float:
    for turn in range(num_turns):
        await said(client, messages)
        messages.append(user(f"turn {turn}"))
    return 1.0


async def chats(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    return await converses(client, opening(task))


async def streams(task: dict[str, Any], client: openai.AsyncOpenAI) -> dict[str, float]:
    messages, settings = opening(task), {"stream": True, "stream_options": {"include_usage": True}}
    for turn in range(3):
        text, usage = "", None
        stream = await client.chat.completions.create(model="gpt-4o", messages=messages, **settings)
        async for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert usage is not None and usage.completion_tokens > 1
        messages += [{"role": "assistant", "content": text}, user(f"turn {turn}")]
    return {"right": 0.5, "short": 0.25}


def blocks(task: dict[str, Any], client: openai.OpenAI) -> float:
    messages = opening(task)
    for turn in range(3):
        response = client.chat.completions.create(model="gpt-4o", messages=messages)
        messages += [{"role": "assistant", "content": response.choices[0].message.content}, user(f"turn {turn}")]
    return 1.0


def leaves_half_a_request(task: dict[str, Any], client: openai.OpenAI) -> float:
    connection = socket.create_connection((client.base_url.host, client.base_url.port or 0))
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer " + client.api_key.encode())
    LEFT_OPEN.append(connection)
    return blocks(task, client)  # once it is answered, the server has the other connection too


async def rewrites(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    messages = [user("one")]
    await said(client, messages)
    messages.append(user("two"))
    await said(client, messages)
    await said(client, [user("a summary"), *messages[-2:], user("three")])
    return 1.0


async def splits(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    await asyncio.gather(converses(client, [user("left")]), converses(client, [user("right")]))
    return 1.0


async def chooses(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    messages = [user("one")]
    response = await client.chat.completions.create(model="gpt-4o", messages=messages, n=2, logprobs=True)
    assert [choice.index for choice in response.choices] == [0, 1]
    first = response.choices[0]
    assert len(first.logprobs.content) > 1
    messages += [{"role": "assistant", "content": first.message.content}, user("two")]
    await said(client, messages)
    return 1.0


async def stops(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    messages = [user("one")]
    text = await said(client, messages, stop=["b"], max_tokens=20)
    assert "b" not in text
    messages.append(user("two"))
    await said(client, messages)
    return 1.0


async def has_tools(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "have"}]},
        user("go"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
    ]
    await said(client, messages, tools=[tool], tool_choice="auto")
    return 1.0


async def talks_on(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    messages = [user("go")]
    while True:
        await said(client, messages)
        messages.append(user("and on"))


async def talks_until_refused(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    try:
        return await talks_on(task, client)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded" and "maximum context length" in error.message
        return 0.75


async def talks_too_much_at_first(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    return await said(client, [user("x" * 1000)]) is not None


async def fails_after_a_refusal_that_it_expected(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    await said(client, [user("go")])
    try:
        await said(client, [user("x" * 1000)])
    except openai.BadRequestError:
        await said(client, [user("shorter")])
    raise LookupError("a bug of the agent")


async def tries_again(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """An agent whose SDK gives up after a while and tries again, as frameworks set it."""
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, timeout=0.4, max_retries=3) as mine:
        return await converses(mine, [user("go")], num_turns=2)


async def never_waits(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """An agent whose SDK is too impatient, and which takes that for a failure of the policy."""
    mine = client.with_options(timeout=0.02, max_retries=0)
    try:
        while True:
            with contextlib.suppress(openai.APITimeoutError):
                await said(mine, [user("go")])
    except openai.APIStatusError:
        return 0.0


_numbers = itertools.count()


async def never_repeats(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    return await converses(client, [user(f"at {next(_numbers)}")])


class Returns:
    """An agent that plays one turn and then does what its name says."""

    def __init__(self, value: object) -> None:
        self.value = value

    async def play(self, task: dict[str, Any], client: openai.AsyncOpenAI) -> Any:
        await said(client, [user("go")])
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


async def hangs(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    await said(client, [user("go")])
    await asyncio.sleep(3600)
    return 1.0


async def asks_nothing(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    return 1.0


async def raises(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    raise LookupError("a bug of the agent")


returns_infinity = Returns(float("inf")).play
returns_text = Returns("1.0").play
returns_nothing = Returns(None).play
returns_an_empty_dict = Returns({}).play
returns_a_list = Returns([1.0]).play
cancels_itself = Returns(asyncio.CancelledError()).play
exits = Returns(SystemExit(3)).play
is_interrupted = Returns(KeyboardInterrupt()).play
returns_true = Returns(True).play
NUMBER = 4


async def asks_once(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    return await converses(client, opening(task), num_turns=1)


def returns_a_coroutine(task: dict[str, Any], client: openai.OpenAI) -> Any:
    return asks_nothing(task, client)
