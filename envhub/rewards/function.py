"""Reward functions of the user's: ours get a whole `Episode`, those of TRL and verl are called as they call them.

TRL's is `function(prompts, completions, completion_ids, **columns)`, with lists of one, and verl's is
`function(data_source, solution_str, ground_truth, extra_info)`. A function may be async. It returns one number, in a
list or not, or None where it does not apply; ours may also return one number for each turn.

A function that is not async runs in a process of its own (`function_worker.py`), in the main thread: timers by signals,
as in Math-Verify, work nowhere else.
"""

import atexit
import contextlib
import contextvars
import copy
import functools
import inspect
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from typing import Any

import msgspec

from slipstream.common.process.imported import imported
from slipstream.common.process.wire import MALFORMED
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.offspring import end_offspring_of
from slipstream.envhub.isolation.own_thread import in_own_thread
from slipstream.envhub.rewards.episode import Episode, Values
from slipstream.envhub.rewards.measures import Measure

OURS = "episode"  # a function with a parameter of this name gets an Episode
VERL = {"solution_str", "ground_truth"}, {"solution_strs", "ground_truths"}  # one of each, or lists of one
MADE_UP = "<think>\n1\n</think>\n<answer>\n1\n</answer>"  # the reply on which functions are rehearsed
SILENT_EPISODES = 64  # without a number, before a function is reported
MAX_WORKERS = 8  # processes of one function
POLL_S = 0.5  # between two looks at whether a call was given up

log = logging.getLogger(__name__)


# What goes to the process of a function: an episode, and whether its completions are chats. And what comes back; a text
# says why there is no number.
Call = tuple[Episode, bool]
Returned = float | list[float] | str | None


def function_measure(key: str, name: str) -> Measure:
    """Return the measure that calls `module:function`, the value of `key`. Raises ConfigError if it cannot."""
    function = imported(key, name, Callable)
    as_chat: bool | None = None  # the form of completions that it reads; None: that of the prompt
    has_completions = "completions" in inspect.signature(function).parameters
    num_silent = 0

    async def once(episode: Episode, *, as_chat: bool) -> Values:
        if inspect.iscoroutinefunction(function):
            try:
                result = await function(**arguments(function, episode, as_chat=as_chat))
            except SystemExit as error:  # which would end this process without a word
                raise EnvError(f"raised SystemExit: {error}") from error
            return numbers(result, num_turns=len(episode.turns))
        return await workers_of(name).call((episode, as_chat))

    async def reads(episode: Episode, *, as_chat: bool) -> bool:
        """Whether `function` takes a made-up reply in this form."""
        with contextlib.suppress(Exception):
            await once(made_up(episode), as_chat=as_chat)
            return True
        return False

    async def measure(episode: Episode) -> Values:
        nonlocal as_chat, num_silent
        is_chat = not isinstance(episode.columns.get("prompts"), str)
        try:
            found = await once(episode, as_chat=is_chat if as_chat is None else as_chat)
        except Exception:
            other = not is_chat
            if as_chat is not None or not has_completions or not await reads(episode, as_chat=other):
                raise
            if await reads(episode, as_chat=is_chat):  # then the reply was at fault, or whatever the function asks
                raise
            as_chat = other
            found = await once(episode, as_chat=as_chat)
        num_silent = -1 if found is not None or num_silent < 0 else num_silent + 1
        if num_silent == SILENT_EPISODES:
            log.warning(
                "FAULT: `%s` %s has given no number for any of %d episodes, only None; does it `return` the number?",
                key,
                name,
                num_silent,
            )
        return found

    return measure


def made_up(episode: Episode) -> Episode:
    turn = replace(episode.turns[-1], reply=MADE_UP, action=MADE_UP)
    messages = [*episode.prompt, {"role": "assistant", "content": MADE_UP}]
    return replace(episode, turns=[turn], messages=messages)


def check_call(key: str, name: str, columns: Mapping[str, Any]) -> None:
    """Raise ValueError if the function `name` would need an argument that no column gives."""
    function = imported(key, name, Callable)
    if _is_ours(function):
        return
    given = {"prompts": [], "completions": [], "completion_ids": []} | dict(columns)
    verl = _of_verl(function, columns, "")
    try:
        inspect.signature(function).bind(**_taken(function, given if verl is None else verl))
    except TypeError as error:
        raise ValueError(
            f"`{key}` {name!r} gets `episode`, or prompts, completions, completion_ids and the columns of the task "
            f"({', '.join(map(str, columns)) or 'it has none'}), or data_source, solution_str, ground_truth and "
            f"extra_info: {error}"
        ) from None


