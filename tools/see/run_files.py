"""Reads what the directory of a run holds. Whatever is missing or damaged is named, and the rest is read."""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import Standing, standing
from slipstream.learner.lead.tally import load_tally
from slipstream.replay.records.ledger import Ledger
from slipstream.replay.run.archive import Archive, ArchiveError
from slipstream.replay.run.observer import last_line
from slipstream.tools.see.metrics_window import Course, Record
from slipstream.tools.see.summary import Summary, read_summary

T = TypeVar("T")
NUM_SAMPLED_STEPS = 10  # of the archive, from which the time of episodes is measured
MAX_GROUP_BYTES = 1 << 30  # in memory at one time, from an archive
ANY_TOKEN = 2**31  # a vocabulary size that accepts every token: records are shown as they are
ERROR = "slipstream learner: "  # begins the last line of a learner that ends with an error
MAX_ERROR_CHARS = 600
MAX_LOG_BYTES = 64 << 20  # of the end of each log
_LOGGED = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (WARNING|ERROR|CRITICAL) ", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTime:
    """Seconds of the episodes of some archived steps."""

    num_episodes: int
    generate_s: float
    env_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """Everything that a report shows of one run."""

    name: str
    config: Config | None
    steps: Sequence[Record]  # of optimizer steps, in order: see `Course`
    evaluations: Sequence[Record]  # those of a known number of tasks
    num_refused: int  # steps that the gradient or the guard skipped
    state: Standing
    summary: Summary | None
    ledger: Ledger | None  # of the summary, else of the newest checkpoint
    episode_time: EpisodeTime | None
    complaints: Mapping[str, int]  # warnings and errors by log
    error: str  # with which the learner ended; empty if it did not, or if that is not known
    missing: Sequence[str]  # one sentence for each thing that could not be read


def read_run(run_dir: RunDir) -> RunFiles:
    """Read the directory of a run, which may be running, stopped, finished or damaged."""
    missing = list[str]()

    def attempt(read: Callable[[], T | None]) -> T | None:
        try:
            return read()
        except (ConfigError, OSError, ArchiveError) as error:
            missing.append(str(error))
            return None

    config = attempt(lambda: _config(run_dir))
    course = Course()
    attempt(lambda: course.read(run_dir.metrics))
    if not course.steps:
        missing.append(f"{run_dir.metrics} has no optimizer step: the run has made none, or the file is damaged")
    summary = attempt(lambda: read_summary(run_dir))
    if summary is None and not run_dir.summary.exists():
        missing.append(f"{run_dir.summary} does not exist: the run has not finished")
    tally = attempt(lambda: load_tally(run_dir.tally)) if summary is None and run_dir.tally.exists() else None
    archived = attempt(lambda: _episode_time(run_dir, config))
    evaluated = [record for record in course.evaluations if record.get("eval/num_tasks", 0) >= 1]
    return RunFiles(
        name=run_dir.path.name,
        config=config,
        steps=course.steps,
        evaluations=sorted(evaluated, key=lambda record: record["step"]),
        num_refused=course.num_refused,
        state=standing(run_dir),
        summary=summary,
        ledger=summary.ledger if summary else tally.recorded if tally else None,
        episode_time=archived,
        complaints=attempt(lambda: _complaints(run_dir)) or {},
        error=_error(run_dir),
        missing=missing,
    )


def _config(run_dir: RunDir) -> Config:
    if not run_dir.config.is_file():
        raise ConfigError(f"{run_dir.config} does not exist: differences from the defaults are unknown")
    return load_config(str(run_dir.config), [])


def _episode_time(run_dir: RunDir, config: Config | None) -> EpisodeTime | None:
    """Measured on steps that are spread evenly over the archive."""
    if config is None:
        return None
    archive = Archive(run_dir.trajectories, config.run.name)
    steps = archive.steps
    wanted = steps[:: max(1, -(-len(steps) // NUM_SAMPLED_STEPS))]
    count, generate_s, env_s, total_s = 0, 0.0, 0.0, 0.0
    for step in wanted:
        archived = archive.read(step, vocab_size=ANY_TOKEN, max_group_bytes=MAX_GROUP_BYTES)
        trajectories = [trajectory for group in archived.groups for trajectory in group.trajectories]
        count += len(trajectories)
        generate_s += sum(turn.generate_s for trajectory in trajectories for turn in trajectory.turns)
        env_s += sum(turn.env_s for trajectory in trajectories for turn in trajectory.turns)
        total_s += sum(trajectory.duration_s for trajectory in trajectories)
    return EpisodeTime(num_episodes=count, generate_s=generate_s, env_s=env_s, total_s=total_s) if count else None


def _complaints(run_dir: RunDir) -> dict[str, int]:
    """The numbers of warnings and errors, by log and level. Raises OSError."""
    counts = Counter[str]()
    for path in sorted(run_dir.log("*").parent.glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            counts.update(f"{path.stem}: {found[1].decode().lower()}" for found in _LOGGED.finditer(file.read()))
    return dict(counts)


def _error(run_dir: RunDir) -> str:
    """The error that the learner's log ends with."""
    line = last_line(run_dir.log("learner"))
    return line.removeprefix(ERROR)[:MAX_ERROR_CHARS] if line.startswith(ERROR) else ""
