"""`slipstream up`: a whole run on this machine, supervised: Redis, a learner, actors, TensorBoard."""

import contextlib
import importlib.util
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live

from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import PASSWORD_VARIABLE, connect, connect_or_explain
from slipstream.common.process.headline import progress_line
from slipstream.common.process.metrics import MetricsFile, newest_metrics
from slipstream.common.process.output import write_whole
from slipstream.common.process.printable import printable
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import training
from slipstream.common.process.shutdown import LEAVE_S, Shutdown
from slipstream.envhub.rewards.part import actors_judge, judged_envs, reward_parts
from slipstream.replay.fleet.fleet import Fleet
from slipstream.replay.run.diagnosis import FaultLog, diagnose
from slipstream.replay.run.observer import Observer
from slipstream.replay.server.redis_server import Server, password_of, start_private_server
from slipstream.replay.server.server_settings import free_port
from slipstream.tools.run.check_input import check_input
from slipstream.tools.run.child import (
    EXIT_BAD_INPUT,
    LEARNER_GRACE_S,
    RESTARTED,
    Child,
    failed_code,
    kill_descendants,
    print_failure,
    verb_command,
)
from slipstream.tools.run.devices import VARIABLE, split_devices, visible_devices
from slipstream.tools.run.doctor import check_machine, print_missing
from slipstream.tools.run.model_export import finish_command
from slipstream.tools.run.server_command import ended, env_servers, server_commands
from slipstream.tools.run.sharing import share_gpus
from slipstream.tools.see.dashboard import redirect_to_charts
from slipstream.tools.see.report_page import REPORT, page, report_of
from slipstream.tools.see.summary import read_summary, summary_rows
from slipstream.tools.see.view import View, show
from slipstream.tools.terminal.table import cell, print_table

POLL_S = 0.2
START_S = 5.0  # between two lines about the start, where the output is not a terminal
LOOK_EVERY_S = 2.0  # between two diagnoses, where the output is not a terminal
ACTORS_GRACE_S = LEAVE_S + 5.0  # after the drain
JOINS = "actors.join_timeout_s=1e6"  # a warm start may take hours, and a learner that ends ends the run
TRACKER_GRACE_S = 30.0  # to send what there is
DASHBOARD_PORT, TENSORBOARD_PORT = 6006, 6007


def up(config: Config, *, resume: bool, dry_run: bool, trackers: Sequence[str] = ()) -> int:
    """Start everything, show progress until the learner is done, end everything in order; return the exit code."""
    if missing := [to for to in trackers if importlib.util.find_spec(to) is None]:
        raise ConfigError(f"--{missing[0]} needs the package {missing[0]}: `pip install {missing[0]}`")
    if dry_run:
        return _print_plan(config, trackers)
    run_dir = _checked(config, resume=resume)
    share_gpus(config)
    shutdown = Shutdown(at_once=lambda: kill_descendants(psutil.Process()))
    stop = shutdown.requested
    with run_dir.held(), _redis(config, run_dir) as server, env_servers(config, stop=stop) as env_hosts:
        run_dir.create()
        run_dir.start_clock()
        if server:
            os.environ[PASSWORD_VARIABLE] = server.password
        if resume:
            # Actors may join before the learner: they must neither leave at once, nor take its former settings or code.
            Fleet(connect_or_explain(config.redis.url), config.run.name).forget_run()
        write_whole(run_dir.config, dump_config(config))
        processes = replace(_processes(config, run_dir, trackers), server=server, env_hosts=env_hosts)
        return training(run_dir, lambda: _supervise(config, run_dir, processes, shutdown))


def _print_plan(config: Config, trackers: Sequence[str]) -> int:
    """Print what would be started; return 0."""
    run_dir = _checked(config, resume=True)
    share_gpus(config)
    print(f"redis: {config.redis.url or 'a server of its own'}")
    print(f"GPUs: {split_devices(config, visible_devices())}")
    for command, (label, _) in server_commands(config.env).items():
        print(f"server-{label}: {command}")
    for child in _processes(config, run_dir, trackers).all:
        print(f"{child.name}: {' '.join(child.command)}")
    return 0


def _checked(config: Config, *, resume: bool) -> RunDir:
    """Check everything that can be checked before a start; return the run's directory. Raises ConfigError."""
    run_dir = RunDir(config.run.root, config.run.name)
    if run_dir.config.exists() and not resume:
        raise ConfigError(
            f"run {config.run.name!r} exists in {run_dir.path}; continue it by `--resume {config.run.name} "
            "[key=value ...]`, or choose another run.name"
        )
    if config.run.rerun_of:
        raise ConfigError(
            f"run {config.run.name!r} is a re-run of {config.run.rerun_of!r} and needs no actors; continue it by "
            f"`slipstream learner {config.run.name}`"
        )
    if config.learner.hosts > 1:
        raise ConfigError(
            f"`learner.hosts` must be 1 for processes on one machine, got {config.learner.hosts}; start `slipstream "
            "learner` on each host (docs/running.md), or by `slipstream launch slurm`"
        )
    split_devices(config, visible_devices())
    check_machine()
    check_input(config)
    return run_dir


