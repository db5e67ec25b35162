"""The interface of an environment that runs the whole episode itself and requests tokens: `begin`, `answer`, `close`.

The other kind is in envhub/env.py: it gets one action as text and returns an observation. An environment of this kind
keeps and renders the conversation itself. So its prompts are tokens, and the sampled answer goes back as tokens. Both
kinds return rewards and, separately, a score. In both, a failure is an EnvError, never a reward of 0.
"""

from dataclasses import dataclass
from pathlib import Path

from common.trajectory import Sampling, StopReason
from envhub.env import Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The settings of an episode, which the environment must respect."""

    model_folder: Path  # of the tokenizer and the chat template
    max_tokens: int  # of a prompt plus its answer
    max_turns: int
    sampling: Sampling
    end_tokens: frozenset[int]  # tokens that end a turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The tokens that the policy sampled after a prompt."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked(Observation):
    """The rewards of the last answer and the next prompt; at the end of the episode, its `stop_reason`."""

    prompt: list[int]  # the whole prompt as tokens; empty at the end
    stop_reason: StopReason | None = None
