"""The policy as an OpenAI-compatible server for one episode of an agent.

    POST /v1/chat/completions   messages, tools -> choices, whole or as a stream
    POST /v1/responses          input items, tools -> output items; nothing is kept between two requests
    GET  /v1/models             the one model
    POST /v1/reward             {"reward": 1.0} or {"reward": {NAME: 1.0}}: the reward of the episode

A request needs the key of its episode. Each answer is one turn of the episode.
"""

import asyncio
import contextlib
import os
import secrets
import select
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler

from slipstream.common.process.http_guard import Border
from slipstream.common.records.tool_call import ParsedAnswer, ToolCall
from slipstream.common.records.trajectory import StopReason, pack_tokens
from slipstream.envhub.agent.prompts import Prompts
from slipstream.envhub.agent.request import (
    ChatRequest,
    decoded,
    decoded_reward,
    template_messages,
    warn_of_unread_calls,
)
from slipstream.envhub.agent.response import MODEL, Answer, Answers
from slipstream.envhub.agent.responses import INERT, REFUSED, ResponsesRequest, events, response_body
from slipstream.envhub.driving import Generate, Request, Terms
from slipstream.envhub.env import EnvError
from slipstream.envhub.together import together

MAX_BODY_BYTES = 1 << 20  # without the conversation
MAX_TOKEN_BYTES = 16  # of a token's text in JSON, on average
GIVEN_UP_PER_TURN = 4  # of `env.max_turns`; an SDK may try each call several times
CONTEXT_FULL = "context_length_exceeded"  # the code that agents look for