@contextlib.contextmanager
def _redis(config: Config, run_dir: RunDir) -> Iterator[Server | None]:
    """Start a Redis server for the run and write its URL into `config`; yield None if the user runs one already."""
    if config.redis.url and password_of(run_dir.redis, config.redis.url) is None:
        connect_or_explain(config.redis.url).close()
        yield None
        return
    run_dir.create()
    with start_private_server(run_dir.redis) as server:
        config.redis.url = server.url
        yield server


@dataclass(frozen=True, kw_only=True, slots=True)
class _Processes:
    """The processes of a run. Training does not depend on TensorBoard and the trackers."""

    learner: Child
    actors: Child
    judges: list[Child]  # one, if the rewards need its process
    tensorboard: Child
    trackers: list[Child]
    server: Server | None = None  # None if the user runs one
    env_hosts: Sequence[Child] = ()

    @property
    def all(self) -> list[Child]:
        """Those to start, in this order. The servers run before them."""
        return [self.learner, self.actors, *self.judges, self.tensorboard, *self.trackers]


def _processes(config: Config, run_dir: RunDir, trackers: Sequence[str]) -> _Processes:
    settings, devices, entries = str(run_dir.config), split_devices(config, visible_devices()), config.env.entries()
    charts = ["--logdir", str(run_dir.tensorboard), "--host", "127.0.0.1", "--port", str(free_port(TENSORBOARD_PORT))]
    needs_judge = judged_envs(entries) and not actors_judge(reward_parts(entries).values())
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # of the learner; each actor computes with one

    def child(name: str, command: list[str], *, gpus: Sequence[str] = (), **environment: str) -> Child:
        own = environment | ({VARIABLE: ",".join(gpus)} if gpus else {})
        return Child(name, command, log=run_dir.log(name), environment=own)

    return _Processes(
        learner=child("learner", verb_command("learner", settings), gpus=devices.learner, OMP_NUM_THREADS=threads),
        actors=child("actors", verb_command("actors", settings, JOINS), gpus=devices.actors, OMP_NUM_THREADS="1"),
        judges=[child("judge", verb_command("serve", "judge", settings), OMP_NUM_THREADS="1")] if needs_judge else [],
        tensorboard=child(
            "tensorboard", [sys.executable, "-P", "-m", "tensorboard.main", *charts, "--reload_interval", "5"]
        ),
        trackers=[child(to, verb_command("track", settings, "--to", to)) for to in trackers],
    )


def _supervise(config: Config, run_dir: RunDir, processes: _Processes, shutdown: Shutdown) -> int:
    console = Console(markup=False)
    _print_places(config, run_dir, processes.tensorboard)
    try:
        for child in processes.all:
            child.start()
        failed = _watch(console, config, run_dir, processes, shutdown)
        if failed:
            print_failure("up", failed)
            if failed.exit_code != EXIT_BAD_INPUT and not newest_metrics(run_dir.metrics, 1):
                print_missing(config)
    finally:
        # Actors first: without a learner they would wait. TensorBoard and trackers last: they show how the run ends.
        for child, grace_s in (
            (processes.actors, config.actors.drain_s + ACTORS_GRACE_S),
            *((judge, LEAVE_S + 5.0) for judge in processes.judges),
            (processes.learner, LEARNER_GRACE_S),
            (processes.tensorboard, 5.0),
            *((tracker, TRACKER_GRACE_S) for tracker in processes.trackers),
        ):
            child.end(grace_s)
    summary = read_summary(run_dir) if not failed and processes.learner.exit_code == 0 else None
    if summary:
        print_table("Summary", summary_rows(summary))
    show(console, lambda: _print_next(config, run_dir, is_finished=summary is not None))
    return failed_code(failed) if failed else shutdown.exit_code


def _print_next(config: Config, run_dir: RunDir, *, is_finished: bool) -> None:
    """Write the report, and print where it is and what a person can do with the run."""
    target = run_dir.path / REPORT
    write_whole(target, page(report_of([run_dir.path])))
    print_table("Next", {"report": str(target)} | next_commands(config, run_dir, is_finished=is_finished))


