"""What a simulation takes from the records of a run: episodes, the engine's speed, the learner's steps."""

import itertools
import os
import socket
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.common.config.config import Config, load_config
from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.batch.prefixes import lexicographic, shared_lengths
from slipstream.replay.run.archive import Archive, ArchivedStep, ArchiveError
from slipstream.tools.run.devices import visible_devices
from slipstream.tools.see.run_files import ANY_TOKEN, MAX_GROUP_BYTES
from slipstream.tools.simulate.simulated_engine import TokenTime

MAX_STEPS, MAX_EPISODES = 200, 20_000  # the newest ones are read: a run's episodes change while it learns
WARM_UP_STEPS = 5  # the first steps are not typical: engines and caches are cold
FEWEST_STEPS = 10
TOLD_APART = 0.1  # what varies by less than this share of its mean shows no slope
AT_ONCE = 0.05  # of a step: a shorter wait is the claim of a batch that was ready
OF_BATCH = ("measure", "pack", "forward", "backward")  # parts of a step that grow with it
NEEDED = ("perf/step_s", "time/wait_s", "time/forward_s", "produced/episodes", "fleet/num_actors")  # of each step

Record = Mapping[str, float]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedTurn:
    num_tokens: int  # sampled ones
    env_s: float  # and of all else between two turns


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Of one optimizer step, without the wait for its batch."""

    of_batch_s: float  # grows with the batch
    rest_s: float

    def of(self, scale: float) -> float:
        return self.of_batch_s * scale + self.rest_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The measured facts of one run."""

    config: Config  # that it had
    groups: Sequence[Sequence[Sequence[PlayedTurn]]]  # of episodes
    member_tokens: tuple[float, float]  # that the learner computes of a group: of its first member, of each further one
    first_tokens: float  # what a turn takes until its first token, in iterations: its request's way, and the prefill
    token_time: TokenTime
    step_times: Sequence[StepTime]
    eval_episodes: int  # of an evaluation
    useful_share: float  # of the finished groups: the others had equal returns and were dropped
    failed_share: float  # of the attempts
    refresh_s: float  # from the end of a step until actors sample with its weights, on average
    num_actors: int
    num_cores: int  # that the learner and the engines share, one for each; 0: they have their own
    steps_per_hour: float  # as recorded, for comparison
    tokens_per_s: float  # likewise: sampled ones of finished episodes
    lag: float  # likewise: mean lag of the oldest tokens, in optimizer steps

    def batch_scale(self, replay: ReplayConfig) -> float:
        """How much the learner computes for a batch of `replay`, beside a recorded one."""

        def num_tokens(each: ReplayConfig) -> float:
            first, further = self.member_tokens
            return each.groups_per_step * (first + (each.group_size - 1) * further)

        return num_tokens(replay) / num_tokens(self.config.replay)


def calibrate(config: Config) -> Calibration:
    """Read the newest records of the run of `config`. Raises ConfigError if they do not suffice."""
    run_dir = RunDir(config.run.root, config.run.name)
    records, recorded = list(read_metrics(run_dir.metrics)), load_config(str(run_dir.config), [])
    steps = [record for record in records if "trained/reward" in record and record["step"] <= recorded.last_full_step]
    steps = steps[WARM_UP_STEPS:][-MAX_STEPS:]
    if len(steps) < FEWEST_STEPS:
        raise ConfigError(
            f"{run_dir.metrics} has {len(steps)} steps after the first {WARM_UP_STEPS}; a simulation needs "
            f"{FEWEST_STEPS}: let the run make more, or name another run"
        )
    _check_keys(steps, run_dir)
    archived_steps = _archived(config, run_dir, {int(record["step"]) for record in steps})
    groups = [group.trajectories for step in archived_steps for group in step.groups]
    archived = list(itertools.chain.from_iterable(groups))
    dropped = _growth(steps, "replay/total_dropped_zero_variance")
    trained = _growth(steps, "replay/trained") + _growth(steps, "replay/claimed")
    useful_share = trained / (trained + dropped) if trained + dropped else 1.0
    failed = sum(_growth(steps, name) for name in steps[-1] if name.startswith("replay/total_failed_"))
    produced, waited_s, lasted_s = (
        sum(record[name] for record in steps) for name in ("produced/episodes", "time/wait_s", "perf/step_s")
    )
    num_actors = round(statistics.median(record["fleet/num_actors"] for record in steps))
    num_cores = _shared_cores(archived)
    alone, together = (max(1.0, num_busy / (num_cores or num_busy)) for num_busy in (num_actors, num_actors + 1))
    engines_slowdown = together + (alone - together) * waited_s / lasted_s
    first_tokens, token_time = speed_of(archived, share=useful_share, slowdown=engines_slowdown)
    claim_s = min(record["time/wait_s"] for record in steps)
    claim_s *= claim_s < AT_ONCE * lasted_s / len(steps)  # else no batch was ready
    num_tokens = statistics.fmean(sum(turn.stop - turn.start for turn in each.turns) for each in archived)
    return Calibration(
        config=recorded,
        groups=[[_played(trajectory) for trajectory in group] for group in groups],
        member_tokens=member_tokens(groups),
        first_tokens=first_tokens,
        token_time=token_time,
        step_times=[_step_time(record, claim_s=claim_s, slowdown=together) for record in steps],
        eval_episodes=2 * int(max((record.get("eval/num_tasks", 0.0) for record in records), default=0.0)),
        useful_share=useful_share,
        failed_share=failed / (failed + produced) if failed + produced else 0.0,
        refresh_s=refresh_s(archived, made_at_s=_made_at_s(archived_steps, steps)),
        num_actors=num_actors,
        num_cores=num_cores,
        steps_per_hour=3600 * len(steps) / lasted_s,
        tokens_per_s=produced * num_tokens / lasted_s,
        lag=statistics.fmean([record["lag/mean"] for record in steps if "lag/mean" in record] or [0.0]),
    )


