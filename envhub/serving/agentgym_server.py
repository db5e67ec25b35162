"""Serve our environments to AgentGym's clients, whose `env_server_base` is http://HOST:PORT/agentgym/SERVER/NAME.

SERVER, a key of `SERVERS`, selects the format in which NAME is served: `webshop/shop`, `alfworld/household`,
`textcraft/craft`, `textcraft/kg` or any other. Task numbers are those of train tasks. A `create` with
{"split": "held_out"} selects held-out tasks, and its {"options": {...}} are the environment's options. The reward is
the score so far.

HTTP has no connection that shows when a client has left. So the server closes an episode that has had no request for
the time of a lease.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec
from aiohttp import web

from slipstream.common.process.wire import MALFORMED, WireError
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Observation
from slipstream.envhub.remote.agentgym_servers import SERVERS, AgentGymServer
from slipstream.envhub.remote.env_protocol import (
    Actions,
    EnvLost,
    EnvRequest,
    EnvResponse,
    ErrorResponse,
    ListActions,
    Observed,
    Opened,
    Reset,
    StepEnv,
    decode_response,
    opening,
)
from slipstream.envhub.serving.env_pool import EnvPool, Episode

CHECKS_PER_LEASE = 10  # how many times in the time of a lease the server looks for expired episodes

T = TypeVar("T")


class CreateBody(msgspec.Struct, kw_only=True, frozen=True):
    split: Literal["train", "held_out"] = "train"
    options: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass(kw_only=True, slots=True)
class _CreatedEnv:
    """An environment that a client created."""

    env: str
    split: str
    episode: Episode
    slot: contextlib.AsyncExitStack  # closing it frees the slot of the pool
    used_at: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    observation: Observation | None = None


class _RequestFailed(Exception):
    """A failed request. The reply is an error object with status 200, as AgentGym's servers send it."""


class AgentGymHost:
    """Serves the environments `names`, each in the format of any of AgentGym's servers."""

    def __init__(self, pool: EnvPool, *, names: Collection[str], lease_s: float) -> None:
        self._pool = pool
        self._names = names
        self._lease_s = lease_s
        self._created: dict[int, _CreatedEnv] = {}

    def add_routes(self, app: web.Application) -> None:
        where = "/agentgym/{server}/{env}"
        app.router.add_post(f"{where}/create", self._create)
        app.router.add_post(f"{where}/{{verb:reset|step|close}}", self._do)
        app.router.add_get(f"{where}/observation", self._show)
        app.cleanup_ctx.append(self._expiring)

    async def _create(self, request: web.Request) -> web.Response:
        form, env = self._named(request)
        if self._pool.is_full:
            raise web.HTTPServiceUnavailable(text=f"the server is full: {self._pool.max_episodes} episodes are running")
        try:
            number = await self._open(env, _read(await request.read() or b"{}", CreateBody))
        except _RequestFailed as error:
            return _json({"error": str(error)})
        reply = {form.id_key: number, "observation": "", "reward": 0, "done": False}
        return _json(number if form.create_is_bare else reply)

    async def _open(self, env: str, body: CreateBody) -> int:
        """Create an environment and return its number."""
        try:
            request = opening(env, bytes(body.options))
        except WireError as error:
            raise _RequestFailed(str(error)) from error
        slot = contextlib.AsyncExitStack()
        try:
            episode = await slot.enter_async_context(self._pool.episode())
            await _request(episode, request, Opened)
        except BaseException:
            await slot.aclose()
            raise
        number = secrets.randbelow(1 << 31)
        while number in self._created:
            number = secrets.randbelow(1 << 31)
        self._created[number] = _CreatedEnv(env=env, split=body.split, episode=episode, slot=slot, used_at=_now())
        return number

    async def _do(self, request: web.Request) -> web.Response:
        form, env = self._named(request)
        try:
            fields = _read(await request.read(), dict[str, msgspec.Raw])
            number = _field(fields, form.id_key, int)
            return _json(await self._done(form, request.match_info["verb"], self._find(env, number), number, fields))
        except _RequestFailed as error:
            return _json({"error": str(error)})

    async def _done(
        self, form: AgentGymServer, verb: str, created: _CreatedEnv, number: int, fields: dict[str, msgspec.Raw]
    ) -> object:
        """Do a reset, step or close, and return the reply."""
        async with created.lock:
            created.used_at = _now()
            try:
                match verb:
                    case "reset":
                        task = Task(env=created.env, split=created.split, index=_field(fields, form.index_key, int))
                        return await _observe(form, created, number, Reset(task=task))
                    case "step":
                        return await _observe(form, created, number, StepEnv(action=_field(fields, "action", str)))
                self._created.pop(number, None)
                await created.slot.aclose()
                return {"closed": True, form.id_key: number}
            except _Lost:
                self._created.pop(number, None)
                await created.slot.aclose()
                raise
            finally:
                created.used_at = _now()

    async def _show(self, request: web.Request) -> web.Response:
        """Reply with the text of the last observation."""
        form, env = self._named(request)
        number = request.query.get(form.id_key, "")
        try:
            created = self._find(env, int(number[:20]) if number.isascii() and number.isdigit() else -1)
        except _RequestFailed as error:
            return _json({"error": str(error)})
        return _json(_text(created.observation) if created.observation is not None else "")

    def _find(self, env: str, number: int) -> _CreatedEnv:
        """Return the environment of that number. Raises _RequestFailed if no environment has it."""
        created = self._created.get(number)
        if created is None or created.env != env:
            raise _RequestFailed(
                f"no environment has the number {number}; the server closes one that has had no request for "
                f"{self._lease_s:g} s"
            )
        return created

    def _named(self, request: web.Request) -> tuple[AgentGymServer, str]:
        """Return the format and the environment that the path names. Raises HTTPNotFound."""
        form, env = SERVERS.get(request.match_info["server"]), request.match_info["env"]
        if form is None or env not in self._names:
            served = f"/agentgym/SERVER/NAME, SERVER one of {', '.join(SERVERS)}, NAME one of {', '.join(self._names)}"
            raise web.HTTPNotFound(text=f"this path is not served; the server has {served}")
        return form, env

    async def _expiring(self, app: web.Application) -> AsyncIterator[None]:
        """Close expired environments while the server runs, and all environments when it ends."""
        expiring = asyncio.create_task(self._expire())
        yield
        expiring.cancel()
        await asyncio.wait([expiring])
        for created in self._created.values():
            await created.slot.aclose()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / CHECKS_PER_LEASE)
            for number, created in list(self._created.items()):
                if not created.lock.locked() and _now() - created.used_at > self._lease_s:
                    del self._created[number]
                    await created.slot.aclose()


