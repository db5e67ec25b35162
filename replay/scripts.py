"""The verbs of the buffer as Lua, one file each: run whole or not at all, and harmless when run twice."""

import functools
from pathlib import Path

import redis
from redis.commands.core import Script

_DIRECTORY = Path(__file__).parent


def load(client: redis.Redis, *names: str) -> Script:
    """The script whose text is that of the named files, one after another.

    Calling it runs it by hash, and sends the text again to a server that has forgotten it.
    """
    return client.register_script("".join(_text(name) for name in names))


@functools.cache
def _text(name: str) -> str:
    return (_DIRECTORY / f"{name}.lua").read_text()
