"""A judge: a model behind an OpenAI-compatible URL, or the run's own policy, that marks an episode by a rubric.

`sibling_judge` lets one compare whole groups.
"""

import asyncio
import hashlib
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from slipstream.common.process.config_error import require
from slipstream.envhub.env import EnvError
from slipstream.envhub.env_options import is_number
from slipstream.envhub.rewards.chat_client import ACTORS, ChatClient
from slipstream.envhub.rewards.client_settings import check_model, check_request, check_whole, client_of
from slipstream.envhub.rewards.episode import Episode, Reading
from slipstream.envhub.rewards.rubric import Rubric, read_rubric

PLAIN = {"temperature": 0, "max_tokens": 512}
MAX_KEPT = 10_000  # answers of one judge

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Judge:
    """Marks episodes; the same request is answered from a cache. One for each process."""

    client: ChatClient
    rubric: Rubric
    model: str
    columns: Sequence[str]  # of the task, shown to the judge
    request: Mapping[str, Any]  # more fields of the request
    max_chars: int
    _cache: OrderedDict[bytes, Any] = field(default_factory=OrderedDict)
    _asking: WeakValueDictionary[bytes, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    @property
    def is_own(self) -> bool:
        return self.client.url == ACTORS

    async def __call__(self, episode: Episode) -> Reading[float]:
        """Return the mark of `episode` in [0, 1]. Raises EnvError if the judge gives no mark within the deadline."""
        return await self.ask(self.rubric.instructions, self._shown(episode), read=self.rubric.read)

    async def ask(self, instructions: str, shown: str, *, read: Callable[[str], T]) -> Reading[T]:
        """Return the judge's answer, read by `read`. Raises EnvError without a readable answer within the deadline."""
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": shown}]
        body = json.dumps({**self.request, "model": self.model, "messages": messages}).encode()
        digest = hashlib.blake2b(body, digest_size=16).digest()
        # Siblings often say the same: the first of them asks, and the others wait for the cache.
        lock = self._asking.setdefault(digest, asyncio.Lock())
        async with lock:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                known: Reading[T] = self._cache[digest]
                return known
            found = await self.client.ask(body, read=read)
            self._cache[digest] = found
            if len(self._cache) > MAX_KEPT:
                self._cache.popitem(last=False)
        return found

    def _shown(self, episode: Episode) -> str:
        shown: dict[str, Any] = {"conversation": [*episode.messages, *episode.ending]}
        if reference := columns_of(episode, self.columns):
            shown["reference"] = reference
        return cut_in_the_middle(json.dumps(shown, ensure_ascii=False, default=str), self.max_chars)


def columns_of(episode: Episode, names: Sequence[str]) -> dict[str, Any]:
    """The task's columns that a judge may see. Raises EnvError if one is missing."""
    if missing := [name for name in names if name not in episode.columns]:
        known = ", ".join(map(str, episode.columns)) or "none"
        raise EnvError(f"the task has no column {', '.join(missing)} to show to the judge; it has {known}")
    return {name: episode.columns[name] for name in names}


def judge(
    key: str,
    *,
    rubric: Any,
    model: str = "",
    columns: Sequence[str] = (),
    request: Mapping[str, Any] = PLAIN,
    max_chars: int = 100_000,
    **client: Any,
) -> Judge:
    """Make a judge from the settings of the part `key`; `client` are those of ChatClient.

    Raises ConfigError if one is malformed.
    """
    if client["url"] == ACTORS:
        secrets = client.get("key_env", ""), client.get("key_file", "")
        _check_own(key, model=model, request=request, secrets=secrets)
    else:
        check_model(key, model)
    check_request(key, request, PLAIN)
    is_list = isinstance(columns, list | tuple) and all(isinstance(name, str) for name in columns)
    require(is_list, f"{key}.columns", "a list of names", columns, "columns of the task that the judge may see")
    check_whole(f"{key}.max_chars", max_chars, least=1000)
    return Judge(
        client=client_of(key, **client),
        rubric=read_rubric(f"{key}.rubric", rubric),
        model=model,
        columns=tuple(columns),
        request=dict(request),
        max_chars=max_chars,
    )


# What may be given to `judge`: the settings of its client have their own names.
_OWN = [each for name, each in inspect.signature(judge).parameters.items() if name != "client"]
_CLIENTS = inspect.signature(ChatClient).parameters.values()
judge.__signature__ = inspect.Signature([*_OWN, *_CLIENTS])  # type: ignore[attr-defined]


def _check_own(key: str, *, model: Any, request: Any, secrets: tuple[Any, Any]) -> None:
    """Raise ConfigError for settings that the run's own policy would not read."""
    cure = f"leave it out: `{ACTORS}` is the run's own policy"
    require(model == "", f"{key}.model", "empty", model, cure)
    require(secrets == ("", ""), f"{key}.key_env, {key}.key_file", "empty", secrets, cure)
    known = isinstance(request, Mapping) and request.keys() == PLAIN.keys()
    require(known, f"{key}.request", "temperature and max_tokens alone", request, f"{PLAIN} is the default")
    check_whole(f"{key}.request.max_tokens", request["max_tokens"], least=1, cure="512 is the default")
    heat = request["temperature"]
    require(is_number(heat) and 0 <= heat <= 1000, f"{key}.request.temperature", "in [0, 1000]", heat, "0 is usual")


def cut_in_the_middle(text: str, max_chars: int) -> str:
    """The text, without its middle if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters are left out] {text[-half:]}"
