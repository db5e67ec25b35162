"""`slipstream up`: a whole run on this machine, supervised: Redis, a learner, actors, TensorBoard."""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import redis
from rich.console import Console
from rich.live import Live

from common.config import Config, dump_config
from common.config_error import ConfigError
from common.connection import PASSWORD_VARIABLE, check_servers, connect_or_explain, connect_shards
from common.metrics import read_metrics
from common.run_dir import RunDir, write_whole
from common.shutdown import LEAVE_S, Shutdown
from replay.fleet import Fleet, RunState, UnknownRun
from replay.server import Server, password_of, start_server
from tools.check_input import check_input
from tools.child import Child, kill, say_last_words
from tools.table import print_table
from tools.view import View

POLL_S = 0.2
ACTORS_GRACE_S = LEAVE_S + 5.0  # after the drain
LEARNER_GRACE_S = 60.0
TENSORBOARD_PORT = 6006


def up(config: Config, *, resume: bool) -> int:
    """Start everything, show progress until the learner is done, end everything in order; return the exit code."""
    run_dir = _checked(config, resume=resume)
    shutdown = Shutdown(at_once=_kill_everything)
    with _redis(config, run_dir) as server:
        environment = {PASSWORD_VARIABLE: server.password} if server else {}
        run_dir.create()
        run_dir.start_clock()
        os.environ.update(environment)
        if resume:
            say_that_it_goes_on(config)
        write_whole(run_dir.config, dump_config(config))
        return _supervise(config, run_dir, _children(config, run_dir, environment), server, shutdown)


def dry_run(config: Config) -> int:
    """Print what would be started."""
    run_dir = _checked(config, resume=True)
    print(f"redis: {config.redis.url or 'a server of its own'}")
    for child in _children(config, run_dir, environment={}):
        print(f"{child.name}: {' '.join(child.command)}")
    return 0


def _checked(config: Config, *, resume: bool) -> RunDir:
    """The run's directory, after everything that can be checked before anything is started. Raises ConfigError."""
    run_dir = RunDir(config.run.root, config.run.name)
    if run_dir.config.exists() and not resume:
        raise ConfigError(
            f"run {config.run.name!r} exists in {run_dir.path}; go on with it by `--resume {config.run.name}`, "
            "with the settings that are to change behind it, or choose another run.name"
        )
    if config.run.rerun_of:
        raise ConfigError(
            f"run {config.run.name!r} is a re-run of {config.run.rerun_of!r} and needs no actors; go on with it by "
            f"`slipstream learner --resume {config.run.name}`"
        )
    check_input(config)
    return run_dir


def _kill_everything() -> None:
    kill(psutil.Process().children(recursive=True))


@contextlib.contextmanager
def _redis(config: Config, run_dir: RunDir) -> Iterator[Server | None]:
    """The run's Redis: None where it is the user's, else a server of its own, whose URL goes into `config`."""
    if config.redis.url and password_of(run_dir.redis, config.redis.url) is None:
        check_servers(config.redis.url, config.redis.shards)
        yield None
        return
    with start_server(run_dir.redis) as server:
        config.redis.url = server.url
        yield server


def say_that_it_goes_on(config: Config) -> None:
    """A run that ended says so in Redis, and actors that come before the learner would leave again.

    They play as `config` says, which may not be what the run was described with when it ended.
    """
    fleet = Fleet(connect_or_explain(config.redis.url), config.run.name)
    with contextlib.suppress(UnknownRun):
        fleet.describe_run(msgspec.structs.replace(fleet.run_facts(), config_yaml=dump_config(config)))
        fleet.set_run_state(RunState.STARTING)


def _children(config: Config, run_dir: RunDir, environment: dict[str, str]) -> list[Child]:
    """In the order of starting; they end in the order actors, learner, TensorBoard."""
    python, settings = sys.executable, str(run_dir.config)
    secrets = {"OMP_NUM_THREADS": "1", **environment}
    port = free_port(TENSORBOARD_PORT)
    return [
        Child("learner", [python, "-m", "tools.cli", "learner", settings], log=run_dir.log("learner"),
              environment=secrets),
        Child("actors", [python, "-m", "tools.cli", "actors", settings], log=run_dir.log("actors"),
              environment=secrets),
        Child("tensorboard", [python, "-m", "tensorboard.main", "--logdir", str(run_dir.tensorboard), "--host",
              "127.0.0.1", "--port", str(port), "--reload_interval", "5"], log=run_dir.log("tensorboard"),
              environment={}),
    ]  # fmt: skip


