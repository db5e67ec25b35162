"""A teacher behind a URL: the log-probability that a vLLM server gives to each sampled token of the learner's batch."""

import http.client
import json
import logging
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.http_answer import answer_to
from slipstream.common.process.wire import MALFORMED
from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.credit.token_rewards import Numbers

NUM_THREADS = 16
TIMEOUT_S = 300.0  # of one request
DEADLINE_S = 900.0  # of one sequence, with all attempts
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
MAX_BYTES_OF_TOKEN, MAX_BYTES_BESIDE = 2000, 1 << 20  # of a reply
# Both tokenizers must divide this into the same tokens.
PROBE = "The 3 quick-brown foxes (42.5 %) can't jump:\n\tdef f(x): return x**2  # Straße, naïve, 東京, привет 🙂"

T = TypeVar("T")

log = logging.getLogger(__name__)


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


class _Passing(Exception):
    """An attempt failed in a way that may pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """A model of a vLLM server."""

    url: str  # up to /v1
    model: str

    def logprobs(self, sequences: Sequence[TokenSequence]) -> Numbers:
        """The log-probability of each loss token, sequence after sequence. Raises TeacherAway."""
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            return np.concatenate([np.zeros(0), *threads.map(self._of_sequence, sequences)])

    def _of_sequence(self, sequence: TokenSequence) -> Numbers:
        tokens = sequence.tokens.tolist()
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        completion = _asked(f"{self.url}/completions", body, kind=_Completion, num_tokens=len(tokens))
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
        models = _once(f"{url}/models", None, kind=_Models, num_tokens=0)
        if len(models.data) != 1:
            names = ", ".join(each.id for each in models.data) or "none"
            raise ConfigError(
                f"`objective.reference_model` {url} must serve one model, got {names}; serve the teacher alone"
            )
        (card,) = models.data
        root = url.removesuffix("/v1")
        body = {"model": card.id, "prompt": PROBE, "add_special_tokens": False}
        theirs = _once(f"{root}/tokenize", body, kind=_Tokens, num_tokens=len(probe)).tokens
    except (_Passing, TeacherAway) as error:
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


def _asked(url: str, body: object, *, kind: type[T], num_tokens: int) -> T:
    """The answer, of several attempts. Raises TeacherAway after DEADLINE_S, or if the server refuses for good."""
    ends_at, wait_s = time.monotonic() + DEADLINE_S, FIRST_WAIT_S
    while True:
        try:
            return _once(url, body, kind=kind, num_tokens=num_tokens)
        except _Passing as failure:
            if time.monotonic() + wait_s > ends_at:
                raise TeacherAway(f"{url}: {failure}; no answer within {DEADLINE_S:g} s") from None
            log.info("%s: %s; next attempt in %.1f s", url, failure, wait_s)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _once(url: str, body: object, *, kind: type[T], num_tokens: int) -> T:
    """The answer of one attempt. Raises _Passing, and TeacherAway if another one would not help."""
    data = None if body is None else json.dumps(body).encode()
    limit = MAX_BYTES_OF_TOKEN * num_tokens + MAX_BYTES_BESIDE
    try:
        request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
        status, reply = answer_to(request, timeout_s=TIMEOUT_S, max_bytes=limit)
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no URL at all
        raise _Passing(f"{type(error).__name__}: {error}") from None
    if status in (408, 409, 429) or status >= 500:
        raise _Passing(f"status {status}: {reply[:300]!r}")
    if not 200 <= status < 300:
        raise TeacherAway(f"{url} refused with status {status}: {reply[:300]!r}")
    if len(reply) > limit:
        raise TeacherAway(f"{url}: the reply has more than {limit} bytes")
    try:
        return msgspec.json.decode(reply, type=kind)
    except MALFORMED as error:
        raise TeacherAway(f"{url} has sent something else than vLLM's server does: {error}") from None
