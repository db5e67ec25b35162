"""Run served environments: `python -m slipstream.envhub.serving.env_worker FD STEP_TIMEOUT_S`, where FD is a socket.

An environment that crashes or hangs takes down this process and not the server, which starts another worker. The
episodes of a worker are coroutines of one process, as in an actor.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from contextvars import Context
from dataclasses import dataclass, field

import msgspec

from slipstream.common.process.log import log_to_stderr
from slipstream.common.records.message import Message, valid_text
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Env, EnvError, Observation
from slipstream.envhub.isolation.offspring import begin_episode, end_offspring, end_offspring_of
from slipstream.envhub.remote.env_protocol import (
    MAX_MESSAGE_BYTES,
    READY,
    Actions,
    Advice,
    AskExpert,
    Close,
    Closed,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    InvalidRequest,
    ListActions,
    NotSupported,
    Observed,
    Open,
    Opened,
    Reset,
    Restore,
    Snapshot,
    StepEnv,
    TakeSnapshot,
    WorkerRequest,
    WorkerResponse,
    decode_response,
    encode_message,
    read_numbered,
    write_numbered,
)
from slipstream.envhub.step_deadline import StepDeadline

MAX_WHY_CHARS = 2000

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class _Episode:
    env: Env | None = None
    running: asyncio.Task[None] | None = None
    context: Context = field(default_factory=Context)  # of all its requests: processes they start carry the mark
    mark: str = ""


class Worker:
    """Answers each request in a task of its own, one request at a time for each episode."""

    def __init__(
        self, requests: asyncio.StreamReader, responses: asyncio.StreamWriter, *, step_timeout_s: float
    ) -> None:
        self._requests = requests
        self._responses = responses
        self._step_timeout_s = step_timeout_s
        self._episodes: dict[int, _Episode] = {}

    async def serve(self) -> None:
        """Answer requests until the server closes the socket."""
        decoder = msgspec.msgpack.Decoder(WorkerRequest)
        while (message := await read_numbered(self._requests, decoder)) is not None:
            if isinstance(message.request, Open):  # only Open adds an episode: other requests may come after its Close
                opened = self._episodes.setdefault(message.episode, _Episode())
                opened.mark = opened.mark or opened.context.run(begin_episode)
            episode = self._episodes.get(message.episode) or _Episode()
            before = episode.running
            if isinstance(message.request, Close):
                self._episodes.pop(message.episode, None)
                if before is not None:
                    before.cancel()
            episode.running = asyncio.create_task(self._answer(message, episode, before), context=episode.context)

    async def _answer(self, message: WorkerRequest, episode: _Episode, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        response = _checked(await self._tried(episode, message.request))
        if isinstance(message.request, Close):
            await asyncio.to_thread(end_offspring, episode.mark)
        write_numbered(self._responses, WorkerResponse(call=message.call, response=msgspec.Raw(response)))

    async def _tried(self, episode: _Episode, request: EnvRequest) -> EnvResponse:
        """Return the response to `request`; an exception of the environment becomes an error response."""
        try:
            async with asyncio.timeout(self._step_timeout_s):
                with StepDeadline(self._step_timeout_s):
                    return await _done(episode, request)
        except EnvError as error:
            return EnvFailed(why=str(error)[:MAX_WHY_CHARS])
        except NotImplementedError as error:
            return NotSupported(why=str(error)[:MAX_WHY_CHARS])
        except ValueError as error:
            return InvalidRequest(why=str(error)[:MAX_WHY_CHARS])
        except TimeoutError:
            return EnvFailed(why=f"no answer within {self._step_timeout_s:g} s")
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # users' code may raise anything
            return EnvFailed(why=f"{type(error).__name__}: {error}"[:MAX_WHY_CHARS])


async def _done(episode: _Episode, request: EnvRequest) -> EnvResponse:
    if isinstance(request, Open):
        episode.env = make_env(request.env, request.read_options())
        return Opened(replay_only=episode.env.replay_only)
    env = episode.env
    if env is None:
        raise EnvError("no environment is open; send Open first")
    match request:
        case Reset(task=task):
            return _observed(env, await env.reset(task))
        case StepEnv(action=action):
            return _observed(env, await env.step(action))
        case Restore(state=state):
            return _observed(env, env.restore(state))
        case TakeSnapshot():
            return Snapshot(state=env.snapshot())
        case ListActions():
            return Actions(actions=env.admissible())
        case AskExpert():
            return Advice(action=env.expert())
        case Close():
            await env.close()
            return Closed()


def _observed(env: Env, observation: object) -> Observed:
    """Return the observation with built-in types only: the environment may use subclasses, which cannot be encoded."""
    if not isinstance(observation, Observation):
        raise EnvError(f"answered a {type(observation).__name__}, not an Observation")
    plain = Observation(
        messages=tuple(Message(str(message.role), str(message.content)) for message in observation.messages),
        rewards={str(name): float(reward) for name, reward in observation.rewards.items()},
        terminated=bool(observation.terminated),
        truncated=bool(observation.truncated),
        valid_action=bool(observation.valid_action),
        score=float(observation.score),
        success=bool(observation.success),
        columns=dict(observation.columns),
        tools=tuple(dict(tool) for tool in observation.tools),
    )
    return Observed(observation=plain, state_key=valid_text(env.state_key()))


def _checked(response: EnvResponse) -> bytes:
    """Return the encoded response, or an encoded EnvFailed if the client could not decode it."""
    try:
        encoded = encode_message(response)
        decode_response(encoded)
    except (TypeError, ValueError) as error:
        return encode_message(EnvFailed(why=f"its answer cannot be encoded: {error}"[:MAX_WHY_CHARS]))
    if len(encoded) > MAX_MESSAGE_BYTES:
        return encode_message(EnvFailed(why=f"answered {len(encoded)} bytes, the limit is {MAX_MESSAGE_BYTES}"))
    return encoded


async def main(fd: int, step_timeout_s: float) -> None:
    requests, responses = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    write_numbered(responses, WorkerResponse(call=READY, response=msgspec.Raw(encode_message(Closed()))))
    await Worker(requests, responses, step_timeout_s=step_timeout_s).serve()


if __name__ == "__main__":
    log_to_stderr()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
    end_offspring_of(os.getpid())  # a server that was killed has closed no episode
    # Not sys.exit: an environment may have left threads that never end.
    os._exit(0)
