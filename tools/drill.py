"""`slipstream drill`: a run on this machine, one fault after another, and a report that says what was lost."""

import argparse
import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import redis

from common.config import Config, RunConfig
from common.config_error import ConfigError
from common.objective_config import ObjectiveConfig
from common.run_dir import RunDir
from common.shutdown import EXIT_PREEMPTED
from replay.archive import Archive
from replay.audit import audit
from replay.ledger import read_ledger
from tools.child import Child
from tools.drill_stage import DrillFailed, Stage
from tools.table import print_rows

LEASE_TTL_S = 4.0
SLOW_S = 0.05  # of a slow link, for each piece and each way
SLOW_FOR_S = 10.0
NUM_STEPS = 2  # that the learner must make after each fault
CHOSEN = ("zero_variance", "low_variance", "too_old")  # groups that the learner itself lets go of


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the verb."""
    parser.add_argument(
        "--fault", action="append", choices=list(FAULTS), help="this one; may be given again; left out: all"
    )


def drill(config: Config, *, faults: list[str]) -> int:
    """Run, strike, report; 0 where nothing was lost."""
    prepare(config)
    logs = RunDir(config.run.root, config.run.name).log("*")
    print(f"drill {config.run.name}: a learner and two hosts of one actor each; see {logs}", flush=True)
    stage = Stage(config)
    rows = []
    try:
        stage.start()
        for name in faults:
            print(f"{name} ...", flush=True)
            rows.append([name, *_strike(stage, FAULTS[name])])
        stage.end()
        lost = what_is_lost(stage.client, config, last_step=stage.last_step())
        ledger = stage.ledger()
    except DrillFailed as error:
        print(f"slipstream drill: {error}")
        return 1
    finally:
        stage.close()
    print_rows(["fault", "what was seen", "over after", "steps meanwhile"], rows)
    print(f"{ledger.inserted} trajectories were stored: {ledger.trained_trajectories} trained, "
          f"{sum(ledger.dropped_trajectories.values())} of groups that were dropped ({_counted(ledger.dropped)}), "
          f"{ledger.held_trajectories} are held; {ledger.expired_leases} leases expired, {ledger.partials_handed_in} "
          f"parts of episodes were handed in, {ledger.partials_resumed} gone on with")  # fmt: skip
    print("lost: " + ("; ".join(lost) or "nothing"))
    return 1 if lost else 0


def prepare(config: Config) -> None:
    """Make it a drill's: endless, short leases, a step from any groups, a name of its own. Raises ConfigError."""
    if config.run.name == RunConfig().name:
        config.run.name = "drill-" + time.strftime("%Y%m%d-%H%M%S")
    config.run.root = str(Path(config.run.root).resolve())
    if RunDir(config.run.root, config.run.name).path.exists():
        raise ConfigError(f"run {config.run.name!r} exists; choose another run.name")
    if config.redis.url:
        raise ConfigError("`redis.url` must be empty: a drill kills its Redis, and starts one of its own for that")
    config.learner.steps, config.learner.checkpoint_every = 1_000_000, 5
    config.replay.lease_ttl_s, config.replay.archive = LEASE_TTL_S, True
    config.actors.count, config.actors.drain_s = 1, 0.0  # so that episodes are handed over in their middle
    config.eval.num_tasks, config.eval.every = 0, 0
    if config.objective.compares_siblings:  # groups of equal returns would be dropped, and a fault wait for luck
        config.objective = ObjectiveConfig(advantage="reinforce_pp")


def what_is_lost(client: redis.Redis, config: Config, *, last_step: int) -> list[str]:
    """All that books, recount and archive disagree on, and every group that was given up by no wish of the learner's.

    The run must have ended in order, after `last_step`.
    """
    run_id, ledger = config.run.name, read_ledger(client, config.run.name)
    lost = audit(client, run_id)
    if not ledger.balanced:
        lost.append(f"the ledger does not balance: {ledger}")
    given_up = {reason: count for reason, count in ledger.dropped.items() if reason not in CHOSEN}
    lost += [f"{count} groups were given up: {reason}" for reason, count in given_up.items()]
    archive = Archive(RunDir(config.run.root, run_id).trajectories, run_id)
    missing = set(range(1, last_step + 1)) - set(archive.steps)
    lost += [f"step {step} is not in the archive" for step in sorted(missing)]
    limit = config.replay.group_size * config.replay.max_trajectory_bytes
    uses = Counter(group for step in archive.steps for group in archive.group_ids(step, max_group_bytes=limit))
    lost += [f"group {group} was trained {num} times" for group, num in uses.items() if num > config.replay.max_uses]
    return lost


