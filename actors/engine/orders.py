"""The messages between an actor and its engine process: orders to it and answers from it, as MessagePack structs.

`call` is the number of an order, which its answer repeats.
"""

from typing import Any

import msgspec

from slipstream.actors.engine.engine import Completion
from slipstream.actors.weights.receive import ReceiverInfo
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.records.tool_call import ParsedAnswer
from slipstream.common.records.trajectory import Sampling
from slipstream.common.transfer.weights import Offer


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first order: what to serve, and how."""

    model: ModelConfig  # of the run
    actors: ActorsConfig  # of this host
    model_path: str  # on this host; that of `model` is the learner's
    policy_version: int  # of the weights in that folder
    seed: int  # must differ between actors, or they sample the same tokens
    receiver: ReceiverInfo


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
