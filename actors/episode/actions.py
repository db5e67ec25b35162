"""Reads the actions of an episode from replies, and gives answers back in the form that the format of actions needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.actors.episode.answer import CheckedEnv, parsed
from slipstream.common.records.message import Message
from slipstream.common.text.action_format import ACT, ActionFormat, ParsedAction, ToolCalls, called
from slipstream.common.text.chat import Chat, Extension
from slipstream.envhub.driving import Parse
from slipstream.envhub.env import EnvError, Observation

ADMISSIBLE = "Possible actions:"
NO_CALL = "The reply must contain exactly one valid call of a tool."


@dataclass(kw_only=True, slots=True)
class Actions:
    """How the actions of one episode are written and read."""

    env: CheckedEnv
    chat: Chat
    action_format: ActionFormat
    parse: Parse | None = None  # the engine's parser of calls
    shows: bool = False  # each prompt lists the admissible actions
    tools: Sequence[Mapping[str, Any]] = ()  # those in the prompts; none unless actions are calls

    async def opening(self, first: Observation) -> tuple[Message, ...]:
        """Return the first messages as the policy sees them.

        Raises EnvError if calls cannot be read, or the admissible actions cannot be listed.
        """
        if isinstance(self.action_format, ToolCalls):
            if self.parse is None:
                raise EnvError("`env.action_format` tools needs `model.tool_parser`, the parser of the model's family")
            self.tools = first.tools or (ACT,)
        return with_instructions(await self._listed(tuple(first.messages)), self.action_format)

    def open(self, messages: tuple[Message, ...]) -> Extension:
        """Begin the conversation with `messages`; return the first prompt."""
        return Extension(tokens=self.chat.open(messages, tools=self.tools), new_branch=False)

    async def read(self, reply: str, *, tokens: list[int], prompt: list[int]) -> ParsedAction:
        """Return the action in `reply`, which the conversation has just recorded.

        Raises EnvError if the format fails, EngineError if the engine cannot parse.
        """
        if isinstance(self.action_format, ToolCalls) and self.parse is not None:
            tools = [dict(tool) for tool in self.tools]
            answer = await self.parse(reply, tokens=tokens, prompt=prompt, tools=tools)
            return called(answer, as_text=tools == [ACT])
        return parsed(self.action_format, self.chat.answer)

    async def shown(self, action: ParsedAction, observation: Observation) -> tuple[Message, ...]:
        """Return the environment's messages as the policy sees them: the answer to a call is the result of a tool.

        Raises EnvError if the admissible actions cannot be listed.
        """
        messages = tuple(observation.messages)
        if not observation.done:
            messages = await self._listed(messages)
        if not isinstance(self.action_format, ToolCalls):
            return messages
        if not action.valid:
            return (Message("user", "\n".join([NO_CALL, *(message.content for message in messages)])),)
        return tuple(Message("tool", each.content) if each.role == "user" else each for each in messages)

    async def _listed(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return `messages`, with the actions that are possible now at their end if they are shown."""
        if not self.shows or not messages:
            return messages
        last, possible = messages[-1], await self.env.admissible()
        return (*messages[:-1], Message(last.role, f"{last.content}\n{ADMISSIBLE} {'; '.join(possible)}"))


def with_instructions(messages: tuple[Message, ...], action_format: ActionFormat) -> tuple[Message, ...]:
    """The first messages with the instructions of the action format in the system message."""
    if not action_format.instructions:
        return messages
    if messages[0].role == "system":
        extended = Message(role="system", content=f"{messages[0].content}\n{action_format.instructions}")
        return (extended, *messages[1:])
    return (Message(role="system", content=action_format.instructions), *messages)
