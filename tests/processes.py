"""A run by real processes: a learner and actors with their logs, signals to them, and conditions to wait for."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import redis

from slipstream.common.process.connection import PASSWORD_VARIABLE, connect
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import die_with_parent
from slipstream.common.records.trajectory import Trajectory, decode_trajectory
from slipstream.replay.buffer.audit import audit
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet, Member, UnknownRun
from slipstream.replay.records.keys import key
from slipstream.replay.records.ledger import Ledger, read_ledger
from slipstream.replay.server.redis_server import Server

REPOSITORY = Path(__file__).parents[1]
DEADLINE_S = 240.0  # for what takes seconds on an idle machine
POLL_S = 0.05
NUM_LAST_LINES = 30
MARK = "SLIPSTREAM_TEST"  # an environment variable that every descendant of a test's processes carries
CLI = ["-m", "slipstream.tools.cli.cli"]
Done = subprocess.CompletedProcess[str]

# A model of one layer, the environment of tests/guess.py, and steps of 4 groups of 4.
GUESS = ["env.name=tests.guess:GuessEnv", "model.tiny_depth=1", "model.max_tokens=64", "sampling.max_turn_tokens=4"]
GUESS += ["learner.micro_batch_tokens=256", "replay.groups_per_step=4", "replay.group_size=4"]
GUESS += ["actors.max_episodes=8", "optim.lr=1e-3", "eval.num_tasks=0"]
# For what another one plays than the policy: a stand-in, or a script.
PLAYED_BY_OTHERS = ["objective.guard=false", "objective.max_negative_kl=0"]


def started(command: list[str], output: IO[bytes], **more: Any) -> "subprocess.Popen[bytes]":
    """Start a program that reads nothing, writes all to `output`, and ends when this process does."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    return subprocess.Popen(command, **streams, preexec_fn=partial(die_with_parent, os.getpid()), **more)


def python(*arguments: str, cwd: Path = REPOSITORY, timeout_s: float = DEADLINE_S, **variables: str) -> Done:
    """Run `python ARGUMENTS` to its end, as from a terminal that knows no password, with these variables beside."""
    here = {name: value for name, value in os.environ.items() if name != PASSWORD_VARIABLE}
    environment = {**here, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, timeout=timeout_s, capture_output=True, text=True
    )


class Process:
    """A process of ours, its output in a log."""

    def __init__(self, name: str, command: list[str], *, log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._log = log
        self._is_to_end = False
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with log.open("ab") as output:  # a session of its own: Ctrl-C is for pytest, whose exit ends them
            self._popen = started(command, output, cwd=REPOSITORY, env=environment, start_new_session=True)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._popen.poll()

    @property
    def failed(self) -> bool:
        """Whether it ended in an error that no test asked for."""
        return self.exit_code not in (None, 0) and not self._is_to_end

    def expect_end(self) -> None:
        """From now on the test makes it end; that is no failure."""
        self._is_to_end = True

    def send(self, number: signal.Signals) -> None:
        if number in (signal.SIGTERM, signal.SIGKILL):
            self.expect_end()
        self._popen.send_signal(number)

    def kill(self) -> None:
        """End this very process with SIGKILL, and wait until it is gone."""
        self.send(signal.SIGKILL)
        self._popen.wait(30)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Its exit code. Fails the test when it does not end in time."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} did not end within {timeout_s:.0f} s:\n{self.last_words()}")

    def child(self, module: str) -> psutil.Process:
        """The process that it started as `python -m module`."""
        children = psutil.Process(self._popen.pid).children()
        return next(child for child in children if module in child.cmdline())

    def said(self) -> str:
        """All that it wrote so far."""
        return self._log.read_text(errors="replace")

    def last_words(self) -> str:
        return "\n".join([f"--- {self.name}, exit code {self.exit_code}:", *self.said().splitlines()[-NUM_LAST_LINES:]])


