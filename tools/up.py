"""`slipstream up`: a whole run on this machine, supervised: Redis, a learner, actors, TensorBoard."""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.live import Live

from common.config import Config, ConfigError, dump_config
from common.connection import PASSWORD_VARIABLE, RedisUnreachable, connect_or_explain
from common.metrics import read_metrics
from common.run_dir import RunDir, write_whole
from common.shutdown import Shutdown
from replay.server import ServerError, start_server
from tools.child import Child
from tools.table import two_columns
from tools.view import View

POLL_S = 0.2
LEARNER_GRACE_S = 60.0
TENSORBOARD_PORT = 6006


def up(config: Config, *, resume: bool, dry_run: bool) -> int:
    """Start everything, show progress until the learner is done, end everything in order; return the exit code."""
    run_dir = RunDir(config.run.root, config.run.name)
    if run_dir.config.exists() and not resume:
        raise ConfigError(
            f"run {config.run.name!r} exists in {run_dir.path}; go on with it by `--resume {config.run.name}`, or "
            "choose another run.name"
        )
    if dry_run:
        print(f"redis: {config.redis.url or 'a server of its own'}")
        for child in _children(config, run_dir, environment={}):
            print(f"{child.name}: {' '.join(child.command)}")
        return 0
    run_dir.create()
    run_dir.start_clock()
    shutdown = Shutdown()
    with _redis(config, run_dir) as environment:
        write_whole(run_dir.config, dump_config(config))
        os.environ.update(environment)
        return _supervise(config, run_dir, _children(config, run_dir, environment), shutdown)


@contextlib.contextmanager
def _redis(config: Config, run_dir: RunDir) -> Iterator[dict[str, str]]:
    """The run's Redis: the user's, or one of its own whose URL goes into `config`. Yields the children's secrets."""
    if config.redis.url and not _is_own(config, run_dir):
        try:
            connect_or_explain(config.redis.url).close()
        except RedisUnreachable as error:
            raise ConfigError(str(error)) from None
        yield {}
        return
    try:
        server = start_server(run_dir.redis)
    except ServerError as error:
        raise ConfigError(str(error)) from None
    with server:
        config.redis.url = server.url
        yield {PASSWORD_VARIABLE: server.password}


def _is_own(config: Config, run_dir: RunDir) -> bool:
    """Whether a resumed run's URL is that of the server in its own directory."""
    settings = run_dir.redis / "redis.conf"
    return (
        settings.exists() and f"port {config.redis.url.rpartition(':')[2].partition('/')[0]}\n" in settings.read_text()
    )


def _children(config: Config, run_dir: RunDir, environment: dict[str, str]) -> list[Child]:
    """In the order of starting; they end in the order actors, learner, TensorBoard."""
    python, settings = sys.executable, str(run_dir.config)
    secrets = {"OMP_NUM_THREADS": "1", **environment}
    port = _free_port(TENSORBOARD_PORT)
    return [
        Child("learner", [python, "-m", "tools.cli", "learner", settings], log=run_dir.log("learner"),
              environment=secrets),
        Child("actors", [python, "-m", "tools.cli", "actors", settings], log=run_dir.log("actors"),
              environment=secrets),
        Child("tensorboard", [python, "-m", "tensorboard.main", "--logdir", str(run_dir.tensorboard), "--host",
              "127.0.0.1", "--port", str(port), "--reload_interval", "5"], log=run_dir.log("tensorboard"),
              environment={"TB_PORT": str(port)}),
    ]  # fmt: skip


def _free_port(wanted: int) -> int:
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


def _supervise(config: Config, run_dir: RunDir, children: list[Child], shutdown: Shutdown) -> int:
    learner, actors, tensorboard = children
    console = Console()
    _say_where_to_look(console, config, run_dir, tensorboard)
    try:
        for child in (learner, actors, tensorboard):
            child.start()
        exit_code = _watch(console, config, run_dir, children, shutdown)
    finally:
        # Actors first: a learner that stops under them would leave them waiting; TensorBoard last, it shows the end.
        for child, grace_s in ((actors, config.actors.drain_s + 10), (learner, LEARNER_GRACE_S), (tensorboard, 5.0)):
            child.ask_to_end()
            child.wait(grace_s)
    if run_dir.summary.exists() and exit_code == 0:
        console.print(two_columns("Summary", summary_rows(json.loads(run_dir.summary.read_text()))))
    return exit_code


def _watch(console: Console, config: Config, run_dir: RunDir, children: list[Child], shutdown: Shutdown) -> int:
    """Show progress until the learner is done, a child fails for good, or a signal asks to stop."""
    learner = children[0]
    client = connect_or_explain(config.redis.url)
    view = View(client, run_dir, config.run.name, num_steps=config.learner.steps)
    reporter = _LineReporter(console, run_dir)
    live = Live(view.render(), console=console, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while learner.exit_code != 0:
            if shutdown.requested.wait(POLL_S):
                console.print("stopping: actors, then the learner with a checkpoint; again Ctrl-C to stop at once")
                return shutdown.exit_code
            for child in children:
                if not child.keep_up():
                    console.print(f"{child.name} ended with {child.exit_code}; its last words:\n{child.last_words()}")
                    return 1
            if live:
                live.update(view.render(), refresh=True)
            else:
                reporter.report()
    reporter.report()
    return 0


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


def _say_where_to_look(console: Console, config: Config, run_dir: RunDir, tensorboard: Child) -> None:
    port = tensorboard.command[tensorboard.command.index("--port") + 1]
    rows = {
        "run directory": str(run_dir.path),
        "TensorBoard": f"http://127.0.0.1:{port}",
        "Redis": config.redis.url,
        "logs": str(run_dir.log("*")),
        "another terminal": f"slipstream top {run_dir.config}",
        "started": time.strftime("%H:%M:%S"),
    }
    console.print(two_columns(f"Slipstream: {config.run.name}", rows))


def summary_rows(summary: dict[str, Any]) -> dict[str, str]:
    """The table that a person judges the run by."""
    rows = {
        f"held-out success, {name.replace('_', ' ')}": (
            f"{result['sampled']:.1%} sampled, {result['greedy']:.1%} greedy, of {result['num_tasks']} tasks"
        )
        for name, result in summary["eval"].items()
    }
    ledger = summary["ledger"]
    lost = ", ".join(f"{count} {reason}" for reason, count in ledger["dropped_trajectories"].items()) or "none"
    first_reward = summary["first_reward_s"]
    return rows | {
        "trajectories produced": str(ledger["inserted"]),
        "trajectories trained": str(ledger["trained_trajectories"]),
        "trajectories dropped": lost,
        "ledger": "balanced" if ledger["balanced"] else "NOT BALANCED",
        "lag (optimizer steps: trajectories)": ", ".join(f"{lag}: {n}" for lag, n in summary["lag"].items()),
        "tokens per second": f"{summary['tokens_per_s']['generated']:.0f} generated, "
        f"{summary['tokens_per_s']['trained']:.0f} trained",
        "first reward line": f"after {first_reward:.0f} s" if first_reward is not None else "none",
        "whole run": f"{summary['wall_s']:.0f} s",
        "run directory": summary["run_dir"],
    }
