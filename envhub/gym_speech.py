"""How a Gymnasium environment is played in text: rules, a renderer for states, and a parser for actions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The state of an episode at one point."""

    env: Any  # the gymnasium.Env without its wrappers; read it, but do not step it
    observation: Any
    info: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How an episode ended, as Gymnasium reports it."""

    terminated: bool  # True: the environment ended it; False: its time limit did
    last_reward: float
    total_reward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Speech:
    """The texts of one Gymnasium environment. For your own, define `MY_SPEECH = Speech(...)` in a module of yours."""

    rules: str  # the system message: the goal and how actions are written; "" for no message
    show: Callable[[Moment], str]
    parse: Callable[[Moment, str], Any]  # returns the action that a text stands for, None if the text is invalid
    score: Callable[[Ending], float]  # in [0, 1]; 1 is success
    actions: Callable[[Moment], list[str]] | None = None  # the texts that are valid now, if they can be listed
    key: Callable[[Moment], str] | None = None  # equal for equal states; None if states cannot be compared
    expert: Callable[[Moment], str] | None = None  # a good action, for warm starts
