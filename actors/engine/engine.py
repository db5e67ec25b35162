"""The interface of an inference engine: tokens in, tokens out, each with its log-probability and policy version."""

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from slipstream.common.records.kept_sets import KeptSets, joined, no_sets
from slipstream.common.records.tool_call import ParsedAnswer
from slipstream.common.records.trajectory import Sampling, Turn, VersionSpan
from slipstream.common.transfer.weights import Offer

Moving = TypeVar("Moving", Turn, VersionSpan)


class EngineError(RuntimeError):
    """A request failed in the engine; the episode is redone and never trained."""


class EngineDied(EngineError):
    """The whole engine has died: the actor must end and give its members back. No attempt counts as failed."""


class EngineSpoiled(EngineDied):
    """The engine computes something else with its weights than the learner, and has no others. It must be ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The result of one generation."""

    tokens: list[int]  # including the end-of-turn token if it was sampled
    logprobs: list[float]  # of the processed distribution (temperature, top-p, top-k), one for each token
    kept: KeptSets | None  # of `tokens`; None unless `Sampling.is_cut`, or a thought was closed
    version_spans: list[VersionSpan]  # over `tokens`, in order, without gaps
    finish_reason: str  # "stop" or "length"

    def then(self, more: "Completion") -> "Completion":
        """Both as one generation, of which `more` is the rest."""
        return Completion(
            tokens=self.tokens + more.tokens,
            logprobs=self.logprobs + more.logprobs,
            kept=joined([part.kept or no_sets(len(part.tokens)) for part in (self, more)]),
            version_spans=self.version_spans + [moved(span, by=len(self.tokens)) for span in more.version_spans],
            finish_reason=more.finish_reason,
        )

    def first(self, num_tokens: int, *, finish_reason: str) -> "Completion":
        """The first `num_tokens`, at least one, as if sampling had ended after them."""
        return Completion(
            tokens=self.tokens[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            kept=None if self.kept is None else self.kept.between(0, num_tokens),
            version_spans=[
                VersionSpan(start=span.start, stop=min(span.stop, num_tokens), policy_version=span.policy_version)
                for span in self.version_spans
                if span.start < num_tokens
            ],
            finish_reason=finish_reason,
        )


def moved(part: Moving, *, by: int) -> Moving:
    """The same part of a sequence, `by` tokens later."""
    return msgspec.structs.replace(part, start=part.start + by, stop=part.stop + by)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """The current load of the engine, for admission and for the fleet's metrics."""

    num_running: int
    kv_use: float  # fraction of KV blocks in use, in [0, 1]
    generated_tokens: int  # of generations that have ended, since the start
    running_tokens: int = 0  # that the running generations have so far


class Served:
    """The policy version that an engine serves, and those that wait for a newer one."""

    def __init__(self, policy_version: int) -> None:
        self.policy_version = policy_version
        self._changed = asyncio.Event()

    def change(self, policy_version: int) -> None:
        """Serve another version; call it in the event loop of those that wait."""
        self.policy_version = policy_version
        self._changed.set()
        self._changed = asyncio.Event()

    async def reach(self, policy_version: int) -> None:
        while self.policy_version < policy_version:
            await self._changed.wait()


class Sampler(Protocol):
    """Generates the actions of an episode: an engine, or an expert that writes its own."""

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        """Continue `tokens`. Cancelling the awaiting task aborts the request.

        Raises EngineError if only this request failed, EngineDied if every other one would fail too.
        """


class Engine(Sampler, Protocol):
    """Serves generations, and changes its weights without aborting them."""

    @property
    def name(self) -> str:
        """Its name, version and kind of device, for people."""

    @property
    def policy_version(self) -> int:
        """The version that samples the next token."""

    async def serving(self, policy_version: int) -> None:
        """Wait until it serves `policy_version` or a newer one."""

    async def parse(
        self, text: str, *, tokens: list[int], prompt: list[int], tools: list[dict[str, Any]]
    ) -> ParsedAnswer:
        """Divide an answer by `model.tool_parser` and `model.reasoning_parser`. Raises EngineDied."""

    async def stage(self, offer: Offer) -> None:
        """Receive and verify the offered weights while generation continues. One stage at a time.

        Raises WeightsRefused if they do not arrive, are corrupt or do not fit the model; the old ones keep serving.
        """

    async def commit(self, policy_version: int) -> float:
        """Switch to the staged weights at a token boundary; running requests continue. Return the pause in seconds.

        Raises WeightsUnfit if it computes something else with them than the learner, and serves the old ones again;
        EngineSpoiled if it cannot.
        """

    def leave_broadcasts(self) -> None:
        """Take part in no more broadcasts of weights, so that none waits for this actor. Does not wait."""

    def load(self) -> EngineLoad:
        """The current load. Raises EngineDied, so that an idle actor also notices it."""

    async def close(self) -> None:
        """Stop the engine; every waiting call raises EngineDied. Idempotent."""
