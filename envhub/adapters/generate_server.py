"""The endpoint from which `verifiers` 0.4 requests tokens: vLLM's `/inference/v1/generate`, on loopback.

    GET  /v1/models               the one model, with the length of the longest prompt
    POST /inference/v1/generate   {model, token_ids, sampling_params} -> {request_id, choices: [{token_ids,
                                  finish_reason, logprobs: {content: [{token: "token_id:7", logprob}]}}]}

`X-Session-ID` is the name of the episode, a random one that cannot be guessed. A request for other sampling settings
than the run's fails its episode, because the recorded log-probabilities must belong to the run's `sampling`.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Annotated

import msgspec
from aiohttp import web

from slipstream.common.process.http_guard import Border
from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.trajectory import Sampling
from slipstream.envhub.adapters.verifiers_session import Session
from slipstream.envhub.agent.endpoint import has_left, refusal
from slipstream.envhub.agent.response import MODEL
from slipstream.envhub.driving import Reply
from slipstream.envhub.env import EnvError

SESSION_HEADER = "X-Session-ID"
MAX_BODY_BYTES = 1 << 20  # without the prompt
MAX_TOKEN_BYTES = 12  # the length of a token id in JSON
NO_TOP_K = (0, -1)  # both mean no limit in vLLM

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling settings of a request, with vLLM's defaults. Any other key would change what is sampled."""

    logprobs: int
    stop_token_ids: list[Token]
    skip_special_tokens: bool
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    routed_experts_prompt_start: int = 0  # ignored: this endpoint does not report the routing of experts


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    token_ids: Annotated[list[Token], msgspec.Meta(min_length=1)]
    sampling_params: SamplingParams
    cache_salt: str | None = None  # ignored: the engine salts its cache by policy version
    priority: int | None = None


class GenerateServer:
    """Passes each request to its session, by its name in `sessions`, and the reply back."""

    def __init__(
        self, sessions: Mapping[str, Session], *, max_tokens: int, end_tokens: frozenset[int], secret: str
    ) -> None:
        self._sessions = sessions
        self._longest_prompt = max_tokens - 1  # a reply has at least one token
        self._end_tokens = end_tokens
        self._secret = secret

    def listening(self) -> AbstractAsyncContextManager[str]:
        """Serve on loopback, at the URL that is yielded. Raises OSError."""
        max_bytes = MAX_BODY_BYTES + MAX_TOKEN_BYTES * self._longest_prompt
        app = web.Application(client_max_size=max_bytes)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        why = "this endpoint is for the process that the actor started"
        border = Border(max_body_bytes=max_bytes, secret=self._secret, why_refused=why)
        return border.served(app, ("127.0.0.1", 0))

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "max_model_len": self._longest_prompt}
        return web.json_response({"object": "list", "data": [card]})

    async def _generate(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            return refusal(403, "no such episode: the policy plays one agent, once in an episode")
        try:
            body = msgspec.json.decode(await request.read(), type=GenerateRequest)
            self._check(body, session.sampling)
        except (*MALFORMED, ValueError) as error:
            session.fail(EnvError(f"verifiers sent an invalid request: {error}"))
            return refusal(400, str(error))
        if len(body.token_ids) > self._longest_prompt:
            # Harnesses look for exactly these words, and then end the episode normally.
            return refusal(
                400, f"{len(body.token_ids)} tokens are over the maximum context length of {self._longest_prompt}"
            )
        try:
            reply = await session.answer(body.token_ids, has_left=partial(has_left, request))
        except EnvError as error:
            return refusal(503, str(error))
        return web.json_response(_reply_body(reply))

    def _check(self, body: GenerateRequest, sampling: Sampling) -> None:
        """Raise ValueError unless the request names the run's model and the run's sampling settings."""
        if body.model != MODEL:
            raise ValueError(f"the model is {MODEL}, not {body.model!r}")
        params = body.sampling_params
        for name, value, wanted in (
            ("temperature", params.temperature, sampling.temperature),
            ("top_p", params.top_p, sampling.top_p),
            ("top_k", 0 if params.top_k in NO_TOP_K else params.top_k, sampling.top_k),
            ("max_tokens", params.max_tokens, sampling.max_turn_tokens),
        ):
            if value != wanted:
                raise ValueError(
                    f"{name} is {wanted} in this run, and {value} was requested; leave it to the run's `sampling`"
                )
        if params.skip_special_tokens or params.logprobs not in (0, 1):
            raise ValueError(
                "skip_special_tokens must be false and logprobs 0 or 1: a reply has every token, each with its own "
                "log-probability only"
            )
        if unknown := sorted(set(params.stop_token_ids) - self._end_tokens):
            raise ValueError(
                f"the request ends a turn at tokens {unknown}, and the engine at {sorted(self._end_tokens)}; list "
                "them as `eos_token_id` in the model's generation_config.json"
            )


def _reply_body(reply: Reply) -> dict[str, object]:
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
