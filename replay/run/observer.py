"""Reads the facts about a run that a diagnosis is made from, out of its Redis."""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import redis

from slipstream.common.config.config import Config
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet, RunState, UnknownRun
from slipstream.replay.fleet.roles import STREAMS
from slipstream.replay.records.failures import read_failures
from slipstream.replay.records.keys import key
from slipstream.replay.records.ledger import Ledger, read_ledger, total
from slipstream.replay.run.diagnosis import NUM_STEPS, Facts, is_error

WINDOW_S = 60.0  # what happened before is no longer judged
TAIL_BYTES = 1 << 16  # of a log, enough for its last error, also where a traceback of vLLM follows
WITH_WORDS = (None, RunState.STARTING, RunState.FAILED)  # in these states only the learner's log says more
READING_S = 2.0  # between two ledgers that are kept
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (INFO )?")  # of a line of our logs
_BAR = re.compile(r"\d+%\|")  # of tqdm


class Observer:
    """Reads a run again and again, and remembers the ledger of the last minute."""

    def __init__(
        self,
        client: redis.Redis,
        config: Config,
        *,
        log: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log` is the learner's, if this machine has it."""
        self._clock = clock
        self._log = log
        self._client = client
        self._config = config
        self._fleet = Fleet(client, config.run.name)
        self._bulletin = Bulletin(client, config.run.name)
        self._readings = deque[tuple[float, Ledger]]()
        self._streams: tuple[str, ...] = ()
        self._has_seen_actors = False

    def facts(self, steps: Sequence[Mapping[str, float]]) -> Facts:
        """The facts as they are now; `steps` are the records of the run's optimizer steps."""
        state = self._state()
        streams = STREAMS if state is RunState.STARTING else ("train",)  # the first evaluation comes before any step
        if streams != self._streams:
            self._readings.clear()
            self._streams = streams
        run_id = self._config.run.name
        ledger = total(read_ledger(self._client, run_id, stream=stream) for stream in streams)
        failures = [
            failure for stream in reversed(streams) for failure in read_failures(self._client, key(run_id, stream))
        ]
        census = self._fleet.census()
        self._has_seen_actors |= bool(census.alive)
        return Facts(
            config=self._config,
            state=state,
            census=census,
            ledger=ledger,
            earlier=self._earlier(ledger),
            failures=failures,
            steps=steps[-NUM_STEPS:],
            newest_version=self._bulletin.highest_version(),
            now_s=time.time(),
            last_words=last_line(self._log) if self._log and state in WITH_WORDS else "",
            actor_words="" if census.alive or not self._log else self._actor_words(self._log.parent),
            has_seen_actors=self._has_seen_actors,
        )

    def published_steps(self) -> list[dict[str, float]]:
        """The record of the newest step, for a machine without the run's directory; empty before the first."""
        newest = self._fleet.newest_step()
        return [newest] if newest else []

    def _state(self) -> RunState | None:
        try:
            return self._fleet.run_state()
        except UnknownRun:
            return None

    def _actor_words(self, logs: Path) -> str:
        """The last line of the actor's log that was written last; its last error if actors were alive or failed."""
        newest = max(logs.glob("actor-*.log"), key=lambda log: log.stat().st_mtime, default=None)
        if newest is None:
            return ""
        line = last_line(newest)
        return last_error(newest) if self._has_seen_actors or is_error(line) else line

    def _earlier(self, ledger: Ledger) -> Ledger | None:
        """The oldest ledger of the last minute; None at the first reading."""
        now = self._clock()
        while self._readings and now - self._readings[0][0] > WINDOW_S:
            self._readings.popleft()
        earlier = self._readings[0][1] if self._readings else None
        if not self._readings or now - self._readings[-1][0] > READING_S:
            self._readings.append((now, ledger))
        return earlier


def last_error(log: Path) -> str:
    """The last error in a process's log that is not about another process; the last line if there is none."""
    found = [line for line in _tail(log) if is_error(line) and "EngineDied" not in line]
    return (found or _tail(log) or [""])[-1]


def last_line(log: Path) -> str:
    """The last line of a process's log; empty if it cannot be read."""
    return (_tail(log) or [""])[-1]


def _tail(log: Path) -> list[str]:
    """The last lines without their times, and without bars of progress."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return []
    return [_TIME.sub("", line) for line in lines if not _BAR.search(line)]
