"""Marks the rows of `slipstream data` by a judge, whose answers are kept in a journal beside the result.

Each is appended at once, with what was spent until then. So the same command continues after a failure: it asks nothing
again, and its budget is not new.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.long_work import LongWork, report_on_stderr
from slipstream.common.process.output import appended
from slipstream.common.process.wire import MALFORMED
from slipstream.common.process.yaml_file import read_yaml
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.chat_client import ACTORS
from slipstream.envhub.rewards.episode import Episode
from slipstream.envhub.rewards.judge import Judge
from slipstream.envhub.rewards.part import check_keys, judge_of, parts_of

MAX_OPEN = 256  # rows that are judged at a time; `max_concurrent` of a judge limits the requests
# What may change without asking again.
LIMITS = {
    *("max_concurrent", "timeout_s", "deadline_s", "max_requests", "max_total_tokens", "max_cost"),
    *("input_price", "output_price", "key_env", "key_file"),
}
NOT_HERE = {"weight", "min", "max", "only_if", "success_from", "compare"}  # keys of a part of a reward


@dataclass(frozen=True, kw_only=True, slots=True)
class RowJudge:
    judge: Judge
    name: str  # that its file gives it
    key: str  # in its file
    settings: str  # what its marks depend on


def read_judge(path: Path) -> RowJudge:
    """Read the file of `--judge`: one name, with the settings of a judge. Raises ConfigError."""
    found = read_yaml(path, "`--judge` ")
    if not isinstance(found, dict) or len(found) != 1:
        raise ConfigError(f"`--judge` {path} must have one name with a judge's settings, as in docs/data.md")
    ((name, settings),) = found.items()
    if isinstance(settings, dict) and settings.keys() & NOT_HERE:
        wrong = ", ".join(sorted(settings.keys() & NOT_HERE))
        raise ConfigError(f"`{path}.{name}` has {wrong}, which are for rewards; leave them out")
    (part,) = parts_of(str(path), found)
    if (judge := judge_of(part)) is None:
        raise ConfigError(f"`{path}.{name}.part` must be judge, got {part.kind!r}; the other parts mark no rows")
    if judge.is_own:
        raise ConfigError(f"`{path}.{name}.url` must be a server's, got {ACTORS!r}: rows are judged without a run")
    check_keys({"": [part]})
    asked = {str(key): value for key, value in settings.items() if key not in (*LIMITS, "rubric")}
    depends_on = json.dumps([asked, repr(judge.rubric)], sort_keys=True, default=str)
    return RowJudge(judge=judge, name=part.name, key=part.key, settings=depends_on)


def judged(rows: BinaryIO, judge: RowJudge, journal: Path) -> list[dict[str, float]]:
    """The marks of each row of the file `rows`, in order. Raises ConfigError if the judge fails or its budget ends.

    In memory are a mark for each row, and the rows that are being judged.
    """
    rows.seek(0)
    marks: list[dict[str, float]] = [{} for _ in rows]
    rows.seek(0)
    try:
        with appended(journal) as written:
            work = _Work(judge=judge, known=_known(written, journal, judge), journal=written, marks=marks)
            asyncio.run(work.all(enumerate(rows)))
    except EnvError as error:
        raise ConfigError(
            f"the judge `{judge.key}` failed: {error}; {sum(map(bool, marks))} of {len(marks)} rows are marked in "
            f"{journal}, and the same command asks for the others"
        ) from None
    return marks


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the journal: the marks of a row, and what was spent until then."""

    asked: str  # the digest of what the judge was shown, and of how it was asked
    marks: dict[str, float]  # by name
    spent: tuple[int, int, float]  # requests, tokens, money


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    judge: RowJudge
    known: dict[str, dict[str, float]]  # by what was asked
    journal: BinaryIO
    marks: list[dict[str, float]]  # of each row

    async def all(self, rows: Iterator[tuple[int, bytes]]) -> None:
        """Set the marks of the rows, given with their numbers. Raises EnvError."""
        progress = LongWork("rows that are judged", len(self.marks), report=report_on_stderr)

        async def worker() -> None:
            for numbered in rows:  # all workers share them
                await self.one(numbered)
                progress.done()

        await asyncio.gather(*(worker() for _ in range(MAX_OPEN)))  # after an error, `run` cancels the others

    async def one(self, numbered: tuple[int, bytes]) -> None:
        """Set the marks of one row. Raises EnvError."""
        number, line = numbered
        row = json.loads(line)
        messages = [{"role": each["role"], "content": each["content"]} for each in row["messages"]]
        text = json.dumps([self.judge.settings, messages, row["columns"]], sort_keys=True)
        asked = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        if asked not in self.known:
            judge = self.judge.judge
            self.known[asked] = {self.judge.name: (await judge(_episode(messages, row["columns"]))).value}
            client = judge.client
            spent = (client.num_requests, client.num_tokens, client.cost)
            entry = _Entry(asked=asked, marks=self.known[asked], spent=spent)
            self.journal.write(msgspec.json.encode(entry) + b"\n")
            self.journal.flush()
        self.marks[number] = self.known[asked]


def _known(file: BinaryIO, journal: Path, judge: RowJudge) -> dict[str, dict[str, float]]:
    """The journal's marks under the judge's name, by what was asked; sets what it has spent. Raises ConfigError."""
    known = {}
    for entry in _entries_of(file, journal):
        if judge.name in entry.marks:
            known[entry.asked] = entry.marks
        client, (requests, tokens, cost) = judge.judge.client, entry.spent
        client.num_requests, client.num_tokens = max(client.num_requests, requests), max(client.num_tokens, tokens)
        client.cost = max(client.cost, cost)
    return known


def _entries_of(file: BinaryIO, path: Path) -> Iterator[_Entry]:
    """Yield each entry of the journal in `file`. Raises ConfigError for a damaged line.

    A last line that was cut off, as the process was killed, is removed.
    """
    file.seek(0)
    start = 0
    for number, line in enumerate(iter(file.readline, b""), start=1):
        if not line.endswith(b"\n"):
            file.truncate(start)
            break
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except MALFORMED as error:
            raise ConfigError(f"{path}, line {number} is damaged: {error}; remove the line") from None
        yield entry
        start += len(line)


def _episode(messages: list[dict[str, str]], columns: dict[str, Any]) -> Episode:
    """A row as a judge of episodes gets it."""
    return Episode(
        task=Task(env="data", split="train", index=0),
        columns=columns,
        prompt=[],
        messages=messages,
        ending=[],
        turns=[],
        max_turns=0,
        score=0.0,
        success=False,
        stop_reason="done",
        completion_ids=[],
    )
