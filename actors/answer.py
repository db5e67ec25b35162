"""What an environment answers, or an EnvError: the boundary that nothing of an environment's own gets past."""

import asyncio
import contextlib
import hashlib
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator
from numbers import Real
from pathlib import Path
from typing import TypeVar

import numpy as np

from common.message import Message
from common.trajectory import MAX_REWARD, MAX_STATE_KEY
from envhub.env import Env, EnvError, Observation

log = logging.getLogger(__name__)
_told = set[str]()  # where environments failed in this process: so many lines of their code

Observed = TypeVar("Observed", bound=Observation)
Said = TypeVar("Said")


async def answer(ask: Callable[[], Awaitable[Observed]], *, timeout_s: float) -> Observed:
    """The observation that `ask()` gives. Whatever else it does within or beyond `timeout_s` becomes an EnvError."""
    with boundary():
        try:
            async with asyncio.timeout(timeout_s):
                observation = await ask()
        except TimeoutError:
            raise EnvError(f"no answer within {timeout_s} s") from None
        _check(observation)
        return observation


@contextlib.contextmanager
def boundary() -> Iterator[None]:
    """Whatever an environment raises is an EnvError."""
    try:
        yield
    except EnvError:
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EnvError("something that it waited for was cancelled") from None  # by itself: this task is not
    except (Exception, SystemExit) as error:
        where = _place_of(error)
        if where not in _told:
            _told.add(where)
            told = "".join(traceback.format_exception(error)).encode(errors="backslashreplace").decode()
            log.warning("an environment failed at %s; it is told in full this once\n%s", where, told)
        raise EnvError(f"{type(error).__name__}: {error} ({where})") from error


def _place_of(error: BaseException) -> str:
    """The file and line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def state_key(env: Env) -> str:
    """The key of `env`'s state as it is recorded: a long one as its beginning and its digest. Raises EnvError."""
    try:
        key = env.state_key()
        encoded = key.encode()
    except EnvError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvError(f"gives no state_key: {type(error).__name__}: {error}") from error
    if len(key) <= MAX_STATE_KEY:
        return key
    digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    return f"{key[: MAX_STATE_KEY - len(digest) - 1]}~{digest}"


def in_tokens(say: Callable[[tuple[Message, ...]], Said], messages: tuple[Message, ...]) -> Said:
    """What `say`, `Chat.open` or `Chat.extend`, makes of an environment's words. Raises EnvError.

    A chat template may refuse a role, and a tokenizer half of a surrogate pair.
    """
    try:
        with boundary():
            return say(messages)
    except EnvError as error:
        raise EnvError(f"says what the model cannot be told: {error}") from error


def _check(observation: object) -> None:
    """Raise EnvError for what is no observation: it would do harm far from its cause."""
    if not isinstance(observation, Observation):
        raise EnvError(f"answered a {type(observation).__name__}, not an Observation")
    for message in observation.messages:
        if not isinstance(message, Message) or not _is_text(message.role) or not _is_text(message.content):
            raise EnvError(f"said {message!r}, not a Message of text")
    for name, reward in observation.rewards.items():
        if not _is_text(name):
            raise EnvError(f"gave a reward the name {name!r}, not a text")
        if not _is_number(reward) or not abs(reward) <= MAX_REWARD:
            raise EnvError(f"gave {reward!r} as reward {name!r}, not a finite number")
    if not _is_number(observation.score) or not 0.0 <= observation.score <= 1.0:
        raise EnvError(f"gave a score of {observation.score!r}, not in [0, 1]")
    for name, verdict in (("success", observation.success), ("valid_action", observation.valid_action)):
        if not isinstance(verdict, bool | np.bool_):
            raise EnvError(f"says {name}={verdict!r}, not True or False")


def _is_text(said: object) -> bool:
    """Half a character, as of a file that was read with surrogates, is none: no wire and no tokenizer takes it."""
    return isinstance(said, str) and said.encode(errors="replace").decode() == said


def _is_number(given: object) -> bool:
    """Numpy's are; True is none."""
    return isinstance(given, Real) and not isinstance(given, bool)
