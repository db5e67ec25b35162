"""Our environments for AgentGym's clients, whose `env_server_base` is http://HOST:PORT/agentgym/SERVER/NAME.

SERVER, a key of `SERVERS`, says in which of their forms NAME is served: `webshop/shop`, `alfworld/household`,
`textcraft/craft`, `textcraft/kg` or any other. A number is a train task's; a `create` with {"split": "held_out"} makes
it a held-out one's, and with {"options": {...}} these are the environment's. The reward is the score so far.

There is no connection here to tell that a client is gone: an episode that nobody asks for a lease time is closed.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from common.trajectory import Task
from envhub.remote.agentgym_servers import SERVERS, AgentGymServer
from envhub.remote.env_protocol import (
    MAX_OPTIONS_BYTES,
    Actions,
    Answer,
    Ask,
    EnvLost,
    ListActions,
    Observed,
    Open,
    Opened,
    Refusal,
    Reset,
    Step,
    decode_answer,
)
from envhub.env import Observation
from envhub.serving.env_pool import EnvPool, Episode

LOOKS_A_LEASE = 10  # how often, in a lease time, it is looked for episodes that nobody asks for

T = TypeVar("T")


class CreateBody(msgspec.Struct, kw_only=True, frozen=True):
    split: Literal["train", "held_out"] = "train"
    options: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass(kw_only=True, slots=True)
class _Played:
    """An environment that a client created."""

    env: str
    split: str
    episode: Episode
    held: contextlib.AsyncExitStack
    asked_at: float
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    observation: Observation | None = None


class _Wrong(Exception):
    """What is answered as an error object, with status 200 as theirs are."""


class AgentGymHost:
    """Environments by `names`, each in the form of any of AgentGym's servers."""

    def __init__(self, pool: EnvPool, *, names: Collection[str], lease_s: float) -> None:
        self._pool = pool
        self._names = names
        self._lease_s = lease_s
        self._played: dict[int, _Played] = {}

    def add_routes(self, app: web.Application) -> None:
        where = "/agentgym/{server}/{env}"
        app.router.add_post(f"{where}/create", self._create)
        app.router.add_post(f"{where}/{{verb:reset|step|close}}", self._do)
        app.router.add_get(f"{where}/observation", self._show)
        app.cleanup_ctx.append(self._looking)

    async def _create(self, request: web.Request) -> web.Response:
        form, env = self._named(request)
        if self._pool.is_full:
            raise web.HTTPServiceUnavailable(text=f"{self._pool.max_episodes} episodes are played already")
        try:
            number = await self._opened(env, _read(await request.read() or b"{}", CreateBody))
        except _Wrong as error:
            return _json({"error": str(error)})
        told = {form.id_key: number, "observation": "", "reward": 0, "done": False}
        return _json(number if form.create_is_bare else told)

    async def _opened(self, env: str, body: CreateBody) -> int:
        """The number of a new environment."""
        options = bytes(body.options)
        if len(options) > MAX_OPTIONS_BYTES:
            raise _Wrong(f"options of {len(options)} bytes, the limit is {MAX_OPTIONS_BYTES}")
        packed = msgspec.msgpack.encode(_read(options, dict[str, Any]))
        held = contextlib.AsyncExitStack()
        try:
            episode = await held.enter_async_context(self._pool.episode())
            await _asked(episode, Open(env=env, options=msgspec.Raw(packed)), Opened)
        except BaseException:
            await held.aclose()
            raise
        number = secrets.randbelow(1 << 31)
        while number in self._played:
            number = secrets.randbelow(1 << 31)
        self._played[number] = _Played(env=env, split=body.split, episode=episode, held=held, asked_at=_now())
        return number

    async def _do(self, request: web.Request) -> web.Response:
        form, env = self._named(request)
        try:
            fields = _read(await request.read(), dict[str, msgspec.Raw])
            number = _field(fields, form.id_key, int)
            return _json(await self._done(form, request.match_info["verb"], self._of(env, number), number, fields))
        except _Wrong as error:
            return _json({"error": str(error)})

    async def _done(
        self, form: AgentGymServer, verb: str, played: _Played, number: int, fields: dict[str, msgspec.Raw]
    ) -> object:
        async with played.turn:
            played.asked_at = _now()
            try:
                match verb:
                    case "reset":
                        task = Task(env=played.env, split=played.split, index=_field(fields, form.index_key, int))
                        return await _told(form, played, number, Reset(task=task))
                    case "step":
                        return await _told(form, played, number, Step(action=_field(fields, "action", str)))
                self._played.pop(number, None)
                await played.held.aclose()
                return {"closed": True, form.id_key: number}
            except _Lost:
                self._played.pop(number, None)
                await played.held.aclose()
                raise
            finally:
                played.asked_at = _now()

    async def _show(self, request: web.Request) -> web.Response:
        """What was observed last."""
        form, env = self._named(request)
        number = request.query.get(form.id_key, "")
        try:
            played = self._of(env, int(number) if number.isascii() and number.isdigit() else -1)
        except _Wrong as error:
            return _json({"error": str(error)})
        return _json(_text(played.observation) if played.observation is not None else "")

    def _of(self, env: str, number: int) -> _Played:
        played = self._played.get(number)
        if played is None or played.env != env:
            raise _Wrong(
                f"no environment has the number {number}; nobody asked for it for {self._lease_s:g} s, perhaps"
            )
        return played

    def _named(self, request: web.Request) -> tuple[AgentGymServer, str]:
        """The form and the environment that the path names."""
        form, env = SERVERS.get(request.match_info["server"]), request.match_info["env"]
        if form is None or env not in self._names:
            served = f"/agentgym/SERVER/NAME, SERVER one of {', '.join(SERVERS)}, NAME one of {', '.join(self._names)}"
            raise web.HTTPNotFound(text=f"what is served here is {served}")
        return form, env

    async def _looking(self, app: web.Application) -> AsyncIterator[None]:
        """As long as the server runs, let go of what nobody asks for; at its end, of all."""
        looking = asyncio.create_task(self._look())
        yield
        looking.cancel()
        await asyncio.wait([looking])
        for played in self._played.values():
            await played.held.aclose()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / LOOKS_A_LEASE)
            for number, played in list(self._played.items()):
                if not played.turn.locked() and _now() - played.asked_at > self._lease_s:
                    del self._played[number]
                    await played.held.aclose()


