"""A client of an OpenAI-compatible chat server that cannot be trusted to be up, quick or well-behaved.

Every request has a timeout, and all attempts at an answer have one deadline. What may pass is tried again after a
growing wait: lost connections, timeouts, 408, 409, 429 and 5xx, malformed replies. A reply is read up to a limit.

With the url `actors` the run's own policy answers: no server is asked, but the engine of the actor.
"""

import asyncio
import base64
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from slipstream.common.process.http_answer import Passing, Reply, requested
from slipstream.common.process.wire import MALFORMED
from slipstream.common.text.thought import THOUGHT_MARKS
from slipstream.envhub.env import EnvError
from slipstream.envhub.remote.env_secret import headers_with, read_secret
from slipstream.envhub.rewards.attempts import repeated
from slipstream.envhub.rewards.episode import Reading

MAX_REPLY_BYTES = 1 << 20
MAX_TOKENS = 10**9  # of one request; with more, Redis could not add up what a run has spent
MAX_QUOTED_CHARS = 300
ACTORS = "actors"  # the url of the run's own policy
_PASSING = (408, 409, 429)  # and 5xx

T = TypeVar("T")
R = TypeVar("R")


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None  # of DeepSeek's API, and of vLLM's
    reasoning: str | None = None  # the same of others


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class Usage(msgspec.Struct):
    total_tokens: TokenCount = 0
    prompt_tokens: TokenCount = 0
    completion_tokens: TokenCount = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One answer of a model."""

    text: str
    usage: Usage | None
    reasoning: str = ""  # if the server sends it apart from the text
    is_cut: bool = False  # it had more to say than `max_tokens` of the request
    policy_version: int | None = None  # of the run's own policy, when it wrote the last token; None: another model


OwnPolicy = Callable[[bytes], Awaitable[Answered]]
"""Answers the body of a chat request by the run's own policy. Raises Passing, and EnvError if the request is wrong."""


Account = Callable[[int, int, float], tuple[int, int, float]]
"""Adds requests, tokens and money to what the whole run has spent, and returns the sums. It may wait for Redis."""


