"""`make bench-data`: rows per second and peak memory of `slipstream data`, on as many rows as two published sets have.

The rows are made here, with random words, in the shapes and the numbers of AgentInstruct (1,866 rows,
https://huggingface.co/datasets/THUDM/AgentInstruct) and Agent-FLAN (34,442 rows,
https://huggingface.co/datasets/internlm/Agent-FLAN), at the mean length of AgentInstruct, 4.3 KB. Some are exact
repeats, some differ in a few words from an earlier row, and some cannot be read.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.benchmark import Row

NUM_INSTRUCT, NUM_FLAN = 1866, 34_442
NUM_REPEATS = 2
MEAN_REPLIES = 5
WORDS_OF_A_MESSAGE = 90
REPEATED, CHANGED, BROKEN = 0.02, 0.05, 0.005  # shares of the rows
OPTIONS = ("--near-duplicates=0.8", "--max-repetition=0.5", "--action-format=plain", "--held-out=0.05")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run over one file."""

    rows_per_s: float
    peak_mib: float


def main() -> int:
    """Measure, print, and write docs/benchmarks/data.json; return 0 if every goal holds."""
    measuring = benchmark.Run("data")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, tenth = folder / "whole.jsonl", folder / "tenth.jsonl"
        num_rows = write_rows(whole, num_instruct=NUM_INSTRUCT, num_flan=NUM_FLAN)
        num_of_tenth = write_rows(tenth, num_instruct=NUM_INSTRUCT // 10, num_flan=NUM_FLAN // 10)
        ours, copied, small = [], [], []
        for _ in range(NUM_REPEATS):
            ours.append(sifted(whole, num_rows))
            copied.append(copy_rate(whole, num_rows))
            small.append(sifted(tenth, num_of_tenth))
    rows = [
        Row.of(
            f"all filters over {num_rows:,} rows, beside parsing and writing the same JSON",
            [each.rows_per_s for each in ours],
            unit="rows/s",
            against=copied,
        ),
        Row.of(
            f"peak memory over {num_rows:,} rows, beside a tenth of them",
            [each.peak_mib for each in ours],
            unit="MiB",
            against=[each.peak_mib for each in small],
            goal="ratio <= 1.2",
        ),
    ]
    return measuring.end(rows, versions={})


def write_rows(path: Path, *, num_instruct: int, num_flan: int) -> int:
    """Write rows of both shapes; return their number."""
    with path.open("w") as file:  # in a stream: the peak memory of a process begins with that of its parent
        for number, shape in ((num_instruct, "instruct"), (num_flan, "flan")):
            file.writelines(line + "\n" for line in published_rows(number, shape=shape))
    return num_instruct + num_flan


def published_rows(number: int, *, shape: str) -> Iterator[str]:
    """Yield lines of JSON in the columns of AgentInstruct, `instruct`, or of Agent-FLAN, `flan`."""
    dice = random.Random(f"{shape}/{number}")
    names = {"instruct": ("from", "value", "human", "gpt"), "flan": ("role", "content", "user", "assistant")}
    role, content, asks, answers = names[shape]
    newest: list[list[str]] = [_texts(dice)]
    for index in range(number):
        texts, chance = _texts(dice), dice.random()
        if chance < REPEATED:
            texts = newest[-1]
        elif chance < REPEATED + CHANGED:
            texts = [*newest[-1][:-1], f"{newest[-1][-1]} {_words(dice, 5)}"]
        elif chance < REPEATED + CHANGED + BROKEN:
            texts = texts[:1]
        newest = [*newest[-50:], texts]
        messages: list[dict[str, Any]] = [
            {role: answers if place % 2 else asks, "loss": bool(place % 2 and place > 1), content: text}
            for place, text in enumerate(texts)
        ]
        column = "conversations" if shape == "instruct" else "conversation"
        line = json.dumps({"id": f"{shape}_{index}", column: messages})
        yield line if len(texts) > 1 else line[: len(line) // 2]


def _texts(dice: random.Random) -> list[str]:
    num_replies = max(2, round(dice.expovariate(1 / MEAN_REPLIES)))
    return [_words(dice, WORDS_OF_A_MESSAGE) for _ in range(2 * num_replies)]


def _words(dice: random.Random, number: int) -> str:
    """Random words; short numbers are frequent, as short words are."""
    return " ".join(f"w{int(dice.paretovariate(0.4)) % 50_000}" for _ in range(number))


def sifted(path: Path, num_rows: int) -> Measured:
    """Run `slipstream data` over `path` in a process of its own."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "slipstream.tools.cli.cli",
        "data",
        str(path.with_suffix(".out.jsonl")),
        "--force",
    ]
    started = time.perf_counter()
    process = subprocess.Popen(
        [*command, f"--data={path}", *OPTIONS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.stdout is not None
    print(process.stdout.read().decode().strip())
    if process.returncode:
        raise RuntimeError(f"`slipstream data` ended with code {process.returncode}")
    return Measured(rows_per_s=num_rows / seconds, peak_mib=usage.ru_maxrss / 1024)


def copy_rate(path: Path, num_rows: int) -> float:
    """Rows per second of a loop that only parses each line and writes it again."""
    started = time.perf_counter()
    with path.open() as rows, path.with_suffix(".copy").open("w") as copy:
        for line in rows:
            try:
                copy.write(json.dumps(json.loads(line)) + "\n")
            except ValueError:
                continue
    return num_rows / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
