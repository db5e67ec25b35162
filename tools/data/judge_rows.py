"""Marks the rows of `slipstream data` by a judge: each row by itself, or the rows of a task against each other.

The answers of a judge are appended to a journal beside the result at once, with what they cost. So the same command
continues after a failure: it asks nothing again, and its budget is not new.
"""

import asyncio
import hashlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import appended
from slipstream.common.process.wire import MALFORMED
from slipstream.common.process.yaml_file import read_yaml
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.chat_client import ACTORS
from slipstream.envhub.rewards.episode import Episode, Marked
from slipstream.envhub.rewards.judge import Judge
from slipstream.envhub.rewards.panel import Panel
from slipstream.envhub.rewards.part import Part, check_keys, parts_of
from slipstream.envhub.rewards.sibling_judge import GroupJudge, Shown

MAX_OPEN = 256  # rows or tasks that are judged at a time; `max_concurrent` of a judge limits the requests
MAX_COMPARED = 64  # rows of a task
PROGRESS_S = 5.0
# What may change without asking again.
LIMITS = {
    *("max_concurrent", "timeout_s", "deadline_s", "max_requests", "max_total_tokens", "max_cost"),
    *("input_price", "output_price", "cache_size", "key_env", "key_file"),
}
NOT_HERE = {"weight", "min", "max", "only_if", "success_from"}  # keys of a part of a reward


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the journal: the marks of the rows that were shown together, and what was spent until then."""

    asked: str  # the digest of what the judge was shown, and of how it was asked
    marks: list[dict[str, float]]  # by name, of each row
    spent: dict[str, tuple[int, int, float]]  # of each judge: requests, tokens, money


@dataclass(frozen=True, kw_only=True, slots=True)
class RowJudge:
    """A judge of rows, by the name that its file gives it."""

    part: Part
    settings: str  # what its marks depend on

    @property
    def judges(self) -> Mapping[str, Judge]:
        """The judges that it asks, by name; one without a panel."""
        measure = self.part.measure
        if isinstance(measure, Panel | GroupJudge):
            return measure.judges
        assert isinstance(measure, Judge)
        return {"": measure}

    @property
    def columns(self) -> list[str]:
        """The columns that a judge sees beside the conversation."""
        return sorted({name for judge in self.judges.values() for name in judge.columns})

    @property
    def compares(self) -> bool:
        """Whether it is shown the rows of a task together."""
        return isinstance(self.part.measure, GroupJudge)

    async def marks(self, rows: Sequence[Shown]) -> list[dict[str, float]]:
        """The marks of rows that are shown together. Raises EnvError without any."""
        name, measure = self.part.name, self.part.measure
        if isinstance(measure, GroupJudge):
            found = await measure(rows)
        else:
            values = [await measure(_episode(row)) for row in rows]
            found = [
                value if isinstance(value, Marked) else Marked(value=_number(value), beside={}) for value in values
            ]
        return [{name: each.value} | {f"{name}_{key}": mark for key, mark in each.beside.items()} for each in found]


def read_judge(path: Path) -> RowJudge:
    """Read the file of `--judge`: one name, with the settings of a judge or a panel. Raises ConfigError."""
    found = read_yaml(path, "`--judge` ")
    if not isinstance(found, dict) or len(found) != 1:
        raise ConfigError(f"`--judge` {path} must have one name with a judge's settings, as in docs/data.md")
    ((name, settings),) = found.items()
    if isinstance(settings, dict) and settings.keys() & NOT_HERE:
        wrong = ", ".join(sorted(settings.keys() & NOT_HERE))
        raise ConfigError(f"`{path}.{name}` has {wrong}, which are for rewards; leave them out")
    (part,) = parts_of(str(path), found)
    if part.kind not in ("judge", "panel"):
        raise ConfigError(
            f"`{path}.{name}.part` must be judge or panel, got {part.kind!r}; the other parts mark no rows"
        )
    judge = RowJudge(part=part, settings="")
    if any(each.client.url == ACTORS for each in judge.judges.values()):
        raise ConfigError(f"`{path}.{name}.url` must be a server's, got {ACTORS!r}: rows are judged without a run")
    check_keys({"": [part]}, of_groups=judge.compares)
    rubrics = {key: repr(each.rubric) for key, each in judge.judges.items()}
    return RowJudge(part=part, settings=json.dumps([_without_limits(settings), rubrics], sort_keys=True, default=str))


def _without_limits(settings: object) -> object:
    if not isinstance(settings, dict):
        return settings
    return {str(key): _without_limits(value) for key, value in settings.items() if key not in (*LIMITS, "rubric")}


def judged(waiting: Path, judge: RowJudge, journal: Path) -> list[dict[str, float]]:
    """The marks of each row of the file `waiting`, in order. Raises ConfigError if the judge fails or its budget ends.

    In memory are a mark and a place for each row, and the rows that are being judged.
    """
    offsets, together = _index(waiting, by_task=judge.compares)
    known = _known(journal, judge)
    marks: list[dict[str, float]] = [{}] * len(offsets)
    try:
        with waiting.open("rb") as file, appended(journal) as written:
            work = _Work(judge=judge, known=known, journal=written, marks=marks)
            asyncio.run(work.all_of(_units(file, offsets, together)))
    except EnvError as error:
        raise ConfigError(
            f"the judge `{judge.part.key}` failed: {error}; {sum(map(bool, marks))} of {len(marks)} rows are marked in "
            f"{journal}, and the same command continues there"
        ) from None
    return marks


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    judge: RowJudge
    known: dict[str, list[dict[str, float]]]  # by what was asked
    journal: BinaryIO
    marks: list[dict[str, float]]  # of each row

    async def all_of(self, units: Iterator[tuple[list[int], list[Shown]]]) -> None:
        """Judge all units, several at a time. Raises EnvError of the first that fails; the others then end."""
        running, shown_at = set[asyncio.Task[None]](), time.monotonic()
        try:
            for numbers, rows in units:
                running.add(asyncio.create_task(self._one(numbers, rows)))
                if len(running) >= MAX_OPEN:
                    running = await self._some(running)
                if time.monotonic() - shown_at > PROGRESS_S:
                    shown_at = time.monotonic()
                    print(
                        f"{sum(map(bool, self.marks))} of {len(self.marks)} rows are judged",
                        file=sys.stderr,
                        flush=True,
                    )
            while running:
                running = await self._some(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _some(self, running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        done, others = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return others

    async def _one(self, numbers: Sequence[int], rows: Sequence[Shown]) -> None:
        shown = json.dumps([self.judge.settings, [[row.conversation, row.columns] for row in rows]], sort_keys=True)
        asked = hashlib.blake2b(shown.encode(), digest_size=16).hexdigest()
        if asked not in self.known:
            found = await self.judge.marks(rows)
            self.known[asked] = found
            entry = Entry(asked=asked, marks=found, spent=_spent(self.judge))
            self.journal.write(msgspec.json.encode(entry) + b"\n")
            self.journal.flush()
        for number, mark in zip(numbers, self.known[asked], strict=True):
            self.marks[number] = mark


def _spent(judge: RowJudge) -> dict[str, tuple[int, int, float]]:
    return {
        name: (each.client.num_requests, each.client.num_tokens, each.client.cost)
        for name, each in judge.judges.items()
    }


def _known(journal: Path, judge: RowJudge) -> dict[str, list[dict[str, float]]]:
    """What the journal has under the judge's name, by what was asked. The judges then have spent what the journal says.

    The last line may be cut off, if the process was killed; such a line is not used. Raises ConfigError for others.
    """
    lines = journal.read_bytes().splitlines(keepends=True) if journal.exists() else []
    known = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except MALFORMED as error:
            if number == len(lines) and not line.endswith(b"\n"):
                with journal.open("rb+") as file:
                    file.truncate(sum(map(len, lines[:-1])))
                break
            raise ConfigError(f"{journal}, line {number} is damaged: {error}; remove the line") from None
        if all(judge.part.name in mark for mark in entry.marks):
            known[entry.asked] = entry.marks
        for name, each in judge.judges.items():
            client, (requests, tokens, cost) = each.client, entry.spent.get(name, (0, 0, 0.0))
            client.num_requests, client.num_tokens = max(client.num_requests, requests), max(client.num_tokens, tokens)
            client.cost = max(client.cost, cost)
    return known


def _index(waiting: Path, *, by_task: bool) -> tuple[list[int], list[list[int]]]:
    """Where each row begins in the file, and the numbers of the rows that are shown together. Raises ConfigError."""
    offsets, together = list[int](), dict[object, list[int]]()
    with waiting.open("rb") as file:
        while line := file.readline():
            offsets.append(file.tell() - len(line))
            number = len(offsets) - 1
            together.setdefault(json.loads(line)["task"] if by_task else number, []).append(number)
    for task, numbers in together.items():
        if len(numbers) > MAX_COMPARED:
            raise ConfigError(
                f"`compare`: task {task} has {len(numbers)} rows, the limit is {MAX_COMPARED}; leave compare out, or "
                "filter the rows"
            )
    return offsets, list(together.values())


def _units(
    file: Any, offsets: Sequence[int], together: Sequence[Sequence[int]]
) -> Iterator[tuple[list[int], list[Shown]]]:
    """Yield the rows that are shown together, with their numbers. Raises ConfigError if their columns differ."""
    for numbers in together:
        rows = []
        for number in numbers:
            file.seek(offsets[number])
            row = json.loads(file.readline())
            conversation = [{"role": each["role"], "content": each["content"]} for each in row["messages"]]
            rows.append(Shown(conversation=conversation, columns=row["columns"]))
            if differing := [name for name, value in row["columns"].items() if value != rows[0].columns[name]]:
                raise ConfigError(
                    f"`compare`: the rows of task {row['task']} differ in {', '.join(differing)}, and a judge that "
                    "compares them is shown one value; remove it from `columns`, or leave compare out"
                )
        yield list(numbers), rows


def _episode(row: Shown) -> Episode:
    """A row as a judge of episodes gets it."""
    return Episode(
        task=Task(env="data", split="train", index=0),
        columns=row.columns,
        prompt=[],
        messages=row.conversation,
        ending=[],
        turns=[],
        max_turns=0,
        score=0.0,
        success=False,
        stop_reason="done",
        completion_ids=[],
    )


def _number(value: Any) -> float:
    assert isinstance(value, float), "a judge gives one number"
    return value


def agreement(marks: Sequence[Mapping[str, float]], successes: Sequence[bool | None], *, name: str) -> list[str]:
    """Lines for the data card: the marks, how far the judges agree, and how far the marks agree with `success`."""
    values = [mark[name] for mark in marks]
    tenths = Counter(min(int(10 * value), 9) for value in values)
    lines = [
        f"- {len(values):,} rows have a mark `{name}`: mean {statistics.fmean(values):.3f}",
        "- in tenths: " + ", ".join(f"{tenth / 10:g}: {tenths[tenth]:,}" for tenth in sorted(tenths)),
    ]
    beside = sorted({key for mark in marks for key in mark if key != name and key != f"{name}_agreement"})
    for at, one in enumerate(beside):
        for other in beside[at + 1 :]:
            pairs = [(mark[one], mark[other]) for mark in marks]
            apart = statistics.fmean(abs(first - second) for first, second in pairs)
            lines.append(f"- `{one}` and `{other}`: mean difference {apart:.3f}, correlation {_correlation(pairs)}")
    won = [value for value, success in zip(values, successes, strict=True) if success is True]
    lost = [value for value, success in zip(values, successes, strict=True) if success is False]
    if won and lost:
        lines.append(
            f"- a success has a higher mark than a failure with probability {_above(won, lost):.3f} (ties are half), "
            f"over {len(won):,} successes and {len(lost):,} failures"
        )
    return lines


def _correlation(pairs: Sequence[tuple[float, float]]) -> str:
    firsts, seconds = zip(*pairs, strict=True)
    if len(set(firsts)) < 2 or len(set(seconds)) < 2:
        return "unknown, as one of them gives equal marks"
    return f"{statistics.correlation(firsts, seconds):.3f}"


def _above(won: Sequence[float], lost: Sequence[float]) -> float:
    """The probability that one of `won` is above one of `lost`. Of (1, 2) and (1,): 0.75."""
    numbers_lost, below, total = Counter(lost), 0, 0.0
    levels = {}
    for value in sorted({*won, *lost}):
        levels[value] = below + numbers_lost[value] / 2
        below += numbers_lost[value]
    for value in won:
        total += levels[value]
    return total / (len(won) * len(lost))
