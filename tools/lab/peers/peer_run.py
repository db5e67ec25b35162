"""What a peer measures of its run, and the file that `bench` reads. It imports neither torch nor our rooms."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Success:
    """Held-out success of some weights, of one sampled and one greedy episode for each task."""

    sampled: float
    greedy: float


@dataclass(kw_only=True, slots=True)
class PeerRun:
    """Counts of a run, and its points. The clock starts at `begin`, after the evaluation of the first weights."""

    started: float = 0.0  # Unix time
    greedy: float = 0.0  # held-out success of the first weights, greedily: the same on all sides
    episodes: int = 0  # of training, finished
    successes: int = 0  # of those
    tokens: int = 0  # of those, prompt and sampled
    trained_tokens: int = 0  # of the episodes that were trained
    counted: tuple[int, int] = (0, 0)  # episodes and successes at the newest point of fresh episodes
    points: list[dict[str, float]] = field(default_factory=list)  # see slipstream.tools.lab.peers.results.Point

    def begin(self, success: Success, *, fresh: bool) -> None:
        """Start the clock; `success` is of the first weights, and no point if points are of `fresh` episodes."""
        self.started, self.greedy = time.time(), success.greedy
        if not fresh:
            self.add(0, success.sampled, seconds=0.0)

    def seconds(self) -> float:
        """Since `begin`."""
        return time.time() - self.started

    def end_step(self, step: int, *, every: int, last: int, success: Callable[[], Success]) -> None:
        """Add the point of a step: of its own episodes if `every` is 0, else an evaluation of its weights, if due."""
        seconds = self.seconds()
        if every == 0:
            episodes, successes = self.counted
            self.counted = (self.episodes, self.successes)
            self.add(step, (self.successes - successes) / (self.episodes - episodes), seconds=seconds)
        elif step % every == 0 or step == last:
            self.add(step, success().sampled, seconds=seconds)

    def add(self, step: int, success: float, *, seconds: float) -> None:
        """Add the success of the weights that existed after `seconds`, or of the episodes that ended in this step."""
        point = {"step": step, "success": success, "seconds": seconds, "episodes": self.episodes, "tokens": self.tokens}
        self.points.append(point)
        print(json.dumps(point), flush=True)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")