@dataclass(kw_only=True, slots=True)
class ChatClient:
    """Asks one server. Counts what it has spent, or with an account, what the run has spent.

    The key, in an environment variable or a file of the actor's host, is never logged or put into an error.
    """

    url: str  # up to /v1, or ACTORS
    key_env: str = ""
    key_file: str = ""
    max_concurrent: int = 16
    timeout_s: float = 60.0  # of one request
    deadline_s: float = 300.0  # of an answer, with all its attempts and waits; not of the wait for a place among others
    max_requests: int = 0  # the budget of the run, without an account of this process; 0: no limit
    max_total_tokens: int = 0  # the same, by the server's own count
    max_cost: float = 0.0  # the same, in the currency of the prices
    input_price: float = 0.0  # of a million tokens of prompts
    output_price: float = 0.0  # of a million tokens of answers
    num_requests: int = field(init=False, default=0)
    num_tokens: int = field(init=False, default=0)
    cost: float = field(init=False, default=0.0)
    account: Account | None = field(init=False, default=None)
    own_policy: OwnPolicy | None = field(init=False, default=None)  # for the url ACTORS; an actor sets it
    _room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.max_concurrent)

    def read_key(self) -> str:
        """Return the key, "" if none is configured. Raises ValueError if it is not there, or cannot be sent."""
        if self.key_env and not os.environ.get(self.key_env):
            raise ValueError(f"key_env names the environment variable {self.key_env}, which is not set; export it")
        return read_secret(self.key_file, option="key_file", variable=self.key_env)

    async def ask(self, body: bytes, *, read: Callable[[str], T]) -> Reading[T]:
        """Send `body` until `read` accepts the answer, and return what it read; `read` raises ValueError to refuse.

        Raises EnvError if the deadline or the budget is over, or the server refuses the request for good.
        """
        return await self._within_deadline(body, lambda answered: self._reading(answered, read))

    async def answer(self, body: bytes) -> Answered:
        """Send `body`, and return the answer with the reasoning before it.

        Raises EnvError if the deadline or the budget is over, or the server refuses the request for good.
        """
        return await self._within_deadline(body, lambda answered: answered)

    async def _within_deadline(self, body: bytes, read: Callable[[Answered], R]) -> R:
        async def attempt() -> R:
            return read(await self._once(body))

        async with self._room:  # also in waits between attempts: a server that has enough is asked less
            return await repeated(attempt, url=self.url, deadline_s=self.deadline_s)

    def _reading(self, answer: Answered, read: Callable[[str], T]) -> Reading[T]:
        # A number that is cut off would be read as another number.
        if answer.is_cut and not answer.text.rstrip().endswith("}"):
            why = f"its answer was cut off at `max_tokens` of `request`: {self._quoted(answer.text)}"
            raise Passing(why, is_malformed=True)
        try:
            return Reading(value=read(_without_thought(answer.text)), policy_version=answer.policy_version)
        except ValueError as error:
            raise Passing(self._quoted(str(error)), is_malformed=True) from None

    async def _once(self, body: bytes) -> Answered:
        """Return one completion, and count it. Raises Passing, and EnvError if another attempt would not help."""
        await self._begin_request()
        try:
            if self.url == ACTORS:
                if self.own_policy is None:
                    raise EnvError(
                        f"the url `{ACTORS}` is the policy of an actor, and this process has none; give a server's"
                    )
                async with asyncio.timeout(self.timeout_s):
                    answered = await self.own_policy(body)
            else:
                answered = self._decoded(await self._post(body))
        except TimeoutError:
            raise Passing(f"no answer within {self.timeout_s:g} s (timeout_s)") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Passing(f"{type(error).__name__}: {self._quoted(str(error))}") from None
        await self._count(answered.usage)
        return answered

    def _decoded(self, reply: Reply) -> Answered:
        if reply.status != 200:
            why = f"status {reply.status}: {self._quoted(reply.body.decode(errors='replace'))}"
            if reply.status in _PASSING or reply.status >= 500:
                raise Passing(why, wait_s=reply.wait_s)
            raise EnvError(f"{self.url} refused with {why}")
        try:
            completion = msgspec.json.decode(reply.body, type=_Completion)
            choice = completion.choices[0]
            said, is_cut = choice.message, choice.finish_reason == "length"
            thought = said.reasoning_content or said.reasoning or ""
            if said.content is None and not thought:
                raise Passing("the reply has no content", is_malformed=True)
            return Answered(text=said.content or "", usage=completion.usage, reasoning=thought, is_cut=is_cut)
        except (*MALFORMED, IndexError) as error:
            raise Passing(f"the reply is not a chat completion: {error}", is_malformed=True) from None

    async def _post(self, body: bytes) -> Reply:
        headers = headers_with(self._key()) | {"Content-Type": "application/json"}
        url = f"{self.url.rstrip('/')}/chat/completions"
        return await requested(url, body, headers, timeout_s=self.timeout_s, max_bytes=MAX_REPLY_BYTES)

    def _key(self) -> str:
        try:
            return self.read_key()
        except ValueError as error:
            raise EnvError(str(error)) from None

    async def _begin_request(self) -> None:
        """Count a request. Raises EnvError, and counts none, if the budget is spent."""
        requests, tokens, cost = await self._add(1, 0, 0.0)
        try:
            self._check_budget(requests - 1, tokens, cost)
        except EnvError:
            await self._add(-1, 0, 0.0)
            raise

    async def _add(self, requests: int, tokens: int, cost: float) -> tuple[int, int, float]:
        """Add to what was spent, and return the sums."""
        if self.account is not None and (self.max_requests or self.max_total_tokens or self.max_cost):
            sums = await asyncio.to_thread(self.account, requests, tokens, cost)
        else:
            sums = (self.num_requests + requests, self.num_tokens + tokens, self.cost + cost)
        self.num_requests, self.num_tokens, self.cost = sums
        return sums

    async def _count(self, usage: Usage | None) -> None:
        used = usage or Usage()
        num_tokens = max(used.total_tokens, used.prompt_tokens + used.completion_tokens)
        if (self.max_total_tokens or self.max_cost) and not num_tokens:
            raise EnvError(f"{self.url} reports no `usage`, so the budget cannot be kept; limit max_requests instead")
        if self.max_cost and not (used.prompt_tokens and used.completion_tokens):
            raise EnvError(
                f"{self.url} reports no prompt_tokens or no completion_tokens in `usage`, so max_cost cannot be kept; "
                "limit max_total_tokens instead"
            )
        prices = self.input_price * used.prompt_tokens + self.output_price * used.completion_tokens
        await self._add(0, num_tokens, prices / 1e6)

    def _check_budget(self, requests: int, tokens: int, cost: float) -> None:
        whose = "process" if self.account is None else "run"
        for name, spent, most in (
            ("max_requests", requests, self.max_requests),
            ("max_total_tokens", tokens, self.max_total_tokens),
            ("max_cost", cost, self.max_cost),
        ):
            if most and spent >= most:
                raise EnvError(
                    f"the budget of this {whose} is spent: {name} is {most:g}, and it has used {spent:g}; raise it"
                )

    def _quoted(self, text: str) -> str:
        """The beginning of a text of the server, or nothing of it if it repeats the key, in whatever encoding."""
        key = self._key()
        hidden = text.replace(key, "***") if key else text
        coded = key.encode().hex(), base64.b64encode(key.encode()).decode(), quote(key, safe=""), _escaped(key)
        if key and any(_letters(form) in _letters(hidden) for form in (key, *coded)):
            return "(not shown: it repeats the key)"
        return repr(hidden[:MAX_QUOTED_CHARS])


def _letters(text: str) -> str:
    """The letters and digits of ASCII in `text`: those of UTF-16 too, whose other bytes are 0."""
    return "".join(char for char in text.lower() if char.isascii() and char.isalnum())


def _escaped(text: str) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in text)


def _without_thought(text: str) -> str:
    """What follows the thought; its opening mark may be in the prompt, where a chat template wrote it."""
    for _, closing in THOUGHT_MARKS:
        text = text.rpartition(closing)[2]
    return text
