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
from slipstream.envhub.remote import env_protocol as protocol
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
        decoder = msgspec.msgpack.Decoder(protocol.WorkerRequest)
        while (message := await protocol.read_numbered(self._requests, decoder)) is not None:
            # Only Open adds an episode: other requests may come after its Close.
            if isinstance(message.request, protocol.Open):
                opened = self._episodes.setdefault(message.episode, _Episode())
                opened.mark = opened.mark or opened.context.run(begin_episode)
            episode = self._episodes.get(message.episode) or _Episode()
            before = episode.running
            if isinstance(message.request, protocol.Close):
                self._episodes.pop(message.episode, None)
                if before is not None:
                    before.cancel()
            episode.running = asyncio.create_task(self._answer(message, episode, before), context=episode.context)

    async def _answer(
        self, message: protocol.WorkerRequest, episode: _Episode, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        response = _checked(await self._tried(episode, message.request))
        if isinstance(message.request, protocol.Close):
            await asyncio.to_thread(end_offspring, episode.mark)
        numbered = protocol.WorkerResponse(call=message.call, response=msgspec.Raw(response))
        protocol.write_numbered(self._responses, numbered)

    async def _tried(self, episode: _Episode, request: protocol.EnvRequest) -> protocol.EnvResponse:
        """Return the response to `request`; an exception of the environment becomes an error response."""
        try:
            async with asyncio.timeout(self._step_timeout_s):
                with StepDeadline(self._step_timeout_s):
                    return await _done(episode, request)
        except EnvError as error:
            return protocol.EnvFailed(why=str(error)[:MAX_WHY_CHARS])
        except NotImplementedError as error:
            return protocol.NotSupported(why=str(error)[:MAX_WHY_CHARS])
        except ValueError as error:
            return protocol.InvalidRequest(why=str(error)[:MAX_WHY_CHARS])
        except TimeoutError:
            return protocol.EnvFailed(why=f"no answer within {self._step_timeout_s:g} s")
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # users' code may raise anything
            return protocol.EnvFailed(why=f"{type(error).__name__}: {error}"[:MAX_WHY_CHARS])


async def _done(episode: _Episode, request: protocol.EnvRequest) -> protocol.EnvResponse:
    if isinstance(request, protocol.Open):
        episode.env = make_env(request.env, request.read_options())
        return protocol.Opened(replay_only=episode.env.replay_only)
    env = episode.env
    if env is None:
        raise EnvError("no environment is open; send Open first")
    match request:
        case protocol.Reset(task=task):
            return _observed(env, await env.reset(task))
        case protocol.StepEnv(action=action):
            return _observed(env, await env.step(action))
        case protocol.Restore(state=state):
            return _observed(env, env.restore(state))
        case protocol.TakeSnapshot():
            return protocol.Snapshot(state=env.snapshot())
        case protocol.ListActions():
            return protocol.Actions(actions=env.admissible())
        case protocol.AskExpert():
            return protocol.Advice(action=env.expert())
        case protocol.Close():
            await env.close()
            return protocol.Closed()


def _observed(env: Env, observation: object) -> protocol.Observed:
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
    return protocol.Observed(observation=plain, state_key=valid_text(env.state_key()))


def _checked(response: protocol.EnvResponse) -> bytes:
    """Return the encoded response, or an encoded EnvFailed if the client could not decode it."""
    try:
        encoded = protocol.encode_message(response)
        protocol.decode_response(encoded)
    except (TypeError, ValueError) as error:
        return protocol.encode_message(protocol.EnvFailed(why=f"its answer cannot be encoded: {error}"[:MAX_WHY_CHARS]))
    if len(encoded) > (limit := protocol.MAX_MESSAGE_BYTES):
        return protocol.encode_message(protocol.EnvFailed(why=f"answered {len(encoded)} bytes, the limit is {limit}"))
    return encoded


async def main(fd: int, step_timeout_s: float) -> None:
    requests, responses = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    closed = msgspec.Raw(protocol.encode_message(protocol.Closed()))
    protocol.write_numbered(responses, protocol.WorkerResponse(call=protocol.READY, response=closed))
    await Worker(requests, responses, step_timeout_s=step_timeout_s).serve()


if __name__ == "__main__":
    log_to_stderr()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
    end_offspring_of(os.getpid())  # a server that was killed has closed no episode
    # Not sys.exit: an environment may have left threads that never end.
    os._exit(0)
