"""The rows of a benchmark, each our number and its limit, and the files that they are written to.

A benchmark measures both sides of a row alternately in one run, so that other load on the machine affects both. A row
has medians over the repeats; the range of the ratio shows how reliable they are.
"""

import asyncio
import datetime
import gc
import os
import platform
import re
import statistics
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from slipstream.common.process.output import write_whole

DOCS = Path(__file__).resolve().parents[3] / "docs"
GOAL = re.compile(r"(ratio|value) (<=|>=) (\d+(?:\.\d+)?)")


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement and its limit."""

    name: str
    value: float  # the median of ours
    unit: str
    against: float  # the median of its limit, in the same unit
    ratio: float  # the median over the repeats of ours / against
    ratio_range: tuple[float, float]  # over the repeats
    num_repeats: int
    goal: str  # "ratio <= 1.02", "value <= 0.3"; empty for none
    holds: bool | None  # None without a goal

    @classmethod
    def of(cls, name: str, values: Sequence[float], *, unit: str, against: Sequence[float], goal: str = "") -> Self:
        """The row of paired repeats: `values[i]` and `against[i]` were measured one after the other."""
        ratios = [value / limit for value, limit in zip(values, against, strict=True)]
        value, ratio = statistics.median(values), statistics.median(ratios)
        return cls(
            name=name,
            value=value,
            unit=unit,
            against=statistics.median(against),
            ratio=ratio,
            ratio_range=(min(ratios), max(ratios)),
            num_repeats=len(ratios),
            goal=goal,
            holds=_holds(goal, value=value, ratio=ratio) if goal else None,
        )


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine of a benchmark, without names."""

    cpu: str
    num_cores: int
    memory_gib: float
    gpu: str  # empty for none
    versions: dict[str, str]
    load_before: float  # the load average of the minute before
    load_after: float  # the same at the end; what exceeds the benchmark's own load is from other processes


class Benchmark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of one benchmark, as it is stored in docs/benchmarks/NAME.json."""

    name: str
    date: str
    command: str
    machine: Machine
    wall_s: float
    rows: list[Row]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The time that a piece of work took."""

    wall_s: float
    cpu_s: float  # of this process, with all its threads


def cost_of(work: Coroutine[Any, Any, None]) -> Cost:
    """Run `work` to its end, and measure its cost."""
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    asyncio.run(work)
    return Cost(wall_s=time.perf_counter() - wall_s, cpu_s=time.process_time() - cpu_s)


def describe_machine(*, gpu: str, versions: dict[str, str], load_before: float) -> Machine:
    """Describe this machine at the end of a benchmark that began with the load average `load_before`."""
    return Machine(
        cpu=_cpu_model(),
        num_cores=os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpu=gpu,
        versions={"python": platform.python_version(), **versions},
        load_before=round(load_before, 2),
        load_after=round(os.getloadavg()[0], 2),
    )


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


class Run:
    """A benchmark in progress; its time counts from the constructor."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._load_before = os.getloadavg()[0]
        self._started = time.perf_counter()

    def end(self, rows: list[Row], *, gpu: str = "", versions: dict[str, str]) -> int:
        """Print the rows, and write them to docs/benchmarks; return 0 if every goal holds, else 1."""
        result = Benchmark(
            name=self._name,
            date=today(),
            command=f"make bench-{self._name}",
            machine=describe_machine(gpu=gpu, versions=versions, load_before=self._load_before),
            wall_s=round(time.perf_counter() - self._started, 1),
            rows=rows,
        )
        show(result)
        print(f"wrote {write(result)}")
        return 0 if all(row.holds in (True, None) for row in rows) else 1


def show(benchmark: Benchmark) -> None:
    table = Table(*_COLUMNS, title=benchmark.name, title_justify="left")
    for row in benchmark.rows:
        table.add_row(*_cells(row), style="" if row.holds in (True, None) else "red")
    Console().print(table)


def write(benchmark: Benchmark, docs: Path = DOCS) -> Path:
    """Write docs/benchmarks/NAME.json, and its table into docs/benchmarks.md; return the JSON file's path."""
    file = docs / "benchmarks" / f"{benchmark.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, msgspec.json.format(msgspec.json.encode(benchmark), indent=2).decode() + "\n")
    page = docs / "benchmarks.md"
    write_whole(page, with_table(page.read_text(), benchmark))
    return file


def read(name: str, docs: Path = DOCS) -> Benchmark:
    return msgspec.json.decode((docs / "benchmarks" / f"{name}.json").read_bytes(), type=Benchmark)


def with_table(page: str, benchmark: Benchmark) -> str:
    """Return `page` with the table of `benchmark` between its two marks. Raises ValueError if they are missing."""
    return with_text(page, benchmark.name, markdown(benchmark))


def with_text(page: str, name: str, text: str) -> str:
    """Return `page` with `text` between the two marks of `name`. Raises ValueError if they are missing."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have the lines {begin.strip()} and {end} exactly once each")
    before, rest = page.split(begin)
    return before + begin + text + end + rest.split(end)[1]


def markdown(benchmark: Benchmark) -> str:
    """The rows with a goal as a Markdown table, and where all rows are."""
    judged = [_judged_cells(row) for row in benchmark.rows if row.goal]
    lines = [_JUDGED_COLUMNS, ["---"] * len(_JUDGED_COLUMNS), *judged] if judged else []
    machine = benchmark.machine
    return (
        "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        + f"\n[All rows](benchmarks/{benchmark.name}.json): `{benchmark.command}`, {benchmark.date}, {machine.cpu}, "
        + f"{machine.num_cores} cores, {machine.gpu or 'no GPU'}.\n"
    )


_COLUMNS = ("what", "ours", "limit", "ratio: median (range; repeats)", "goal")
_JUDGED_COLUMNS = ("what", "ratio (range), or value", "goal")


def _cells(row: Row) -> list[str]:
    low, high = row.ratio_range
    ratio = f"{row.ratio:.3g} ({low:.3g}-{high:.3g}; {row.num_repeats})" if row.num_repeats > 1 else f"{row.ratio:.3g}"
    goal = f"{row.goal}, **missed**" if row.holds is False else row.goal
    return [row.name, _value(row), f"{row.against:.4g}", ratio, goal]


def _judged_cells(row: Row) -> list[str]:
    """The name, the number that the goal limits, and the limit."""
    what, _, limit = row.goal.partition(" ")
    low, high = row.ratio_range
    ratio = f"{row.ratio:.3g} ({low:.3g}-{high:.3g})" if row.num_repeats > 1 else f"{row.ratio:.3g}"
    number = ratio if what == "ratio" else _value(row)
    return [row.name, number, f"{limit}, **missed**" if row.holds is False else limit]


def _value(row: Row) -> str:
    return f"{row.value:.4g} {row.unit}".strip()


def _holds(goal: str, *, value: float, ratio: float) -> bool:
    match = GOAL.fullmatch(goal)
    if match is None:
        raise ValueError(f"a goal must look like `ratio <= 1.02` or `value >= 3`, got {goal!r}")
    measured, limit = {"ratio": ratio, "value": value}[match[1]], float(match[3])
    return measured <= limit if match[2] == "<=" else measured >= limit


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
