"""What the stages of a road have brought: records in `road.json`, and the table in the terminal and in `road.md`."""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.headline import wilson
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.output import read_json, write_json, write_whole
from slipstream.tools.road.road_file import Stage

COLUMNS = ["stage", "verb", "held-out success", "gain", "greedy", "time", "tokens played", "tokens trained", "note"]


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


class Done(msgspec.Struct):
    """What is known of a stage that has begun."""

    command: list[str]
    finished: bool = False
    seconds: float = 0.0  # without its evaluation; what a killed process took is not in it
    tokens_played: int = 0  # of episodes, prompts included
    tokens_trained: int = 0
    note: str = ""
    evaluation: dict[str, Success] = {}  # of the trained model, by kind of sampling


Records = dict[str, Done]  # the stages of a road by name, in the order in which they began


def load_records(folder: Path) -> Records:
    """The records of a road, empty if it has not begun. Raises ConfigError if they are damaged."""
    path, cure = folder / "road.json", "restore it from a copy, or choose another `run.name`"
    return read_json(path, Records, cure=cure) if path.exists() else {}


def save_records(records: Records, folder: Path, shared: Config) -> None:
    """Write them to `road.json`, and the table to `road.md`."""
    write_json(folder / "road.json", msgspec.to_builtins(records))
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(row_of(records, name) for name in records)]
    lines = [
        f"# {shared.run.name}\n",
        "Held-out success is of sampled episodes on the same tasks for every model, with 95 % intervals. The time of a "
        f"stage is without its evaluation. `run.seed` is {shared.run.seed}.\n",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    write_whole(folder / "road.md", "\n".join(lines) + "\n")


def evaluation_of(output: Path) -> dict[str, Success]:
    """The result that `slipstream eval` printed, summed over environments."""
    found = dict[str, Success]()
    for row in (json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")):
        before = found.get(row["sampling"], Success(0, 0))
        solved = before.solved + round(row["success"] * row["num_tasks"])
        found[row["sampling"]] = Success(solved, before.num_tasks + row["num_tasks"])
    return found


def add_outcome(done: Done, stage: Stage) -> None:
    """Add tokens and a note, from the rows, summary or metrics of a stage that has ended."""
    if done.command[0] == "collect":
        with stage.made.open() as file:
            rows = [(row["success"], row["num_tokens"]) for row in map(json.loads, file)]
        done.tokens_played = sum(tokens for _, tokens in rows)
        done.note = f"{sum(good for good, _ in rows)} successes in {len(rows)} episodes"
    elif done.command[0] == "up":
        cost = json.loads(stage.run_dir.summary.read_text())["cost"]
        done.tokens_trained = cost["tokens_trained"]
        done.tokens_played = done.tokens_trained + sum(cost["wasted_tokens"].values())
    else:
        records = list(read_metrics(stage.run_dir.metrics, not_finite=math.nan))
        done.tokens_trained = round(sum(record.get("fit/tokens", 0.0) for record in records))
        for name in ("loss", "accuracy"):
            if values := [record[key] for record in records if (key := f"fit/held_out_{name}") in record]:
                done.note = f"held-out {name} {values[0]:.2f} to {values[-1]:.2f}"


def good_rounds(title: str, stages: Sequence[Stage], records: Records) -> list[str]:
    """The last trained stage of each round, from the first round on, that solved more tasks than the model before."""

    def measured(among: Iterable[Stage]) -> list[tuple[float, str]]:
        done = [(records[each.name].evaluation, each.name) for each in among if each.name in records]
        return [(found["sampled"].rate, name) for found, name in done if found]

    first = next(place for place, stage in enumerate(stages) if stage.part[0] == title)
    best, good = measured(stages[:first])[-1][0], list[str]()
    for number in itertools.count(1):
        rate, name = next(reversed(measured(each for each in stages if each.part == (title, number))), (0.0, ""))
        if rate <= best:
            break
        best = rate
        good.append(name)
    return good


def row_of(records: Records, name: str) -> list[str]:
    """The cells of COLUMNS for a stage. Its gain is over the last model before."""
    done, names = records[name], list(records)
    now, gained, greedy = done.evaluation.get("sampled"), "", done.evaluation.get("greedy")
    before = [records[each].evaluation.get("sampled") for each in names[: names.index(name)]]
    if now and (last := next(filter(None, reversed(before)), None)):
        difference, low, high = (100 * value for value in gain(last, now))
        gained = f"{difference:+.1f} points ({low:+.0f} to {high:+.0f})"
    tokens = [f"{count:,}" if count else "" for count in (done.tokens_played, done.tokens_trained)]
    measured = [str(now or ""), gained, str(greedy or "")]
    return [name, done.command[0], *measured, f"{done.seconds:.0f} s", *tokens, done.note]


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
