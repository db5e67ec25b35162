"""`slipstream drill`: a run on this machine, one fault after another, and a report that says what was lost."""

import time
from pathlib import Path

from slipstream.common.config.config import Config, RunConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError, require
from slipstream.common.process.run_dir import RunDir
from slipstream.tools.drill.basic_faults import LEASE_TTL_S, SIX
from slipstream.tools.drill.books import what_is_lost
from slipstream.tools.drill.stage import DrillFailed, Stage
from slipstream.tools.terminal.table import print_rows

NUM_STEPS = 2  # that the learner must make after each fault


def drill(config: Config, *, faults: list[str]) -> int:
    """Inject `faults` into a run of its own, or all, and report; return 0 if nothing was lost. Raises ConfigError."""
    for name in faults:
        require(name in SIX, "--fault", f"one of {', '.join(SIX)}", name, "leave it out for all of them")
    prepare(config)
    run_dir = RunDir(config.run.root, config.run.name)
    with run_dir.held():
        print(f"drill {config.run.name}: a learner and two hosts of one actor each; see {run_dir.log('*')}", flush=True)
        stage = Stage(config)
        rows = []
        try:
            stage.start()
            for name in faults or SIX:
                print(f"{name} ...", flush=True)
                rows.append([name, *_strike(stage, name)])
            stage.end()
            lost = what_is_lost(stage.client, config, last_step=stage.last_step())
            ledger = stage.ledger()
        except DrillFailed as error:
            print(f"slipstream drill: {error}")
            return 1
        finally:
            stage.close()
    print_rows(["fault", "what was seen", "over after", "steps meanwhile"], rows)
    print(
        f"{ledger.inserted} trajectories were stored: {ledger.trained_trajectories} trained, "
        f"{sum(ledger.dropped_trajectories.values())} of groups that were dropped ({_counted(ledger.dropped)}), "
        f"{ledger.held_trajectories} are held; {ledger.expired_leases} leases expired, {ledger.partials_handed_in} "
        f"parts of episodes were handed in, {ledger.partials_resumed} continued"
    )
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


def _strike(stage: Stage, name: str) -> list[str]:
    """What was seen, how long until all was well again, and how far the learner came meanwhile."""
    started, step = time.monotonic(), stage.last_step()
    seen = SIX[name](stage)
    lasted_s, meanwhile = time.monotonic() - started, stage.last_step() - step
    for _ in range(NUM_STEPS):
        stage.until_step()
    return [seen, f"{lasted_s:.0f} s", str(meanwhile)]


def _counted(by_reason: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in by_reason.items()) or "none"