class _Lost(_Wrong):
    """The environment is no more."""


async def _told(form: AgentGymServer, played: _Played, number: int, ask: Reset | Step) -> object:
    """What one of theirs would answer."""
    played.observation = (await _asked(played.episode, ask, Observed)).observation
    text, is_reset = _text(played.observation), isinstance(ask, Reset)
    if is_reset and form.reset_answer == "text":
        return text
    if is_reset and form.reset_answer == "pair":
        return [text, None]
    observation = played.observation
    told: dict[str, object] = {
        form.text_key: text,
        "reward": observation.score,
        "score": observation.score,
        "info": None,
    }
    told |= dict(zip(form.done_keys, (observation.done,) if len(form.done_keys) == 1 else
                     (observation.terminated, observation.truncated), strict=True))  # fmt: skip
    if is_reset:
        told |= {form.id_key: number, "observation": text} | ({form.reset_tells: ""} if form.reset_tells else {})
    if form.actions_key:
        told[form.actions_key] = (await _asked(played.episode, ListActions(), Actions)).actions or []
    return told


async def _asked(episode: Episode, ask: Ask, kind: type[T]) -> T:
    answer: Answer = decode_answer(await episode.ask(ask))
    if isinstance(answer, EnvLost):
        raise _Lost(answer.why)
    if isinstance(answer, Refusal):
        raise _Wrong(answer.why)
    assert isinstance(answer, kind)
    return answer


def _text(observation: Observation) -> str:
    return "\n".join(message.content for message in observation.messages)


def _read(body: bytes, kind: type[T]) -> T:
    """Raises HTTPUnprocessableEntity, as theirs do, for a body that is not what it must be."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise web.HTTPUnprocessableEntity(text=str(error)) from None


def _field(fields: dict[str, msgspec.Raw], key: str, kind: type[T]) -> T:
    if key not in fields:
        raise web.HTTPUnprocessableEntity(text=f"{key} is missing")
    return _read(bytes(fields[key]), kind)


def _json(told: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(told), content_type="application/json")


def _now() -> float:
    return asyncio.get_running_loop().time()