# They read and encode the conversations of all episodes: the longest take seconds, while the event loop serves others.
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="agent-prompts")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request with its prompt."""

    body: ChatRequest
    messages: Sequence[dict[str, Any]]  # as the chat template gets them
    text: str  # that `prompt` stands for
    prompt: list[int]


class _Refused(Exception):
    """A request that the episode does not allow."""

    def __init__(self, status: int, why: str, code: str | None = None) -> None:
        super().__init__(why)
        self.status, self.code = status, code


class Endpoint:
    """Serves one episode; `generate` samples and records its answers."""

    def __init__(self, terms: Terms, generate: Generate) -> None:
        self.key = secrets.token_urlsafe()
        self.reward: float | dict[str, float] | None = None  # as posted
        self.limit: StopReason | None = None  # the limit for which the last request was refused, if it was
        self.failure: str = ""  # why the episode has no reward, whatever the agent gives
        self._terms = terms
        self._generate = generate
        self._prompts = Prompts(terms.tokenizer, started_at_s=terms.started_at_s)
        self._prompts_free = asyncio.Lock()  # one thread at a time works with them
        self._num_answers = 0  # that were delivered
        self._num_running = 0
        self._num_given_up = 0  # requests whose client did not wait for the answer
        self._ended = asyncio.Event()  # set when one that was running has ended

    @contextlib.asynccontextmanager
    async def listening(self, socket: Path | None = None) -> AsyncIterator[str]:
        """Serve on loopback, at the base URL that is yielded; or on a Unix socket. Raises OSError."""
        max_bytes = MAX_BODY_BYTES + MAX_TOKEN_BYTES * self._terms.max_tokens
        app = web.Application(middlewares=[_explain], client_max_size=max_bytes)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._response)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/reward", self._note_reward)
        why = "this is not the key of the episode; use the OPENAI_API_KEY that it was given"
        border = Border(max_body_bytes=max_bytes, secret=self.key, why_refused=why)
        async with border.served(app, socket or ("127.0.0.1", 0)) as url:
            if socket is not None:
                os.chmod(socket, 0o666)  # noqa: PTH101 - for a sandbox, which runs as another user; callers need the key
            yield f"{url}/v1"

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "slipstream"}
        return web.json_response({"object": "list", "data": [card | {"max_model_len": self._terms.max_tokens}]})

    async def _note_reward(self, request: web.Request) -> web.Response:
        reward = decoded_reward(await request.read())
        if self.reward not in (None, reward):
            return refusal(409, f"the reward of this episode is {self.reward} already; post it once")
        self.reward = reward
        return web.json_response({})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        sent = await request.read()
        asked = await self._in_thread(lambda: self._asked(decoded(sent, ChatRequest, self._terms.sampling)))
        answers, body = await self._answers(asked, with_logprobs=bool(asked.body.logprobs)), asked.body
        made = Answers(answers=answers, num_prompt_tokens=len(asked.prompt))
        self._deliver(request, answers)
        if not body.stream:
            return web.json_response(made.body())
        return await _streamed(request, made.chunks(with_usage=body.with_usage))

    async def _response(self, request: web.Request) -> web.StreamResponse:
        sent = await request.read()

        def read() -> tuple[ResponsesRequest, Asked]:
            body = decoded(sent, ResponsesRequest, self._terms.sampling, refused=REFUSED, inert=INERT)
            return body, self._asked(body.as_chat())

        body, asked = await self._in_thread(read)
        answers = await self._answers(asked, with_logprobs=False)
        made = response_body(body, answers[0], num_prompt_tokens=len(asked.prompt))
        self._deliver(request, answers)
        return await _streamed(request, events(made)) if body.stream else web.json_response(made)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._prompts_free:
            return await asyncio.get_running_loop().run_in_executor(_THREADS, work)

    def _asked(self, body: ChatRequest) -> Asked:
        """Render the conversation. Raises ValueError if no template can, or the model's refuses it, and _Refused."""
        self._require_room(len(body.messages), "messages")  # each of which has a token at least
        if body.callable_tools and self._terms.parse is None:
            warn_of_unread_calls()
        messages = template_messages(body.messages)
        text = self._prompts.rendered(messages, body.tools or [])
        return Asked(body=body, messages=messages, text=text, prompt=self._prompts.tokens(text))

    async def _answers(self, asked: Asked, *, with_logprobs: bool) -> list[Answer]:
        """Sample the answers. Raises _Refused, and EnvError if the episode cannot continue."""
        num_answers = asked.body.num_answers
        while self._num_running and self._num_answers + self._num_running + num_answers > self._terms.max_turns:
            self._ended.clear()  # its client may give it up
            await self._ended.wait()
        self._require(asked.prompt, num_answers)
        self.limit = None
        self._num_running += num_answers
        try:
            return await together(self._answer(asked, with_logprobs=with_logprobs) for _ in range(num_answers))
        except asyncio.CancelledError:
            self._num_given_up += 1
            raise
        finally:
            self._num_running -= num_answers
            self._ended.set()

    async def _answer(self, asked: Asked, *, with_logprobs: bool) -> Answer:
        """Sample one answer, divide it, and remember it. Raises EnvError if the episode cannot continue."""
        body, prompt = asked.body, asked.prompt
        parsed: ParsedAnswer | None = None

        async def read(tokens: list[int]) -> bool:
            nonlocal parsed
            if self._terms.parse is None:
                return True
            said = _before(self._prompts.answer(tokens), body.stops)
            parsed = await self._terms.parse(said, tokens=tokens, prompt=prompt, tools=body.callable_tools)
            return not parsed.malformed and parsed.tool_calls == parsed.tool_calls[: body.max_calls]

        keep = partial(self._num_kept, body.stops) if body.stops else None
        reply = await self._generate(Request(prompt=prompt, max_tokens=body.longest, keep=keep, read=read))
        written = self._prompts.answer(reply.tokens)
        shown = _before(written, body.stops)
        found = parsed or ParsedAnswer(reasoning="", content=shown, tool_calls=[], malformed=False)
        calls = _tool_calls(prompt, reply.tokens, found.tool_calls[: body.max_calls])
        answer = Answer(
            text=found.content,
            reasoning=found.reasoning,
            tool_calls=calls,
            tokens=reply.tokens,
            pieces=[self._prompts.text([token]) for token in reply.tokens] if with_logprobs else [],
            logprobs=reply.logprobs,
            finish_reason="tool_calls" if calls else reply.finish_reason,
            record=reply.record,
        )

        def remember() -> None:
            self._prompts.remember(asked.text, prompt, reply.tokens, written=written, shown=shown)
            # A message without some of the calls is not what the policy wrote: then the next prompt begins a branch.
            if answer.text != shown and len(calls) == len(found.tool_calls):
                (message,) = template_messages([answer.message])
                self._prompts.remember_message(
                    asked.messages,
                    message,
                    body.tools or [],
                    text=asked.text,
                    prompt=prompt,
                    tokens=reply.tokens,
                    written=shown,
                )

        await self._in_thread(remember)
        return answer

    def _deliver(self, request: web.Request, answers: Sequence[Answer]) -> None:
        """Count and record answers right before they are sent; not those that no client waits for any more.

        Raises EnvError if the episode is over.
        """
        if has_left(request):
            self._num_given_up += 1
            return
        for answer in answers:
            answer.record()
        self._num_answers += len(answers)

    def _require_room(self, count: int, what: str) -> None:
        """Raise _Refused if so many tokens or messages leave no token for an answer."""
        if count >= self._terms.max_tokens:
            self.limit = StopReason.MAX_TOKENS
            why = f"This model's maximum context length is {self._terms.max_tokens} tokens, and the prompt has {count}"
            why += "." if what == "tokens" else f" {what}."
            raise _Refused(400, f"{why} Please reduce the length of the messages.", CONTEXT_FULL)

    def _require(self, prompt: list[int], num_answers: int) -> None:
        """Raise _Refused if a limit of the episode does not allow the request."""
        self._require_room(len(prompt), "tokens")
        most = self._terms.max_turns
        if self._num_answers + num_answers > most:
            self.limit = StopReason.MAX_TURNS
            raise _Refused(400, f"an episode has at most {most} answers (`env.max_turns`)", "max_turns_exceeded")
        if self._num_given_up > GIVEN_UP_PER_TURN * most:
            self.failure = (
                f"the agent's client did not wait for {self._num_given_up} answers; give it a longer timeout than "
                "answers take"
            )
            raise _Refused(503, self.failure)
        if not prompt:
            raise _Refused(400, "the prompt is empty")

    def _num_kept(self, stops: tuple[str, ...], tokens: list[int]) -> int:
        """The number of tokens up to the one that completes a stop text; all if none occurs."""

        def is_stopped(count: int) -> bool:
            text = self._prompts.text(tokens[:count])
            return any(stop in text for stop in stops)

        if not is_stopped(len(tokens)):
            return len(tokens)
        return bisect_left(range(1, len(tokens) + 1), True, key=is_stopped) + 1


