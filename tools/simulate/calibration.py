"""What a simulation takes from the records of a run: episodes, the engine's speed, the learner's steps."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.trajectory import Trajectory, Turn
from slipstream.replay.run.archive import Archive, ArchiveError
from slipstream.tools.see.run_files import ANY_TOKEN, MAX_GROUP_BYTES
from slipstream.tools.simulate.simulated_engine import TokenTime

MAX_EPISODES = 2000  # read from the archive; more would not change the result
WARM_UP_STEPS = 5  # the first steps are not typical: engines and caches are cold
FEWEST_STEPS = 10
POLL_S = 0.1  # how often an actor looks for newer weights
TOLD_APART = 1.2  # the ratio of two loads whose speeds can be compared
NEEDED = (  # in every record of a step
    "perf/step_s",
    "time/wait_s",
    "produced/episodes",
    "fleet/num_actors",
    "fleet/num_episodes",
    "fleet/generated_tokens_per_s",
)

Record = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedTurn:
    num_tokens: int  # sampled ones
    env_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The measured facts of one run."""

    episodes: Sequence[Sequence[PlayedTurn]]
    turn_s: float  # of a turn until its first token: its request's way, and the prefill
    token_time: TokenTime
    step_s: Sequence[float]  # of each optimizer step, without the wait for its batch; it grows with the batch
    groups_per_step: int  # of these steps
    group_size: int  # of the groups below
    useful_share: float  # of the finished groups: the others had equal returns and were dropped
    failed_share: float  # of the attempts
    refresh_s: float  # from the end of a step until actors sample with its weights, on average
    num_actors: int
    steps_per_hour: float  # as recorded, for comparison
    lag: float  # likewise: mean lag of the oldest tokens, in optimizer steps


def calibrate(config: Config) -> Calibration:
    """Read the records of the run of `config`. Raises ConfigError if they do not suffice."""
    run_dir = RunDir(config.run.root, config.run.name)
    steps = [record for record in read_metrics(run_dir.metrics) if "trained/reward" in record][WARM_UP_STEPS:]
    if len(steps) < FEWEST_STEPS:
        raise ConfigError(
            f"{run_dir.metrics} has {len(steps)} steps after the first {WARM_UP_STEPS}; a simulation needs "
            f"{FEWEST_STEPS}: let the run make more, or name another run"
        )
    _check_keys(steps, run_dir)
    newest, recorded = steps[-1], load_config(str(run_dir.config), [])
    archived = _archived(config, run_dir, int(newest["step"]))
    turns = [turn for trajectory in archived for turn in trajectory.turns]
    turn_s, token_s = turn_time(turns)
    dropped = _growth(steps, "replay/total_dropped_zero_variance")
    trained = _growth(steps, "replay/trained") + _growth(steps, "replay/claimed")
    failed = sum(_growth(steps, name) for name in newest if name.startswith("replay/total_failed_"))
    produced = sum(record["produced/episodes"] for record in steps)
    return Calibration(
        episodes=[_played(trajectory) for trajectory in archived],
        turn_s=turn_s,
        token_time=token_time(steps, generating_share=_generating_share(turns, token_s)),
        step_s=[record["perf/step_s"] - record["time/wait_s"] for record in steps],
        groups_per_step=recorded.replay.groups_per_step,
        group_size=recorded.replay.group_size,
        useful_share=trained / (trained + dropped) if trained + dropped else 1.0,
        failed_share=failed / (failed + produced) if failed + produced else 0.0,
        refresh_s=_mean(steps, "time/broadcast_s") + _mean(steps, "time/refresh_pause_s") + POLL_S / 2,
        num_actors=round(statistics.median(record["fleet/num_actors"] for record in steps)),
        steps_per_hour=3600 / statistics.fmean(record["perf/step_s"] for record in steps),
        lag=_mean(steps, "lag/mean"),
    )


def _check_keys(steps: Sequence[Record], run_dir: RunDir) -> None:
    """Raise ConfigError unless every step has the numbers that a simulation needs."""
    for record in steps:
        if missing := [name for name in NEEDED if not isinstance(record.get(name), int | float)]:
            raise ConfigError(
                f"{run_dir.metrics}: step {record['step']} has no number {', '.join(missing)}, which a simulation "
                "needs; name another run"
            )


