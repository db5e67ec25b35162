"""Calls an environment, or a format of actions, and raises EnvError for everything that goes wrong in it."""

import asyncio
import hashlib
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import partial
from numbers import Real
from typing import TypeVar

import numpy as np

from slipstream.common.process.imported import place_of
from slipstream.common.records.message import Message, valid_text
from slipstream.common.records.trajectory import MAX_REWARD, MAX_STATE_KEY, Task
from slipstream.common.text.action_format import ActionFormat, ParsedAction
from slipstream.envhub.env import Env, EnvError, Observation, ask
from slipstream.envhub.step_deadline import StepDeadline

MAX_OBSERVATION_CHARS = 4 << 20  # of all its texts together: about a million tokens
MAX_OBSERVATION_TEXTS = 10_000  # messages and rewards
MAX_LOGGED_CHARS = 20_000  # of an environment's exception
MAX_QUOTED_CHARS = 100

log = logging.getLogger(__name__)
# The usual type first: to ask an abstract class, or a union, takes a microsecond.
_REAL = (float, int, Real)
_MAPPING = (dict, Mapping)
_FLAG = (bool, np.bool_)
_entered = ContextVar[None]("entered")
_logged_places = set[str]()  # file and line of every failure whose traceback this process has logged

Observed = TypeVar("Observed", bound=Observation)
Rendered = TypeVar("Rendered")


async def answer(ask: Callable[[], Awaitable[Observed]], *, timeout_s: float) -> Observed:
    """Return the observation of `ask()`. Raises EnvError if it fails, is malformed or takes over `timeout_s`."""
    with Boundary():
        try:
            async with asyncio.timeout(timeout_s):
                with StepDeadline(timeout_s):
                    observation = await ask()
        except TimeoutError:
            raise EnvError(f"no answer within {timeout_s} s") from None
        check_observation(observation)
        return observation


class Boundary:
    """Turns every exception of an environment into an EnvError, except the cancellation of the task that entered.

    That includes KeyboardInterrupt: `common/process/shutdown.py` handles signals and never raises it. It is a class
    because an actor enters it four times a turn, and a generator takes three times as long.
    """

    __slots__ = ("_token", "_what")

    def __init__(self, what: str = "") -> None:
        """`what` begins the text of the EnvError."""
        self._what = what

    def __enter__(self) -> None:
        self._token = _entered.set(None)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or (isinstance(error, GeneratorExit) and self._is_left_by_another()):
            return
        if isinstance(error, EnvError):
            raise EnvError(self._what + _text_of(error)) from error  # its text may be too long, or raise
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                return
            # This task was not cancelled.
            raise EnvError(f"{self._what}it awaited something that was cancelled") from None
        where = place_of(error)
        if where not in _logged_places:
            _logged_places.add(where)
            kind = type(error).__name__
            log.warning("%s%s at %s; its traceback is shown once\n%s", self._what, kind, where, _full_text(error))
        raise EnvError(f"{self._what}{type(error).__name__}: {_text_of(error)} ({where})") from error

    def _is_left_by_another(self) -> bool:
        """Whether not the task that entered is running, but the garbage collector, which closes its coroutine."""
        try:
            _entered.reset(self._token)
        except ValueError:  # the token is of another task's context
            return True
        return False


def _text_of(error: BaseException) -> str:
    """The text of an exception, cut to MAX_LOGGED_CHARS; `str` of an environment's exception may itself raise."""
    try:
        return str(error)[:MAX_LOGGED_CHARS]
    except BaseException as failure:
        return f"(no text: str() of it raised {type(failure).__name__})"


def _full_text(error: BaseException) -> str:
    """The traceback with the texts and causes of the exception; without them if the text is too long."""
    if len(_text_of(error)) < MAX_LOGGED_CHARS:
        text = "".join(traceback.format_exception(error))[-MAX_LOGGED_CHARS:]
    else:
        text = "".join(traceback.format_tb(error.__traceback__))
    return text.encode(errors="backslashreplace").decode()


class CheckedEnv:
    """The environment of an episode: whatever goes wrong in it is an EnvError, and so is an answer that comes late."""

    def __init__(self, env: Env, *, timeout_s: float) -> None:
        self._env, self._timeout_s = env, timeout_s

    async def reset(self, task: Task) -> Observation:
        """Return the first observation. Raises EnvError if there is nothing to do."""
        observation = await answer(partial(self._env.reset, task), timeout_s=self._timeout_s)
        if observation.done or not observation.messages:
            raise EnvError("reset returned an observation that is done or has no messages")
        return observation

    async def step(self, action: str) -> Observation:
        """Do `action`. Raises EnvError."""
        return await answer(partial(self._env.step, action), timeout_s=self._timeout_s)

    def state_key(self) -> str:
        """Return the key of the state for the record: a long key is cut and ends with its digest. Raises EnvError."""
        with Boundary("state_key failed: "):
            key = self._env.state_key()
            if isinstance(key, str) and len(key) > MAX_OBSERVATION_CHARS:
                raise EnvError(f"it has {len(key)} characters, the limit is {MAX_OBSERVATION_CHARS}")
            key = valid_text(key)
            encoded = key.encode()
        if len(key) <= MAX_STATE_KEY:
            return key
        digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
        return f"{key[: MAX_STATE_KEY - len(digest) - 1]}~{digest}"

    async def admissible(self) -> list[str]:
        """Return the actions that are possible now, for `env.show_admissible`. Raises EnvError if there are none."""
        with Boundary():
            found = [valid_text(str(choice)) for choice in await ask(self._env, self._env.admissible) or ()]
        if not found:
            raise EnvError("`env.show_admissible` is on, but the environment does not list its actions")
        return found


