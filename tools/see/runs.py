"""`slipstream runs`: how far each run under `run.root` has come, from its directory; no server is needed."""

import time
from collections.abc import Mapping
from pathlib import Path

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import RedisUnreachable, is_listening
from slipstream.common.process.headline import headline, held_out_success, interval
from slipstream.common.process.metrics import newest_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import Standing, standing
from slipstream.replay.server.redis_server import password_of
from slipstream.tools.see.summary import Summary, read_summary
from slipstream.tools.terminal.table import print_rows

UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, OSError)  # what damaged files of a run raise
COLUMNS = ("run", "state", "step", "success", "held out", "cost", "last step")


def runs(config: Config) -> int:
    """Print one line for each run, the newest last; return 0. Raises ConfigError."""
    root = Path(config.run.root)
    if root.exists() and not root.is_dir():
        raise ConfigError(f"`run.root` {root} is not a directory; name the folder that has the directories of the runs")
    folders = [path.parent for path in root.glob("*/config.yaml")]
    rows = sorted((row_of(RunDir(config.run.root, folder.name)) for folder in folders), key=lambda row: row[0])
    if not rows:
        print(f"there are no runs under {config.run.root}/; start one with `slipstream up`")
        return 0
    print_rows(COLUMNS, [row for _, row in rows])
    return 0


def trains_alone(config: Config) -> bool:
    """Whether the run needs neither actors nor a Redis server: one of `slipstream fit`, or a re-run."""
    return bool(config.run.rerun_of) or RunDir(config.run.root, config.run.name).fit.is_file()


def has_ended(config: Config) -> bool:
    """Whether the run's own server, which `slipstream up` starts, has ended with the run."""
    is_own = password_of(RunDir(config.run.root, config.run.name).redis, config.redis.url) is not None
    return is_own and not is_listening(config.redis.url)


def check_running(config: Config) -> None:
    """Raise RedisUnreachable, with the next step, if the run's own server has ended with the run."""
    if not has_ended(config):
        return
    name, state = config.run.name, standing(RunDir(config.run.root, config.run.name))
    ended = {Standing.FINISHED: "has finished", Standing.FAILED: "has failed"}.get(state, "was stopped")
    more = " learner.steps=MORE" if ended == "has finished" else ""
    raise RedisUnreachable(
        f"run {name!r} {ended}, and its Redis server ended with it; its archive answers `slipstream replay "
        f"show|export run.name={name}`, and `slipstream up --resume {name}{more}` continues the run"
    )


def row_of(run_dir: RunDir) -> tuple[float, list[str]]:
    """When the run made its last step, and its line, which says why if the run cannot be read."""
    try:
        return _read_row(run_dir)
    except UNREADABLE as error:
        why = str(error) if isinstance(error, ConfigError) else f"damaged: {error!r}"
        return 0.0, [run_dir.path.name, "unreadable", "", "", "", "", why]


def _read_row(run_dir: RunDir) -> tuple[float, list[str]]:
    name, config = run_dir.path.name, load_config(str(run_dir.config), [])
    records, summary = newest_metrics(run_dir.metrics), read_summary(run_dir)
    is_fit = run_dir.fit.is_file()
    steps = [record for record in records if is_fit or "trained/reward" in record]
    evaluations = [record for record in records if "eval/success_sampled" in record]
    newest, last = headline(steps, until=config.last_full_step), steps[-1] if steps else {}
    last_s = last.get("time", run_dir.config.stat().st_mtime)
    return last_s, [
        name,
        standing(run_dir).value,
        f"{last.get('step', 0):.0f}" + ("" if is_fit else f" of {config.learner.steps}"),
        interval(newest.success, newest.num_episodes) if newest else "",
        held_out_success(evaluations[-1]) if evaluations else "",
        _cost(summary, last),
        f"{_age(time.time() - last_s)} ago",
    ]


def _cost(summary: Summary | None, last: Mapping[str, float]) -> str:
    """The dollars that the run's actors have cost; empty if no price is configured."""
    dollars = summary.cost.dollars if summary else last.get("fleet/cost_dollars", 0.0)
    return f"${dollars:.2f}" if dollars else ""


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