class Run:
    """One run against one Redis server: its settings, the processes that were started for it, and what it left."""

    def __init__(self, name: str, *, root: Path, server: Server, settings: list[str]) -> None:
        self.name = name
        self.dir = RunDir(root, name)
        self.processes: list[Process] = []
        self._common = [f"run.name={name}", f"run.root={root}", f"redis.url={server.url}"]
        self._settings = settings
        self._environment = {PASSWORD_VARIABLE: server.password, MARK: name}
        self.client: redis.Redis = connect(server.secret_url)
        self.fleet = Fleet(self.client, name)
        self.bulletin = Bulletin(self.client, name)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        """End whatever still runs, the publishers too, at once."""
        for process in self.processes:
            if process.exit_code is None:
                process.kill()
        for descendant in marked(self.name):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        self.client.close()

    def start_learner(self, *settings: str, **environment: str) -> Process:
        arguments = ["-P", *CLI, "learner", *self._common, *self._settings, *settings]
        return self.start("learner", arguments, **environment)

    def start_rerun(self, name: str, *settings: str) -> Process:
        """Train again on this run's archive, as run `name`. Neither Redis nor actors are in its reach.

        It starts with other threads than the run had: it takes the run's own.
        """
        arguments = ["--replay-archive", self.name, f"run.root={self.dir.path.parent}", f"run.name={name}", *settings]
        return self.start(name, [*CLI, "learner", *arguments], OMP_NUM_THREADS="2")

    def start_actor(self, name: str, *settings: str) -> Process:
        """An actor knows where the run is and what itself is like; the rest it hears from the run."""
        mine = [setting for setting in self._settings if setting.startswith("actors.")]
        return self.start(name, ["-P", "-m", "slipstream.actors", name, *self._common, *mine, *settings])

    def start_scripted_actor(self, name: str) -> Process:
        """An actor whose engine follows a script: see `tests.actors.scripted_actor`."""
        return self.start(name, ["-m", "tests.actors.scripted_actor", name, *self._common])

    def start_host(self, *settings: str) -> Process:
        """A supervisor of actors, which names them."""
        return self.start("host", [*CLI, "actors", *self._common, *self._settings, *settings])

    def start(self, name: str, arguments: list[str], **variables: str) -> Process:
        """`python ARGUMENTS`, named `name`, as a process of this run."""
        environment = self._environment | variables
        process = Process(name, [sys.executable, *arguments], log=self.dir.log(f"test-{name}"), environment=environment)
        self.processes.append(process)
        return process

    def wait_until(self, holds: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Return once `holds()`. Fails the test past the deadline, and at once when a process ends in an error."""
        deadline = time.monotonic() + deadline_s
        while not holds():
            late = time.monotonic() > deadline
            if late or any(process.failed for process in self.processes):
                reason = f"not within {deadline_s:.0f} s" if late else "a process failed"
                words = "\n".join(process.last_words() for process in self.processes)
                pytest.fail(f"{reason}: {what}; {self.ledger()}\n{words}")
            time.sleep(POLL_S)

    def is_described(self) -> bool:
        """Whether the learner has described the run in Redis, which actors wait for."""
        try:
            self.fleet.run_facts()
        except UnknownRun:
            return False
        return True

    def member(self, name: str) -> Member | None:
        """The newest heartbeat of the actor; None before it joined and after it left."""
        return next((member for member in self.fleet.members() if member.name == name), None)

    def generated_tokens(self, name: str) -> int:
        member = self.member(name)
        return member.generated_tokens if member else 0

    def ledger(self) -> Ledger:
        return read_ledger(self.client, self.name)

    def audit(self) -> list[str]:
        return audit(self.client, self.name)

    def steps(self) -> list[int]:
        """The step of every step's record in metrics.jsonl, as they stand there."""
        return [int(record["step"]) for record in self.step_records()]

    def last_step(self) -> int:
        return max(self.steps(), default=0)

    def steps_on(self, num_steps: int, *, deadline_s: float = DEADLINE_S) -> None:
        """Return once the learner has made so many more steps."""
        wanted = self.last_step() + num_steps
        self.wait_until(lambda: self.last_step() >= wanted, f"the learner's step {wanted}", deadline_s=deadline_s)

    def step_records(self) -> list[dict[str, float]]:
        return [record for record in read_metrics(self.dir.metrics) if "trained/reward" in record]

    def published_version(self) -> int:
        """Of the newest offer; -1 before the first."""
        offer = self.bulletin.latest()
        return offer.manifest.policy_version if offer else -1

    def holders(self) -> dict[int, str]:
        """The actor that leases each leased group."""
        holders = {}
        for group_id in self._groups("leased"):
            actor = self._group(group_id).get(b"actor")
            if actor is not None:  # else it was given back since
                holders[group_id] = actor.decode()
        return holders

    def held_by(self, actor: str) -> set[int]:
        return {group_id for group_id, holder in self.holders().items() if holder == actor}

    def unfinished(self) -> set[int]:
        """The groups that are queued or leased: some of their members are not stored yet."""
        with self.client.pipeline(transaction=True) as one_instant:
            for state in ("queued", "leased"):
                one_instant.zrange(f"{key(self.name, 'train')}:{state}", 0, -1)
            return {int(group_id) for found in one_instant.execute() for group_id in found}

    def claimed_after(self, step: int) -> set[int]:
        """The groups that were claimed for later steps than `step`."""
        return {group_id for group_id, claimed_for in self._groups("claimed").items() if claimed_for > step}

    def makers(self, group_id: int) -> set[str]:
        """The actors whose attempts are stored as members of a group that is not trained for good yet."""
        rows = self._group(group_id)
        return {row.decode().split(":", 7)[7] for name, row in rows.items() if name.startswith(b"member:")}

    def records(self, kind: str) -> dict[tuple[int, int], Trajectory]:
        """What Redis holds by (group id, member): `kind` is blob for members that are stored, partial for parts."""
        base = f"{key(self.name, 'train')}:{kind}:"
        names: list[bytes] = list(self.client.scan_iter(match=f"{base}*", count=1000))
        frames: list[Any] = self.client.mget(names) if names else []
        found = {}
        for name, frame in zip(names, frames, strict=True):
            if frame is not None:  # else it is gone since
                group_id, member, *_ = name.decode().removeprefix(base).split(":")
                found[int(group_id), int(member)] = decode_trajectory(frame, max_bytes=1 << 20, vocab_size=1 << 20)
        return found

    def _groups(self, state: str) -> dict[int, float]:
        found: Any = self.client.zrange(f"{key(self.name, 'train')}:{state}", 0, -1, withscores=True)
        return {int(group_id): score for group_id, score in found}

    def _group(self, group_id: int) -> dict[bytes, bytes]:
        row: Any = self.client.hgetall(f"{key(self.name, 'train')}:group:{group_id}")
        return dict(row)


class Gate:
    """Holds every episode of tests/guess.py where it is: closed, no step of the environment ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def close(self) -> None:
        self._path.touch()

    def open(self) -> None:
        self._path.unlink()


def customized(folder: Path) -> dict[str, str]:
    """The environment of a program that runs the `sitecustomize.py` of `folder` first, and so do all that it starts."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def marked(name: str) -> list[psutil.Process]:
    """Every living process that descends from those started for run `name`, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == name:
                found.append(process)
    return found


def nothing_runs(name: str) -> bool:
    """Whether every process of the run is gone."""
    return not marked(name)
