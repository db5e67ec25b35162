"""`tools`: do errands by calling the tools of four servers with state. Each call is checked against its schema."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_range
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.tools.servers import TOOLS, Servers, call_tool
from slipstream.envhub.tools.tools_task import Errand, draw_errands, draw_servers
from slipstream.envhub.world import Change, InvalidAction, WorldEnv, rules_in

MAX_ACTION_CHARS = 2000
DONE = "done"
RULES = (
    'Do the errands by calling tools. A call is one JSON object, {"name": ..., "arguments": {...}}. When all errands '
    "are done, and nothing else has been changed, write done. The tools and the JSON schemas of their arguments:\n"
)


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, object]


class ToolsState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    servers: Servers
    seen: frozenset[int]  # the positions in `calls` of the look-ups that have been made


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolsWorld:
    """The errands, and the states of the servers while the errands are done."""

    opening: str
    first: ToolsState
    errands: list[Errand]
    path: list[Servers]  # the state at the start, then the state after each call in `calls`

    @property
    def calls(self) -> list[tuple[str, dict[str, str | int]]]:
        """The calls of all errands in order. Call `i` changes the state from `path[i]` to `path[i + 1]`."""
        return [call for errand in self.errands for call in errand.calls]

    async def act(self, state: ToolsState, action: str) -> Change[ToolsState]:
        if action.strip().lower() == DONE:
            return Change(state=state, text="bye", over=True, score=float(state.servers == self.path[-1]))
        try:
            if len(action) > MAX_ACTION_CHARS:
                raise ValueError(f"a call has at most {MAX_ACTION_CHARS} characters")
            call = msgspec.json.decode(action, type=_Call)
            if call.name == DONE:
                return await self.act(state, DONE)
            text, servers = call_tool(state.servers, call.name, call.arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidAction(f"error: {error}") from None
        matching = {position for position, needed in enumerate(self.calls) if needed == (call.name, call.arguments)}
        seen = state.seen | {position for position in matching if self.path[position] == self.path[position + 1]}
        return Change(state=ToolsState(servers=servers, seen=seen), text=text)

    def expert(self, state: ToolsState) -> str:
        """Return the next call on the path, but no look-up twice; `done` at its end and in a state outside of it."""
        if state.servers not in self.path:
            return DONE
        for position in range(self.path.index(state.servers), len(self.calls)):
            if position not in state.seen:
                name, arguments = self.calls[position]
                return json.dumps({"name": name, "arguments": arguments})
        return DONE


def tool_lines() -> str:
    """Return the tools in the format of MCP's tools/list, one JSON object a line."""
    return "\n".join(
        json.dumps({"name": name, "description": tool.description, "inputSchema": tool.schema})
        for name, tool in TOOLS.items()
    )


def tool_functions() -> tuple[dict[str, Any], ...]:
    """Return the tools in OpenAI's format, and one more that ends the episode."""
    ending = {"name": DONE, "description": "All errands are done.", "parameters": {"type": "object", "properties": {}}}
    functions = [
        {"name": name, "description": tool.description, "parameters": tool.schema} for name, tool in TOOLS.items()
    ]
    return tuple({"type": "function", "function": function} for function in (*functions, ending))


def make_tools_env(*, profile: str = "full", errands: int = 2) -> Env:
    """Return a `tools` environment. Raises ValueError for invalid options.

    `profile`: see `rules_in`. `errands`: their number.
    """
    check_range("errands", errands, 1, 5)
    return WorldEnv(
        f"tools {profile} errands={errands}",
        make_world=partial(make_tools, num_errands=errands),
        rules=rules_in(profile, RULES + tool_lines()),
        tools=tool_functions(),
    )


def make_tools(task: Task, *, num_errands: int) -> ToolsWorld:
    rng = task_rng(task, world=f"tools/{num_errands}")
    while True:
        servers = draw_servers(rng)
        errands = draw_errands(rng, servers, count=num_errands)
        path, text = _path(servers, errands), "\n".join(errand.text for errand in errands)
        names_found = any(found in text for errand in errands for found in errand.found)
        if path is not None and not names_found and split_of(text) == task.split:
            first = ToolsState(servers=servers, seen=frozenset())
            return ToolsWorld(opening=text, first=first, errands=errands, path=path)


def _path(servers: Servers, errands: list[Errand]) -> list[Servers] | None:
    """Return the states before and after each call; None if one errand makes another impossible."""
    path = [servers]
    for errand in errands:
        for name, arguments in errand.calls:
            try:
                path.append(call_tool(path[-1], name, arguments)[1])
            except ValueError:
                return None
    return path