class _Lost(_RequestFailed):
    """The environment's process has ended."""


async def _observe(form: AgentGymServer, created: _CreatedEnv, number: int, request: Reset | StepEnv) -> object:
    """Do `request`, and return the reply in the server's format."""
    created.observation = (await _request(created.episode, request, Observed)).observation
    text, is_reset = _text(created.observation), isinstance(request, Reset)
    if is_reset and form.reset_answer == "text":
        return text
    if is_reset and form.reset_answer == "pair":
        return [text, None]
    observation = created.observation
    reply: dict[str, object] = {
        form.text_key: text,
        "reward": observation.score,
        "score": observation.score,
        "info": None,
    }
    reply |= dict(
        zip(
            form.done_keys,
            (observation.done,) if len(form.done_keys) == 1 else (observation.terminated, observation.truncated),
            strict=True,
        )
    )
    if is_reset:
        reply |= {form.id_key: number, "observation": text} | ({form.reset_text: ""} if form.reset_text else {})
    if form.actions_key:
        reply[form.actions_key] = (await _request(created.episode, ListActions(), Actions)).actions or []
    return reply


async def _request(episode: Episode, request: EnvRequest, kind: type[T]) -> T:
    response: EnvResponse = decode_response(await episode.request(request))
    if isinstance(response, EnvLost):
        raise _Lost(response.why)
    if isinstance(response, ErrorResponse):
        raise _RequestFailed(response.why)
    assert isinstance(response, kind)
    return response


def _text(observation: Observation) -> str:
    return "\n".join(message.content for message in observation.messages)


def _read(body: bytes, kind: type[T]) -> T:
    """Return the decoded JSON. Raises HTTPUnprocessableEntity if it is malformed, like AgentGym's own servers."""
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as error:
        raise web.HTTPUnprocessableEntity(text=str(error)) from None


def _field(fields: dict[str, msgspec.Raw], key: str, kind: type[T]) -> T:
    if key not in fields:
        raise web.HTTPUnprocessableEntity(text=f"the field {key} is missing")
    return _read(bytes(fields[key]), kind)


def _json(reply: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


def _now() -> float:
    return asyncio.get_running_loop().time()
