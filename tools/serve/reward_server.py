"""The HTTP server of a reward model: requests that wait while a batch is scored are the next batch.

`slipstream.common.records.reward_protocol` has the messages. GET /health says what is served, and how many requests
wait.
"""

import contextlib
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.http_guard import Border
from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.reward_protocol import MAX_REQUEST_BYTES, RewardModelCard, ValuesReply, ValuesRequest
from slipstream.tools.play.state_values import Batches

MAX_WAITING = 4096  # requests; more are refused with 503, and their clients try again


class RewardServer:
    """Serves the model that `card` describes."""

    def __init__(self, batches: Batches, card: RewardModelCard, *, vocab_size: int, secret: str) -> None:
        self._batches, self._card, self._vocab_size = batches, card, vocab_size
        self._border = Border(max_body_bytes=MAX_REQUEST_BYTES, secret=secret)
        self.num_scored = 0

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve at the URL that is yielded. Raises OSError."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/model", self._model)
        app.router.add_post("/v1/values", self._values)
        async with self._border.served(app, (host, port)) as url:
            yield url

    async def _health(self, request: web.Request) -> web.Response:
        about = {"status": "ok", "kind": self._card.kind, "model": self._card.model}
        return web.json_response(about | {"waiting": self._batches.num_waiting, "scored": self.num_scored})

    async def _model(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.msgpack.encode(self._card), content_type="application/msgpack")

    async def _values(self, request: web.Request) -> web.Response:
        if self._batches.num_waiting >= MAX_WAITING:
            raise web.HTTPServiceUnavailable(text=f"{MAX_WAITING} requests are waiting")
        body = await request.read()
        try:
            asked = msgspec.msgpack.decode(body, type=ValuesRequest)
            asked.episode.check(vocab_size=self._vocab_size, max_tokens=self._card.max_tokens)
        except (*MALFORMED, ValueError) as error:
            raise web.HTTPBadRequest(text=f"the request is malformed: {error}") from None
        if asked.reads != self._card.reads:
            raise web.HTTPConflict(
                text="the tokenizer, the chat template or its arguments are not those of the reward model, so it would "
                "score other text than it was trained on; train one from a model of the same family"
            )
        try:
            values = await self._batches.values(asked.episode)
        except ConfigError as error:  # another attempt would not help
            raise web.HTTPUnprocessableEntity(text=str(error)) from None
        self.num_scored += 1
        reply = ValuesReply(values=values.tolist(), kind=self._card.kind, model=self._card.model)
        return web.Response(body=msgspec.msgpack.encode(reply), content_type="application/msgpack")