def free_port(wanted: int) -> int:
    """`wanted` if it is free on loopback, else any that is."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ConfigError("no free port on 127.0.0.1 for TensorBoard")


def _supervise(
    config: Config, run_dir: RunDir, children: list[Child], server: Server | None, shutdown: Shutdown
) -> int:
    learner, actors, tensorboard = children
    console = Console()
    _say_where_to_look(config, run_dir, tensorboard)
    try:
        for child in children:
            child.start()
        failed = _watch(console, config, run_dir, children, server, shutdown)
        if failed:
            say_last_words("up", failed)
    finally:
        # Actors first: a learner that stops under them would leave them waiting; TensorBoard last, it shows the end.
        for child, grace_s in (
            (actors, config.actors.drain_s + ACTORS_GRACE_S),
            (learner, LEARNER_GRACE_S),
            (tensorboard, 5.0),
        ):
            child.ask_to_end()
            child.wait(grace_s)
    if failed:
        return failed.exit_code or 1
    if learner.exit_code == 0 and run_dir.summary.exists():
        print_table("Summary", summary_rows(json.loads(run_dir.summary.read_text())))
    return shutdown.exit_code


def _watch(
    console: Console,
    config: Config,
    run_dir: RunDir,
    children: list[Child],
    server: Server | None,
    shutdown: Shutdown,
) -> Child | None:
    """Show progress until the learner is done or a signal asks to stop; return a child that failed for good."""
    learner, actors, tensorboard = children
    # Without patience: a server that is away is started again from here.
    shards = connect_shards(config.redis.url, config.redis.shards, patience_s=0)
    view = View(shards, run_dir, config.run.name, num_steps=config.learner.steps)
    reporter = _LineReporter(console, run_dir)
    live = Live(view.render(), console=console, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while learner.exit_code != 0:
            if shutdown.requested.wait(POLL_S):
                console.print("stopping: actors, then the learner with a checkpoint; Ctrl-C again to stop at once",
                              soft_wrap=True)  # fmt: skip
                return None
            exit_code = server.keep_up() if server else None
            if exit_code is not None:
                console.print(f"redis-server ended ({exit_code}) and was started again with what it held",
                              soft_wrap=True)  # fmt: skip
            for child in (learner, actors):
                if not child.keep_up():
                    return child
            tensorboard.keep_up()  # training does not depend on it
            if live:
                with contextlib.suppress(redis.RedisError):  # away for a moment: what is shown stays
                    live.update(view.render(), refresh=True)
            else:
                reporter.report()
    reporter.report()
    return None


class _LineReporter:
    """One line a step where the output is no terminal."""

    def __init__(self, console: Console, run_dir: RunDir) -> None:
        self._console = console
        self._run_dir = run_dir
        self._num_said = 0

    def report(self) -> None:
        records = read_metrics(self._run_dir.metrics)
        for record in records[self._num_said :]:
            self._console.print(progress_line(record), highlight=False, soft_wrap=True)
        self._num_said = len(records)


def progress_line(record: dict[str, Any]) -> str:
    """One record of the metrics file, for people."""
    if "reward/mean" not in record:
        return (
            f"step {record['step']:4d}  held-out success {record['eval/success_sampled']:.3f} sampled, "
            f"{record['eval/success_greedy']:.3f} greedy"
        )
    return (
        f"step {record['step']:4d}  reward {record['reward/mean']:.3f}  success {record['reward/success']:.3f}  "
        f"lag {record['lag/mean']:.1f}  ready {record['replay/ready']:.0f}  "
        f"tokens/s {record['fleet/generated_tokens_per_s']:.0f} generated {record['perf/trained_tokens_per_s']:.0f} "
        f"trained  learner busy {record['perf/learner_busy']:.0%}"
    )


def _say_where_to_look(config: Config, run_dir: RunDir, tensorboard: Child) -> None:
    port = tensorboard.command[tensorboard.command.index("--port") + 1]
    rows = {
        "run directory": str(run_dir.path),
        "TensorBoard": f"http://127.0.0.1:{port}",
        "Redis": config.redis.url,
        "logs": str(run_dir.log("*")),
        "another terminal": f"slipstream top {run_dir.config}",
        "started": time.strftime("%H:%M:%S"),
    }
    print_table(f"Slipstream: {config.run.name}", rows)


def summary_rows(summary: dict[str, Any]) -> dict[str, str]:
    """The table that a person judges the run by."""
    rows = {
        f"held-out success, {name.replace('_', ' ')}": (
            f"{result['sampled']:.1%} sampled, {result['greedy']:.1%} greedy, of {result['num_tasks']} tasks"
        )
        for name, result in summary["eval"].items()
    }
    if summary["eval_during"]:
        rows["held-out success, by step"] = ", ".join(
            f"{result['step']}: {result['sampled']:.1%}" for result in summary["eval_during"]
        )
    ledger = summary["ledger"]
    lost = ", ".join(f"{count} {reason}" for reason, count in ledger["dropped_trajectories"].items()) or "none"
    first_reward, cost = summary["first_reward_s"], summary["cost"]
    wasted = ", ".join(f"{tokens} {reason}" for reason, tokens in cost["wasted_tokens"].items()) or "none"
    if cost["dollars_per_million_tokens"] is not None:
        rows["actors cost"] = (
            f"${cost['dollars']:.2f}, ${cost['dollars_per_million_tokens']:.2f} for a million trained tokens"
        )
    return rows | {
        "trajectories produced": str(ledger["inserted"]),
        "trajectories trained": str(ledger["trained_trajectories"]),
        "trajectories dropped": lost,
        "ledger": "balanced" if ledger["balanced"] else "NOT BALANCED",
        "lag (optimizer steps: trajectories)": ", ".join(f"{lag}: {n}" for lag, n in summary["lag"].items()),
        "tokens per second": f"{summary['tokens_per_s']['generated']:.0f} generated, "
        f"{summary['tokens_per_s']['trained']:.0f} trained",
        "tokens wasted": f"{wasted}; {cost['tokens_trained']} were trained",
        "first reward line": f"after {first_reward:.0f} s" if first_reward is not None else "none",
        "whole run": f"{summary['wall_s']:.0f} s",
        "run directory": summary["run_dir"],
    }
