"""The directory of a run: the paths of its files."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import held, write_whole

EARLIEST_S = 1.7e9  # unix time; no run is older than this program
CLOCK_SKEW_S = 86_400.0  # between the hosts that write and read the file


class RunDir:
    """`runs/<name>/{config.yaml, metrics.jsonl, summary.json, tb/, trajectories/, checkpoints/, logs/, redis/}`."""

    def __init__(self, root: str | Path, name: str) -> None:
        path = Path(root) / name
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"  # some of the trained episodes as text
        self.state = path / "state"  # whether a process trains the run, or how it ended: see `run_state`
        self.summary = path / "summary.json"
        self.tensorboard = path / "tb"
        self.checkpoints = path / "checkpoints"
        self.trajectories = path / "trajectories"  # the archive of what each step was trained on: see replay.archive
        self.preferences = path / "preferences.jsonl"  # pairs of siblings, of which a person prefers one: see `marks`
        self.tokens = path / "tokens"  # what each step did with its tokens: see `step_tokens`
        self.tally = path / "tally.json"  # the totals of all steps so far
        self.next_tally = path / "next_tally.json"  # of the checkpoint that is being written; `tally` once durable
        self.highest_version = path / "highest_version.json"  # the highest version that may have been published
        self.fit = path / "fit.json"  # what the checkpoints of a `slipstream fit` depend on
        self.redis = path / "redis"
        self.model = path / "model"  # the tiny model, if the run made one
        self.demonstrations = path / "demonstrations.bin"  # expert episodes for the warm start
        self.reference = path / "reference"  # the policy that RL began with, in a folder named after its step
        self.trained_model = path / "trained_model"  # the last weights, as a Hugging Face folder
        self.trained_adapters = path / "trained_adapters"  # the last adapters in peft's format, if some were trained
        self.trained_critic = path / "trained_critic"  # the critic of `slipstream export --critic`, as a reward model

    def log(self, process: str) -> Path:
        return self.path / "logs" / f"{process}.log"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be the only command that writes this run. Raises ConfigError where another one does."""
        is_new = not self.path.parent.exists()
        self._make(self.path.parent)
        try:
            with held(self.path):
                yield
        finally:
            with contextlib.suppress(OSError):  # it has runs, or is no longer there
                if is_new:
                    self.path.parent.rmdir()

    def create(self) -> None:
        """Make the directories, which only their owner can open. Idempotent. Raises ConfigError."""
        self._make(self.path.parent)
        self._make(self.path, self.tensorboard, self.checkpoints, self.path / "logs", mode=0o700)

    def _make(self, *folders: Path, mode: int = 0o777) -> None:
        try:
            for folder in folders:
                folder.mkdir(mode=mode, parents=True, exist_ok=True)
        except OSError as error:
            why = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror
            raise ConfigError(
                f"`run.root` {self.path.parent}: {error.filename} cannot be created: {why}; name a folder that can be "
                "written"
            ) from error

    def start_clock(self) -> float:
        """The unix time at which the run first started. The first call writes it. Raises ConfigError."""
        started, now_s = self.path / "started_at", time.time()
        cure = f"write the unix time at which the run started into it, as in `date +%s -r {self.config} > {started}`"
        if not started.exists() and not started.is_symlink():
            if self.tally.exists():
                raise ConfigError(f"{started} is missing; {cure}")
            write_whole(started, repr(now_s))
        try:
            started_at_s = float(started.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{started} is damaged: {error}; {cure}") from error
        if not EARLIEST_S < started_at_s <= now_s + CLOCK_SKEW_S:
            raise ConfigError(
                f"{started} is damaged: it contains {started_at_s!r}, and the time now is {now_s:.0f}; {cure}"
            )
        return started_at_s


def run_of(path: Path) -> Path | None:
    """The directory of the run that `path` is in; None for a path in no run."""
    known = (folder for folder in path.resolve().parents if (folder / "checkpoints").is_dir())
    return next((folder for folder in known if (folder / "config.yaml").is_file()), None)


def find_run(word: str, root: str) -> RunDir:
    """The directory of the run `word`: a name under `root`, or a path. Raises ConfigError if there is none."""
    path = Path(word).resolve() if "/" in word else Path(root) / word
    run_dir = RunDir(path.parent, path.name)
    if not run_dir.config.is_file() and not run_dir.metrics.is_file():
        if "/" in word:
            raise ConfigError(f"{path} is not a run: it has no config.yaml; give the directory of a run, or its name")
        existing = sorted(other.parent.name for other in Path(root).glob("*/config.yaml"))
        raise ConfigError(f"no run {word!r} under {root}/; existing runs: {', '.join(existing) or 'none'}")
    return run_dir
