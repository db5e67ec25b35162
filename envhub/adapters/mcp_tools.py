"""`mcp`: tasks over the tools of real MCP servers, from files with the instructions and the checks."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.trajectory import Task
from slipstream.envhub.adapters.mcp_session import INSTALL, McpServer, McpSession
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.env_options import read_secrets
from slipstream.envhub.episode_env import Begun, EpisodeEnv, answered, opened
from slipstream.envhub.package import require_package
from slipstream.envhub.user_files import item_of, read_files, read_lines

MAX_ACTION_CHARS = 20_000
MAX_SHOWN_CHARS = 4000
DONE = "done"
FETCH = (
    "write one JSON object a line: instruction, and check (calls with equals or contains), answer or both; "
    "docs/adapters.md shows it"
)
RULES = (
    'Do the task by calling tools. A call is one JSON object, {"name": ..., "arguments": {...}}. When all is done, '
    "say done, alone; where an answer is asked for, answer(ANSWER). The tools and the schemas of their arguments:\n"
)

_ANSWER = re.compile(r"\s*answer\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call at the end of an episode, and the text that its reply must equal or contain."""

    name: str
    arguments: dict[str, Any] = {}
    equals: str | None = None
    contains: str | None = None

    def __post_init__(self) -> None:
        if (self.equals is None) == (self.contains is None):
            raise ValueError("a check must have either equals or contains")

    def holds(self, text: str) -> bool:
        return text.strip() == self.equals.strip() if self.equals is not None else str(self.contains) in text


class ToolTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a file of tasks."""

    instruction: str
    setup: list[ToolCall] = []  # called before the policy begins
    check: list[Check] = []
    answer: str | None = None  # compared without case and outer white space
    solution: list[ToolCall] = []  # for the expert

    def __post_init__(self) -> None:
        if not self.check and self.answer is None:
            raise ValueError("a task must have a check, an answer or both")


@dataclass(kw_only=True, slots=True)
class _Episode(Begun):
    item: ToolTask
    num_solved: int = 0  # calls of the solution that have been made, from the first


class McpEnv(EpisodeEnv[_Episode]):
    """The tools of one MCP server. The reward component is `solved`, on the last turn: 1 if every check holds.

    Options: `train` and `held_out`, paths of files of tasks; `command`, which starts a server for each episode, or
    `url`, of a server over streamable HTTP; `hidden`, tools for setup and checks that the policy neither sees nor may
    call; `secrets`, a map from a variable of the command's environment, or an HTTP header, to the environment variable
    of the actor with its value.
    """

    def __init__(
        self,
        *,
        train: str = "",
        held_out: str = "",
        command: Sequence[str] = (),
        url: str = "",
        hidden: Sequence[str] = (),
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Raises ValueError if `mcp` or a file is missing, or an option is invalid."""
        require_package("mcp", install=INSTALL)
        if bool(command) == bool(url):
            raise ValueError(
                "exactly one of `env.options.command`, a list such as [python, server.py], and `env.options.url` must "
                f"be set, got {command!r} and {url!r}"
            )
        self._items = read_files(read_lines, train, held_out, ToolTask, fetch=FETCH)
        self._server = McpServer(command=tuple(command), url=url, secrets=read_secrets(secrets))
        self._hidden = frozenset(hidden)
        self._session: McpSession | None = None

    async def reset(self, task: Task) -> Observation:
        """Connect and set `task` up. Raises ValueError for a split without tasks, EnvError if the server fails."""
        item = item_of(task, self._items)
        await self.close()
        self._session = McpSession(self._server)
        await self._session.open()
        for call in item.setup:
            reply = await self._session.call(call.name, call.arguments)
            if reply.is_error:
                raise EnvError(f"the setup of {task.task_id} failed at {call.name}: {reply.text[:200]}")
        self._episode = _Episode(task=task, item=item)
        tools = [json.dumps(tool) for tool in self._session.tools if tool["name"] not in self._hidden]
        return opened(item.instruction, rules=RULES + "\n".join(tools))

    async def _act(self, episode: _Episode, action: str) -> Observation:
        answer = _ANSWER.fullmatch(action)
        if answer or action.strip().lower() == DONE:
            if (episode.item.answer is None) == (answer is not None):
                return _refused("say done, alone" if answer else "say answer(ANSWER)")
            return await self._end(episode, answer[1] if answer else None)
        try:
            if len(action) > MAX_ACTION_CHARS:
                return _refused(f"error: a call has at most {MAX_ACTION_CHARS} characters")
            call = msgspec.json.decode(action, type=ToolCall)
        except MALFORMED as error:
            return _refused(f"error: {error}")
        assert self._session is not None
        if call.name in self._hidden or call.name not in {tool["name"] for tool in self._session.tools}:
            return _refused(f"error: no tool {call.name[:80]}")
        reply = await self._session.call(call.name, call.arguments)
        if episode.item.solution[episode.num_solved : episode.num_solved + 1] == [call]:
            episode.num_solved += 1
        text = reply.text[:MAX_SHOWN_CHARS] or "(no text)"
        return answered(f"error: {text}" if reply.is_error else text, {"solved": 0.0}, valid=not reply.is_error)

    async def close(self) -> None:
        session, self._session, self._episode = self._session, None, None
        if session is not None:
            await session.close()

    def expert(self) -> str:
        """Return the next call of the task's `solution`, then the end. Raises NotImplementedError if it has none."""
        episode = self._running()
        item = episode.item
        if not item.solution:
            raise NotImplementedError(f"{episode.task.task_id} has no solution in its file")
        if episode.num_solved < len(item.solution):
            return msgspec.json.encode(item.solution[episode.num_solved]).decode()
        return DONE if item.answer is None else f"answer({item.answer})"

    async def _end(self, episode: _Episode, answer: str | None) -> Observation:
        item = episode.item
        right = item.answer is None or (answer or "").strip().casefold() == item.answer.strip().casefold()
        assert self._session is not None
        for check in item.check if right else ():
            reply = await self._session.call(check.name, check.arguments)
            right = right and not reply.is_error and check.holds(reply.text)
        return answered("bye", {"solved": float(right)}, terminated=True, score=float(right))


def _refused(why: str) -> Observation:
    return answered(why, {"solved": 0.0}, valid=False)
