"""The endpoint of an agent's episode: what it answers, and what it refuses."""

import asyncio
import contextlib
import dataclasses
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from slipstream.common.records.trajectory import Sampling
from slipstream.common.text.codec import end_tokens
from slipstream.envhub.agent.endpoint import Endpoint
from slipstream.envhub.driving import Reply, Request, Terms
from slipstream.envhub.env import EnvError
from tests.actors.episode.episodes import ids
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer

TOKENIZER = merging_tokenizer(CHATML)
SAMPLING = Sampling(temperature=0.7, top_p=1.0, top_k=0, max_turn_tokens=8)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


class Side:
    """An endpoint, and a client of it."""

    def __init__(self, url: str, endpoint: Endpoint, prompts: list[list[int]], client: aiohttp.ClientSession) -> None:
        self.url, self.endpoint, self.prompts, self.client = url, endpoint, prompts, client
        self.key = {"Authorization": f"Bearer {endpoint.key}"}

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        shown = self.key if headers is None else headers
        async with self.client.post(f"{self.url}/{path}", data=data, headers=shown) as response:
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Side]:
    prompts: list[list[int]] = []

    async def generate(wanted: Request) -> Reply:
        prompts.append(wanted.prompt)
        tokens = [*ids(TOKENIZER, "ok"), TOKENIZER.eos_token_id]
        return Reply(tokens=tokens, logprobs=[-0.5, -0.25, 0.0], finish_reason="stop")

    limits = {"max_tokens": 64, "max_turns": 4, "sampling": SAMPLING, "started_at_s": 0.0}
    endpoint = Endpoint(Terms(tokenizer=TOKENIZER, end_tokens=end_tokens(TOKENIZER), **limits), generate)
    async with endpoint.listening() as url, aiohttp.ClientSession() as client:
        yield Side(url, endpoint, prompts, client)


