"""What a report shows of a run's metrics, in memory that does not grow with the run."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.common.process.metrics import read_metrics
from slipstream.replay.run.diagnosis import was_refused

LARGEST = 1e300  # a larger number is damage; means of such numbers stay finite
NUM_EXACT = 64  # newest steps, which are kept as they were recorded
NUM_KEPT = 512  # records of older steps, and of evaluations
NUM_STEPS = "num_steps"  # in the place of how many steps a record stands; 1 if it is missing
OF_EPISODES = ("produced/success", "produced/reward")  # means over the finished episodes of a step

Record = Mapping[str, float]


class Course:
    """The metrics of a run from its first step on. Where they are many, a record has the means of several steps."""

    def __init__(self) -> None:
        self.evaluations: list[Record] = []
        self.num_refused = 0  # steps that the gradient or the guard skipped
        self._newest = deque[Record]()
        self._kept, self._begun, self._stride = list[Record](), list[Record](), 1

    def read(self, jsonl: Path) -> None:
        """Raises OSError."""
        for record in read_metrics(jsonl):
            self._add(numbers(record))

    @property
    def steps(self) -> list[Record]:
        """The records of optimizer steps, in order."""
        return sorted([*self._kept, *self._begun, *self._newest], key=lambda record: record["step"])

    def _add(self, record: Record) -> None:
        if record.get("step", -1) < 0:
            return
        if "eval/success_sampled" in record:
            self.evaluations.append(record)
            if len(self.evaluations) > NUM_KEPT:
                del self.evaluations[1:-1:2]
        if "trained/reward" in record:
            self.num_refused += was_refused(record)
            self._newest.append(record)
            if len(self._newest) > NUM_EXACT:
                self._keep(self._newest.popleft())

    def _keep(self, record: Record) -> None:
        """Keep an older step in a record of `_stride` steps; if these become too many, two at a time become one."""
        self._begun = [_merged(self._begun[0], record) if self._begun else record]
        if self._begun[0].get(NUM_STEPS, 1) < self._stride:
            return
        self._kept.append(self._begun.pop())
        if len(self._kept) == NUM_KEPT:
            self._kept = [_merged(*pair) for pair in zip(self._kept[::2], self._kept[1::2], strict=True)]
            self._stride *= 2


def _merged(one: Record, other: Record) -> Record:
    """One record of the steps of both."""
    merged = {**one, **other}
    for name in one.keys() & other.keys() - {"step", "time"}:
        count = "produced/episodes" if name in OF_EPISODES else NUM_STEPS
        before, after = one.get(count, 1), other.get(count, 1)
        merged[name] = one[name] + (other[name] - one[name]) * (after / (before + after) if after else 0.0)
    merged["produced/episodes"] = one.get("produced/episodes", 0.0) + other.get("produced/episodes", 0.0)
    return merged | {NUM_STEPS: one.get(NUM_STEPS, 1) + other.get(NUM_STEPS, 1)}


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, without what is damaged: null, text, and what is too large for arithmetic."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
    }
