"""Reward functions of the user's: ours get a whole `Episode`, those with TRL's signature are called as TRL calls them.

TRL's is `function(prompts, completions, completion_ids, **columns)`, with lists of one. A function may be async. It
returns one number, in a list or not, or None where it does not apply; ours may also return one number for each turn.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from slipstream.common.process.imported import imported
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.own_thread import OwnThread
from slipstream.envhub.rewards.episode import Episode, Values
from slipstream.envhub.rewards.measures import Measure

OURS = "episode"  # a function with a parameter of this name gets an Episode


def function_measure(key: str, name: str) -> Measure:
    """Return the measure that calls `module:function`, the value of `key`. Raises ConfigError if it cannot."""
    function = imported(key, name, Callable)

    async def measure(episode: Episode) -> Values:
        return numbers(await called(function, arguments(function, episode)), num_turns=len(episode.turns))

    return measure


def needs_columns(name: str) -> bool:
    """Whether the function `module:function` has TRL's signature, whose arguments are columns of the task."""
    return not _is_ours(imported("part", name, Callable))


def check_call(key: str, name: str, columns: Mapping[str, Any]) -> None:
    """Raise ValueError if the function `name` would need an argument that no column gives."""
    function = imported(key, name, Callable)
    given = {"prompts": [], "completions": [], "completion_ids": []} | dict(columns)
    try:
        inspect.signature(function).bind(**_taken(function, given))
    except TypeError as error:
        raise ValueError(
            f"`{key}` {name!r} gets `episode`, or prompts, completions, completion_ids and the columns of the task "
            f"({', '.join(map(str, columns)) or 'it has none'}): {error}"
        ) from None


def arguments(function: Callable[..., Any], episode: Episode) -> dict[str, Any]:
    """Return what `function` is called with: an Episode, or what TRL would pass for this episode."""
    if _is_ours(function):
        return {OURS: episode}
    # A function may change what it gets, and other episodes of the task have the same columns.
    given: dict[str, Any] = {str(name): [value] for name, value in copy.deepcopy(dict(episode.columns)).items()}
    prompt = episode.columns.get("prompts")
    if isinstance(prompt, str):  # a prompt that is a text has a completion that is one
        given["completions"] = ["\n".join(turn.reply for turn in episode.turns)]
    else:
        given.setdefault("prompts", [episode.prompt])
        given["completions"] = [episode.messages[len(episode.prompt) :]]
    given["completion_ids"] = [list(episode.completion_ids)]
    return _taken(function, given)


def numbers(result: Any, *, num_turns: int) -> Values:
    """Return the number or numbers in `result`. Raises EnvError unless they are finite and as many as expected."""
    found = result.tolist() if hasattr(result, "tolist") else result  # of NumPy or PyTorch
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if isinstance(found, list | tuple) and len(found) == num_turns:
        values: list[float | None] = [_number(each) for each in found]
        if None not in values:
            return [value for value in values if value is not None]
    elif found is None or _number(found) is not None:
        return _number(found)
    raise EnvError(
        f"must return one finite number (in a list or not), one for each of the {num_turns} turns, or None, got "
        f"{result!r}"[:500]
    )


def _is_ours(function: Callable[..., Any]) -> bool:
    return OURS in inspect.signature(function).parameters


def _taken(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that `function` takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


async def called(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Return the result of `function`. It is called in a thread, so that it blocks no episode."""
    thread = OwnThread("a reward")
    try:
        result = await thread.call(partial(function, **given))
    finally:
        thread.end()
    return await result if inspect.isawaitable(result) else result


def _number(value: Any) -> float | None:
    """Return a finite number, or None."""
    try:
        number = math.nan if value is None or isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