def _check_keys(steps: Sequence[Record], run_dir: RunDir) -> None:
    """Raise ConfigError unless every step has the numbers that a simulation needs."""
    for record in steps:
        if missing := [name for name in NEEDED if not isinstance(record.get(name), int | float)]:
            raise ConfigError(
                f"{run_dir.metrics}: step {record['step']} has no number {', '.join(missing)}, which a simulation "
                "needs; name another run"
            )


def member_tokens(groups: Sequence[Sequence[Trajectory]]) -> tuple[float, float]:
    """The mean tokens that the learner computes of the first member of a group, and of each further one.

    The latter are those that it does not share with a sibling; of groups of one, only the prompt is known to be shared.
    """
    first, further = list[int](), list[int]()
    for group in groups:
        sequences = [trajectory.token_array() for trajectory in group]
        ordered = [sequences[index] for index in lexicographic(sequences)]
        first.append(len(ordered[0]))
        further += [len(tokens) - shared for tokens, shared in zip(ordered, shared_lengths(ordered), strict=True)][1:]
    if not further:
        further = [trajectory.num_tokens - trajectory.turns[0].start for group in groups for trajectory in group]
    return statistics.fmean(first), statistics.fmean(further)


def speed_of(archived: Sequence[Trajectory], *, share: float, slowdown: float) -> tuple[float, TokenTime]:
    """The iterations of a turn until its first token, and the time of an iteration with n requests.

    Two lines by least squares: the time of a turn over its tokens, and that of an iteration over the mean number of
    requests which the engine had meanwhile. A line that would begin below 0 begins at 0. Turns that are equally long
    show no time until the first token, and loads that are nearly equal nothing about the time of a request. `archived`
    are a `share` of the episodes: the others' requests are added. The engine was slower by `slowdown` than alone.
    """
    spans = [(trajectory.actor, *span) for trajectory in archived for span in _spans(trajectory)]
    actors, starts, stops, tokens = (np.array(column) for column in zip(*spans, strict=True))
    loads, seconds = np.ones(len(spans)), stops - starts
    for actor in set(actors):
        loads[actors == actor] = mean_loads(starts[actors == actor], stops[actors == actor]) / share
    token_s = _slope(tokens, seconds, np.ones(len(spans)))
    if not 0 < token_s * tokens.sum() <= seconds.sum():
        token_s = seconds.sum() / tokens.sum()
    iterations = seconds.mean() / token_s - tokens.mean() + tokens
    mean_s, mean_load = seconds.sum() / slowdown / iterations.sum(), np.average(loads, weights=iterations)
    slope = min(max(_slope(loads, seconds / slowdown / iterations, iterations), 0.0), mean_s / mean_load)
    time = TokenTime(fixed_s=float(mean_s - slope * mean_load), per_request_s=float(slope))
    return float((iterations - tokens)[0]), time


