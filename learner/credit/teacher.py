"""A teacher behind a URL: the log-probability that a vLLM server gives to each sampled token of the learner's batch."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec
import numpy as np

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.http_answer import Passing, requested
from slipstream.common.process.wire import MALFORMED
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.attempts import LONGEST_WAIT_S, repeated
from slipstream.envhub.together import together
from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.credit.token_rewards import Numbers

MAX_CONCURRENT = 16  # requests
TIMEOUT_S = 300.0  # of one request
DEADLINE_S = 900.0  # of one sequence, with all attempts
MAX_BYTES_OF_TOKEN, MAX_BYTES_BESIDE = 2000, 1 << 20  # of a reply
# Both tokenizers must divide this into the same tokens.
PROBE = "The 3 quick-brown foxes (42.5 %) can't jump:\n\tdef f(x): return x**2  # Straße, naïve, 東京, привет 🙂"

T = TypeVar("T")


class TeacherAway(RuntimeError):
    """The teacher has not answered within the deadline, or cannot be used. The learner must be started again."""


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None]


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """A model of a vLLM server."""

    url: str  # up to /v1
    model: str

    def logprobs(self, sequences: Sequence[TokenSequence]) -> Numbers:
        """The log-probability of each loss token, sequence after sequence. Raises TeacherAway."""
        return np.concatenate([np.zeros(0), *asyncio.run(self._of_all(sequences))])

    async def _of_all(self, sequences: Sequence[TokenSequence]) -> list[Numbers]:
        room = asyncio.Semaphore(MAX_CONCURRENT)

        async def one(sequence: TokenSequence) -> Numbers:
            async with room:
                return await self._of_sequence(sequence)

        return await together(map(one, sequences))

    async def _of_sequence(self, sequence: TokenSequence) -> Numbers:
        tokens = sequence.tokens.tolist()
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        url = f"{self.url}/completions"
        try:
            completion = await repeated(
                lambda: _asked(url, body, kind=_Completion, num_tokens=len(tokens)), url=url, deadline_s=DEADLINE_S
            )
        except EnvError as error:
            raise TeacherAway(f"no answer within {DEADLINE_S:g} s: {error}") from None
        try:
            (choice,) = completion.choices
            of_tokens = choice.prompt_logprobs
            if len(of_tokens) != len(tokens):
                raise ValueError(f"{len(of_tokens)} log-probabilities for {len(tokens)} tokens")
            sampled = np.flatnonzero(sequence.loss_mask)
            found = [(of_tokens[place] or {})[str(tokens[place])].logprob for place in sampled]
        except (KeyError, ValueError) as error:
            raise TeacherAway(f"{self.url} has sent no log-probability for each token of a prompt: {error}") from None
        if not np.isfinite(found).all():
            raise TeacherAway(f"{self.url} gives a token no probability; its sampling parameters cut tokens off")
        return np.array(found, dtype=np.float64)


def find_teacher(url: str, *, probe: Sequence[int], max_tokens: int) -> Teacher:
    """The model that the server at `url` serves. Raises ConfigError unless it fits.

    `probe` are the policy's tokens of PROBE, `max_tokens` the context of an episode.
    """
    url = url.rstrip("/")
    try:
        models = asyncio.run(_asked(f"{url}/models", None, kind=_Models, num_tokens=0))
        if len(models.data) != 1:
            names = ", ".join(each.id for each in models.data) or "none"
            raise ConfigError(
                f"`objective.reference_model` {url} must serve one model, got {names}; serve the teacher alone"
            )
        (card,) = models.data
        root = url.removesuffix("/v1")
        body = {"model": card.id, "prompt": PROBE, "add_special_tokens": False}
        theirs = asyncio.run(_asked(f"{root}/tokenize", body, kind=_Tokens, num_tokens=len(probe))).tokens
    except (Passing, TeacherAway) as error:
        raise ConfigError(
            f"`objective.reference_model` {url} cannot be asked: {error}; start vLLM's server there, and give its "
            "address up to /v1"
        ) from None
    if theirs != list(probe):
        raise ConfigError(
            f"`objective.reference_model` {url} serves {card.id}, which has another tokenizer than the policy; use a "
            "model of the same family"
        )
    if card.max_model_len is not None and card.max_model_len <= max_tokens:
        raise ConfigError(
            f"`objective.reference_model` {url} must have a context above `model.max_tokens` = {max_tokens}, got "
            f"{card.max_model_len}; start it with a larger --max-model-len"
        )
    return Teacher(url=url, model=card.id)


async def _asked(url: str, body: object, *, kind: type[T], num_tokens: int) -> T:
    """The answer of one attempt. Raises Passing, and TeacherAway if another one would not help."""
    data = None if body is None else json.dumps(body).encode()
    limit = MAX_BYTES_OF_TOKEN * num_tokens + MAX_BYTES_BESIDE
    try:
        reply = await requested(url, data, {"Content-Type": "application/json"}, timeout_s=TIMEOUT_S, max_bytes=limit)
    except Passing as error:
        raise TeacherAway(f"{url}: {error}") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: no host's name
        raise Passing(f"{type(error).__name__}: {error}") from None
    why = f"status {reply.status}: {reply.body[:300]!r}"
    if reply.status in (408, 409, 429) or reply.status >= 500:
        raise Passing(why, wait_s=min(reply.wait_s, LONGEST_WAIT_S))
    if not 200 <= reply.status < 300:
        raise TeacherAway(f"{url} refused with {why}")
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except MALFORMED as error:
        raise TeacherAway(f"{url} has sent something else than vLLM's server does: {error}") from None
