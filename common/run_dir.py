"""The directory of a run: where each of its files is, and how it is written."""

import json
import os
import time
from pathlib import Path
from typing import Any


class RunDir:
    """`runs/<name>/{config.yaml, metrics.jsonl, summary.json, tb/, trajectories/, checkpoints/, logs/, redis/}`."""

    def __init__(self, root: str | Path, name: str) -> None:
        self.path = Path(root) / name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trajectories(self) -> Path:
        """What each step was trained on: see replay.archive."""
        return self.path / "trajectories"

    @property
    def tally(self) -> Path:
        """What the steps so far add up to."""
        return self.path / "tally.json"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def model(self) -> Path:
        """The tiny model, where the run made one."""
        return self.path / "model"

    @property
    def demonstrations(self) -> Path:
        """Expert episodes for the warm start."""
        return self.path / "demonstrations.bin"

    @property
    def reference(self) -> Path:
        """Policies that the objective holds on to, each under the step that it is of."""
        return self.path / "reference"

    @property
    def trained_model(self) -> Path:
        """The last weights, as a Hugging Face folder."""
        return self.path / "trained_model"

    @property
    def trained_adapters(self) -> Path:
        """The last adapters alone, in peft's format, where the run trained adapters."""
        return self.path / "trained_adapters"

    def log(self, process: str) -> Path:
        return self.path / "logs" / f"{process}.log"

    def create(self) -> None:
        """Make the directories. Idempotent."""
        for folder in (self.tensorboard, self.checkpoints, self.path / "logs"):
            folder.mkdir(parents=True, exist_ok=True)

    def start_clock(self) -> float:
        """The unix time at which the run first started; the first caller says when."""
        started = self.path / "started_at"
        if not started.exists():
            write_whole(started, repr(time.time()))
        return float(started.read_text())


def sync_path(path: Path) -> None:
    """Return when a file's bytes, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace `path` in one go: a reader sees the old text or the new, also after a crash, or on a full disk.

    `mode` is of a new file, less what the process's umask takes from it.
    """
    half = path.with_name(path.name + ".tmp")
    with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2) + "\n")
