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
        self.path = Path(root) / name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Some of the trained episodes as text."""
        return self.path / "samples.jsonl"

    @property
    def state(self) -> Path:
        """Whether a process trains the run, or how it ended: see `slipstream.common.process.standing`."""
        return self.path / "state"

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
        """The archive of what each step was trained on: see replay.archive."""
        return self.path / "trajectories"

    @property
    def preferences(self) -> Path:
        """Pairs of sibling episodes, of which a person prefers one: see slipstream.tools.viewer.marks."""
        return self.path / "preferences.jsonl"

    @property
    def tokens(self) -> Path:
        """What each step did with its tokens: see slipstream.replay.records.token_record."""
        return self.path / "tokens"

    @property
    def tally(self) -> Path:
        """The totals of all steps so far."""
        return self.path / "tally.json"

    @property
    def next_tally(self) -> Path:
        """The tally of the checkpoint that is being written; it becomes `tally` once that is durable."""
        return self.path / "next_tally.json"

    @property
    def highest_version(self) -> Path:
        """The highest version number that may have been published."""
        return self.path / "highest_version.json"

    @property
    def fit(self) -> Path:
        """What the checkpoints of `slipstream fit sft`, `dpo`, `reward` or `prm` depend on."""
        return self.path / "fit.json"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def model(self) -> Path:
        """The tiny model, if the run made one."""
        return self.path / "model"

    @property
    def demonstrations(self) -> Path:
        """Expert episodes for the warm start."""
        return self.path / "demonstrations.bin"

    @property
    def reference(self) -> Path:
        """The reference policies, each in a folder named after its step."""
        return self.path / "reference"

    @property
    def trained_model(self) -> Path:
        """The last weights, as a Hugging Face folder."""
        return self.path / "trained_model"

    @property
    def trained_adapters(self) -> Path:
        """The last adapters in peft's format, if the run trained adapters."""
        return self.path / "trained_adapters"

    @property
    def trained_critic(self) -> Path:
        """The critic that `slipstream export --critic` wrote, as a reward model."""
        return self.path / "trained_critic"

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
