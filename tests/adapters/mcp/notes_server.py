"""A server of notes, by the server of the package `mcp`, 1.x or 2.x: over stdio, or over HTTP on a socket handed in.

It keeps what it holds until it ends.
"""

import os
import sys

import uvicorn

try:
    from mcp.server.mcpserver import Context, MCPServer
except ImportError:  # 1.x
    from mcp.server.fastmcp import Context
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("notes")
notes: dict[str, str] = {}


@server.tool()
def write(title: str, text: str) -> str:
    """Write a note."""
    notes[title] = text
    return "written"


@server.tool()
def read(title: str) -> str:
    """Read a note."""
    if title not in notes:
        raise ValueError(f"no note {title}")
    return notes[title]


@server.tool()
def wipe() -> str:
    """Forget every note."""
    notes.clear()
    return "wiped"


@server.tool()
def key() -> str:
    """The key that the server was started with, and whether the actor's own secrets came along."""
    return f"{os.environ.get('NOTES_KEY')} {os.environ.get('ACTOR_SECRET')}"


@server.tool()
def header(ctx: Context) -> str:
    """The authorization header of the HTTP request."""
    return str(ctx.request_context.request.headers.get("authorization"))


@server.tool()
def crash() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def long() -> str:
    """A long text."""
    return "x" * 100_000


if __name__ == "__main__":
    if len(sys.argv) > 1:
        uvicorn.run(server.streamable_http_app(), fd=int(sys.argv[1]), log_level="error")
    else:
        server.run()
