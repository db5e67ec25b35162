"""Runs an agent's command in the sandbox: a program for the sandbox's Python, which imports nothing of Slipstream.

The sandbox has no network. So this program listens on the sandbox's own loopback, and forwards each connection to the
Unix socket of the episode's endpoint. It starts the command with OPENAI_BASE_URL, OPENAI_API_KEY and SLIPSTREAM_TASK in
its environment, passes its output on, and posts the last line of it as the reward if it is a number or an object.
"""

import asyncio
import contextlib
import json
import os
import sys
from asyncio import StreamReader, StreamWriter
from pathlib import Path
from typing import Any

ENDPOINT = "/opt/endpoint/socket"
SETTINGS = "agent.json"
MAX_LINE_BYTES = 1 << 16


async def forward(reader: StreamReader, writer: StreamWriter) -> None:
    there, here = await asyncio.open_unix_connection(ENDPOINT)
    await asyncio.gather(copied(reader, here), copied(there, writer))


async def copied(reader: StreamReader, writer: StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    writer.close()


async def last_line(reader: StreamReader) -> bytes:
    """Pass the output on, and return its last line."""
    tail = b""
    while chunk := await reader.read(1 << 16):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        tail = (tail + chunk)[-MAX_LINE_BYTES:]
    return tail.strip().rpartition(b"\n")[2]


async def post_reward(line: bytes, key: str) -> None:
    """Post the reward in `line`, if it is one. The endpoint refuses it if the command has posted another."""
    try:
        reward = json.loads(line)
    except ValueError:
        return
    if not isinstance(reward, (int, float, dict)):
        return
    body = json.dumps({"reward": reward}).encode()
    head = f"POST /v1/reward HTTP/1.1\r\nHost: endpoint\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_unix_connection(ENDPOINT)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    await reader.read()
    writer.close()


def read_settings() -> dict[str, Any]:
    """Read the settings, and remove them: the command sees its environment only."""
    settings: dict[str, Any] = json.loads(Path(SETTINGS).read_text())
    Path(SETTINGS).unlink()
    return settings


async def main() -> int:
    settings = read_settings()
    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    given = {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "OPENAI_API_KEY": settings["key"],
        "SLIPSTREAM_TASK": json.dumps(settings["task"]),
    }
    process = await asyncio.create_subprocess_exec(
        *settings["command"], stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env=os.environ | given
    )
    assert process.stdout is not None
    line = await last_line(process.stdout)
    exit_code = await process.wait()
    if exit_code == 0:
        await post_reward(line, settings["key"])
    return exit_code if exit_code >= 0 else 128 - exit_code


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
