"""What a resumed run reads besides its checkpoint: totals over all of its steps, and the highest version number."""

import logging
from pathlib import Path

import msgspec

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.checkpoint.sealed_file import read_sealed, write_sealed
from slipstream.replay.records.ledger import Ledger, ledger_of

_SCHEMA = 1
CURE = "restore it from a copy, or train again from the archive in a new run with `slipstream learner --replay-archive`"

log = logging.getLogger(__name__)


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Fractions of `num_tasks` held-out tasks that were solved."""

    sampled: float
    greedy: float
    num_tasks: int
    sampled_in: dict[str, float]  # by label of `env.mixture`; empty for a run with only one environment
    greedy_in: dict[str, float]


class EvalDuring(EvalResult, frozen=True, kw_only=True):
    """An evaluation made during training."""

    step: int  # whose weights were evaluated
    policy_version: int


class Tally(msgspec.Struct, kw_only=True):
    """Totals over the steps that the current model contains; steps lost in a crash are not included."""

    durable_step: int = 0  # the last step that a checkpoint covered when this was written; claims up to it are settled
    base_root: str = ""  # hash of the weights that the adapters were trained on; empty without adapters
    evaluations: dict[str, EvalResult] = {}
    evaluations_during: list[EvalDuring] = []
    lag: dict[str, int] = {}  # trajectories trained, by lag of their oldest token
    tokens_trained: int = 0
    seconds: float = 0.0  # spent in steps, including waiting
    first_reward_s: float | None = None  # from the start of the run to the first recorded reward
    recorded: Ledger = ledger_of({})  # at the last record; the next record counts what was added since


def load_tally(path: Path) -> Tally:
    """The tally in `path`, or an empty one if there is no file. Raises ConfigError if it is damaged."""
    if not path.exists() and not path.is_symlink():
        return Tally()
    return read_sealed(path, Tally, schema=_SCHEMA, cure=CURE)


def tally_at(step: int, run_dir: RunDir) -> Tally:
    """The tally of the steps up to `step`, that of the checkpoint which the learner resumed from. Raises ConfigError.

    If the learner was killed after that checkpoint was durable, its tally may still be the next one.
    """
    tally = load_tally(run_dir.tally)
    if run_dir.tally.exists() and tally.durable_step >= step:
        return tally
    following = load_tally(run_dir.next_tally)
    if following.durable_step == step:
        return following
    if not run_dir.tally.exists():
        raise ConfigError(f"{run_dir.tally} is missing, but {step} steps have been made; {CURE}")
    log.error("%s lacks steps %d to %d: the totals of the run are too low", run_dir.tally, tally.durable_step + 1, step)
    tally.durable_step = step
    return tally


def save_tally(tally: Tally, path: Path) -> None:
    write_sealed(path, tally, schema=_SCHEMA)


class _Highest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The highest number that a version may have: a Redis server that came back empty has forgotten it."""

    policy_version: int


def load_highest_version(path: Path) -> int:
    """The number in `path`; -1 if there is no file. Raises ConfigError if it is damaged."""
    if not path.exists() and not path.is_symlink():
        return -1
    cure = "remove it, and if the Redis server has been emptied, end all actors before the learner starts"
    return read_sealed(path, _Highest, schema=_SCHEMA, cure=cure).policy_version


def save_highest_version(policy_version: int, path: Path) -> None:
    """Replace the number in `path`; it is on disk when this returns."""
    write_sealed(path, _Highest(policy_version=policy_version), schema=_SCHEMA)
