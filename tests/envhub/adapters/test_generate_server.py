"""The endpoint for verifiers, with recorded requests and with invalid ones."""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import pytest

from slipstream.common.records.trajectory import Sampling
from slipstream.envhub.adapters.generate_server import GenerateServer
from slipstream.envhub.adapters.verifiers_session import EpisodeReport, Session
from slipstream.envhub.driving import Reply, Request
from slipstream.envhub.env import EnvError

T = TypeVar("T")
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=20, max_turn_tokens=32)
SHOWN = {"Authorization": "Bearer hidden", "X-Session-ID": "episode"}
PARAMS = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 32, "stop_token_ids": [2]}
PARAMS |= {"logprobs": 1, "skip_special_tokens": False}
ASKED = {"model": "policy", "token_ids": [5, 6, 7], "sampling_params": PARAMS}


class Asking:
    """One session and its policy, and a client of the server that knows it."""

    url: str
    client: aiohttp.ClientSession

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.asked = asyncio.Event()
        self.reply: Callable[[list[int]], Reply] | None = None
        self.session = Session(SAMPLING, self._generate)
        self.sessions = {"episode": self.session}

    async def _generate(self, request: Request) -> Reply:
        self.prompts.append(request.prompt)
        self.asked.set()
        if self.reply is None:
            await asyncio.sleep(3600)
        assert self.reply is not None
        return self.reply(request.prompt)

    async def post(self, body: object, headers: dict[str, str] = SHOWN) -> tuple[int, str]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.client.post("/inference/v1/generate", data=data, headers=headers) as reply:
            return reply.status, await reply.text()

    async def models(self, headers: dict[str, str] = SHOWN) -> tuple[int, str]:
        async with self.client.get("/v1/models", headers=headers) as reply:
            return reply.status, await reply.text()


@contextlib.asynccontextmanager
async def asking() -> AsyncIterator[Asking]:
    side = Asking()
    server = GenerateServer(side.sessions, max_tokens=16, end_tokens=frozenset({2, 3}), secret="hidden")
    async with server.listening() as side.url, aiohttp.ClientSession(side.url) as side.client:
        yield side


async def asked(what: Callable[[Asking], Awaitable[T]]) -> T:
    """What is answered beside a new server, which must touch no session."""
    async with asking() as side:
        answer = await what(side)
        assert not side.prompts and not side.session.is_over
        return answer


async def test_a_request_reaches_its_session_and_the_reply_has_the_recorded_format() -> None:
    async with asking() as side:
        side.reply = lambda prompt: Reply(tokens=[8, 2], logprobs=[-0.5, -0.0], finish_reason="stop")
        status, text = await side.post(ASKED)
        assert side.prompts == [[5, 6, 7]]
    content = [{"token": "token_id:8", "logprob": -0.5}, {"token": "token_id:2", "logprob": -0.0}]
    choice = {"index": 0, "token_ids": [8, 2], "finish_reason": "stop", "logprobs": {"content": content}}
    assert (status, json.loads(text)) == (200, {"request_id": "", "choices": [choice]})
    assert side.session.answered == [[8, 2]]


async def test_the_models_card_tells_the_longest_prompt_that_leaves_room() -> None:
    status, text = await asked(lambda side: side.models())
    card = {"id": "policy", "object": "model", "max_model_len": 15}
    assert (status, json.loads(text)) == (200, {"object": "list", "data": [card]})


async def test_a_request_for_an_unknown_episode_is_refused_and_reaches_no_session() -> None:
    for headers in (SHOWN | {"X-Session-ID": "another"}, {"Authorization": "Bearer hidden"}):
        assert (await asked(lambda side, headers=headers: side.post(ASKED, headers)))[0] == 403  # type: ignore[misc]


