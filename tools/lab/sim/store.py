"""A Redis server in this process: the real scripts of the buffer over `redis.lua`, which keeps keys in tables."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lupa.luajit21
import redis

# A part of a script's text, and what a planted bug has in its place.
Patches = tuple[tuple[str, str], ...]


class Store:
    """The keys of one server, and the scripts that it has been sent."""

    def __init__(self, patches: Patches = ()) -> None:
        self._patches = patches
        self._scripts: dict[str, Any] = {}
        self.watch: Callable[[int, Sequence[Any], Any], None] = lambda *_: None  # gets each request with its reply
        _restore(None)

    def execute(self, at_us: int, *request: Any) -> Any:
        """The reply at that time of the server's clock; an error reply is a value."""
        name = request[0]
        if name == "SCRIPT LOAD":
            text = request[1]
            self._scripts[hashlib.sha1(text.encode()).hexdigest()] = _compiled(_patched(text, self._patches))
            reply: Any = b"OK"
        elif name == "EVALSHA":
            script = self._scripts.get(request[1])
            if script is None:
                return redis.exceptions.NoScriptError("No matching script")
            reply = _reply(*_execute(at_us, script, int(request[2]), *map(_argument, request[3:])))
        elif name == "SCAN":
            reply = [b"0", list(_names(at_us).values())]
        elif name == "XREAD":  # whoever waits for an offer asks for it again instead
            reply = []
        else:
            reply = _reply(*_execute(at_us, name.encode(), *map(_argument, request[1:])))
        self.watch(at_us, request, reply)
        return reply

    def save(self) -> Any:
        """A copy of all keys."""
        return _save()

    def restart(self, saved: Any) -> None:
        """Begin again with the keys of `saved`; the scripts are forgotten."""
        self._scripts.clear()
        _restore(saved)


_LUA = lupa.luajit21.LuaRuntime(encoding=None, unpack_returned_tuples=True)
_LUA.execute(b"jit.off()")  # scripts are too short for it
_execute, _unpacked, _save, _restore, _names = _LUA.execute((Path(__file__).parent / "redis.lua").read_bytes())


@functools.cache
def _patched(text: str, patches: Patches) -> str:
    for old, new in patches:
        text = text.replace(old, new)
    return text


@functools.cache
def _compiled(text: str) -> Any:
    return _LUA.execute(b"return function() " + text.encode() + b"\nend")


def _argument(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _reply(worked: bool, reply: Any) -> Any:
    if worked:
        return _converted(reply)
    return redis.ResponseError(reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply))


def _converted(reply: Any) -> Any:
    """As Redis converts a reply of Lua: a number is an integer, false is nothing."""
    if isinstance(reply, bytes):
        return reply
    if reply is None or reply is False:
        return None
    if isinstance(reply, (int, float)):
        return int(reply)
    kind, text, *parts = _unpacked(reply)
    if kind == b"err":
        return redis.ResponseError(text.decode(errors="replace"))
    return text if kind == b"ok" else [each if type(each) is bytes else _converted(each) for each in parts]
