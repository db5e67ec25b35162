"""A client of `slipstream serve rewards`, which may be down, slow or replaced at any moment; the part `reward_model`.

What may pass is tried again until a deadline: lost connections, 429 and 5xx. A request waits at the server for its
batch, so it has no shorter timeout of its own.
"""

import math
import urllib.parse
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import aiohttp
import msgspec

from slipstream.common.process.http_answer import Passing, requested
from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.reward_protocol import (
    CRITICS,
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
from slipstream.envhub.env_options import is_number, is_server_url
from slipstream.envhub.remote.env_secret import headers_with, read_secret
from slipstream.envhub.rewards.attempts import repeated
from slipstream.envhub.rewards.episode import Episode, Values

DEADLINE_S = 300.0
MAX_QUOTED_CHARS = 300

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class RewardClient:
    """Asks one server."""

    url: str
    reads: str = ""  # `slipstream.common.text.tokenizer.text_root` of the tokenizer that makes the tokens
    deadline_s: float = DEADLINE_S
    _model: str = ""  # that has answered; a server that starts again must have the same

    def __post_init__(self) -> None:
        """Raise ValueError for an address that cannot be one."""
        if not is_server_url(self.url) or "@" in urllib.parse.urlsplit(self.url).netloc:
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

    async def __call__(self, episode: Episode) -> Values:
        """As a part: the score of a model of outcome; of the process, how much each turn changes the probability.

        Raises EnvError if the server gives no values within the deadline, or serves a critic.
        """
        if episode.scored is None:
            raise EnvError("a reward model reads tokens, and there are only texts")
        reply = await self.values(episode.scored)
        if reply.kind in CRITICS:
            raise EnvError(
                f"{self.url} serves a critic, whose values are no rewards; serve a model of `slipstream fit reward` or "
                "`slipstream fit prm`"
            )
        if reply.kind != PROCESS:
            return reply.values[0]
        return [after - before for before, after in pairwise([0.0, *reply.values])]

    def _expect(self, model: str) -> None:
        self._model = self._model or model
        if model != self._model:
            raise EnvError(f"{self.url} serves another reward model than before; start this process again")

    async def _answer(self, path: str, body: bytes | None, kind: type[T]) -> T:
        """The reply of several attempts. Raises EnvError after the deadline, or if the server refuses for good."""
        reply = await repeated(partial(self._once, path, body), url=self.url, deadline_s=self.deadline_s)
        try:
            return msgspec.msgpack.decode(reply, type=kind)
        except MALFORMED as error:
            raise EnvError(f"{self.url} is no server of a reward model: {error}") from None

    async def _once(self, path: str, body: bytes | None) -> bytes:
        """The body of one reply. Raises Passing, and EnvError if another attempt would not help."""
        try:
            headers = headers_with(read_secret("", option="", variable=SECRET_VARIABLE))
        except ValueError as error:
            raise EnvError(str(error)) from None
        headers |= {"Content-Type": "application/msgpack"}
        url = f"{self.url.rstrip('/')}/v1/{path}"
        try:
            reply = await requested(url, body, headers, timeout_s=None, max_bytes=MAX_REPLY_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise Passing(f"{type(error).__name__}: {error}") from None
        if reply.status == 200:
            return reply.body
        why = f"status {reply.status}: {reply.body.decode(errors='replace')[:MAX_QUOTED_CHARS]!r}"
        if reply.status == 429 or reply.status >= 500:
            raise Passing(why, wait_s=reply.wait_s)
        hint = f"; set {SECRET_VARIABLE} to its key" if reply.status == 401 else ""
        raise EnvError(f"{self.url} refuses with {why}{hint}")


def reward_model(*, url: str, deadline_s: float = DEADLINE_S) -> RewardClient:
    """Make the part. Raises ValueError for an address, or a deadline, that cannot be one."""
    if not is_number(deadline_s) or deadline_s <= 0:
        raise ValueError(f"deadline_s must be above 0, got {deadline_s!r:.100}; leave it out for {DEADLINE_S:g}")
    return RewardClient(url=url, deadline_s=float(deadline_s))
