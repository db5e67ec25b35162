"""`slipstream drill --random`: schedules of random faults, one after another, against one live run.

A schedule that fails ends the run that it was played on: it is played again on runs of its own until it is as small as
it still fails, and the schedules after it continue with a new one.
"""

import argparse
import copy
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec
import psutil

from slipstream.common.config.config import Config
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.buffer.audit import audit
from slipstream.replay.fleet.fleet import Fleet
from slipstream.replay.run.archive import Archive, ArchivedStep
from slipstream.tools.drill.books import what_is_lost, what_training_again_finds
from slipstream.tools.drill.fault_catalogue import CATALOGUE
from slipstream.tools.drill.schedule import Outcome, Strike, draw, only, report, say_again
from slipstream.tools.drill.stage import Stage, orders_of
from slipstream.tools.terminal.table import print_rows

MAX_GAP_S = 4.0
STEP_TIMEOUT_S = 5.0  # of an environment that hangs
MIN_SAMPLES = 4  # of a process that has lived long enough to be judged
MAX_NEW_DESCRIPTORS = 16
MAX_GROWTH, GROWTH_MIB = 0.25, 64.0  # of the resident memory of its first sample, and beside that


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The resources of a process at one time."""

    descriptors: int
    resident_mib: float


@dataclass(kw_only=True, slots=True)
class Played:
    """The outcomes of the schedules that one run has played."""

    outcomes: list[Outcome] = field(default_factory=list)
    usage: dict[tuple[str, int], list[Usage]] = field(default_factory=dict)  # by process, after each schedule
    fails_at_end: bool = False  # then any of the schedules may have brought it about


def drill_at_random(config: Config, asked: argparse.Namespace) -> int:
    """Play `asked.random` schedules. Return 0 if all of them held."""
    schedules = {
        seed: only(draw(seed, CATALOGUE, max_gap_s=MAX_GAP_S), asked.only)
        for seed in range(asked.seed, asked.seed + asked.random)
    }
    runs: list[Played] = []
    try:
        while schedules:
            runs.append(Played())
            play_schedules(_named(config, f"{len(runs)}"), schedules, runs[-1])
            seeds = list(schedules)[: len(runs[-1].outcomes)]
            _say_again(config, asked, runs[-1], {seed: schedules.pop(seed) for seed in seeds})
    finally:  # also after Ctrl-C
        outcomes = [outcome for played in runs for outcome in played.outcomes]
        _say(report(outcomes, CATALOGUE, asked.report), outcomes, runs)
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def play_schedules(config: Config, schedules: dict[int, list[Strike]], played: Played) -> None:
    """Play them on one run, up to the first that fails. After the last, compare books, archive and metrics."""
    _give_troubles(config)
    logs = RunDir(config.run.root, config.run.name).log("*")
    print(f"drill {config.run.name}: a learner and two hosts of one actor each; see {logs}", flush=True)
    stage = Stage(config)
    try:
        stage.start()
        for seed, strikes in schedules.items():
            outcome = suffer(stage, strikes)
            played.outcomes.append(outcome)
            _say_outcome(seed, strikes, outcome)
            if outcome.failures:
                return
            sample(stage, played)
        failures = _at_the_end(stage, played)
    except Exception as error:  # whatever a fault brings about is what is looked for
        failures = [f"{type(error).__name__}: {error}"]
    finally:
        stage.close()
    if failures:
        played.fails_at_end = True
        last = played.outcomes.pop() if played.outcomes else Outcome(fired={}, failures=[], recovered_s={})
        played.outcomes.append(msgspec.structs.replace(last, failures=failures))
    for failure in failures:
        print(f"  at the end: {failure}", flush=True)


def suffer(stage: Stage, strikes: Sequence[Strike]) -> Outcome:
    """Play one schedule. Afterwards every process must work again without help, and the books must balance."""
    fired: dict[str, str] = {}
    failures: list[str] = []
    recovered_s: dict[str, float] = {}
    whole_s = 0.0
    try:
        for strike in strikes:
            ended = time.monotonic() + strike.gap_s
            stage.until(lambda ended=ended: time.monotonic() > ended, "time passes")  # type: ignore[misc]
            fired[strike.fault] = CATALOGUE[strike.fault](stage, Random(strike.seed))
            stage.recovering(strike.fault, recovered_s)
        stage.undo_all()
        whole_s = stage.until_whole()
        stage.until_recovered()
        failures += audit(stage.client, stage.run_id)
        if not stage.ledger().balanced:
            failures.append(f"the ledger does not balance: {stage.ledger()}")
    except Exception as error:  # whatever a fault brings about is what is looked for
        failures.append(f"{type(error).__name__}: {error}")
    return Outcome(fired=fired, failures=failures, recovered_s=recovered_s, whole_s=whole_s)


def sample(stage: Stage, played: Played) -> None:
    """Record the descriptors and the memory of the run's processes."""
    processes = {child.name: psutil.Process(child.pid) for child in stage.everyone}
    processes |= {"server": psutil.Process(stage.server.process.pid), "publisher": stage.publisher()}
    for host in (stage.near, stage.far):
        processes |= {f"{host.name} actor": stage.actor(host), f"{host.name} engine": stage.engine(host)}
    for name, process in processes.items():
        usage = Usage(descriptors=process.num_fds(), resident_mib=process.memory_info().rss / 2**20)
        played.usage.setdefault((name, process.pid), []).append(usage)


