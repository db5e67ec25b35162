"""Awaits several requests at the same time."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the answers to all requests. Raises the error of the first that fails; the others then end."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
