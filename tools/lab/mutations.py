"""Counts how many small faults the tests catch: `make mutations [OPTIONS="--num 200"]`.

It copies the repository, changes one operator or constant in the body of a function at a time, in Python or Lua, and
runs the tests of the file's room that execute the line, or all of the room's if only other processes execute it. A
fault is caught if they fail. If they take much longer than without it, they are late: caught on a quiet machine, and
beside other work no result. The same seed draws the same faults from the same files; with `--again BEFORE.jsonl` those
of another run are made again, where their line still is. A fault may change nothing that can be observed, so the share
that is caught compares two versions of the tests, and no more.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import coverage

REPOSITORY = Path(__file__).resolve().parents[2]
COPIED = ("actors", "common", "conf", "docs", "envhub", "learner", "replay", "src", "tests", "tools", "pyproject.toml")
Result = Literal["failed", "passed", "late", "absent"]
SLACK_S = 60.0  # beyond twice the time without a fault

# Files, and the tests that should notice a fault in them.
AREAS = {
    "ledger": (
        ("replay/buffer", "replay/buffer/lua", "replay/records"),
        ("tests/replay/buffer", "tests/replay/records", "tests/replay/fleet"),
    ),
    "loss": (
        ("learner/objective", "learner/step", "learner/credit"),
        ("tests/learner/objective", "tests/learner/step", "tests/learner/credit"),
    ),
    "packing": (("learner/batch",), ("tests/learner/batch",)),
    "checkpoint": (("learner/checkpoint",), ("tests/learner/checkpoint",)),
    "weights": (("common/transfer", "actors/weights"), ("tests/common/transfer", "tests/actors/weights")),
    "chat": (("common/text",), ("tests/common/text",)),
    "rewards": (("envhub/rewards",), ("tests/envhub/rewards",)),
}
IN_LUA = re.compile(r"(?<= )(<=|>=|==|~=|<|>|\+|-|and|or)(?= )|\b(\d+)\b")
SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+", "and": "or", "or": "and"}
SWAPPED_IN_LUA = SWAPPED | {"==": "~=", "~=": "=="}
SWAPPED |= {"==": "!=", "!=": "==", "*": "/", "/": "*"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of a file, before and after."""

    area: str
    file: str
    line: str
    changed: str


