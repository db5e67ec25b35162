"""Marks the rows of `slipstream data` by a judge: each row by itself, or the rows of a task against each other."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import appended
from slipstream.common.process.yaml_file import read_yaml
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.chat_client import ACTORS
from slipstream.envhub.rewards.episode import Episode, Marked
from slipstream.envhub.rewards.judge import Judge
from slipstream.envhub.rewards.panel import Panel
from slipstream.envhub.rewards.part import Part, check_keys, parts_of
from slipstream.envhub.rewards.sibling_judge import GroupJudge, Shown
from slipstream.tools.data.answer_journal import Entry, append_entry, ask_for_all, entries_of

MAX_OPEN = 256  # rows or tasks that are judged at a time; `max_concurrent` of a judge limits the requests
MAX_COMPARED = 64  # rows of a task
# What may change without asking again.
LIMITS = {
    *("max_concurrent", "timeout_s", "deadline_s", "max_requests", "max_total_tokens", "max_cost"),
    *("input_price", "output_price", "cache_size", "key_env", "key_file"),
}
NOT_HERE = {"weight", "min", "max", "only_if", "success_from"}  # keys of a part of a reward


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
    marks: list[dict[str, float]] = [{}] * len(offsets)
    try:
        with waiting.open("rb") as file, appended(journal) as written:
            work = _Work(judge=judge, known=_known(written, journal, judge), journal=written, marks=marks)
            ask_for_all(
                _units(file, offsets, together),
                work.one,
                at_once=MAX_OPEN,
                progress=lambda: f"{sum(map(bool, marks))} of {len(marks)} rows are judged",
            )
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

    async def one(self, unit: tuple[list[int], list[Shown]]) -> None:
        """Set the marks of rows that are shown together, given with their numbers. Raises EnvError."""
        numbers, rows = unit
        text = json.dumps([self.judge.settings, [[row.conversation, row.columns] for row in rows]], sort_keys=True)
        asked = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        if asked not in self.known:
            self.known[asked] = await self.judge.marks(rows)
            clients = {name: each.client for name, each in self.judge.judges.items()}
            spent = {name: (each.num_requests, each.num_tokens, each.cost) for name, each in clients.items()}
            append_entry(self.journal, Entry(asked=asked, marks=self.known[asked], spent=spent))
        for number, mark in zip(numbers, self.known[asked], strict=True):
            self.marks[number] = mark


def _known(file: BinaryIO, journal: Path, judge: RowJudge) -> dict[str, list[dict[str, float]]]:
    """What the journal has under the judge's name, by what was asked. The judges then have spent what the journal says.

    Raises ConfigError if it is damaged.
    """
    known = {}
    for entry in entries_of(file, journal):
        if all(judge.part.name in mark for mark in entry.marks):
            known[entry.asked] = entry.marks
        for name in judge.judges.keys() & entry.spent.keys():
            client, (requests, tokens, cost) = judge.judges[name].client, entry.spent[name]
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
