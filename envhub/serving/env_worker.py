"""A process that served environments run in: `python -m envhub.env_worker FD STEP_TIMEOUT_S`, FD being a socket.

What an environment does to its process, by crashing or by never coming back, it does to this one and not to the server,
which starts another. Episodes share the process as they would share an actor: as coroutines.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from dataclasses import dataclass

import msgspec

from common.message import Message
from envhub.remote.env_protocol import (
    MAX_MESSAGE_BYTES,
    READY,
    Actions,
    Advice,
    Answer,
    Ask,
    AskExpert,
    Close,
    Closed,
    Done,
    EnvFailed,
    ListActions,
    NoSense,
    NotThere,
    Observed,
    Open,
    Opened,
    Order,
    Reset,
    Restore,
    Snapshot,
    Step,
    TakeSnapshot,
    decode_answer,
    encode_message,
    read_numbered,
    write_numbered,
)
from envhub.catalogue import make_env
from envhub.env import Env, EnvError, Observation

MAX_WHY_CHARS = 2000

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class _Episode:
    env: Env | None = None
    running: asyncio.Task[None] | None = None


class Worker:
    """Reads orders, and has each answered by a task of its own: no more than one at a time for an episode."""

    def __init__(
        self, orders: asyncio.StreamReader, answers: asyncio.StreamWriter, *, step_timeout_s: float
    ) -> None:  # fmt: skip
        self._orders = orders
        self._answers = answers
        self._step_timeout_s = step_timeout_s
        self._episodes: dict[int, _Episode] = {}

    async def serve(self) -> None:
        """Until the server is gone."""
        decoder = msgspec.msgpack.Decoder(Order)
        while (order := await read_numbered(self._orders, decoder)) is not None:
            if isinstance(order.ask, Open):  # nothing else makes one: an ask may come after its episode was closed
                self._episodes.setdefault(order.episode, _Episode())
            episode = self._episodes.get(order.episode) or _Episode()
            before = episode.running
            if isinstance(order.ask, Close):
                self._episodes.pop(order.episode, None)
                if before is not None:
                    before.cancel()
            episode.running = asyncio.create_task(self._answer(order, episode, before))

    async def _answer(self, order: Order, episode: _Episode, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        answer = _checked(await self._tried(episode, order.ask))
        write_numbered(self._answers, Done(call=order.call, answer=msgspec.Raw(answer)))

    async def _tried(self, episode: _Episode, ask: Ask) -> Answer:
        try:
            async with asyncio.timeout(self._step_timeout_s):
                return await _done(episode, ask)
        except EnvError as error:
            return EnvFailed(why=str(error)[:MAX_WHY_CHARS])
        except NotImplementedError as error:
            return NotThere(why=str(error)[:MAX_WHY_CHARS])
        except ValueError as error:
            return NoSense(why=str(error)[:MAX_WHY_CHARS])
        except TimeoutError:
            return EnvFailed(why=f"no answer within {self._step_timeout_s:g} s")
        except Exception as error:  # a user's own code, whatever it raises
            return EnvFailed(why=f"{type(error).__name__}: {error}"[:MAX_WHY_CHARS])


async def _done(episode: _Episode, ask: Ask) -> Answer:
    if isinstance(ask, Open):
        episode.env = make_env(ask.env, ask.read_options())
        return Opened(replay_only=episode.env.replay_only)
    env = episode.env
    if env is None:
        raise EnvError("no environment was opened here")
    match ask:
        case Reset(task=task):
            return _observed(env, await env.reset(task))
        case Step(action=action):
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
    """The observation as it travels: plain numbers and texts, whatever kinds of them the environment has."""
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
    )
    return Observed(observation=plain, state_key=env.state_key())


def _checked(answer: Answer) -> bytes:
    """The answer as it travels; in place of one that nobody could read, that it cannot be read."""
    try:
        encoded = encode_message(answer)
        decode_answer(encoded)
    except (TypeError, ValueError) as error:
        return encode_message(EnvFailed(why=f"answered what cannot be told: {error}"[:MAX_WHY_CHARS]))
    if len(encoded) > MAX_MESSAGE_BYTES:
        return encode_message(EnvFailed(why=f"answered {len(encoded)} bytes, the limit is {MAX_MESSAGE_BYTES}"))
    return encoded


async def main(fd: int, step_timeout_s: float) -> None:
    orders, answers = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    write_numbered(answers, Done(call=READY, answer=msgspec.Raw(encode_message(Closed()))))
    await Worker(orders, answers, step_timeout_s=step_timeout_s).serve()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
    # Not sys.exit: an environment may have left threads that never end.
    os._exit(0)
