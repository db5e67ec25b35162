"""What an inference engine is: tokens in, tokens out, each with its log-probability and policy version."""

from dataclasses import dataclass
from typing import Protocol

from common.kept_sets import KeptSets
from common.trajectory import Sampling, VersionSpan
from common.weights import Offer


class EngineError(RuntimeError):
    """The engine failed; the episode is redone and never trained."""


class EngineDied(EngineError):
    """The engine as a whole is gone: the actor must end, and its members go back. No attempt has failed."""


class WeightsRefused(RuntimeError):
    """Offered weights did not arrive whole; the old ones keep serving."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What one generation produced."""

    tokens: list[int]  # the end-of-turn token included, when it was sampled
    logprobs: list[float]  # of the processed distribution (temperature, top-p, top-k), one a token
    kept: KeptSets | None  # of `tokens`, where `Sampling.is_cut`
    version_spans: list[VersionSpan]  # over `tokens`, in order, without gaps
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """What the engine is doing now, for admission and for the fleet's metrics."""

    num_running: int
    kv_use: float  # fraction of KV blocks held, in [0, 1]
    generated_tokens: int  # since the start


class Sampler(Protocol):
    """What an episode asks for its actions: an engine, or an expert that writes its own."""

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        """Continue `tokens`. Cancelling the awaiting task aborts the request.

        Raises EngineError where this request failed, EngineDied where every other would.
        """


class Engine(Sampler, Protocol):
    """Serves generations, and takes new weights without aborting any."""

    @property
    def name(self) -> str:
        """What it is, its version and its kind of device, for people."""

    @property
    def policy_version(self) -> int:
        """The version that the next token will come from."""

    async def stage(self, offer: Offer) -> None:
        """Receive and verify the offered weights in the background, while generation goes on. Raises WeightsRefused."""

    async def commit(self, policy_version: int) -> float:
        """Swap the staged weights in at a token boundary; running requests go on. Return the pause in seconds."""

    def leave_broadcasts(self) -> None:
        """Take part in no further broadcast of weights: this actor is about to go. Does not wait."""

    def load(self) -> EngineLoad:
        """What is running now. Raises EngineDied, so that an actor learns of it which has nothing to generate."""

    async def close(self) -> None:
        """Stop. Idempotent."""
