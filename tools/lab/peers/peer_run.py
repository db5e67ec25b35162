"""What a peer measures of its run, and the file that `bench` reads. It imports neither torch nor our rooms."""

import json
import time
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
    tokens: int = 0  # of those, prompt and sampled
    trained_tokens: int = 0  # of the episodes that were trained
    points: list[dict[str, float]] = field(default_factory=list)  # see slipstream.tools.lab.peers.results.Point

    def begin(self, success: Success) -> None:
        """Start the clock; `success` is of the weights of the warm start."""
        self.started, self.greedy = time.time(), success.greedy
        self.add(0, success, seconds=0.0)

    def seconds(self) -> float:
        """Since `begin`."""
        return time.time() - self.started

    def add(self, step: int, success: Success, *, seconds: float) -> None:
        """Add an evaluation of the weights that existed after `seconds`."""
        point = {
            "step": step,
            "success": success.sampled,
            "seconds": seconds,
            "episodes": self.episodes,
            "tokens": self.tokens,
        }
        self.points.append(point)
        print(json.dumps(point), flush=True)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")
