"""The messages between an actor and its engine process: orders to it and answers from it, as MessagePack structs.

`call` is the number of an order, which its answer repeats.
"""

from typing import Any

import msgspec

from slipstream.actors.engine.engine import Completion
from slipstream.actors.weights.receive import ReceiverInfo
from slipstream.common.config.actors_config import WHOLE_GPU, ActorsConfig
from slipstream.common.config.config import Config
from slipstream.common.records.tool_call import ParsedAnswer
from slipstream.common.records.trajectory import Sampling
from slipstream.common.transfer.weights import Offer


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first order: what to serve, and how."""

    model_path: str
    policy_version: int  # of the weights in that folder
    seed: int  # must differ between actors, or they sample the same tokens
    max_tokens: int
    dtype: str
    kv_cache_bytes: int  # 0: 64 MiB on a CPU; on a GPU what the weights leave of its share
    gpu_memory_utilization: float = WHOLE_GPU  # the share of its GPU that an engine takes without kv_cache_bytes
    max_episodes: int
    tensor_parallel: int  # workers over which each layer is split
    kv_policy: str  # "keep" the KV of running requests at a commit, or "recompute" it with the new weights
    receiver: ReceiverInfo
    tool_parser: str = ""  # vLLM's name; with both empty, answers are not parsed
    reasoning_parser: str = ""
    template_arguments: dict[str, Any] = {}


def engine_settings(
    run: Config, mine: ActorsConfig, *, model_path: str, policy_version: int, seed: int, receiver: ReceiverInfo
) -> EngineSettings:
    """The settings of an engine, from the `run` and from `mine`, the settings of this host."""
    return EngineSettings(
        model_path=model_path,
        policy_version=policy_version,
        seed=seed,
        max_tokens=run.model.max_tokens,
        dtype=run.model.dtype,
        kv_cache_bytes=mine.kv_cache_bytes,
        gpu_memory_utilization=mine.gpu_memory_utilization,
        max_episodes=mine.max_episodes,
        tensor_parallel=mine.tensor_parallel,
        kv_policy=mine.kv_policy,
        receiver=receiver,
        tool_parser=run.model.tool_parser,
        reasoning_parser=run.model.reasoning_parser,
        template_arguments=run.model.template_arguments,
    )


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Continue `tokens` by at most `num_tokens`. A Stepped contains the answer."""

    call: int
    tokens: list[int]
    num_tokens: int
    sampling: Sampling
    seed: int | None


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancel a Generate. Not answered."""

    call: int


class Parse(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Divide an answer into reasoning, content and tool calls. Answered by Parsed."""

    call: int
    prompt: list[int]
    tokens: list[int]
    text: str  # of the tokens, as the agent shall see it
    tools: list[dict[str, Any]]  # in OpenAI's format; empty: calls are not looked for


class StageWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive and verify offered weights in the background, instead of any earlier offer. Answered by Staged."""

    call: int
    offer: Offer


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Switch to the staged weights. Answered by Committed."""

    call: int
    policy_version: int


class LeaveBroadcasts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take part in no more broadcasts of weights: this actor is about to leave. Not answered."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End at once. Not answered."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to EngineSettings: vLLM is ready."""

    vocab_size: int
    engine: str  # its name, version and kind of device


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to EngineSettings that vLLM refuses: the model or the sizes are wrong."""

    why: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A finished generation."""

    call: int
    completion: Completion


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A generation that failed; the engine continues."""

    call: int
    why: str


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The generations that ended in one step of the engine, and how full the engine is now."""

    over: list[Ended | Failed]
    kv_use: float
    running_tokens: int  # that the other generations have so far


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the order to stage weights: they are in memory, or were refused."""

    call: int
    refusal: str | None
    unfit: bool = False  # they arrived, or were described, and the engine cannot use them: to fetch again is no cure


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to Commit: the new weights serve, or the engine computes something else with them than the learner."""

    call: int
    pause_s: float
    refusal: str | None = None
    reverted: bool = False  # the weights before serve again; False with a refusal: the engine has no right weights


class Parsed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to Parse."""

    call: int
    answer: ParsedAnswer


class Died(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message of an engine process that failed."""

    why: str


Order = EngineSettings | Generate | Abort | Parse | StageWeights | Commit | LeaveBroadcasts | Stop
Answer = Started | Refused | Stepped | Staged | Committed | Parsed | Died
