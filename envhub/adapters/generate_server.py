"""The endpoint that `verifiers` 0.4 asks for tokens: vLLM's `/inference/v1/generate`, on loopback.

    GET  /v1/models               the one model, with the longest prompt that may be asked about
    POST /inference/v1/generate   {model, token_ids, sampling_params} -> {request_id, choices: [{token_ids,
                                  finish_reason, logprobs: {content: [{token: "token_id:7", logprob}]}}]}

`X-Session-ID` says which episode asks, by a name that nobody can guess. A request for other sampling than the run's
fails its episode: log-probabilities belong to what `sampling` says, and nothing is quietly sampled otherwise.
"""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated

import msgspec
from aiohttp import web

from common.trajectory import Sampling
from envhub.driving import Reply
from envhub.env import EnvError
from envhub.remote.env_secret import headers_with
from envhub.adapters.verifiers_session import Question, Session

MODEL = "policy"
SESSION_HEADER = "X-Session-ID"
MAX_BODY_BYTES = 1 << 20  # beside the prompt
MAX_TOKEN_BYTES = 12  # of a token id in JSON
NO_TOP_K = (0, -1)  # what vLLM takes for none

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SamplingAsked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where nothing is said, what vLLM then does. A key that is not here would change what is sampled."""

    logprobs: int
    stop_token_ids: list[Token]
    skip_special_tokens: bool
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    routed_experts_prompt_start: int = 0  # where routing would be told from, of which nothing is told here


class GenerateAsked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    token_ids: Annotated[list[Token], msgspec.Meta(min_length=1)]
    sampling_params: SamplingAsked
    cache_salt: str | None = None  # the engine salts by policy version itself
    priority: int | None = None


class GenerateServer:
    """Hands what is asked for to the session that asks, by its name in `sessions`, and the answer back."""

    def __init__(
        self, sessions: Mapping[str, Session], *, max_tokens: int, end_tokens: frozenset[int], secret: str
    ) -> None:
        self._sessions = sessions
        self._longest_prompt = max_tokens - 1  # an answer has at least one token
        self._end_tokens = end_tokens
        self._wanted = headers_with(secret)["Authorization"]

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Serve on loopback, at the URL that is given out. Raises OSError."""
        max_bytes = MAX_BODY_BYTES + MAX_TOKEN_BYTES * self._longest_prompt
        app = web.Application(middlewares=[self._admit], client_max_size=max_bytes)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "")
        if "Origin" in request.headers or not hmac.compare_digest(shown.encode(), self._wanted.encode()):
            raise web.HTTPUnauthorized(text="this endpoint is for the process that the actor started")
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "max_model_len": self._longest_prompt}
        return web.json_response({"object": "list", "data": [card]})

    async def _generate(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            return _refusal(403, "no such episode: one agent is played by the policy, once in an episode")
        try:
            asked = msgspec.json.decode(await request.read(), type=GenerateAsked)
            self._check(asked, session.sampling)
        except (msgspec.MsgspecError, ValueError) as error:
            session.events.put_nowait(EnvError(f"it asked for what cannot be had: {error}"))
            return _refusal(400, str(error))
        if len(asked.token_ids) > self._longest_prompt:
            # In these words, as harnesses look for them, and end in order.
            return _refusal(
                400, f"{len(asked.token_ids)} tokens are over the maximum context length of {self._longest_prompt}"
            )
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        session.events.put_nowait(Question(prompt=asked.token_ids, answer=answer))
        return web.json_response(_answered(await answer))

    def _check(self, asked: GenerateAsked, sampling: Sampling) -> None:
        """Raise ValueError unless this is asked of the run's model, as the run samples from it."""
        if asked.model != MODEL:
            raise ValueError(f"the model is {MODEL}, not {asked.model!r}")
        said = asked.sampling_params
        for name, value, wanted in (
            ("temperature", said.temperature, sampling.temperature),
            ("top_p", said.top_p, sampling.top_p),
            ("top_k", 0 if said.top_k in NO_TOP_K else said.top_k, sampling.top_k),
            ("max_tokens", said.max_tokens, sampling.max_turn_tokens),
        ):
            if value != wanted:
                raise ValueError(
                    f"{name} is {wanted} in this run, and {value} was asked for; leave sampling to the run's `sampling`"
                )
        if said.skip_special_tokens or said.logprobs not in (0, 1):
            raise ValueError("every token is told, with its own log-probability and no other's")
        if strange := sorted(set(said.stop_token_ids) - self._end_tokens):
            raise ValueError(
                f"tokens {strange} are to end a turn, and the engine ends it with {sorted(self._end_tokens)}; name "
                "them as `eos_token_id` in the model's generation_config.json"
            )


def _answered(reply: Reply) -> dict[str, object]:
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(reply.tokens, reply.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": reply.tokens,
        "finish_reason": reply.finish_reason,
        "logprobs": {"content": content},
    }
    return {"request_id": "", "choices": [choice]}


def _refusal(status: int, why: str) -> web.Response:
    return web.json_response({"error": {"message": why, "type": "invalid_request_error"}}, status=status)
