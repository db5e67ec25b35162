"""`python -m tests.envhub.remote.openenv_stub`: accepts and sends exactly what was recorded of openenv-core 0.3.0.

The numbers are counted down from what the seed says. One session at a time; its port is printed.
"""

import asyncio
import json
from typing import Any

from aiohttp import web


class Session:
    def __init__(self) -> None:
        self.first, self.next = 0, 0

    def answer(self, text: str) -> dict[str, Any]:
        message = json.loads(text)
        kind = message.get("type", "")
        if kind not in ("reset", "step"):
            return error("UNKNOWN_TYPE", f"Unknown message type: {kind}")
        if set(message) != {"type", "data"} or (kind == "step" and set(message["data"]) != {"words"}):
            return error("VALIDATION_ERROR", "Invalid message", errors=[{"type": "missing", "loc": ["words"]}])
        if kind == "reset":
            assert isinstance(message["data"]["seed"], int) and message["data"]["seed"] >= 0
            self.first = self.next = 2 + message["data"]["seed"] % 4
            return moment(f"count down from {self.first}", None, False)
        words = message["data"]["words"]
        if words == "break":
            return error("EXECUTION_ERROR", "the database is gone")
        if words == "lie":
            return {"type": "observation", "data": {"reward": 1.0}}
        right = words == str(self.next)
        self.next -= right
        return moment("go on" if right else "no", right / self.first, self.next == 0)


def moment(text: str, reward: float | None, done: bool) -> dict[str, Any]:
    shown = {"text": text, "tags": ["a", {"b": 1}]}
    return {"type": "observation", "data": {"observation": shown, "reward": reward, "done": done}}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


class Server:
    def __init__(self) -> None:
        self.num_sessions = 0

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket, session = web.WebSocketResponse(), Session()
        await socket.prepare(request)
        if self.num_sessions == 1:
            at_capacity = "Server at capacity: 1/1 sessions active. Cannot accept new connections."
            await socket.send_json(error("CAPACITY_REACHED", at_capacity, active_sessions=1, max_sessions=1))
            return socket
        self.num_sessions += 1
        try:
            async for message in socket:
                await socket.send_json(session.answer(message.data))
        finally:
            self.num_sessions -= 1
        return socket


async def main() -> None:
    app = web.Application()
    app.router.add_get("/ws", Server().serve)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"port {runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
