"""What passes between an actor and its engine process: orders there, answers back, each one MessagePack struct.

`call` is the number of an order, and of the answer to it.
"""

import msgspec

from actors.receive import ReceiverInfo
from common.config import Config
from common.actors_config import ActorsConfig
from common.kept_sets import KeptSets
from common.trajectory import Sampling, VersionSpan
from common.weights import Offer


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First of all: what to serve, and how."""

    model_path: str
    policy_version: int  # of the weights in that folder
    seed: int  # must differ between actors, or they sample alike
    max_tokens: int
    dtype: str
    kv_cache_bytes: int  # for a CPU; on a GPU the KV cache takes what the weights leave of 90 %
    max_episodes: int
    tensor_parallel: int  # workers that share each layer
    kv_policy: str  # what a commit does with running requests' KV: "keep" it, or "recompute" it with the new weights
    receiver: ReceiverInfo


def engine_settings(
    run: Config, mine: ActorsConfig, *, model_path: str, policy_version: int, seed: int, receiver: ReceiverInfo
) -> EngineSettings:
    """Of an engine as the `run` wants it and `mine`, the settings of its host, allow."""
    return EngineSettings(
        model_path=model_path,
        policy_version=policy_version,
        seed=seed,
        max_tokens=run.model.max_tokens,
        dtype=run.model.dtype,
        kv_cache_bytes=mine.kv_cache_bytes,
        max_episodes=mine.max_episodes,
        tensor_parallel=mine.tensor_parallel,
        kv_policy=mine.kv_policy,
        receiver=receiver,
    )


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Continue `tokens` by at most `num_tokens`. Answered in a Stepped."""

    call: int
    tokens: list[int]
    num_tokens: int
    sampling: Sampling
    seed: int | None


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody waits for that Generate any more. Not answered."""

    call: int


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive and verify in the background; it takes the place of an earlier stage. Answered by Staged."""

    call: int
    offer: Offer


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Swap the staged weights in. Answered by Committed."""

    call: int
    policy_version: int


class LeaveBroadcasts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take part in no further broadcast of weights: this actor is about to go. Not answered."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End at once."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to EngineSettings: vLLM serves."""

    vocab_size: int
    engine: str  # its name, version and kind of device


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to EngineSettings that cannot be: the model or the sizes are wrong."""

    why: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A generation that is over."""

    call: int
    tokens: list[int]
    logprobs: list[float]
    kept: KeptSets | None
    version_spans: list[VersionSpan]
    finish_reason: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A generation that could not be had; the engine is well."""

    call: int
    why: str


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one step of the engine has brought, and how full it is now."""

    over: list[Ended | Failed]
    kv_use: float


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The offered weights are in memory, or were refused."""

    call: int
    refusal: str | None


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New weights serve, after a pause."""

    call: int
    pause_s: float


class Died(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last words of an engine process."""

    why: str


Order = EngineSettings | Generate | Abort | Stage | Commit | LeaveBroadcasts | Stop
Answer = Started | Refused | Stepped | Staged | Committed | Died
