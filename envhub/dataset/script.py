"""A recorded conversation as a task: what the user says after each answer, and what the called tools returned."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.message import Message, bare
from slipstream.common.rows.message_fields import Recorded
from slipstream.common.rows.row_source import plain
from slipstream.common.text.thought import without_thought
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.own_thread import in_own_thread

# A word-level tokenizer puts spaces around punctuation.
_OPENING = re.compile(r"<\s*tool\s*_\s*call\s*>")
_CLOSING = re.compile(r"<\s*/\s*tool\s*_\s*call\s*>")
MAX_CALLS = 100  # of one reply


class Call(msgspec.Struct, frozen=True):
    """One call of a tool in a reply."""

    name: str
    arguments: dict[str, Any] = {}

    @property
    def key(self) -> str:
        """Equal for equal calls, however they are written. White space does not count: tokenizers may change it.

        Nor do arguments that are null, and 1.0 is 1, as in every row.
        """
        return bare(json.dumps([self.name, plain(self.arguments)], sort_keys=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What was recorded after the first message of the user. Its place is the number of messages that are over."""

    rest: tuple[Message, ...] = ()
    spared: frozenset[int] = frozenset()  # replies that are marked, not to be learned
    results: tuple[tuple[int, str, str], ...] = ()  # of each recorded call: its place in `rest`, its key, its result

    def next_user(self, place: int) -> int | None:
        """The place of the user's next message, at `place` or later; None after the last one."""
        later = range(place, len(self.rest))
        return next((index for index in later if self.rest[index].role == "user"), None)

    def recorded_reply(self, place: int) -> str:
        """The reply that was recorded at `place`; empty without a recorded one."""
        recorded = place < len(self.rest) and self.rest[place].role == "assistant"
        return self.rest[place].content if recorded else ""

    def result(self, call: Call, place: int) -> str | None:
        """The recorded result of an equal call: the first from `place` on, else the last one before it."""
        found = [(index, result) for index, key, result in self.results if key == call.key]
        last = found[-1][1] if found else None
        return next((result for index, result in found if index >= place), last)

    def after(self, reply: str, place: int) -> int:
        """The place after `reply` and its results, if it is the recorded one; else `place`."""
        if bare(_answer(self.recorded_reply(place))) != bare(_answer(reply)):
            return place
        place += 1
        while place < len(self.rest) and self.rest[place].role == "tool":
            place += 1
        return place


def has_call(reply: str) -> bool:
    """Whether a reply calls a tool, perhaps malformed."""
    return _OPENING.search(reply) is not None


def calls_in(reply: str) -> list[Call]:
    """The calls of tools in a reply. Raises ValueError if one is malformed or there are too many."""
    _, *written = _OPENING.split(reply)
    parts = [_CLOSING.split(text, maxsplit=1) for text in written]
    if any(len(part) == 1 for part in parts):
        raise ValueError("a call has no end; close it by </tool_call>")
    if len(parts) > MAX_CALLS:
        raise ValueError(f"{len(parts)} calls in one reply, the limit is {MAX_CALLS}")
    try:
        return [_call(part[0]) for part in parts]
    except (*MALFORMED, ValueError) as error:
        raise ValueError(f'a call must be JSON like {{"name": ..., "arguments": {{...}}}}: {error}'[:500]) from None


def _call(text: str) -> Call:
    """Raises ValueError, and what msgspec raises."""
    found = json.loads(text, object_pairs_hook=lambda pairs: {_joined(name): value for name, value in pairs})
    call = msgspec.convert(found, Call)
    call = msgspec.structs.replace(call, name=_joined(call.name))
    call.key  # noqa: B018 - raises for arguments that are nested too deeply for `plain`
    return call


def _joined(name: str) -> str:
    """The name of a tool or an argument, without the spaces of a word-level tokenizer."""
    return "_".join(part.strip() for part in name.split("_"))


async def answers_to(
    calls: Sequence[Call], *, script: Script, place: int, function: Callable[..., Any] | None, row: Mapping[str, Any]
) -> str:
    """What the tools return, one text after another: of `function`, or else what was recorded.

    Raises EnvError if the function does not return a text, and whatever it raises.
    """
    texts = []
    for call in calls:
        if function is None:
            recorded = script.result(call, place)
            texts.append(f"no result of this call of {call.name} is recorded" if recorded is None else recorded)
            continue
        returned = await _called(function, {"name": call.name, "arguments": call.arguments, "row": dict(row)})
        if not isinstance(returned, str):
            raise EnvError(f"`env.options.tool_function` must return a text, got {returned!r}"[:500])
        texts.append(returned)
    return "\n".join(texts)


async def _called(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Return the result of `function`. It is called in a thread, so that it blocks no episode."""
    result = await in_own_thread("a tool", partial(function, **given))
    return await result if inspect.isawaitable(result) else result


def _answer(reply: str) -> str:
    return without_thought(reply, prompt="")


def read_script(read: Sequence[Recorded], given: Sequence[Any], name: str) -> tuple[tuple[Message, ...], Script]:
    """The opening of the recorded conversation in column `name`, and the rest. Raises ValueError if it is malformed.

    `given` are the row's own messages, the last of those that were `read`.
    """
    messages = [each.message for each in read]
    first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if first is None or any(message.role not in ("system", "user") for message in messages[:first]):
        raise ValueError(f"column {name!r} must begin with a message of the user, after those of the system")
    rest = tuple(messages[first + 1 :])
    spared = frozenset(index for index, each in enumerate(read[first + 1 :]) if not each.is_learnt)
    own = given[len(given) - len(rest) :]
    return tuple(messages[: first + 1]), Script(rest=rest, results=_results(rest, own, name), spared=spared)


def _results(
    rest: Sequence[Message], given: Sequence[Mapping[str, Any]], name: str
) -> tuple[tuple[int, str, str], ...]:
    """Results belong to the calls of the last reply: by their ids in `given`, the row's own messages, or in order."""
    open_calls: list[tuple[object, Call]] = []
    found = []
    for index, (message, row) in enumerate(zip(rest, given, strict=True)):
        if message.role == "assistant":
            calls, listed = calls_in(_answer(message.content)), row.get("tool_calls")
            ids = [call.get("id") for call in listed] if isinstance(listed, list) else []
            open_calls = list(zip([None] * (len(calls) - len(ids)) + ids, calls, strict=True))
        elif message.role == "tool":
            if not open_calls:
                raise ValueError(f"column {name!r}: message {index + 2} after the opening is a result without a call")
            wanted = row.get("tool_call_id")
            places = [at for at, (known, _) in enumerate(open_calls) if wanted is not None and known == wanted]
            _, call = open_calls.pop(places[0] if places else 0)
            found.append((index - 1, call.key, message.content))
    return tuple(found)