def turn_time(turns: Sequence[Turn]) -> tuple[float, float]:
    """The time of a turn until its first token, and that of each token: least squares over the turns, in seconds.

    Where all turns are equally long, or the line would fall or begin below 0, tokens take all of the time.
    """
    lengths, times = [turn.stop - turn.start for turn in turns], [turn.generate_s for turn in turns]
    if len(set(lengths)) > 1:
        token_s, turn_s = statistics.linear_regression(lengths, times)
        if token_s >= 0 and turn_s >= 0:
            return turn_s, token_s
    return 0.0, sum(times) / max(1, sum(lengths))


def token_time(steps: Sequence[Record], *, generating_share: float) -> TokenTime:
    """The line through two points: the half of the records with more requests an actor, and the other half.

    The heartbeats count requests n and tokens a second, so n / rate is the time of a token. Each half is summed first,
    because single heartbeats are noisy. `generating_share` of an episode's time is spent on sampled tokens. Where the
    halves have nearly the same load, their difference is noise, and the line is flat. Where it would fall, or begin
    below 0, it is replaced by one through the mean.
    """
    loads = sorted(
        (generating_share * record["fleet/num_episodes"] / record["fleet/num_actors"], _rate(record))
        for record in steps
        if record["fleet/num_episodes"] > 0 and record["fleet/num_actors"] > 0 and _rate(record) > 0
    )
    if not loads:
        raise ConfigError("no step was recorded while actors generated; let the run make more steps")
    low, high = loads[: len(loads) // 2], loads[len(loads) // 2 :]
    (few, fast), (many, slow), (mean, middle) = (_point(half) for half in (low or high, high, loads))
    slope = (slow - fast) / (many - few) if many > TOLD_APART * few else 0.0
    slope = min(max(slope, 0.0), middle / mean)
    return TokenTime(fixed_s=middle - slope * mean, per_request_s=slope)


def _point(loads: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean number of requests, and the time of a token: (2 requests, 10 tokens/s) gives (2, 0.2 s)."""
    requests = sum(count for count, _ in loads)
    return requests / len(loads), requests / sum(rate for _, rate in loads)


def _rate(record: Record) -> float:
    """Tokens a second of one actor."""
    return record["fleet/generated_tokens_per_s"] / record["fleet/num_actors"]


def _played(trajectory: Trajectory) -> list[PlayedTurn]:
    return [PlayedTurn(num_tokens=turn.stop - turn.start, env_s=turn.env_s) for turn in trajectory.turns]


def _generating_share(turns: Sequence[Turn], token_s: float) -> float:
    """The share of the turns' time in which tokens are sampled."""
    lasted_s = sum(turn.generate_s + turn.env_s for turn in turns)
    return token_s * sum(turn.stop - turn.start for turn in turns) / lasted_s if lasted_s else 1.0


def _archived(config: Config, run_dir: RunDir, last_step: int) -> list[Trajectory]:
    """The newest trajectories that were trained. Raises ConfigError."""
    archive, found = Archive(run_dir.trajectories, config.run.name), list[Trajectory]()
    try:
        for step in reversed([step for step in archive.steps if step <= last_step]):
            archived = archive.read(step, vocab_size=ANY_TOKEN, max_group_bytes=MAX_GROUP_BYTES)
            found += [trajectory for group in archived.groups for trajectory in group.trajectories]
            if len(found) >= MAX_EPISODES:
                break
    except ArchiveError as error:
        raise ConfigError(str(error)) from error
    if not found:
        raise ConfigError(f"{run_dir.trajectories} has no trajectories; a simulation needs a run with replay.archive")
    return found


def _growth(steps: Sequence[Record], name: str) -> float:
    return steps[-1].get(name, 0.0) - steps[0].get(name, 0.0)


def _mean(steps: Sequence[Record], name: str) -> float:
    values = [record[name] for record in steps if name in record]
    return statistics.fmean(values) if values else 0.0
