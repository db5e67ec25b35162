"""The rewards of a reply: named parts, each a check of `checks.CHECKS` or a function of the user's, with a weight.

A function has the signature of TRL's reward functions: `function(prompts, completions, **columns)`, with lists of one.
It may be async. It returns one number in a list, or None where it does not apply.
"""

import copy
import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.imported import imported, is_own
from envhub.dataset.checks import CHECKS, Check, regex, score
from envhub.dataset.item import Item
from envhub.env import EnvError
from envhub.isolation.own_thread import OwnThread


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The reply of a policy to the prompt of a row."""

    item: Item
    text: str
    extracted: str | None  # what of `text` is compared; None if the pattern of answers matches nowhere


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One component of the reward."""

    name: str
    weight: float
    check: Check | None = None
    function: Callable[..., Any] | None = None  # either of the two

    async def value(self, reply: Reply) -> float | None:
        """Return the part's own value, without its weight. Raises EnvError if a function returns no number."""
        if self.check is not None:
            return 0.0 if reply.extracted is None else score(self.check, reply.extracted, reply.item.answer)
        assert self.function is not None
        return _number(self.name, await _called(self.function, reply))

    def check_reply(self, reply: Reply) -> None:
        """Raise ValueError if `reply`, the row's own answer, does not score 1, or the function cannot be called."""
        if self.check is not None:
            # The answer of `regex` is a pattern, which need not match itself.
            if score(self.check, reply.text, reply.item.answer) < 1.0 and self.check is not regex:
                raise ValueError(
                    f"the answer {reply.item.answer!r} fails its own check `env.options.rewards.{self.name}`"[:500]
                )
            return
        assert self.function is not None
        try:
            inspect.signature(self.function).bind(**_arguments(self.function, reply))
        except TypeError as error:
            raise ValueError(
                f"the function of `env.options.rewards.{self.name}` gets prompts, completions and the columns: {error}"
            ) from None


def parts_of(rewards: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts that `env.options.rewards` names. Raises ValueError, with the key, if one is malformed."""
    if not isinstance(rewards, Mapping) or not rewards:
        raise ValueError(
            f"`env.options.rewards` must name at least one part, as in {{right: {{check: exact}}}}, got {rewards!r}"
        )
    return tuple(_part(str(name), settings) for name, settings in rewards.items())


def _part(name: str, settings: Any) -> Part:
    key = f"env.options.rewards.{name}"
    if not isinstance(settings, Mapping) or "check" not in settings or not settings.keys() <= {"check", "weight"}:
        raise ValueError(f"`{key}` must have `check` and may have `weight`, got {settings!r}")
    weight, check = settings.get("weight", 1.0), settings["check"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"`{key}.weight` must be a number, got {weight!r}")
    if isinstance(check, str) and is_own(check):
        return Part(name=name, weight=float(weight), function=imported(f"{key}.check", check, Callable))
    if check not in CHECKS:
        near = difflib.get_close_matches(str(check), CHECKS, n=1)
        hint = f"did you mean {near[0]}?" if near else "change it"
        raise ValueError(
            f"`{key}.check` must be one of {', '.join(CHECKS)}, or module:function of yours, got {check!r}; {hint}"
        )
    return Part(name=name, weight=float(weight), check=CHECKS[check])


async def _called(function: Callable[..., Any], reply: Reply) -> Any:
    """The result of `function`. It is called in a thread, so that it blocks no other episode."""
    thread = OwnThread("a reward")
    try:
        result = await thread.call(partial(function, **_arguments(function, reply)))
    finally:
        thread.end()
    return await result if inspect.isawaitable(result) else result


def _arguments(function: Callable[..., Any], reply: Reply) -> dict[str, list[Any]]:
    """What TRL would pass for this reply, as far as `function` takes it."""
    row = copy.deepcopy(reply.item.row)  # a function may change what it gets, and other episodes use the row too
    given: dict[str, list[Any]] = {str(name): [value] for name, value in row.items()}
    if reply.item.is_chat:
        messages = [{"role": message.role, "content": message.content} for message in reply.item.prompt]
        given |= {"prompts": [messages], "completions": [[{"role": "assistant", "content": reply.text}]]}
    else:
        given |= {"prompts": [reply.item.prompt[-1].content], "completions": [reply.text]}
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _number(name: str, result: Any) -> float | None:
    values = result.tolist() if hasattr(result, "tolist") else result  # of NumPy or PyTorch
    value = values[0] if isinstance(values, list | tuple) and len(values) == 1 else values
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    raise EnvError(
        f"the reward function of `env.options.rewards.{name}` must return one finite number in a list, or None, "
        f"got {result!r}"[:500]
    )