def has_left(request: web.Request) -> bool:
    """Whether the client has closed its connection, also if no event has come yet."""
    if request.transport is None or request.transport.is_closing():
        return True
    poll = select.poll()
    poll.register(request.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


async def _streamed(request: web.Request, chunks: Iterable[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    await response.write_eof()
    return response


def _tool_calls(prompt: list[int], tokens: list[int], calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """The calls of an answer in OpenAI's format.

    Their ids depend on nothing but the tokens, because the calls of a preempted episode are repeated by another actor,
    and templates may write ids into prompts. Mistral's templates accept ids of nine letters and digits only.
    """
    digest = xxhash.xxh3_64(pack_tokens(prompt) + pack_tokens(tokens))
    found = []
    for call in calls:
        digest.update(call.name.encode())
        function = {"name": call.name, "arguments": call.arguments}
        found.append({"id": digest.hexdigest()[:9], "type": "function", "function": function})
    return found


def _before(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop text in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a client did wrong in the form that clients of OpenAI expect."""
    try:
        return await handler(request)
    except _Refused as error:
        return refusal(error.status, str(error), error.code)
    except (ValueError, RecursionError) as error:
        return refusal(400, str(error))
    except EnvError as error:
        return refusal(503, str(error))
    except web.HTTPNotFound:
        return refusal(
            404,
            f"{request.path[:100]} does not exist; this endpoint has /v1/chat/completions, /v1/responses, /v1/models "
            "and /v1/reward",
        )
    except web.HTTPMethodNotAllowed as error:
        return refusal(405, f"{request.path[:100]} allows {', '.join(sorted(error.allowed_methods))}")
    except web.HTTPException as error:
        return refusal(error.status, error.text or error.reason)


def refusal(status: int, why: str, code: str | None = None) -> web.Response:
    """An error in the form in which clients of OpenAI look for it."""
    error = {"message": why, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