def next_commands(config: Config, run_dir: RunDir, *, is_finished: bool) -> dict[str, str]:
    """What a person can do with a run that has ended, and the command for it."""
    name, root = config.run.name, "" if config.run.root == "runs" else f" run.root={shlex.quote(config.run.root)}"
    resume, rows = f"slipstream up --resume {name}{root}", {}
    if config.replay.archive:
        rows["look at episodes"] = f"slipstream view {name}{root}"
        rows["export episodes"] = f"slipstream replay export {name} {name}.jsonl{root}"
    if is_finished:
        rows["evaluate"] = f"slipstream eval {name}{root}"
        rows["exported model"] = str(run_dir.trained_model)
        return rows | {"continue": f"{resume} learner.steps=MORE"}
    if ends := finish_command(run_dir):
        rows["evaluate, export the model"] = ends
    return rows | {"continue": resume}


def _watch(
    console: Console, config: Config, run_dir: RunDir, processes: _Processes, shutdown: Shutdown
) -> Child | None:
    """Show progress until the learner is done or a signal asks to stop; return a child that cannot be restarted."""
    learner, actors, server = processes.learner, processes.actors, processes.server
    # Without retries: this loop restarts a server that has ended.
    client = connect(config.redis.url, patience_s=0)
    view, observer = View(client, run_dir, config), Observer(client, config, log=run_dir.log("learner"))
    reporter = LineReporter(console, run_dir, observer)
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while learner.exit_code != 0:
            if shutdown.requested.wait(POLL_S):
                console.print(
                    "stopping the actors, then the learner, which writes a checkpoint; press Ctrl-C again "
                    "to stop at once",
                    soft_wrap=True,
                )
                return None
            exit_code = server.keep_up() if server else None
            if exit_code is not None:
                console.print(f"redis-server ended with code {exit_code}; restarted it with its data", soft_wrap=True)
            for child in (learner, actors, *processes.judges):
                if not child.keep_up():
                    return child
            if gone := ended(processes.env_hosts):
                return gone
            for line in actors.new_lines(RESTARTED):
                console.print(cell(line), soft_wrap=True)
            for child in (processes.tensorboard, *processes.trackers):  # training does not depend on them
                child.keep_up()
            for line in (line for child in processes.trackers for line in child.new_lines("slipstream track:")):
                console.print(cell(line), soft_wrap=True)
            show(console, lambda: live.update(view.render(), refresh=True) if live else reporter.report())
    show(console, reporter.report)
    return None


class LineReporter:
    """Prints one line per step, and every fault that lasts, where the output is not a terminal."""

    def __init__(
        self, console: Console, run_dir: RunDir, observer: Observer, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._metrics = MetricsFile(run_dir.metrics)
        self._observer = observer
        records = self._metrics.records()  # of steps that were made before this start; they are not printed
        self._printed_s = records[-1].get("time", 0.0) if records else 0.0
        self._looked_at = -math.inf  # when the run was last diagnosed, by the clock
        self._faults = FaultLog()
        self._reported_at, self._reported = clock(), ""  # how far the start of the run is

    def report(self) -> None:
        """Print what is new."""
        records = self._metrics.records()
        self._report_steps(records)
        now = self._clock()
        if now - self._looked_at > LOOK_EVERY_S:
            self._looked_at = now
            steps = [record for record in records if "trained/reward" in record]
            found = diagnose(self._observer.facts(steps))
            if line := self._faults.line(found, now_s=now):
                self._console.print(cell(line), soft_wrap=True)
            progress = f"{found.cause}: {found.evidence}"
            if not records and not found.is_fault and now - self._reported_at >= START_S and progress != self._reported:
                self._reported_at, self._reported = now, progress
                self._console.print(cell(progress), soft_wrap=True)

    def _report_steps(self, records: Sequence[dict[str, Any]]) -> None:
        for place, record in enumerate(records, start=1):
            if record.get("time", 0.0) > self._printed_s:
                self._printed_s = record["time"]  # before printing: a record which cannot be printed is tried once
                self._console.print(progress_line(records[:place]), highlight=False, soft_wrap=True)


def _print_places(config: Config, run_dir: RunDir, tensorboard: Child) -> None:
    """Print where TensorBoard, Redis and logs are, one line each."""
    charts = f"http://127.0.0.1:{tensorboard.command[tensorboard.command.index('--port') + 1]}"
    rows = {
        "TensorBoard": redirect_to_charts(charts, port=free_port(DASHBOARD_PORT)),
        "GPUs": str(split_devices(config, visible_devices())),
        "Redis": config.redis.url,
        "logs": str(run_dir.log("*")),
        "in another terminal": f"slipstream top {run_dir.config}",
    }
    for line in (f"Slipstream: {config.run.name}, {time.strftime('%H:%M:%S')}", *map(": ".join, rows.items())):
        print(printable(line), flush=True)  # one line each, and no table: its line breaks would cut the link
