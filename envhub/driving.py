"""What an environment is that plays its episodes by itself and asks for tokens: `begin`, `answer`, `close`.

envhub/env.py is the other kind: told an action in words, it says what came of it. This one holds the conversation and
renders it, so that its prompts are tokens when they come, and what is sampled goes back as tokens. What is common to
both are rewards, a score apart from them, and that a failure is an EnvError, never a reward of 0.
"""

from dataclasses import dataclass
from pathlib import Path

from common.trajectory import Sampling, StopReason
from envhub.env import Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What an episode is played with, which the environment has to keep to."""

    model_folder: Path  # of the tokenizer and the chat template
    max_tokens: int  # of a prompt and its answer together
    max_turns: int
    sampling: Sampling
    end_tokens: frozenset[int]  # what ends a turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What was sampled behind the prompt that was asked about."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked(Observation):
    """What an answer earned, and what is asked next; or, with a `stop_reason`, how the episode ended."""

    prompt: list[int]  # whole, as tokens; empty at the end
    stop_reason: StopReason | None = None