async def post(path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Post to a fresh endpoint, which must not pass on what it refuses."""
    async with served() as side:
        status, response = await side.post(path, body, headers)
        assert bool(side.prompts) == (status == 200 and path != "reward")
        return status, response


async def test_a_response_has_what_openais_has() -> None:
    status, response = await post("chat/completions", CHAT | {"logprobs": True})
    assert status == 200 and response.pop("id").startswith("chatcmpl-") and response.pop("created") > 0
    (choice,) = response.pop("choices")
    assert [token["logprob"] for token in choice.pop("logprobs")["content"]] == [-0.5, -0.25, 0.0]
    assert choice == {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
    assert response.pop("usage") == {"prompt_tokens": 21, "completion_tokens": 3, "total_tokens": 24}
    assert response == {"object": "chat.completion", "model": "policy"}


async def events_of(path: str, body: object) -> list[Any]:
    async with served() as side, side.client.post(f"{side.url}/{path}", json=body, headers=side.key) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        events = (await response.text()).removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_stream_has_the_chunks_of_openais() -> None:
    first, last = await events_of("chat/completions", CHAT | {"stream": True})
    assert (first["object"], first["id"]) == ("chat.completion.chunk", last["id"])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "ok"}
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    options = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    *texts, usage = await events_of("chat/completions", CHAT | options)
    assert [text["choices"][0]["index"] for text in texts] == [0, 0, 1, 1]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)


@pytest.mark.parametrize("path", ["chat/completions", "reward", "nothing"])
@pytest.mark.parametrize("authorization", [None, "Bearer guessed", "Bearer ", "sk-key", "Bearer \xfc"])
async def test_a_request_without_the_key_of_the_episode_is_refused(path: str, authorization: str | None) -> None:
    status, response = await post(path, CHAT, {} if authorization is None else {"Authorization": authorization})
    assert status == 401 and "not the key of the episode" in response["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        *(("chat/completions", body, "malformed request") for body in (b"", b"\xff\xfe", b"[" * 100_000)),
        ("chat/completions", b"[]", "Expected `object`, got `array`"),
        ("chat/completions", {}, "missing required field `messages`"),
        ("chat/completions", CHAT | {"messages": []}, "length >= 1"),
        ("chat/completions", CHAT | {"messages": ["hi"]}, "Expected `object`, got `str`"),
        ("chat/completions", CHAT | {"messages": [{"content": "hi"}]}, "role of a message must be one of"),
        ("chat/completions", CHAT | {"messages": [{"role": "robot", "content": "hi"}]}, "got 'robot'"),
        ("chat/completions", CHAT | {"messages": [{"role": ["user"], "content": "hi"}]}, "got ['user']"),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": 3}]}, "must be text, or parts"),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": [IMAGE]}]}, "or parts of type text"),
        ("chat/completions", CHAT | {"messages": [{"role": "assistant", "tool_calls": 3}]}, "tool_calls"),
        ("chat/completions", CHAT | {"n": 0}, "`int` >= 1"),
        ("chat/completions", CHAT | {"n": 129}, "`int` <= 128"),
        ("chat/completions", CHAT | {"max_tokens": -1}, "`int` >= 1"),
        ("chat/completions", CHAT | {"stop": ["a"] * 17}, "at most 16 texts"),
        ("chat/completions", CHAT | {"stop": [3]}, "Expected `str`"),
        ("chat/completions", CHAT | {"tools": "look"}, "Expected `array"),
        ("responses", {}, "missing required field `input`"),
        ("responses", {"input": []}, "length >= 1"),
        ("responses", {"input": "hi", "tools": [{"type": "web_search"}]}, "'web_search'; this endpoint has functions"),
        ("responses", {"input": "hi", "tools": [{"type": "function"}]}, "missing required field `name`"),
        ("responses", {"input": [{"type": "computer_call"}]}, "'computer_call', which this endpoint does not have"),
        ("responses", {"input": [{"type": "function_call", "name": "f"}]}, "missing required field `call_id`"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "content must be text"),
        ("responses", {"input": [{"role": "user", "content": 3}]}, "content must be text"),
        ("responses", {"input": [{"role": "user"}]}, "content must be text"),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": None}]}, "content must be"),
        ("responses", {"input": [{"role": "user", "content": [{"type": {}}]}]}, "content must be text"),
        ("responses", {"input": [{"content": "hi"}]}, "role of a message must be one of"),
        *(
            ("reward", body, "malformed reward")
            for body in ({"reward": "1"}, b'{"reward": NaN}', {"rewards": 1}, {"reward": {"right": None}})
        ),
    ],
)
async def test_a_malformed_or_impossible_body_is_refused_with_a_reason(path: str, body: object, complaint: str) -> None:
    status, response = await post(path, body)
    assert status == 400 and complaint in response["error"]["message"]
    assert response["error"]["type"] == "invalid_request_error"


async def test_a_path_or_method_that_does_not_exist_names_those_that_do() -> None:
    status, response = await post("embeddings", CHAT)
    assert status == 404 and "/v1/chat/completions, /v1/responses" in response["error"]["message"]
    assert (await post("models", {}))[0] == 405


async def test_a_prompt_without_room_and_answers_beyond_the_turns_of_an_episode_are_refused() -> None:
    async with served() as side:
        status, response = await side.post("chat/completions", {"messages": [{"role": "user", "content": "x" * 100}]})
        assert (status, response["error"]["code"], side.prompts) == (400, "context_length_exceeded", [])
        assert "maximum context length is 64 tokens, and the prompt has 119" in response["error"]["message"]
        assert (await side.post("chat/completions", CHAT | {"n": 3}))[0] == 200
        status, response = await side.post("chat/completions", CHAT | {"n": 2})
        assert (status, response["error"]["code"]) == (400, "max_turns_exceeded")
        assert (await side.post("chat/completions", CHAT))[0] == 200
        assert len(side.prompts) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", ["sampling", "its end", "the second of two answers"])
async def test_an_answer_that_no_client_waits_for_does_not_count(at: str, stream: bool) -> None:
    """At its end, the client leaves while the event loop stands still, before any event reaches the endpoint."""
    recorded = list[str]()
    num_slow = 0
    async with served() as side:
        generate = side.endpoint._generate
        host, port = side.url.removeprefix("http://").removesuffix("/v1").split(":")

        async def slow(wanted: Request) -> Reply:
            nonlocal num_slow
            text = TOKENIZER.decode(wanted.prompt)
            num_slow += "slow" in text
            if "slow" in text and at == "its end":
                writer.transport.abort()
            elif "slow" in text and num_slow == (2 if "two" in at else 1):
                await asyncio.sleep(60)
            return dataclasses.replace(await generate(wanted), record=lambda: recorded.append(text))

        side.endpoint._generate = slow
        body = {"messages": [{"role": "user", "content": "slow"}], "stream": stream, "n": 2 if "two" in at else 1}
        if at == "its end":
            _, writer = await asyncio.open_connection(host, int(port))
            data, key = json.dumps(body), side.key["Authorization"]
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: {key}\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
            await writer.drain()
        else:
            with pytest.raises(TimeoutError):
                timeout = aiohttp.ClientTimeout(total=0.5)
                await side.client.post(f"{side.url}/chat/completions", json=body, headers=side.key, timeout=timeout)
        for _ in range(4):  # as many as an episode may have
            assert (await side.post("chat/completions", CHAT))[0] == 200
        assert (await side.post("chat/completions", CHAT))[1]["error"]["code"] == "max_turns_exceeded"
        assert num_slow == body["n"] and len(recorded) == 4 and not any("slow" in text for text in recorded)


async def test_the_reward_is_posted_once() -> None:
    async with served() as side:
        assert (await side.post("reward", {"reward": {"right": 1.0}}))[0] == 200
        assert (await side.post("reward", {"reward": {"right": 1.0}}))[0] == 200  # again, as an SDK may
        assert (await side.post("reward", {"reward": 2.0}))[0] == 409
        assert side.endpoint.reward == {"right": 1.0}


async def test_a_call_of_an_episode_that_cannot_continue_says_so_and_one_after_its_end_reaches_nothing() -> None:
    async def over(wanted: Request) -> Reply:
        raise EnvError("the episode is over")

    async with served() as side:
        side.endpoint._generate = over
        status, response = await side.post("chat/completions", CHAT | {"n": 2})
        assert (status, response["error"]["message"]) == (503, "the episode is over")
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.post(f"{side.url}/chat/completions", json=CHAT, headers=side.key)
