"""`dataset`: questions from a file of yours, each answered in one turn or in several, and scored by a check.

No class has to be written: a file, the names of its columns and a check are enough. Functions and judges of yours are
parts of `env.rewards`, as in every environment.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import regex

from slipstream.common.process.imported import imported
from slipstream.common.records.message import Message
from slipstream.envhub.dataset.checks import CHECKS, MAX_MATCH_S, MAX_REPLY_CHARS, Check, compiled
from slipstream.envhub.dataset.dataset_row import Columns, Item, read_items
from slipstream.envhub.dataset.script import answers_to, calls_in, has_call
from slipstream.envhub.env import Env, EnvError
from slipstream.envhub.env_options import check_choice
from slipstream.envhub.user_files import item_of, read_tasks_of_rows
from slipstream.envhub.world import Change, InvalidAction, WorldEnv

NONE = "none"
FETCH = "give the path of a .jsonl, .json or .parquet file, with one task in each row, or hub:NAME:SPLIT"


class DatasetState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    place: int = 0  # in the recorded conversation
    is_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetWorld:
    """One question, or one recorded conversation.

    A reply that calls tools gets their results. Any other reply ends the turn of the policy: the user's next message
    follows, and after the last one the reply is compared with the answer.
    """

    item: Item
    check: Check | None  # None: no score, as only parts of `env.rewards` say what a reply is worth
    system: str = ""
    pattern: regex.Pattern[str] | None = None
    has_tools: bool = False  # otherwise a call in a reply is a text like any other
    tool_function: Callable[..., Any] | None = None  # answers calls; None: the recorded results do
    first: DatasetState = field(default_factory=DatasetState)

    @property
    def opening(self) -> tuple[Message, ...]:
        return (Message("system", self.system), *self.item.prompt) if self.system else self.item.prompt

    async def act(self, state: DatasetState, action: str) -> Change[DatasetState]:
        script = self.item.script
        if self.has_tools and has_call(action):
            return await self._called(state, action)
        place = script.after(action, state.place)
        if (at := script.next_user(place)) is not None:
            return Change(state=DatasetState(place=at + 1), text=script.rest[at].content)
        reply = action if self.pattern is None else await asyncio.to_thread(_extracted, action, self.pattern)
        try:
            value = 0.0 if self.check is None or reply is None else await self.check.score(reply, self.item.answer)
        except ValueError as error:  # a row whose answer was not tried at the start
            raise EnvError(f"`env.options.check` cannot be used for a row: {error}") from error
        return Change(state=DatasetState(is_over=True), text="answered", over=True, score=value)

    async def _called(self, state: DatasetState, action: str) -> Change[DatasetState]:
        try:
            calls = calls_in(action)
        except ValueError as error:
            raise InvalidAction(str(error), role="tool") from None
        script = self.item.script
        text = await answers_to(calls, script=script, place=state.place, function=self.tool_function, row=self.item.row)
        return Change(state=DatasetState(place=script.after(action, state.place)), text=text, role="tool")

    def expert(self, state: DatasetState) -> str:
        """Return the recorded reply, the row's solution, or its answer. Raises NotImplementedError without any."""
        script = self.item.script
        if recorded := script.recorded_reply(state.place):
            if state.place in script.spared:
                raise NotImplementedError(f"message {state.place + 2} after the opening is marked, not to be learned")
            return recorded
        if script.next_user(state.place) is not None:
            raise NotImplementedError(f"no reply is recorded before message {state.place + 2} after the opening")
        right = self.check.reply if self.check else None
        good = self.item.solution or (right(self.item.answer_text) if right else "")
        if not good or _extracted(good, self.pattern) is None:
            raise NotImplementedError(
                "no reply to imitate is known; name a column with whole replies by `env.options.solution`"
            )
        return good


def make_dataset_env(
    *,
    train: str = "",
    held_out: str = "",
    prompt: str = "prompt",
    answer: str = "answer",
    solution: str = "",
    system: str = "",
    answer_pattern: str = "",
    check: str = "exact",
    conversation: str = "",
    tools: str = "",
    tool_function: str = "",
) -> Env:
    """Make an environment of the rows of `train` and `held_out`: .jsonl, .json or .parquet files, or `hub:NAME:SPLIT`.

    Without `held_out`, one prompt in eight of `train` is held out. `prompt`, `answer` and `solution` are columns; a
    prompt is a text or a list of messages. `system`: a system message before every prompt. `answer_pattern`: a regular
    expression with one group, whose last match in a reply is compared with the answer; without it, the whole reply is.
    `check`: how they are compared, a name in `CHECKS`; `none` gives no score, and needs no answers. `conversation`: in
    place of `prompt`, a column with a recorded conversation, whose replies the policy gives. `tools`: a column with a
    list of tools. `tool_function`: `module:function` that answers calls; without it, the recorded results do. Raises
    ValueError if a file, a row or an option is wrong.
    """
    check_choice("check", check, [*CHECKS, NONE])
    compare = CHECKS.get(check)
    if compare:
        compare.require()
    if answer_pattern and not compare:
        raise ValueError(f"`env.options.answer_pattern` {answer_pattern!r} has no effect with check=none; leave it out")
    if conversation and prompt != "prompt":
        raise ValueError(f"`env.options.prompt` {prompt!r} has no effect with conversation; leave one of them out")
    function = imported("env.options.tool_function", tool_function, Callable) if tool_function else None
    columns = Columns(
        prompt=prompt, answer=answer if compare else "", solution=solution, conversation=conversation, tools=tools
    )
    items = read_tasks_of_rows(read_items, train, held_out, columns, compare, text=_text, fetch=FETCH)
    pattern = _pattern(answer_pattern)
    return WorldEnv(
        f"dataset {train} {held_out} {columns} {system} {answer_pattern} {check} {tool_function}",
        make_world=lambda task: DatasetWorld(
            item=item_of(task, items),
            system=system,
            pattern=pattern,
            check=compare,
            has_tools=bool(tools or tool_function),
            tool_function=function,
        ),
        reward="right" if compare else "unchecked",  # then it is always 0
        columns=lambda world: columns_of(world.item),
        num_tasks={split: len(found) for split, found in items.items()},
    )


def columns_of(item: Item) -> dict[str, Any]:
    """The row, and its prompt as a reward function of TRL gets it: a text, or a list of messages."""
    messages = [{"role": message.role, "content": message.content} for message in item.prompt]
    return {**item.row, "prompts": messages if item.is_chat else item.prompt[-1].content}


def _text(item: Item) -> str:
    return "\n".join(message.content for message in item.prompt)


def _pattern(text: str) -> regex.Pattern[str] | None:
    if not text:
        return None
    pattern = compiled("`env.options.answer_pattern`", text, flags=regex.DOTALL)
    if pattern.groups != 1:
        raise ValueError(
            f"`env.options.answer_pattern` {text!r} must have one group, around the answer, has {pattern.groups}"
        )
    return pattern


def _extracted(reply: str, pattern: regex.Pattern[str] | None) -> str | None:
    """The last match's group; the whole reply without a pattern; None without a match within a second."""
    if pattern is None:
        return reply
    try:
        found: list[str] = pattern.findall(reply[-MAX_REPLY_CHARS:], timeout=MAX_MATCH_S, concurrent=True)
    except TimeoutError:
        return None
    return found[-1] if found else None