def _strike(stage: Stage, fault: Callable[[Stage], str]) -> list[str]:
    """What was seen, how long until all was well again, and how far the learner came meanwhile."""
    started, step = time.monotonic(), stage.last_step()
    seen = fault(stage)
    lasted_s, meanwhile = time.monotonic() - started, stage.last_step() - step
    stage.until(lambda: stage.last_step() >= step + meanwhile + NUM_STEPS, "the learner steps on")
    return [seen, f"{lasted_s:.0f} s", str(meanwhile)]


def _in_mid_episode(stage: Stage, host: Child) -> int:
    """Stop the actor of `host` where it holds leases; return how many."""
    while True:
        stage.until(lambda: stage.num_held(host) > 0, f"the actor on {host.name} plays")
        stage.actor(host).send_signal(signal.SIGSTOP)
        num_held = stage.num_held(host)
        if num_held:
            return num_held
        stage.actor(host).send_signal(signal.SIGCONT)


def _expire(stage: Stage, before: int, num_held: int) -> str:
    stage.until(lambda: stage.ledger().expired_leases >= before + num_held, "its leases expire")
    return f"{num_held} leases expired, and others got them"


def kill(stage: Stage) -> str:
    before = stage.ledger().expired_leases
    num_held = _in_mid_episode(stage, stage.near)
    dead = stage.actor(stage.near)
    names = {member.name for member in stage.members(stage.near)}
    dead.kill()
    seen = _expire(stage, before, num_held)
    stage.until(
        lambda: any(member.name not in names and member.generated_tokens for member in stage.members(stage.near)),
        "another actor serves in its place",
    )
    return seen + ", and an actor is in its place"


def stop(stage: Stage) -> str:
    before = stage.ledger().expired_leases
    num_held = _in_mid_episode(stage, stage.near)
    stopped = stage.actor(stage.near)
    try:
        seen = _expire(stage, before, num_held)
    finally:
        stopped.send_signal(signal.SIGCONT)
    stage.until(lambda: stage.num_held(stage.near) > 0, "it plays again")
    return seen + "; it came back, and plays"


def slow(stage: Stage) -> str:
    stage.link.delay_s = SLOW_S
    inserted, ended = stage.ledger().inserted, time.monotonic() + SLOW_FOR_S
    stage.until(lambda: time.monotonic() > ended and stage.ledger().inserted > inserted, "trajectories come")
    stage.link.delay_s = 0.0
    return f"{stage.ledger().inserted - inserted} trajectories came in {SLOW_FOR_S:.0f} s or so"


def partition(stage: Stage) -> str:
    before, link, num_held = stage.ledger().expired_leases, stage.link, 0
    while not num_held:
        link.is_cut = False
        stage.until(lambda: stage.num_held(stage.far) > 0, "the actor behind the link plays")
        link.is_cut = True
        num_held = stage.num_held(stage.far)
    try:
        seen = _expire(stage, before, num_held)
    finally:
        link.is_cut = False
    stage.until(lambda: stage.num_held(stage.far) > 0, "it plays again")
    return seen + f"; {link.num_held} pieces were held up, and it plays again"


def restart(stage: Stage) -> str:
    inserted = stage.ledger().inserted
    stage.restart_server()
    held = stage.ledger().inserted
    stage.until(lambda: stage.ledger().inserted > held, "trajectories come again")
    if held < inserted:
        raise DrillFailed(f"{inserted} trajectories were stored before, and {held} after it")
    return f"{inserted} trajectories were there before and after; everyone went on"


def preempt(stage: Stage) -> str:
    before = stage.ledger()
    stage.until(lambda: stage.num_held(stage.far) > 0, "the actor behind the link plays")
    stage.cloud.notice = json.dumps({"action": "terminate", "time": "in two minutes"})
    stage.until(lambda: stage.far.exit_code is not None, "the host leaves")
    after = stage.ledger()
    if stage.far.exit_code != EXIT_PREEMPTED:
        raise DrillFailed(f"the host ended with {stage.far.exit_code}, not {EXIT_PREEMPTED}; see {stage.far.log}")
    if after.expired_leases > before.expired_leases:
        raise DrillFailed(f"{after.expired_leases - before.expired_leases} leases expired that were to be given back")
    parts = after.partials_handed_in - before.partials_handed_in
    return f"the host left with code {EXIT_PREEMPTED}, and handed in {parts} parts of episodes; no lease expired"


FAULTS = {"kill": kill, "stop": stop, "slow": slow, "partition": partition, "redis": restart, "preempt": preempt}


def _counted(by_reason: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in by_reason.items()) or "none"
