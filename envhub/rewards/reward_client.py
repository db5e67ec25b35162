"""A client of `slipstream serve rewards`, which may be down, slow or replaced at any moment.

What may pass is tried again until a deadline: lost connections, 429 and 5xx. A request waits at the server for its
batch, so it has no shorter timeout of its own.
"""

import asyncio
import io
import logging
import math
import random
import urllib.parse
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.reward_protocol import (
    MAX_REPLY_BYTES,
    OUTCOME,
    PROCESS,
    SECRET_VARIABLE,
    RewardModelCard,
    ScoredEpisode,
    ValuesReply,
    ValuesRequest,
)
from slipstream.envhub.env import EnvError
from slipstream.envhub.remote.env_secret import headers_with, read_secret

DEADLINE_S = 300.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0
MAX_QUOTED_CHARS = 300

T = TypeVar("T")

log = logging.getLogger(__name__)


class _Passing(Exception):
    """An attempt failed in a way that may pass."""


@dataclass(kw_only=True, slots=True)
class RewardClient:
    """Asks one server."""

    url: str
    reads: str = ""  # `slipstream.common.text.tokenizer.text_root` of the tokenizer that makes the tokens
    deadline_s: float = DEADLINE_S
    _model: str = ""  # that has answered; a server that starts again must have the same

    def __post_init__(self) -> None:
        """Raise ValueError for an address that cannot be one."""
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            raise ValueError(
                f"the address must be like http://HOST:PORT of `slipstream serve rewards`, got {self.url!r}"
            )

    async def card(self) -> RewardModelCard:
        """What the server serves. Raises EnvError."""
        card = await self._answer("model", None, RewardModelCard)
        self._expect(card.model)
        return card

    async def values(self, episode: ScoredEpisode) -> ValuesReply:
        """The values of an episode. Raises EnvError."""
        body = msgspec.msgpack.encode(ValuesRequest(reads=self.reads, episode=episode))
        reply = await self._answer("values", body, ValuesReply)
        self._expect(reply.model)
        wanted = 1 if reply.kind == OUTCOME else len(episode.turn_stops)
        possible = (0 <= value <= 1 if reply.kind == PROCESS else math.isfinite(value) for value in reply.values)
        if len(reply.values) != wanted or not all(possible):
            raise EnvError(f"{self.url} has sent {reply.values[:10]} as the values of {wanted} turns")
        return reply

    def _expect(self, model: str) -> None:
        self._model = self._model or model
        if model != self._model:
            raise EnvError(f"{self.url} serves another reward model than before; start this process again")

    async def _answer(self, path: str, body: bytes | None, kind: type[T]) -> T:
        """The reply of several attempts. Raises EnvError after the deadline, or if the server refuses for good."""
        why, wait_s = "no reply yet", FIRST_WAIT_S
        try:
            async with asyncio.timeout(self.deadline_s) as limit:
                while True:
                    try:
                        reply = await self._once(path, body)
                        break
                    except _Passing as failure:
                        why = str(failure)
                    log.info("%s: %s; next attempt in %.1f s", self.url, why, wait_s)
                    await asyncio.sleep(wait_s * random.SystemRandom().uniform(0.75, 1.25))
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        except TimeoutError:
            if not limit.expired():
                raise
            raise EnvError(f"no answer from {self.url} within {self.deadline_s:g} s: {why}") from None
        try:
            return msgspec.msgpack.decode(reply, type=kind)
        except MALFORMED as error:
            raise EnvError(f"{self.url} is no server of a reward model: {error}") from None

    async def _once(self, path: str, body: bytes | None) -> bytes:
        """The body of one reply. Raises _Passing, and EnvError if another attempt would not help."""
        try:
            headers = headers_with(read_secret("", option="", variable=SECRET_VARIABLE))
        except ValueError as error:
            raise EnvError(str(error)) from None
        headers |= {"Accept-Encoding": "identity", "Content-Type": "application/msgpack"}
        try:
            async with (
                # A small compressed reply could become any size, so none is decompressed.
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False) as session,
                session.request(
                    "GET" if body is None else "POST",
                    f"{self.url.rstrip('/')}/v1/{path}",
                    data=None if body is None else io.BytesIO(body),  # a large body as bytes would block the loop
                    headers=headers,
                    allow_redirects=False,
                ) as response,
            ):
                reply = await _read(response)
        except (aiohttp.ClientError, OSError) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from None
        if response.status == 200:
            return reply
        why = f"status {response.status}: {reply.decode(errors='replace')[:MAX_QUOTED_CHARS]!r}"
        if response.status == 429 or response.status >= 500:
            raise _Passing(why)
        hint = f"; set {SECRET_VARIABLE} to its key" if response.status == 401 else ""
        raise EnvError(f"{self.url} refuses with {why}{hint}")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    reply = bytearray()
    async for chunk in response.content.iter_any():
        reply += chunk
        if len(reply) > MAX_REPLY_BYTES:
            raise EnvError(f"{response.url.origin()} has sent more than {MAX_REPLY_BYTES} bytes")
    return bytes(reply)
