"""Loads and runs the Lua scripts, one file for each verb. A script runs whole or not at all, and is idempotent."""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import NoPermissionError, NoScriptError

from slipstream.common.process.redis_retry import NotReady, patiently

_DIRECTORY = Path(__file__).parents[1] / "buffer" / "lua"
# Parts of the errors that Redis 6.2 and later returns for damaged keys and fields. "attempt to" is from Lua itself.
_DAMAGE_WORDS = (
    "DAMAGED",
    "WRONGTYPE",
    "not an integer",
    "not a valid float",
    "not a float",
    "NaN or Infinity",
    "would overflow",
    "attempt to",
    "bad argument",
    "must be strings or integers",
)


class Damaged(redis.ResponseError):
    """A script met damage: a key of another type, a counter that is not a number, or a group without its hash."""


def is_damage(error: Exception) -> bool:
    """Whether an error reply means that stored data is damaged."""
    return isinstance(error, redis.ResponseError) and any(words in str(error) for words in _DAMAGE_WORDS)


class Script:
    """A script on one server. It is called by its hash, and sent if the server does not know the hash.

    A user who may not send scripts waits until the learner has loaded them: a restarted server has forgotten them.
    """

    def __init__(self, client: redis.Redis, text: str) -> None:
        self._client = client
        self.text = text
        self.sha = _sha(text)

    def __call__(self, *, keys: Sequence[str | bytes], args: Iterable[Any] = ()) -> Any:
        """Run the script and return its reply. Raises RedisAway, Damaged."""
        arguments = (*keys, *args)
        try:
            return patiently(self._client, lambda: self._run(*arguments, num_keys=len(keys)))
        except redis.ResponseError as error:
            if is_damage(error):
                raise Damaged(str(error)) from None
            raise

    def _run(self, *arguments: Any, num_keys: int) -> Any:
        while True:  # the server may restart, and forget the script again, before it is called
            try:
                return self._client.evalsha(self.sha, num_keys, *arguments)
            except NoScriptError:
                self._send()

    def _send(self) -> None:
        try:
            self._client.script_load(self.text)
        except NoPermissionError:
            raise NotReady(
                "the run's scripts are not loaded, and this user may not load them; waiting for the learner"
            ) from None


@functools.cache
def _sha(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def load(client: redis.Redis, *names: str) -> Script:
    """The script made of the named files, one after another."""
    return Script(client, "".join(_text(name) for name in names))


@functools.cache
def _text(name: str) -> str:
    return (_DIRECTORY / f"{name}.lua").read_text()
