"""`python -m tests.envhub.remote.agentgym_stub [PORT]`: AgentGym servers that accept exactly what was recorded.

Each one counts down from 2 plus the task's number modulo 4. Its requests and replies are written out here, and share no
code with the client that they test. Each /step first gets a 503, as from a busy server.
"""

import asyncio
import itertools
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

# Templates of answers: NUMBER and the like stand for values.
CREATE: dict[str, tuple[set[str], Any]] = {  # the body's fields, and the answer
    "webshop": (set(), "NUMBER"),
    "alfworld": (set(), {"id": "NUMBER"}),
    "sciworld": (set(), {"id": "NUMBER"}),
    "textcraft": (set(), {"id": "NUMBER", "observation": "old", "done": False, "reward": 0}),
    "wordle": (set(), {"id": "NUMBER"}),
    "weather": ({"id"}, "NUMBER"),
    "webarena": (set(), {"env_idx": "NUMBER"}),
}
BEGUN = {"id": "NUMBER", "observation": "TEXT"}
TO_COUNT = {"task_name": "count", "var_num": 1, "task_description": "Your task is to count."}
RESET: dict[str, tuple[str, str, set[str], Any]] = {  # id's field, task's, others, the answer
    "webshop": ("env_idx", "session_id", set(), ["TEXT", None]),
    "alfworld": ("id", "game", {"world_type"}, BEGUN | {"available_actions": ["look", "wait"], "task_type": "count"}),
    "sciworld": ("id", "data_idx", set(), TO_COUNT | {"observation": "TEXT", "reward": 0, "score": 0, "done": False}),
    "textcraft": ("id", "data_idx", set(), BEGUN | {"done": False, "reward": 0}),
    "wordle": ("id", "seed", set(), BEGUN | {"done": False}),
    "weather": ("env_idx", "id", set(), "TEXT"),
    "webarena": ("env_idx", "idx", {"seed"}, {"observation": "TEXT", "sites": [], "object": "x"}),
}
WENT_ON = {"observation": "TEXT", "reward": "REWARD", "done": "DONE"}
STEP: dict[str, dict[str, Any]] = dict.fromkeys(("textcraft", "wordle", "weather"), WENT_ON) | {
    "webshop": {"state": "TEXT", "reward": "REWARD", "done": "DONE", "info": None},
    "alfworld": WENT_ON | {"available_actions": "ACTIONS"},
    "sciworld": WENT_ON | {"score": 7},
    "webarena": {"observation": "TEXT", "reward": "REWARD", "terminated": False, "truncated": "DONE", "info": {}},
}
CAN_CLOSE = ("sciworld", "textcraft", "webarena")


@dataclass(kw_only=True, slots=True)
class Kept:
    """What a server has of its environments; those without /close never forget one."""

    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    next: dict[int, int] = field(default_factory=dict)
    is_busy: bool = True
    num_created: int = 0


KEPT = {name: Kept() for name in CREATE}


def filled(template: Any, **values: Any) -> Any:
    match template:
        case dict():
            return {name: filled(each, **values) for name, each in template.items()}
        case list():
            return [filled(each, **values) for each in template]
    return values.get(template, template) if isinstance(template, str) else template


async def create(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    wanted, answer = CREATE[name]
    if set(await request.json()) != wanted:
        raise web.HTTPUnprocessableEntity(text=f"wants {wanted}")
    kept = KEPT[name]
    kept.num_created += 1
    return web.json_response(filled(answer, NUMBER=next(kept.numbers)))


async def reset(request: web.Request) -> web.Response:
    name, body = request.match_info["name"], await request.json()
    id_field, task_field, others, answer = RESET[name]
    if set(body) != {id_field, task_field} | others:
        raise web.HTTPUnprocessableEntity(text=f"wants {id_field}, {task_field} and {others}, got {list(body)}")
    number, first = body[id_field], 2 + body[task_field] % 4
    KEPT[name].next[number] = first
    return web.json_response(filled(answer, NUMBER=number, TEXT=f"count down from {first}"))


async def step(request: web.Request) -> web.Response:
    name, body = request.match_info["name"], await request.json()
    kept, id_field = KEPT[name], RESET[name][0]
    kept.is_busy = not kept.is_busy
    if not kept.is_busy:
        raise web.HTTPServiceUnavailable
    if set(body) != {id_field, "action"}:
        raise web.HTTPUnprocessableEntity(text=f"wants {id_field} and action")
    number, action = body[id_field], body["action"]
    if number not in kept.next:
        return web.json_response({"error": f"The id {number} is not valid."})
    match action:
        case "break":
            return web.json_response({"error": "the database is gone"})
        case "crash":
            raise web.HTTPInternalServerError(text="Internal Server Error")
        case "lie":
            return web.json_response({"said": "so"})
        case "flood":
            return web.json_response({"observation": "x" * (9 << 20)})
    right = action == str(kept.next[number])
    kept.next[number] -= right
    done = kept.next[number] == 0
    reward = 1.0 if done else 0.25 if right else 0.0
    said = {"TEXT": "go on" if right else "no", "REWARD": reward, "DONE": done, "ACTIONS": [] if done else ["look"]}
    return web.json_response(filled(STEP[name], **said))


async def close(request: web.Request) -> web.Response:
    name, body = request.match_info["name"], await request.json()
    if name not in CAN_CLOSE:
        raise web.HTTPNotFound
    KEPT[name].next.pop(body[RESET[name][0]], None)
    return web.json_response({"closed": True})


async def tally(request: web.Request) -> web.Response:
    kept = KEPT[request.match_info["name"]]
    return web.json_response({"created": kept.num_created, "kept": len(kept.next)})


async def main() -> None:
    app = web.Application()
    for verb in (create, reset, step, close):
        app.router.add_post(f"/{{name}}/{verb.__name__}", verb)
    app.router.add_get("/{name}/tally", tally)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(next(iter(sys.argv[1:]), 0))).start()
    print(f"port {runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
