"""Reads the actions of an episode from replies, and gives answers back in the form that the format of actions needs."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.actors.episode.answer import Boundary, parsed
from slipstream.common.records.message import Message
from slipstream.common.records.valid_text import valid_text
from slipstream.common.text.action_format import ACT, ActionFormat, ParsedAction, ToolCalls, called
from slipstream.common.text.chat import Chat
from slipstream.envhub.driving import Parse
from slipstream.envhub.env import Env, EnvError, Observation
from slipstream.envhub.remote.env_client import EnvClient

ADMISSIBLE = "Possible actions:"
NO_CALL = "The reply must contain exactly one valid call of a tool."


@dataclass(frozen=True, kw_only=True, slots=True)
class Actions:
    """How the actions of one episode are written and read."""

    action_format: ActionFormat
    tools: Sequence[Mapping[str, Any]]  # those in the prompts; none unless actions are calls
    parse: Parse | None  # the engine's parser of calls
    lists: Env | None  # the environment whose admissible actions are shown; None: they are not
    enforces: bool = False  # no other action than an admissible one is valid

    @classmethod
    def of(
        cls,
        first: Observation,
        action_format: ActionFormat,
        *,
        parse: Parse | None,
        lists: Env | None,
        enforces: bool = False,
    ) -> "Actions":
        """Return those of an episode that begins with `first`. Raises EnvError if calls cannot be read."""
        if not isinstance(action_format, ToolCalls):
            return cls(action_format=action_format, tools=(), parse=None, lists=lists, enforces=enforces)
        if parse is None:
            raise EnvError("`env.action_format` tools needs `model.tool_parser`, the parser of the model's family")
        return cls(action_format=action_format, tools=first.tools or (ACT,), parse=parse, lists=lists)

    async def possible(self, env: Env) -> list[str]:
        """Return the actions among which the next one is sampled; none if they are not enforced. Raises EnvError."""
        return await admissible(env, key="enforce_admissible") if self.enforces else []

    async def read(
        self, chat: Chat, reply: str, *, tokens: list[int], prompt: list[int], possible: Sequence[str]
    ) -> ParsedAction:
        """Return the action in `reply`, which `chat` has just recorded and `possible` preceded.

        An enforced action that was cut off, or whose mark was written in a way that the engine does not stop at, is
        invalid. Raises EnvError if the format fails, EngineError if the engine cannot parse.
        """
        if isinstance(self.action_format, ToolCalls) and self.parse is not None:
            tools = [dict(tool) for tool in self.tools]
            answer = await self.parse(reply, tokens=tokens, prompt=prompt, tools=tools)
            return called(answer, as_text=tools == [ACT])
        action = parsed(self.action_format, chat.answer)
        if self.enforces and bare(action.text) not in map(bare, possible):
            return ParsedAction(text="", valid=False)
        return action

    async def shown(self, action: ParsedAction, observation: Observation) -> tuple[Message, ...]:
        """Return the environment's messages as the policy sees them: the answer to a call is the result of a tool.

        Raises EnvError if the admissible actions cannot be listed.
        """
        messages = tuple(observation.messages)
        if not observation.done:
            messages = await self.listed(messages)
        if not isinstance(self.action_format, ToolCalls):
            return messages
        if not action.valid:
            return (Message("user", "\n".join([NO_CALL, *(message.content for message in messages)])),)
        return tuple(Message("tool", each.content) if each.role == "user" else each for each in messages)

    async def listed(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return `messages` with the admissible actions at their end, if these are shown. Raises EnvError."""
        if self.lists is None or not messages:
            return messages
        choices = await admissible(self.lists, key="show_admissible")
        last = messages[-1]
        return (*messages[:-1], Message(last.role, f"{last.content}\n{ADMISSIBLE} {'; '.join(choices)}"))


def bare(text: str) -> str:
    """`text` without white space, of which a tokenizer may lose some."""
    return "".join(text.split())


async def admissible(env: Env, *, key: str) -> list[str]:
    """Return the actions that are possible now. Raises EnvError if `env` lists none, which `env.KEY` needs."""
    with Boundary():
        if isinstance(env, EnvClient):  # it waits for its server, and must not block other episodes
            choices = await asyncio.to_thread(env.admissible)
        else:
            choices = env.admissible()
        found = [valid_text(str(choice)) for choice in choices or ()]
    if not found:
        raise EnvError(f"`env.{key}` is on, but the environment does not list its actions")
    return found
