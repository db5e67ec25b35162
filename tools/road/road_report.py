"""What the stages of a road have brought: records in `road.json`, and the summary in the terminal and in `road.md`."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.headline import wilson
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import write_json, write_whole
from slipstream.tools.road.road_file import Road, Stage
from slipstream.tools.terminal.table import print_rows

COLUMNS = ("stage", "kind", "held-out success", "gain", "greedy", "time", "tokens played", "tokens trained", "note")


class Success(msgspec.Struct, frozen=True):
    """How many of the held-out tasks a model solved, over all environments."""

    solved: int
    num_tasks: int

    @property
    def rate(self) -> float:
        return self.solved / self.num_tasks

    def __str__(self) -> str:
        low, high = wilson(self.rate, self.num_tasks)
        return f"{self.rate:.1%} ({low:.0%} to {high:.0%})"


class Evaluation(msgspec.Struct, frozen=True):
    """The held-out success of one model."""

    sampled: Success
    greedy: Success


class Done(msgspec.Struct):
    """What is known of a stage that has begun."""

    kind: str
    options: list[str]
    finished: bool = False
    seconds: float = 0.0  # without its evaluation; what a killed process took is not in it
    tokens_played: int = 0  # of episodes, prompts included
    tokens_trained: int = 0
    note: str = ""
    model: str = ""  # the folder, if the stage trained one
    evaluation: Evaluation | None = None


class Records(msgspec.Struct):
    """The stages of a road by name, in the order in which they began."""

    stages: dict[str, Done] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the files of a finished stage say about it."""

    played: int
    trained: int
    note: str


def load_records(folder: Path) -> Records:
    """The records of a road, empty if it has not begun. Raises ConfigError if they are damaged."""
    path = folder / "road.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Records) if path.exists() else Records()
    except (msgspec.MsgspecError, OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}; restore it from a copy, or choose another `run.name`") from None


def save_records(folder: Path, records: Records) -> None:
    write_json(folder / "road.json", msgspec.to_builtins(records))


def evaluation_of(output: Path) -> Evaluation:
    """The result that `slipstream eval` printed, summed over environments."""
    rows = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
    return Evaluation(sampled=_success(rows, "sampled"), greedy=_success(rows, "greedy"))


def _success(rows: Iterable[dict[str, float | str]], how: str) -> Success:
    chosen = [row for row in rows if row["sampling"] == how]
    return Success(
        solved=round(sum(float(row["success"]) * float(row["num_tasks"]) for row in chosen)),
        num_tasks=round(sum(float(row["num_tasks"]) for row in chosen)),
    )


def outcome_of(stage: Stage) -> Outcome:
    """Tokens and a note, from the rows, metrics and summary of a finished stage."""
    played, trained, notes = 0, 0, []
    if stage.collect is not None:
        played, note = _collected(stage.rows)
        notes.append(note)
    if stage.fit is not None:
        fitted = read_metrics(stage.run_dir.metrics)
        trained = round(sum(record.get("fit/tokens", 0.0) for record in fitted))
        notes += _fitted(fitted)
    if stage.kind == "rl":
        cost = json.loads(stage.run_dir.summary.read_text())["cost"]
        trained = cost["tokens_trained"]
        played = trained + sum(cost["wasted_tokens"].values())
        notes.append(f"{stage.config.learner.steps} steps")
    return Outcome(played=played, trained=trained, note=", ".join(notes))


def _collected(path: Path) -> tuple[int, str]:
    num_rows, num_good, num_tokens = 0, 0, 0
    with path.open() as rows:
        for row in map(json.loads, rows):
            num_rows, num_good, num_tokens = num_rows + 1, num_good + row["success"], num_tokens + row["num_tokens"]
    return num_tokens, f"{num_good} successes in {num_rows} episodes"


def _fitted(records: list[dict[str, float]]) -> list[str]:
    """The held-out loss, and the accuracy of preferences, before the first step and after the last."""
    measured = [record for record in records if "fit/held_out_loss" in record]
    if not measured:
        return []
    first, last = measured[0], measured[-1]
    name = "accuracy" if "fit/held_out_accuracy" in last else "loss"
    return [f"held-out {name} {first[f'fit/held_out_{name}']:.2f} to {last[f'fit/held_out_{name}']:.2f}"]


def gain(before: Success, after: Success) -> tuple[float, float, float]:
    """The difference of two success rates, and its 95 % interval by Newcombe's hybrid of two Wilson intervals.

        d - sqrt((p2 - l2)^2 + (u1 - p1)^2)  to  d + sqrt((u2 - p2)^2 + (p1 - l1)^2),  d = p2 - p1

    https://doi.org/10.1002/(SICI)1097-0258(19980430)17:8<873::AID-SIM779>3.0.CO;2-I, method 10. The two are treated as
    independent; both play the same tasks, so the interval is rather too wide. 48 of 80 after 56 of 70: -0.2 (-0.34 to
    -0.05).
    """
    low_1, high_1 = wilson(before.rate, before.num_tasks)
    low_2, high_2 = wilson(after.rate, after.num_tasks)
    difference = after.rate - before.rate
    down = math.hypot(after.rate - low_2, high_1 - before.rate)
    up = math.hypot(high_2 - after.rate, before.rate - low_1)
    return difference, difference - down, difference + up


def report_line(records: Records, name: str) -> str:
    """What a stage has brought, in one line."""
    cells = dict(zip(COLUMNS, _row(records, name), strict=True))
    shown = ("held-out success", "gain", "time", "note")
    return ", ".join(f"{column} {cells[column]}" for column in shown if cells[column])


def write_summary(road: Road, records: Records) -> None:
    """Write the table of the stages that have finished to `road.md`."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *_rows(records)]
    lines = [
        f"# {road.config.run.name}",
        "",
        "Held-out success is of sampled episodes on the same tasks for every model, with 95 % intervals. The time of a "
        f"stage is without its evaluation. `run.seed` is {road.config.run.seed}.",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    write_whole(road.run_dir.path / "road.md", "\n".join(lines) + "\n")


def print_summary(road: Road, records: Records) -> None:
    print_rows(COLUMNS, _rows(records))
    print(f"the table and all numbers are in {road.run_dir.path}/road.md and road.json")


def _rows(records: Records) -> list[list[str]]:
    return [_row(records, name) for name, record in records.stages.items() if record.finished]


def _row(records: Records, name: str) -> list[str]:
    """The cells of COLUMNS. The gain is that over the last model before."""
    record = records.stages[name]
    names = list(records.stages)
    before = [records.stages[each].evaluation for each in names[: names.index(name)]]
    last = next((evaluation for evaluation in reversed(before) if evaluation is not None), None)
    gained = ""
    if record.evaluation is not None and last is not None:
        difference, low, high = (100 * value for value in gain(last.sampled, record.evaluation.sampled))
        gained = f"{difference:+.1f} points ({low:+.0f} to {high:+.0f})"
    return [
        name,
        record.kind,
        str(record.evaluation.sampled) if record.evaluation else "",
        gained,
        str(record.evaluation.greedy) if record.evaluation else "",
        f"{record.seconds:.0f} s",
        f"{record.tokens_played:,}" if record.tokens_played else "",
        f"{record.tokens_trained:,}" if record.tokens_trained else "",
        record.note,
    ]
