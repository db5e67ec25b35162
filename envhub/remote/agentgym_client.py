"""`agentgym`: an environment that one of AgentGym's servers runs.

A reply with an `error` is a failure, although its status is 200. Some servers cannot close an environment, and would
keep it forever. Such an environment is used again for the next episode of this process.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from slipstream.common.process.http_answer import Passing, requested
from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.message import valid_text
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.env_options import check_choice, check_url
from slipstream.envhub.episode_env import Begun, EpisodeEnv, answered, opened
from slipstream.envhub.remote.agentgym_servers import SERVERS
from slipstream.envhub.remote.client_connection import within
from slipstream.envhub.remote.env_secret import headers_with, read_secret

MAX_ANSWER_BYTES = 8 << 20
OPEN_S = 60.0  # time to reach the server at the start of an episode
ANSWER_S = 120.0
CLOSE_S = 10.0  # then the server keeps an environment that no episode uses
RETRY_S = 0.25
BUSY = 503  # the server did nothing; the request may be repeated
MAX_TASKS = 1 << 31

_SPARE: dict[str, list[int]] = {}  # idle environments by the URL of their server, which cannot close them

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class _Episode(Begun):
    id: int
    last_reward: float = 0.0
    actions: list[str] | None = None


class AgentGymClient(EpisodeEnv[_Episode]):
    """The `Env` of an AgentGym server.

    The server's reward is the score so far. So a turn's reward, `agentgym`, is the change of the score: the rewards of
    an episode add up to its score, also when it ends early.

    Options: `url` of the server; `server`, its kind, a key of SERVERS; `train` and `held_out`, the first and the last
    number of the tasks of each split; `rules`, a system message, because the servers do not explain the actions;
    `key_file`, a file with the secret for a server that requires one; `server_command`, which starts the server with
    the run.
    """

    def __init__(
        self,
        *,
        url: str,
        server: str,
        train: Sequence[int],
        held_out: Sequence[int] = (),
        rules: str = "",
        key_file: str = "",
        server_command: str = "",
    ) -> None:
        """Raises ValueError for invalid options. Does not connect yet: the server may start later."""
        check_url(url, "an AgentGym server")
        check_choice("server", server, SERVERS)
        self._splits = {"train": _numbers("train", train)}
        if held_out:
            self._splits["held_out"] = _numbers("held_out", held_out)
        self._url = url.rstrip("/")
        self._server = SERVERS[server]
        self._headers = headers_with(read_secret(key_file, option="env.options.key_file"))
        self._rules = rules

    async def reset(self, task: Task) -> Observation:
        """Start `task`: the server's task of its number. Raises ValueError if the split has no tasks."""
        numbers = self._splits.get(task.split)
        if numbers is None:
            raise ValueError(
                f"task {task.task_id}: split must be {' or '.join(self._splits)}, got {task.split!r}; the tasks of "
                "held_out are given by `env.options.held_out`"
            )
        number = numbers[task.index % len(numbers)]
        why = f"{self._url} did not start an episode within {OPEN_S:g} s; the server is busy or not reachable"
        async with within(OPEN_S, self._dropped, why):
            episode = self._episode = self._episode or await self._created(task)
            answer = await self._request(episode, "reset", {self._server.index_key: number, **self._server.reset_body})
        episode.task, episode.last_reward, episode.is_over, episode.actions = task, 0.0, False, None
        return opened(self._opening(episode, answer), rules=self._rules)

    async def close(self) -> None:
        if self._episode is not None and not self._server.can_close:
            _SPARE.setdefault(self._url, []).append(self._episode.id)
        await self._dropped()

    async def _dropped(self) -> None:
        """Use the episode's environment no more. After a failure another episode could not trust its state either."""
        episode = self._episode
        await super().close()
        if episode is not None and self._server.can_close:
            with contextlib.suppress(EnvError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._request(episode, "close", {})

    def admissible(self) -> list[str] | None:
        """Return the actions that the server's last reply listed, or None if its replies list none."""
        episode = self._started()
        return [] if episode.is_over else episode.actions

    async def _created(self, task: Task) -> _Episode:
        """Return an environment of the server: an idle one, else a new one."""
        if spare := _SPARE.get(self._url):
            return _Episode(id=spare.pop(), task=task)
        while True:
            try:
                answer = await self._posted("create", self._server.create_body)
                break
            except aiohttp.ClientConnectorError:  # the server has not started yet, or restarts
                await asyncio.sleep(RETRY_S)
        if not self._server.create_is_bare:
            answer = _field(answer, self._server.id_key)
        return _Episode(id=_read(answer, int), task=task)

    async def _act(self, episode: _Episode, action: str) -> Observation:
        async with within(ANSWER_S, self._dropped, f"{self._url} did not answer within {ANSWER_S:g} s"):
            return self._observed(episode, await self._request(episode, "step", {"action": valid_text(action)}))

    def _observed(self, episode: _Episode, answer: bytes) -> Observation:
        reward = _read(_field(answer, "reward"), float)
        change, episode.last_reward = reward - episode.last_reward, reward
        done = [_read(_field(answer, key), bool) for key in self._server.done_keys]
        score = min(1.0, max(0.0, reward)) if any(done) else 0.0
        text = self._with_actions(episode, answer, _field(answer, self._server.text_key))
        return answered(text, {"agentgym": change}, terminated=done[0], truncated=any(done), score=score)

    def _opening(self, episode: _Episode, answer: bytes) -> str:
        match self._server.reset_answer:
            case "text":
                return _text(answer)
            case "pair":
                return _text(bytes(_read(answer, list[msgspec.Raw])[0]))
        text = self._with_actions(episode, answer, _field(answer, "observation"))
        return f"{_text(_field(answer, self._server.reset_text))}\n{text}" if self._server.reset_text else text

    def _with_actions(self, episode: _Episode, answer: bytes, text: bytes) -> str:
        if not self._server.actions_key:
            return _text(text)
        episode.actions = _read(_field(answer, self._server.actions_key), list[str])
        return f"{_text(text)}\nYou can: {', '.join(episode.actions)}"

    async def _request(self, episode: _Episode, path: str, body: Mapping[str, object]) -> bytes:
        try:
            return await self._posted(path, {self._server.id_key: episode.id, **body})
        except aiohttp.ClientError as error:
            raise EnvError(f"{self._url}/{path}: {type(error).__name__}: {error}") from error

    async def _posted(self, path: str, body: Mapping[str, object]) -> bytes:
        """Return the body of the reply. Raises EnvError for a failure, and ClientError if there is no reply."""
        url, sent = f"{self._url}/{path}", msgspec.json.encode(body)
        headers = {**self._headers, "Content-Type": "application/json"}
        while True:
            try:
                reply = await requested(url, sent, headers, timeout_s=None, max_bytes=MAX_ANSWER_BYTES)
            except Passing:
                raise EnvError(f"{url} replied with more than {MAX_ANSWER_BYTES} bytes") from None
            if reply.status != BUSY:
                break
            await asyncio.sleep(RETRY_S)
        answer = reply.body
        if reply.status != 200:
            raise EnvError(f"{url} replied with status {reply.status}: {answer[:500].decode(errors='replace')}")
        if answer.lstrip()[:1] == b"{" and "error" in _read(answer, dict[str, msgspec.Raw]):
            raise EnvError(f"{url} reported an error: {_text(_field(answer, 'error'))[:500]}")
        return answer


def _numbers(name: str, bounds: Sequence[int]) -> range:
    """Return the numbers from the first to the last of `bounds`."""
    if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1] < MAX_TASKS:
        raise ValueError(
            f"`env.options.{name}` must be the first and the last number of its tasks, such as [0, 99], got {bounds!r}"
        )
    return range(bounds[0], bounds[1] + 1)


def _field(answer: bytes, key: str) -> bytes:
    """Return the JSON of one field of an object. Raises EnvError if the field is missing."""
    fields = _read(answer, dict[str, msgspec.Raw])
    if key not in fields:
        raise EnvError(
            f"the server's reply has no field {key}, only {', '.join(fields)}; is `env.options.server` right?"
        )
    return bytes(fields[key])


def _text(written: bytes) -> str:
    """Return a JSON string's text, and any other value as JSON."""
    return _read(written, str) if written.lstrip()[:1] == b'"' else written.decode(errors="replace")


def _read(written: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(written, type=kind)
    except MALFORMED as error:
        raise EnvError(f"malformed reply of an AgentGym server: {error}; is `env.options.server` right?") from error