def grown(name: str, usage: Sequence[Usage]) -> list[str]:
    """The resources of a process that have grown too much; empty for fewer than `MIN_SAMPLES` samples."""
    if len(usage) < MIN_SAMPLES:
        return []
    first, last = usage[0], usage[-1]
    found = []
    if last.descriptors > first.descriptors + MAX_NEW_DESCRIPTORS:
        found.append(f"the {name} had {first.descriptors} descriptors, and has {last.descriptors}")
    if last.resident_mib > first.resident_mib * (1 + MAX_GROWTH) + GROWTH_MIB:
        found.append(f"the {name} had {first.resident_mib:.0f} MiB, and has {last.resident_mib:.0f}")
    return found


def _at_the_end(stage: Stage, played: Played) -> list[str]:
    """Let the run make its last steps. Return the contradictions of archive, metrics, ledger, weights and usage."""
    stage.finish()
    config, last_step = stage.config, stage.config.learner.steps
    failures = what_is_lost(stage.client, config, last_step=last_step)
    archive = Archive(RunDir(config.run.root, config.run.name).trajectories, config.run.name)
    versions = [_read(archive, step, stage).policy_version for step in archive.steps]
    failures += [
        f"step {step} began with version {version}, after {before}"
        for step, before, version in zip(archive.steps[1:], versions, versions[1:], strict=False)
        if version <= before
    ]
    if stage.recorded_steps() != list(range(1, last_step + 1)):
        failures.append("the metrics do not have every step once, in order")
    failures += what_training_again_finds(config)
    for (name, _), usage in played.usage.items():
        failures += grown(name, usage)
    return failures


def _read(archive: Archive, step: int, stage: Stage) -> ArchivedStep:
    replay, facts = stage.config.replay, Fleet(stage.client, stage.run_id).run_facts()
    limit = replay.group_size * replay.max_trajectory_bytes
    return archive.read(step, vocab_size=facts.vocab_size, max_group_bytes=limit)


def _named(config: Config, suffix: str) -> Config:
    named = copy.deepcopy(config)
    named.run.name = f"{config.run.name}-{suffix}"
    return named


def _give_troubles(config: Config) -> None:
    """Let environments fail on order, and write weights to disk too."""
    orders = str(orders_of(config))

    def troubled(part: MixtureEntry) -> dict[str, object]:
        return {"name": part.name, "options": part.options, "orders": orders}

    env = config.env
    for label, part in env.mixture.items():
        part.options = troubled(MixtureEntry(name=part.name or label, options=part.options))
        part.name = TROUBLED
    if not env.mixture:
        env.options = troubled(MixtureEntry(name=env.name, options=env.options))
        env.name = TROUBLED
    env.step_timeout_s = min(env.step_timeout_s, STEP_TIMEOUT_S)
    config.weights.disk = config.weights.disk or str(orders_of(config).with_name("weights"))


TROUBLED = "slipstream.tools.drill.failing_env:TroubledEnv"


def _say_again(config: Config, asked: argparse.Namespace, played: Played, schedules: dict[int, list[Strike]]) -> None:
    """Print the smallest command that shows a failure of the `schedules` that were `played`, if there was one."""
    seed, *_, last = *schedules, *schedules
    if played.fails_at_end:
        print(f"  again: {_command(asked, seed)} --random {len(schedules)}", flush=True)
    elif played.outcomes[-1].failures and not asked.only:
        number = iter(range(1_000_000))

        def again(fewer: Sequence[Strike]) -> Outcome:
            smaller = Played()
            play_schedules(_named(config, f"{last}-again-{next(number)}"), {last: list(fewer)}, smaller)
            return smaller.outcomes[-1]

        say_again(f"{_command(asked, last)} --random 1", schedules[last], schedules[last], again)


def _command(asked: argparse.Namespace, seed: int) -> str:
    return f"slipstream drill {shlex.join(asked.settings)} --seed {seed}"


def _say_outcome(seed: int, strikes: Sequence[Strike], outcome: Outcome) -> None:
    worst_s = max(outcome.recovered_s.values(), default=0.0)
    ended = "FAILED" if outcome.failures else f"held, recovered within {worst_s:.1f} s, whole after {outcome.whole_s} s"
    print(f"schedule {seed}: {', '.join(strike.fault for strike in strikes)}: {ended}", flush=True)
    for failure in outcome.failures:
        print(f"  {failure}", flush=True)


def _usage_rows(played: Played) -> list[list[str]]:
    """The first and the last sample of each process with enough samples."""
    return [
        [
            name,
            str(len(usage)),
            f"{usage[0].descriptors} .. {usage[-1].descriptors}",
            f"{usage[0].resident_mib:.0f} .. {usage[-1].resident_mib:.0f}",
        ]
        for (name, _), usage in played.usage.items()
        if len(usage) >= MIN_SAMPLES
    ]


def _say(facts: dict[str, object], outcomes: Sequence[Outcome], runs: Sequence[Played]) -> None:
    """Print the faults that fired and the resources of the processes as tables."""
    fired, by_fault = facts["fired"], facts["recovered_s_by_fault"]
    assert isinstance(fired, dict) and isinstance(by_fault, dict)
    rows = []
    for name, count in fired.items():
        recovered = by_fault.get(name, {})
        rows.append([name, str(count), str(recovered.get("median", "")), str(recovered.get("worst", ""))])
    print_rows(["fault", "fired", "recovered after, median s", "worst s"], rows)
    print(
        f"{len(outcomes)} schedules, {facts['failed']} failed; seconds until an insert was answered and a step made: "
        f"{facts['recovered_s']}, until an actor of each host had its part in it: {facts['whole_s']}"
    )
    print_rows(
        ["process", "samples", "descriptors", "resident MiB"], [row for played in runs for row in _usage_rows(played)]
    )
