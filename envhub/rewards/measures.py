"""The built-in measures of an episode. Each is made with the options of its part, and computed from records alone."""

import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from slipstream.common.text.action_format import PREDICTION
from slipstream.envhub.rewards.episode import Episode, Values

Measure = Callable[[Episode], Awaitable[Values]]


def goal(*, component: str = "") -> Measure:
    """Make the environment's own reward of each turn: one component, or the sum of all if `component` is empty.

    Raises ValueError unless `component` is a name.
    """
    if not isinstance(component, str):
        raise ValueError(f"`component` must be the name of a reward, got {component!r}")

    async def measure(episode: Episode) -> Values:
        if not component:
            return [sum(turn.rewards.values()) for turn in episode.turns]
        known = {name for turn in episode.turns for name in turn.rewards}
        if component not in known:
            raise ValueError(f"the environment gave no reward {component!r}, only {', '.join(sorted(known))}")
        return [turn.rewards.get(component, 0.0) for turn in episode.turns]

    return measure


def length(*, budget_tokens: int | None = None, budget_turns: int | None = None) -> Measure:
    """Make how far an episode is beyond its budget, in budgets: 0 within it, 1 at twice its size.

    Raises ValueError unless exactly one budget is given.
    """
    if (budget_tokens is None) == (budget_turns is None):
        raise ValueError("give either budget_tokens or budget_turns")
    budget = _at_least_1("budget_tokens", budget_tokens) or _at_least_1("budget_turns", budget_turns)

    async def measure(episode: Episode) -> Values:
        used = len(episode.turns) if budget_tokens is None else episode.num_tokens
        return max(0.0, used / budget - 1.0)

    return measure


def valid_actions(episode: Episode) -> Values:
    """Return the share of turns whose action was valid."""
    return sum(turn.valid_action for turn in episode.turns) / len(episode.turns)


def efficiency(episode: Episode) -> Values:
    """Return the share of `env.max_turns` that a successful episode left; 0 without success."""
    return max(0.0, 1.0 - len(episode.turns) / episode.max_turns) if episode.success else 0.0


def invalid_actions(episode: Episode) -> Values:
    """Return 1 for each turn whose action was invalid."""
    return [float(not turn.valid_action) for turn in episode.turns]


def repetition(episode: Episode) -> Values:
    """Return 1 for each turn whose action was tried before in the same state.

    States are compared by their `state_key`. Where an environment has none, the same action always counts.
    """
    seen, repeated = set[tuple[str, str]](), list[float]()
    for turn in episode.turns:
        choice = (turn.state_key, turn.action)
        repeated.append(float(choice in seen))
        seen.add(choice)
    return repeated


def prediction(episode: Episode) -> Values:
    """Return, for each turn, how well the predicted answer fits the one that came: the F1 score of their words.

        F1 = 2 * shared / (predicted + came)

    "red mug" for "a red bowl": 2 * 1 / (2 + 3) = 0.4. It is 0 without a prediction.
    """
    return [_f1(_words(PREDICTION.parse(turn.reply).text), _words(turn.answer)) for turn in episode.turns]


def _without_options(function: Callable[[Episode], Values]) -> Callable[[], Measure]:
    async def measure(episode: Episode) -> Values:
        return function(episode)

    return lambda: measure


MEASURES: dict[str, Callable[..., Measure]] = {
    "goal": goal,
    "length": length,
    "format": _without_options(valid_actions),
    "efficiency": _without_options(efficiency),
    "invalid_actions": _without_options(invalid_actions),
    "repetition": _without_options(repetition),
    "prediction": _without_options(prediction),
}


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def _f1(predicted: Counter[str], came: Counter[str]) -> float:
    shared = (predicted & came).total()
    return 2 * shared / (predicted.total() + came.total()) if shared else 0.0


def _at_least_1(name: str, value: Any) -> int:
    """Return `value`, or 0 for None. Raises ValueError unless it is a whole number of at least 1."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be a whole number >= 1, got {value!r}")
    return value
