"""A connection to an MCP server, over stdio or streamable HTTP, with the package `mcp` 1.x or 2.x."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.envhub.env import EnvError
from slipstream.envhub.package import require_package

INSTALL = "'mcp>=1.28,<3'"
MAX_TOOLS = 1000
WRONG_CALLS = (-32602, -32601, -32600)  # JSON-RPC's codes for mistakes of the caller


@dataclass(frozen=True, kw_only=True, slots=True)
class McpServer:
    """An MCP server: a `command` that starts a new one for each episode, or the `url` of a running one."""

    command: tuple[str, ...] = ()
    url: str = ""
    secrets: Mapping[str, str]  # a variable of the command's environment, or an HTTP header -> its value


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolReply:
    """A tool's reply, as text."""

    text: str
    is_error: bool


class McpSession:
    """One session. A separate task opens and closes it, because the package requires the same task for both."""

    def __init__(self, server: McpServer) -> None:
        self._mcp = require_package("mcp", install=INSTALL)
        self._error: type[Exception] = vars(self._mcp).get("MCPError") or self._mcp.McpError  # 2.x, 1.x
        streams = require_package("anyio", install=INSTALL)
        self._lost = (streams.ClosedResourceError, streams.BrokenResourceError)
        self._server = server
        self._closing = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._session: Any = None
        self.tools: list[dict[str, Any]] = []  # as `tools/list` gives them: name, description, inputSchema

    async def open(self) -> None:
        """Connect. Raises EnvError if the server does not start or answer."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(opened))
        await asyncio.wait((self._holder, opened), return_when=asyncio.FIRST_COMPLETED)
        if self._holder.done():
            raise EnvError(f"the MCP server cannot be used: {_innermost(self._holder.exception())}")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        """Call a tool. Raises EnvError if the connection is lost."""
        assert self._holder is not None
        if self._holder.done():
            raise EnvError("the MCP server has closed the connection")
        try:
            result = await self._session.call_tool(name, dict(arguments))
        except self._error as error:
            wrong: Any = error
            if wrong.error.code in WRONG_CALLS:
                return ToolReply(text=wrong.error.message, is_error=True)
            raise EnvError(f"the MCP server failed: {wrong.error.message}") from error
        except self._lost as error:
            raise EnvError("the MCP server has closed the connection") from error
        found = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        return ToolReply(text=_text_of(found.get("content", ())), is_error=bool(found.get("isError", False)))

    async def close(self) -> None:
        """Disconnect from the server. Idempotent; if it is cancelled, it closes the connection at once."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        self._closing.set()
        try:
            await asyncio.gather(holder, return_exceptions=True)
        finally:
            holder.cancel()

    async def _hold(self, opened: asyncio.Future[None]) -> None:
        async with self._streams() as (read, write, *_), self._mcp.ClientSession(read, write) as session:
            await session.initialize()
            self._session, self.tools = session, await self._listed(session)
            opened.set_result(None)
            await self._closing.wait()

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[Any]:
        server = self._server
        if server.url:
            http = require_package("mcp.client.streamable_http", install=INSTALL)
            async with (
                http.create_mcp_http_client(headers=dict(server.secrets)) as client,
                http.streamable_http_client(server.url, http_client=client) as streams,
            ):
                yield streams
        else:
            parameters = self._mcp.StdioServerParameters(
                command=server.command[0], args=list(server.command[1:]), env=dict(server.secrets)
            )
            async with self._mcp.stdio_client(parameters) as streams:
                yield streams

    async def _listed(self, session: Any) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        parameters = None
        while len(tools) < MAX_TOOLS:
            page = (await session.list_tools(params=parameters)).model_dump(mode="json", by_alias=True)
            tools += [{key: tool[key] for key in ("name", "description", "inputSchema")} for tool in page["tools"]]
            if not page["nextCursor"]:
                return tools
            parameters = self._mcp.types.PaginatedRequestParams(cursor=page["nextCursor"])
        raise EnvError(f"the MCP server lists more than {MAX_TOOLS} tools")


def _text_of(content: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of `content`, and the type of each other part (an image, a resource)."""
    return "\n".join(part["text"] if part["type"] == "text" else f"({part['type']})" for part in content)


def _innermost(error: BaseException | None) -> str:
    """Describe the first error inside the exception groups that the package raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "it closed the connection" if error is None else f"{type(error).__name__}: {error}"