def mean_loads(starts: Floats, stops: Floats) -> Floats:
    """How many spans run during each, on average: 2 and 1.5 for one of 1 s in the middle of one of 2 s."""
    ends = np.concatenate([starts, stops])
    order = np.argsort(ends)
    times, running = ends[order], np.cumsum(np.where(order < len(starts), 1.0, -1.0))
    until = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    loads: Floats = np.interp(stops, times, until) - np.interp(starts, times, until)
    return loads / np.maximum(stops - starts, 1e-9)


def _slope(x: Floats, y: Floats, weights: Floats) -> float:
    """Of the line through the points; 0 if x hardly varies."""
    apart = x - np.average(x, weights=weights)
    variance = np.average(apart**2, weights=weights)
    return float(np.average(apart * y, weights=weights) / variance) if variance > (TOLD_APART * x.mean()) ** 2 else 0.0


def _between_s(trajectory: Trajectory) -> float:
    """The time of a turn that neither the engine nor the environment took."""
    known_s = sum(turn.generate_s + turn.env_s for turn in trajectory.turns)
    return max(0.0, trajectory.duration_s - known_s) / len(trajectory.turns)


def _played(trajectory: Trajectory) -> list[PlayedTurn]:
    between_s = _between_s(trajectory)
    return [PlayedTurn(num_tokens=turn.stop - turn.start, env_s=turn.env_s + between_s) for turn in trajectory.turns]


def _spans(trajectory: Trajectory) -> Iterator[tuple[float, float, int]]:
    """When each turn was generated, and its number of tokens."""
    at, between_s = trajectory.started_at_s, _between_s(trajectory)
    for turn in trajectory.turns:
        yield at, at + turn.generate_s, turn.stop - turn.start
        at += turn.generate_s + turn.env_s + between_s


def _step_time(record: Record, *, claim_s: float, slowdown: float) -> StepTime:
    of_batch_s = sum(record.get(f"time/{part}_s", 0.0) for part in OF_BATCH)
    rest_s = record["perf/step_s"] - record["time/wait_s"] + claim_s - of_batch_s
    return StepTime(of_batch_s=of_batch_s / slowdown, rest_s=rest_s / slowdown)


def _shared_cores(archived: Sequence[Trajectory]) -> int:
    """This host's cores if the actors were on it, as then learner and engines were, and it has no GPU; else 0."""
    hosts = {trajectory.provenance.host for trajectory in archived}
    return os.cpu_count() or 0 if hosts == {socket.gethostname()} and not visible_devices() else 0


def _made_at_s(archived: Sequence[ArchivedStep], steps: Sequence[Record]) -> dict[int, float]:
    """When each version was made: the one that a step begins with, at the end of the step before."""
    ends = {int(record["step"]): record["time"] for record in steps}
    return {step.policy_version: ends[step.step - 1] for step in archived if step.step - 1 in ends}


def refresh_s(archived: Sequence[Trajectory], *, made_at_s: Mapping[int, float]) -> float:
    """The median time until a version sampled, of the turns that it came into; 0 without such turns.

    A turn's tokens are assumed to be evenly spread over its time.
    """
    found = list[float]()
    for trajectory in archived:
        for turn, (start_s, stop_s, num_tokens) in zip(trajectory.turns, _spans(trajectory), strict=True):
            for span in trajectory.version_spans:
                if turn.start < span.start < turn.stop and span.policy_version in made_at_s:
                    at_s = start_s + (stop_s - start_s) * (span.start - turn.start) / num_tokens
                    found.append(max(0.0, at_s - made_at_s[span.policy_version]))
    return statistics.median(found) if found else 0.0


def _archived(config: Config, run_dir: RunDir, steps: Collection[int]) -> list[ArchivedStep]:
    """The newest of `steps`. Raises ConfigError."""
    archive, found = Archive(run_dir.trajectories, config.run.name), list[ArchivedStep]()
    try:
        for step in reversed([step for step in archive.steps if step in steps]):
            found.append(archive.read(step, vocab_size=ANY_TOKEN, max_group_bytes=MAX_GROUP_BYTES))
            if sum(len(each.groups) for each in found) * config.replay.group_size >= MAX_EPISODES:
                break
    except ArchiveError as error:
        raise ConfigError(str(error)) from error
    if not found:
        raise ConfigError(f"{run_dir.trajectories} has no trajectories; a simulation needs a run with replay.archive")
    return found


def _growth(steps: Sequence[Record], name: str) -> float:
    return steps[-1].get(name, 0.0) - steps[0].get(name, 0.0)
