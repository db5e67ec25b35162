"""The verbs in Lua, one file each: run whole or not at all, and harmless when run twice."""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import NoPermissionError, NoScriptError

from common.patience import NotReady, patiently

_DIRECTORY = Path(__file__).parent / "lua"


class Script:
    """A script on one server. It is run by its hash, and sent where the server does not know that.

    A user who may not send scripts waits until the run's learner has: a server forgets them when it is started again.
    """

    def __init__(self, client: redis.Redis, text: str) -> None:
        self._client = client
        self.text = text
        self.sha = hashlib.sha1(text.encode()).hexdigest()

    def __call__(self, *, keys: Sequence[str], args: Iterable[Any] = ()) -> Any:
        """Run it, and return its reply. Raises RedisAway."""
        arguments = (*keys, *args)
        return patiently(self._client, lambda: self._run(*arguments, num_keys=len(keys)))

    def _run(self, *arguments: Any, num_keys: int) -> Any:
        try:
            return self._client.evalsha(self.sha, num_keys, *arguments)
        except NoScriptError:
            try:
                self._client.script_load(self.text)
            except NoPermissionError:
                raise NotReady(
                    "the run's scripts are not loaded, and this user may not load them: its learner does"
                ) from None
            return self._client.evalsha(self.sha, num_keys, *arguments)


def load(client: redis.Redis, *names: str) -> Script:
    """The script whose text is that of the named files, one after another."""
    return Script(client, "".join(_text(name) for name in names))


@functools.cache
def _text(name: str) -> str:
    return (_DIRECTORY / f"{name}.lua").read_text()
