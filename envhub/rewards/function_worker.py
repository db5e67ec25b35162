"""The process in which reward functions of the user's run, one call after another, in the main thread.

`python -P -m slipstream.envhub.rewards.function_worker MODULE:FUNCTION FD PARENT_PID`, where FD is a socket.
"""

import asyncio
import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from slipstream.common.process.imported import imported, place_of
from slipstream.common.records.message import valid_text
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.offspring import begin_episode, end_offspring, end_offspring_of
from slipstream.envhub.rewards.episode import Episode
from slipstream.envhub.rewards.function import Call, Returned, arguments, numbers

POLL_S = 1.0  # between two looks at whether the parent still lives


def returned(function: Callable[..., Any], episode: Episode, *, as_chat: bool) -> Returned:
    """What `function` gives for an episode, or why it gives nothing."""
    mark = begin_episode()
    try:
        result = function(**arguments(function, episode, as_chat=as_chat))
        found = asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
        return numbers(found, num_turns=len(episode.turns))
    except EnvError as error:
        return str(error)
    except BaseException as error:  # a user's function may raise anything
        return valid_text(f"raised {type(error).__name__} at {place_of(error)}: {error}"[:2000])
    finally:
        end_offspring(mark)


async def _awaited(result: Any) -> Any:
    return await result


def _end_with(parent: int) -> None:
    """End after the process `parent`. The signal of the kernel comes when its thread ends, which is earlier."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    end_offspring_of(os.getpid())
    os._exit(0)


def main() -> None:
    name, fd, parent = sys.argv[1:]
    threading.Thread(target=_end_with, args=[int(parent)], daemon=True).start()
    function, connection = imported("part", name, Callable), Connection(int(fd))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            episode, as_chat = msgspec.msgpack.decode(connection.recv_bytes(), type=Call)
            connection.send_bytes(msgspec.msgpack.encode(returned(function, episode, as_chat=as_chat)))


if __name__ == "__main__":
    main()