def faults_of(area: str, path: Path) -> Iterator[Fault]:
    """Every fault that can be made in a file, in lines that it has once."""
    text = path.read_text()
    lines = text.split("\n")
    if path.suffix == ".lua":
        changes = _changes_in_lua(lines)
    else:
        functions = (
            node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        nodes = {id(node): node for body in functions for part in body.body for node in ast.walk(part)}
        changes = chain.from_iterable(_changes(node, lines) for node in nodes.values())
    for row, start, stop, new in changes:
        line = lines[row]
        changed = f"{line[:start]}{new}{line[stop:]}"
        if changed != line and lines.count(line) == 1:
            yield Fault(area, str(path.relative_to(REPOSITORY)), line, changed)


def _changes_in_lua(lines: Sequence[str]) -> Iterator[tuple[int, int, int, str]]:
    for row, line in enumerate(lines):
        for found in IN_LUA.finditer(line.partition("--")[0]):
            sign, number = found.groups()
            yield row, found.start(), found.end(), SWAPPED_IN_LUA[sign] if sign else str(int(number) + 1)


def _changes(node: ast.AST, lines: Sequence[str]) -> Iterator[tuple[int, int, int, str]]:
    """Row, first and last column, and what comes there instead."""
    match node:
        case ast.Constant(value=bool(value)):
            yield node.lineno - 1, node.col_offset, node.end_col_offset or 0, repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node.lineno - 1, node.col_offset, node.end_col_offset or 0, repr(value + 1)
        case ast.Compare(left=left, ops=[_], comparators=[right]) | ast.BinOp(left=left, right=right):
            yield from _change_between(left, right, lines)
        case ast.BoolOp(values=[left, right, *_]):
            yield from _change_between(left, right, lines)


def _change_between(left: ast.expr, right: ast.expr, lines: Sequence[str]) -> Iterator[tuple[int, int, int, str]]:
    """The change of the operator between two expressions on one line."""
    line = lines[right.lineno - 1]
    if left.end_lineno != right.lineno or not line.isascii():
        return
    between = line[left.end_col_offset : right.col_offset]
    if (sign := between.strip("() ")) in SWAPPED:
        start = (left.end_col_offset or 0) + between.index(sign)
        yield right.lineno - 1, start, start + len(sign), SWAPPED[sign]


def drawn(num: int, seed: int) -> list[Fault]:
    """`num` faults, as many of each area."""
    dice, chosen = random.Random(seed), list[Fault]()
    for place, (area, (folders, _)) in enumerate(AREAS.items()):
        paths = sorted(path for folder in folders for path in (REPOSITORY / folder).glob("*.[pl][yu]*"))
        every = [fault for path in paths for fault in faults_of(area, path)]
        chosen += dice.sample(every, num // len(AREAS) + (place < num % len(AREAS)))
    return chosen


class Tests:
    """The tests of an area, in a copy of the repository that has no fault yet."""

    def __init__(self, area: str, copy: Path) -> None:
        self._copy, (folders, self._all) = copy, AREAS[area]
        started = time.monotonic()
        measured = [f"--cov={folder}" for folder in folders if not folder.endswith("lua")]
        if self._run([*self._all, *measured, "--cov-context=test", "--cov-report="], 7200.0) != "passed":
            raise SystemExit(f"the tests of {area} fail without a fault")
        self._limit_s = 2 * (time.monotonic() - started) + SLACK_S
        self._data = coverage.CoverageData(str(copy / ".coverage"))
        self._data.read()

    def result(self, fault: Fault) -> Result:
        """How they end with the fault; `absent` if its line is not there, or there more than once."""
        path = self._copy / fault.file
        lines = path.read_text().split("\n") if path.exists() else []
        if lines.count(fault.line) != 1:
            return "absent"
        number = lines.index(fault.line)
        tests = self._tests_of(path, number + 1) or self._all
        path.write_text("\n".join([*lines[:number], fault.changed, *lines[number + 1 :]]))
        try:
            return self._run(tests, self._limit_s)
        finally:
            path.write_text("\n".join(lines))

    def _tests_of(self, path: Path, line: int) -> list[str]:
        """The tests that execute a line in their own process. A statement of several lines is recorded at the first."""
        contexts = self._data.contexts_by_lineno(str(path))
        for recorded in range(line, line - 10, -1):
            if tests := {name.rpartition("|")[0] for name in contexts.get(recorded, ()) if name}:
                return sorted(tests)
        return []

    def _run(self, arguments: Sequence[str], limit_s: float) -> Result:
        named = self._copy / "tests_to_run.txt"
        named.write_text("\n".join(arguments))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"@{named}"]
        paths = f"{self._copy / 'src'}:{self._copy}"
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COVERAGE_FILE": ".coverage"}
        with subprocess.Popen(
            command,
            cwd=self._copy,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                return "failed" if process.wait(limit_s) else "passed"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return "late"


def main(arguments: Sequence[str]) -> None:
    """Make the faults one after another, and write a line for each; those that OUT has are not made again."""
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="the result of another run, whose faults are made again")
    options = parser.parse_args(arguments)
    if options.again:
        rows = [json.loads(line) for line in options.again.read_text().splitlines()]
        faults = [Fault(*(row[name] for name in Fault.__slots__)) for row in rows]
    else:
        faults = drawn(options.num, options.seed)
    done = len(options.out.read_text().splitlines()) if options.out.exists() else 0
    with tempfile.TemporaryDirectory() as folder, options.out.open("a") as out:
        copy, tests = Path(folder).resolve(), dict[str, Tests]()
        for name in COPIED:
            if (REPOSITORY / name).is_dir():
                shutil.copytree(REPOSITORY / name, copy / name, symlinks=True)
            else:
                shutil.copyfile(REPOSITORY / name, copy / name)
        for number, fault in enumerate(faults[done:], start=done + 1):
            if fault.area not in tests:
                tests[fault.area] = Tests(fault.area, copy)
            result = tests[fault.area].result(fault)
            out.write(json.dumps(asdict(fault) | {"tests": result}) + "\n")
            out.flush()
            print(f"{number} of {len(faults)}: {fault.area}, {fault.file}: {result}", flush=True)
    results = [json.loads(line) for line in options.out.read_text().splitlines()]
    for area in AREAS:
        print(area, dict(Counter(row["tests"] for row in results if row["area"] == area)))


if __name__ == "__main__":
    main(sys.argv[1:])
