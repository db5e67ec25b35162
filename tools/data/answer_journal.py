"""The answers of a judge for the rows of `slipstream data`, in a journal beside the result.

Each is appended at once, with what was spent until then. So the same command continues after a failure: it asks nothing
again, and its budget is not new.
"""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.wire import MALFORMED
from slipstream.envhub.rewards.chat_client import ChatClient

PROGRESS_S = 5.0
Spent = tuple[int, int, float]  # requests, tokens, money
T = TypeVar("T")
E = TypeVar("E", bound=msgspec.Struct)


def entries_of(file: BinaryIO, path: Path, kind: type[E]) -> Iterator[E]:
    """Yield each entry of the journal in `file`. Raises ConfigError for a damaged line.

    A last line that was cut off, as the process was killed, is removed.
    """
    file.seek(0)
    start = 0
    for number, line in enumerate(iter(file.readline, b""), start=1):
        if not line.endswith(b"\n"):
            file.truncate(start)
            break
        try:
            entry = msgspec.json.decode(line, type=kind)
        except MALFORMED as error:
            raise ConfigError(f"{path}, line {number} is damaged: {error}; remove the line") from None
        yield entry
        start += len(line)


def append_entry(file: BinaryIO, entry: msgspec.Struct) -> None:
    file.seek(0, 2)
    file.write(msgspec.json.encode(entry) + b"\n")
    file.flush()


def digest_of(asked: Any) -> str:
    """A name for what a model was asked, a value of JSON."""
    return hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=16).hexdigest()


def spent_by(client: ChatClient) -> Spent:
    return client.num_requests, client.num_tokens, client.cost


def restore_spent(client: ChatClient, spent: Spent) -> None:
    """Count what the journal says beside what `client` has spent; the larger one of each holds."""
    requests, tokens, cost = spent
    client.num_requests, client.num_tokens = max(client.num_requests, requests), max(client.num_tokens, tokens)
    client.cost = max(client.cost, cost)


def ask_for_all(
    items: Iterator[T], ask: Callable[[T], Awaitable[None]], *, at_once: int, progress: Callable[[], str]
) -> None:
    """Await `ask` for each item, `at_once` of them at a time, and print the progress. Raises the first error."""
    shown_at = time.monotonic()

    async def worker() -> None:
        nonlocal shown_at
        for item in items:  # all workers share them
            await ask(item)
            if time.monotonic() - shown_at > PROGRESS_S:
                shown_at = time.monotonic()
                print(progress(), file=sys.stderr, flush=True)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(worker())

    try:
        asyncio.run(work())
    except BaseExceptionGroup as failed:
        why: BaseException = failed
        while isinstance(why, BaseExceptionGroup):
            why = why.exceptions[0]
        raise why from None