def sampling(**changes: Any) -> dict[str, Any]:
    params = {name: value for name, value in {**PARAMS, **changes}.items() if value != "left out"}
    return ASKED | {"sampling_params": params}


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"\xff\xfe", "sent an invalid request"),
        (ASKED | {"token_ids": [-1]}, "`int` >= 0"),
        (ASKED | {"token_ids": [True]}, "Expected `int`, got `bool`"),
        (ASKED | {"token_ids": [1.5]}, "Expected `int`, got `float`"),
        (ASKED | {"token_ids": [1 << 40]}, "`int` <="),
        (ASKED | {"token_ids": []}, "length >= 1"),
        (ASKED | {"model": "other"}, "the model is policy, not 'other'"),
        (ASKED | {"content_parts": []}, "unknown field `content_parts`"),
        (sampling(temperature=1.0), r"temperature is 0\.7 in this run, and 1\.0 was requested"),
        (sampling(temperature="left out"), r"temperature is 0\.7 in this run, and 1\.0 was requested"),
        (sampling(top_p="left out"), r"top_p is 0\.9"),
        (sampling(top_k=-1), "top_k is 20 in this run, and 0 was requested"),
        (sampling(max_tokens="left out"), "max_tokens is 32 in this run, and None was requested"),
        (sampling(stop_token_ids=[2, 4]), r"ends a turn at tokens \[4\], and the engine at \[2, 3\]"),
        (sampling(skip_special_tokens=True), "skip_special_tokens must be false"),
        (sampling(logprobs=5), "skip_special_tokens must be false"),
        (sampling(min_p=0.1), "unknown field `min_p`"),
        (sampling(seed=1), "unknown field `seed`"),
    ],
)
async def test_an_invalid_request_is_refused_and_fails_its_episode(body: object, complaint: str) -> None:
    async with asking() as side:
        assert (await side.post(body))[0] == 400
        with pytest.raises(EnvError, match=complaint):
            await side.session.ending()


async def test_a_prompt_over_the_context_is_refused_in_the_words_that_harnesses_know_and_fails_no_episode() -> None:
    status, text = await asked(lambda side: side.post(ASKED | {"token_ids": [1] * 16}))
    assert status == 400 and "maximum context length" in text


async def test_only_answers_that_verifiers_still_waits_for_are_recorded_and_count() -> None:
    recorded: list[int] = []

    async def late(request: Request) -> Reply:
        """The client leaves while the answer is being made; no event has come yet."""
        if recorded == [1]:
            posted.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(posted), 5)
            left.set()
        return Reply(tokens=[8, 2], logprobs=[0.0] * 2, finish_reason="stop", record=lambda: recorded.append(1))

    posted: asyncio.Task[tuple[int, str]]
    left = asyncio.Event()
    async with asking() as side:
        posted = asyncio.create_task(side.post(ASKED))
        await side.asked.wait()
        posted.cancel()
        side.session = side.sessions["episode"] = Session(SAMPLING, late)
        assert (await side.post(ASKED))[0] == 200
        posted = asyncio.create_task(side.post(ASKED))
        await asyncio.wait_for(left.wait(), 10)
        assert recorded == [1] and side.session.answered == [[8, 2]]
        side.session.end(EpisodeReport(ended="episode", errors=["a timeout"]))
        with pytest.raises(EnvError, match="a timeout; verifiers did not wait for 1 answers"):
            await side.session.ending()


async def test_a_request_that_ended_with_its_process_says_so() -> None:
    async with asking() as side:
        posted = asyncio.create_task(side.post(ASKED))
        await side.asked.wait()
        posted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posted
        side.session.fail(EnvError("its process ended"))
        with pytest.raises(EnvError, match="its process ended"):
            await side.session.ending()


async def test_a_request_of_an_episode_that_is_over_is_refused() -> None:
    async def over(request: Request) -> Reply:
        raise EnvError("the episode is over")

    async with asking() as side:
        side.session = side.sessions["episode"] = Session(SAMPLING, over)
        assert (await side.post(ASKED))[0] == 503