def arguments(function: Callable[..., Any], episode: Episode, *, as_chat: bool) -> dict[str, Any]:
    """Return what `function` is called with: an Episode, or what TRL or verl would pass for this episode."""
    if _is_ours(function):
        return {OURS: episode}
    # A function may change what it gets, and other episodes of the task have the same columns.
    columns = copy.deepcopy(dict(episode.columns))
    reply = "\n".join(turn.reply for turn in episode.turns)
    if (verl := _of_verl(function, columns, reply)) is not None:
        return _taken(function, verl)
    given: dict[str, Any] = {str(name): [value] for name, value in columns.items()}
    prompt = columns.get("prompts", episode.prompt)
    if isinstance(prompt, str) == as_chat:
        prompt = episode.prompt if as_chat else episode.prompt[-1]["content"]
    given["prompts"] = [prompt]
    given["completions"] = [episode.messages[len(episode.prompt) :] if as_chat else reply]
    given["completion_ids"] = [list(episode.completion_ids)]
    return _taken(function, given)


def _of_verl(function: Callable[..., Any], columns: Mapping[str, Any], reply: str) -> dict[str, Any] | None:
    """What verl would pass, one by one and as lists; None to a function that has another signature.

    The truth is the field `ground_truth` of `reward_model`, as in verl's files, or a column of this name, or `answer`.
    """
    if not any(names <= inspect.signature(function).parameters.keys() for names in VERL):
        return None
    given = {"data_source": columns.get("data_source", ""), "solution_str": reply}
    given["extra_info"] = columns.get("extra_info") or {}
    fields = columns.get("reward_model")
    known = {**columns, **(fields if isinstance(fields, Mapping) else {})}
    for name in ("answer", "ground_truth"):
        given |= {"ground_truth": known[name]} if name in known else {}
    return given | {f"{name}s": [value] for name, value in given.items()}


def numbers(result: Any, *, num_turns: int) -> float | list[float] | None:
    """Return the number or numbers in `result`. Raises EnvError unless they are finite and as many as expected."""
    found = result["score"] if isinstance(result, dict) and "score" in result else result  # verl's may have more
    found = found.tolist() if hasattr(found, "tolist") else found  # of NumPy or PyTorch
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if isinstance(found, list | tuple) and len(found) == num_turns:
        values = [value for value in map(_number, found) if value is not None]
        if len(values) == num_turns:
            return values
    elif found is None or _number(found) is not None:
        return _number(found)
    raise EnvError(
        f"must return one finite number (in a list or not), one for each of the {num_turns} turns, or None, got "
        f"{result!r}"[:500]
    )


def _is_ours(function: Callable[..., Any]) -> bool:
    return OURS in inspect.signature(function).parameters


def _taken(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that `function` takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


class Workers:
    """The processes of one function, each started when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_Worker] = []
        self._places = threading.Semaphore(MAX_WORKERS)
        atexit.register(self.end)

    async def call(self, call: Call) -> Values:
        """Return what the function gives. Raises EnvError if it fails. A call that is cancelled ends its process."""
        try:
            request = msgspec.msgpack.Encoder(decimal_format="number").encode(call)
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvError(f"a column of the task cannot be sent to the function's process: {error}") from error
        given_up = threading.Event()
        try:
            returned = await in_own_thread("a reward", partial(self._ask, request, given_up))
        finally:
            given_up.set()
        if isinstance(returned, str):
            raise EnvError(returned)
        return returned

    def _ask(self, request: bytes, given_up: threading.Event) -> Returned:
        with self._places:
            if given_up.is_set():
                raise EnvError("the call was given up")
            try:
                worker = self._idle.pop()
            except IndexError:  # in an empty context: a process belongs to no episode
                worker = contextvars.Context().run(_Worker, self._name)
            try:
                returned = worker.ask(request, given_up)
            except BaseException:
                worker.end()
                raise
            self._idle.append(worker)
            return returned

    def end(self) -> None:
        """End those that are idle."""
        while self._idle:
            self._idle.pop().end()


workers_of = functools.cache(Workers)  # by name: several parts may have one function


class _Worker:
    def __init__(self, name: str) -> None:
        self._connection, theirs = Pipe()
        program = [sys.executable, "-P", "-m", "slipstream.envhub.rewards.function_worker"]
        with theirs:
            self._process = subprocess.Popen(
                [*program, name, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def ask(self, request: bytes, given_up: threading.Event) -> Returned:
        """Raises EnvError if the process ends, or `given_up` is set before it has answered."""
        try:
            self._connection.send_bytes(request)
            while not self._connection.poll(POLL_S):
                if given_up.is_set():
                    raise EnvError("the call was given up")
            returned: Returned = msgspec.msgpack.decode(self._connection.recv_bytes(), type=Returned)
            return returned
        except (OSError, EOFError, *MALFORMED) as error:
            raise EnvError(f"the process of the function ended: {type(error).__name__} {error}") from error

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        end_offspring_of(self._process.pid)
        self._connection.close()


def _number(value: Any) -> float | None:
    """Return a finite number, or None."""
    try:
        number = math.nan if value is None or isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