def in_tokens(render: Callable[[tuple[Message, ...]], Rendered], messages: tuple[Message, ...]) -> Rendered:
    """Render an environment's messages with `render`, which is `Chat.open` or `Chat.extend`. Raises EnvError.

    A chat template may refuse a role, and a tokenizer refuses half a surrogate pair.
    """
    with Boundary("its messages cannot be turned into tokens: "):
        return render(messages)


def parsed(action_format: ActionFormat, completion: str) -> ParsedAction:
    """The action in `completion`. Raises EnvError if the format, which may be the user's own, fails."""
    with Boundary("`env.action_format` failed: "):
        action = action_format.parse(completion)
        if not isinstance(action, ParsedAction):
            raise EnvError(f"parse returned {_quoted(action)}, expected a ParsedAction")
        return action


def check_observation(observation: object) -> None:
    """Raise EnvError for a malformed observation: it would cause an error far from here."""
    if not isinstance(observation, Observation):
        raise EnvError(f"returned a {type(observation).__name__}, expected an Observation")
    _check_size(observation)
    for message in observation.messages:
        if not isinstance(message, Message) or not _is_text(message.role) or not isinstance(message.content, str):
            raise EnvError(f"returned {_quoted(message)} as a message, expected a Message of valid Unicode text")
    for name, reward in observation.rewards.items():
        if not _is_text(name):
            raise EnvError(f"named a reward {_quoted(name)}, expected valid Unicode text")
        if not _is_number(reward) or not abs(reward) <= MAX_REWARD:
            raise EnvError(
                f"returned reward {_quoted(name)} = {_quoted(reward)}, expected a number up to {MAX_REWARD:g}"
            )
    if not _is_number(observation.score) or not 0.0 <= observation.score <= 1.0:
        raise EnvError(f"returned score {_quoted(observation.score)}, expected a number in [0, 1]")
    for name, flag in (("success", observation.success), ("valid_action", observation.valid_action)):
        if not isinstance(flag, _FLAG):
            raise EnvError(f"returned {name} = {_quoted(flag)}, expected True or False")


def _check_size(observation: Observation) -> None:
    """Raise EnvError if the observation is larger than any model's context, before anything is copied."""
    if not isinstance(observation.messages, (tuple, list)):
        raise EnvError(f"returned {_quoted(observation.messages)} as messages, expected a tuple of Message")
    if not isinstance(observation.rewards, dict):
        raise EnvError(f"returned {_quoted(observation.rewards)} as rewards, expected a dict")
    if not isinstance(observation.columns, _MAPPING):
        raise EnvError(f"returned {_quoted(observation.columns)} as columns, expected a dict")
    if not isinstance(observation.tools, (tuple, list)) or not all(map(_is_tool, observation.tools)):
        raise EnvError("returned tools that are not functions in OpenAI's format, each with a name")
    num_texts = len(observation.tools) + len(observation.messages) + len(observation.rewards)
    if num_texts > MAX_OBSERVATION_TEXTS:
        raise EnvError(f"returned {num_texts} messages and rewards, the limit is {MAX_OBSERVATION_TEXTS}")
    texts = [
        text
        for message in observation.messages
        if isinstance(message, Message)
        for text in (message.role, message.content)
    ]
    num_chars = sum(len(text) for text in (*texts, *observation.rewards) if isinstance(text, str | bytes))
    if num_chars > MAX_OBSERVATION_CHARS:
        raise EnvError(
            f"returned {num_chars} characters, the limit of an observation is {MAX_OBSERVATION_CHARS}; make the "
            "environment cut its texts"
        )


def _quoted(thing: object) -> str:
    """A short description of any object."""
    if isinstance(thing, str | bytes):
        return repr(thing[:MAX_QUOTED_CHARS])
    if isinstance(thing, Message):
        return f"Message({_quoted(thing.role)}, {_quoted(thing.content)})"
    return repr(thing) if thing is None or isinstance(thing, Real) else f"a {type(thing).__name__}"


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _is_text(value: object) -> bool:
    """Whether it is valid Unicode text: half a surrogate pair can be neither sent nor tokenised."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value


def _is_number(value: object) -> bool:
    """Whether it is a number, of Python or numpy; a bool is not."""
    return isinstance(value, _REAL) and not isinstance(value, bool)
