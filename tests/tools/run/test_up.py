"""`slipstream up` as a person uses it: started, watched, stopped, killed, and resumed."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import redis

from slipstream.actors.host.join import wait_for_run
from slipstream.common.process.connection import PASSWORD_VARIABLE, connect
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import die_with_parent
from slipstream.learner.checkpoint.conditions import THREADS
from slipstream.replay.fleet.fleet import Fleet, RunState, UnknownRun
from slipstream.replay.records.keys import key
from slipstream.replay.records.ledger import read_ledger
from slipstream.replay.run.archive import Archive
from slipstream.replay.server.redis_server import Server, _socket_of, password_of
from slipstream.replay.server.server_settings import free_port
from tests.processes import DEADLINE_S, GUESS, MARK, REPOSITORY, Gate, marked
from tests.replay.buffer.every_verb import FACTS
from tests.tools.cli.verbs import Output, slipstream
from tests.waiting import wait_until

NAME = "run"
ENDLESS = 100_000  # steps: a sitting ends when the test ends it
AT_ONCE_S = 180.0  # what needs no drain and no checkpoint ends within seconds; DRAIN_S would show
DRAIN_S = 600.0
SMALL = [*GUESS, "actors.count=1", "replay.groups_per_step=2", "learner.checkpoint_every=2", "env.step_timeout_s=600"]


class Up:
    def __init__(self, root: Path, mark: str, *arguments: str, columns: int, **variables: str) -> None:
        self.dir = RunDir(root, NAME)
        self._stdout, self._stderr = root / "stdout", root / "stderr"
        environment = {**os.environ, MARK: mark, "COLUMNS": str(columns), "OMP_NUM_THREADS": "1", **variables}
        environment.pop(PASSWORD_VARIABLE, None)
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.tools.cli.cli", "up", f"run.root={root}", *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def said(self) -> str:
        return self._stdout.read_text()

    def complained(self) -> str:
        return self._stderr.read_text()

    def log(self, process: str) -> str:
        path = self.dir.log(process)
        return path.read_text() if path.exists() else ""

    def last_step(self) -> int:
        return max((int(record["step"]) for record in read_metrics(self.dir.metrics)), default=0)

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{what}: never, exit code {self.process.poll()}\n{self._everything()}")
            time.sleep(0.05)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"`slipstream up` did not end within {timeout_s:.0f} s\n{self._everything()}")

    def _everything(self) -> str:
        logs = [f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.dir.path.glob("logs/*.log")]
        return "\n".join([self.said(), self.complained(), *logs])


class Sittings:
    def __init__(self, root: Path, mark: str) -> None:
        self._root, self._mark = root, mark
        self._ups: list[Up] = []

    def __call__(self, *arguments: str, columns: int = 80, **variables: str) -> Up:
        self._ups.append(Up(self._root, self._mark, *arguments, columns=columns, **variables))
        return self._ups[-1]

    def left(self) -> list[list[str]]:
        return list(self.running().values())

    def running(self) -> dict[psutil.Process, list[str]]:
        lines = {}
        for process in marked(self._mark):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended between the two looks
                lines[process] = process.cmdline()
        return lines

    def end(self) -> None:
        left = marked(self._mark)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for up in self._ups:
            up.process.wait()
        psutil.wait_procs(left, DEADLINE_S)


@pytest.fixture
def start(tmp_path: Path, run_id: str) -> Iterator[Sittings]:
    sittings = Sittings(tmp_path, run_id)
    yield sittings
    sittings.end()


@pytest.mark.parametrize("ends", [["Ctrl-C"], pytest.param(["Ctrl-C", "kill -9"], marks=pytest.mark.long)])
def test_a_run_that_is_ended_is_gone_on_with_to_its_end(
    tmp_path: Path, start: Sittings, printed: Output, ends: list[str]
) -> None:
    """One run in two sittings, or in three."""
    settings = [f"run.name={NAME}", *SMALL, f"learner.steps={ENDLESS}", "eval.num_tasks=2", "env.options={step_s: 0.1}"]
    first = start(*settings, columns=40)
    first.wait_until(lambda: first.last_step() >= 3, "the third step")
    its_first_screen_says_what_runs_where(first.said())
    its_link_opens_on_the_charts(first.said())
    it_can_be_watched_and_audited_without_a_password(tmp_path, printed)
    it_starts_its_redis_again(first)
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130
    assert start.left() == []
    reached = first.last_step()
    assert reached >= 3
    progress = [line for line in first.said().splitlines() if line.startswith("step ") and "reward" in line]
    assert progress and all(line.endswith("%") for line in progress), "none is cut"
    it_says_how_to_look_evaluate_export_and_continue(first, reached)

    if "kill -9" in ends:
        second = start("--resume", NAME)
        second.wait_until(lambda: second.last_step() >= reached + 2, "two more steps")
        second.process.kill()
        everything_ends_soon(start)

    last = first.last_step() + 2
    resumed = start("--resume", NAME, f"learner.steps={last}", OMP_NUM_THREADS="2")
    assert resumed.wait() == 0
    archive = Archive(resumed.dir.trajectories, NAME)
    assert [archive.conditions(step)[THREADS] for step in (1, last)] == ["1", "2"], "the user's own number"
    assert start.left() == []
    steps = [record["step"] for record in read_metrics(resumed.dir.metrics) if "trained/reward" in record]
    assert steps == list(range(1, last + 1))
    summary = json.loads(resumed.dir.summary.read_text())
    assert summary["ledger"]["balanced"] and summary["ledger"]["trained"] == 2 * last
    assert set(summary["eval"]) == {"initial", "final"}
    assert "Summary" in resumed.said() and "ledger: balanced" in resumed.said()
    assert f"report: {resumed.dir.path}/report.html" in resumed.said()
    assert f"exported model: {resumed.dir.trained_model}\n" in resumed.said()
    assert f"{last} of {last} steps, finished" in (resumed.dir.path / "report.html").read_text()
    its_password_is_in_no_file_but_its_own(resumed.dir)
    the_trained_model_can_be_evaluated(tmp_path)


def it_can_be_watched_and_audited_without_a_password(root: Path, printed: Output) -> None:
    os.environ.pop(PASSWORD_VARIABLE, None)
    here = [f"run.root={root}", f"run.name={NAME}"]
    top = printed("top", *here)
    assert re.search(rf"step .* of {ENDLESS}", top) and "SERVING" in top.upper()
    os.environ.pop(PASSWORD_VARIABLE, None)  # which `top` has found
    audit = printed("replay", "audit", *here)
    assert f"{NAME}: train" in audit and "balanced: True" in audit


def it_starts_its_redis_again(up: Up) -> None:
    before = up.last_step()
    server = next(child for child in psutil.Process(up.process.pid).children() if child.name().endswith("-server"))
    server.kill()
    up.wait_until(lambda: "redis-server ended with code -9; restarted it" in up.said(), "Redis is restarted")
    up.wait_until(lambda: up.last_step() >= before + 2, "two more steps on the new server")


def its_first_screen_says_what_runs_where(said: str) -> None:
    """Before the first line about the start or a step."""
    lines = said.splitlines()
    first = lines[: next(place for place, line in enumerate(lines) if line.startswith(("step ", "the ", "no ")))]
    assert len(first) <= 8 and "%" not in "".join(first), first
    assert first[0].startswith(f"Slipstream: {NAME}, ")
    places = ["TensorBoard", "GPUs", "Redis", "logs", "in another terminal"]
    assert [line.partition(":")[0] for line in first[1:6]] == places
    assert "start `slipstream learner`" not in said and "start `slipstream actors`" not in said


def its_link_opens_on_the_charts(said: str) -> None:
    link = re.search(r"^TensorBoard: (http://127\.0\.0\.1:\d+)$", said, re.MULTILINE)
    assert link is not None
    connection = http.client.HTTPConnection(link[1].removeprefix("http://"), timeout=DEADLINE_S)
    connection.request("GET", "/")
    answer = connection.getresponse()
    connection.close()
    target = urllib.parse.urlsplit(answer.headers["Location"])
    assert answer.status == 302 and target.fragment == "timeseries"
    pinned = [card["tag"] for card in json.loads(urllib.parse.parse_qs(target.query)["pinnedCards"][0])]
    assert {"charts/success", "charts/reward", "lag/mean", "perf/learner_busy"} <= set(pinned)


def it_says_how_to_look_evaluate_export_and_continue(up: Up, reached: int) -> None:
    root = f"run.root={up.dir.path.parent}"
    for row in (
        f"look at episodes: slipstream view {NAME} {root}",
        f"export episodes: slipstream replay export {NAME} {NAME}.jsonl {root}",
        f"evaluate, export the model: slipstream up --resume {NAME} {root} learner.steps={reached}",
        f"continue: slipstream up --resume {NAME} {root}\n",
    ):
        assert row in up.said()


def its_password_is_in_no_file_but_its_own(run_dir: RunDir) -> None:
    settings = dict(line.split(" ", 1) for line in (run_dir.redis / "redis.conf").read_text().splitlines())
    password = settings["requirepass"].encode()
    leaks = [path for path in run_dir.path.rglob("*") if path.is_file() and password in path.read_bytes()]
    assert leaks == [run_dir.redis / "redis.conf"]
    assert password_of(run_dir.redis, "redis://127.0.0.1:1/0") is None


def the_trained_model_can_be_evaluated(root: Path) -> None:
    evaluated = slipstream("eval", f"run.root={root}", f"run.name={NAME}")
    assert evaluated.returncode == 0, evaluated.stderr
    results = [json.loads(line) for line in evaluated.stdout.splitlines() if line.startswith("{")]
    assert [result["sampling"] for result in results] == ["sampled", "greedy"]
    served = json.loads((RunDir(str(root), NAME).trained_model / "generation_config.json").read_text())
    assert (served["temperature"], served["top_k"]) == (1.0, 0), "those of sampling, though the run names none"
    assert all(result["num_tasks"] == 2 and 0 <= result["success"] <= 1 for result in results)


@pytest.mark.long  # test_server_command has the same of a verb that plays in its own process
def test_a_run_ends_with_its_environments_server_and_continues_with_a_new_one(tmp_path: Path, start: Sittings) -> None:
    port = free_port()
    serve = f"{sys.executable} -m slipstream.tools.cli.cli serve envs --names tests.guess:GuessEnv --port {port}"
    options = {"url": f"http://127.0.0.1:{port}", "env": "tests.guess:GuessEnv", "server_command": serve}
    settings = ["env.name=remote", f"env.options={json.dumps(options)}", f"learner.steps={ENDLESS}"]
    up = start(f"run.name={NAME}", *SMALL, *settings)
    up.wait_until(lambda: up.last_step() >= 1, "the first step")
    (server,) = (each for each, line in start.running().items() if line[0] != "sh" and line[-1:] == [str(port)])
    server.kill()
    assert up.wait() == 137
    assert "slipstream up: server-remote ended with code 137" in up._everything()
    assert start.left() == []
    reached = up.last_step()
    again = start("--resume", NAME)
    again.wait_until(lambda: again.last_step() > reached, "another step")
    again.process.kill()
    everything_ends_soon(start)


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path, start: Sittings) -> None:
    gate = Gate(tmp_path / "gate")
    up = start(f"run.name={NAME}", *SMALL, f"env.options={{gate: {gate}}}", f"actors.drain_s={DRAIN_S}")
    up.wait_until((up.dir.model / "config.json").exists, "the model is made, by playing the environment")
    gate.close()  # no episode ends, so that a drain would last for DRAIN_S
    up.wait_until(lambda: is_leased(up), "episodes are being played")
    up.process.send_signal(signal.SIGINT)
    up.wait_until(lambda: "Ctrl-C again" in up.said(), "it says that it stops")
    up.wait_until(lambda: "draining" in up.log("actor-0"), "the actor drains")
    up.process.send_signal(signal.SIGINT)
    assert up.wait(AT_ONCE_S) == 130
    everything_ends_soon(start)


def everything_ends_soon(start: Sittings) -> None:
    wait_until(lambda: not start.left(), "what outlived `up` to be gone", timeout_s=AT_ONCE_S)


def is_leased(up: Up) -> bool:
    """Whether an actor holds a lease, as the run's own Redis says."""
    settings = dict(line.split(" ", 1) for line in (up.dir.redis / "redis.conf").read_text().splitlines())
    with connect(f"unix://:{settings['requirepass']}@{_socket_of(up.dir.redis.resolve())}") as client:
        return read_ledger(client, NAME).leased > 0


def test_ctrl_c_while_a_run_starts_ends_without_a_drain(redis_server: Server, tmp_path: Path, start: Sittings) -> None:
    """On a Redis of the user's, whose password is in the URL: it stays out of every file, and the server stays up."""
    settings = [f"actors.drain_s={DRAIN_S}", "warm_start.episodes=50", "warm_start.batch_tokens=1"]
    up = start(f"run.name={NAME}", *SMALL, f"redis.url={redis_server.secret_url}", *settings)
    up.wait_until(lambda: "warm start " in up.log("learner") or is_described(redis_server), "the warm start")
    up.process.send_signal(signal.SIGINT)
    assert up.wait(AT_ONCE_S) == 130
    assert start.left() == []
    assert redis_server.process.poll() is None
    password = redis_server.password.encode()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and password in path.read_bytes()] == []
    with connect(redis_server.secret_url) as client:
        described = Fleet(client, NAME).run_facts().config_yaml
    assert redis_server.url in described and redis_server.password not in described


def is_described(server: Server) -> bool:
    """Whether the learner has joined the run; imitation comes next, and actors start their engines."""
    with connect(server.secret_url) as client:
        return bool(client.exists(key(NAME, "facts")))


def test_actors_that_come_before_the_learner_wait_for_what_it_describes(redis_client: redis.Redis, run_id: str) -> None:
    fleet = Fleet(redis_client, run_id)
    fleet.describe_run(FACTS)
    fleet.set_run_state(RunState.FINISHED)
    fleet.forget_run()
    with pytest.raises(UnknownRun):
        wait_for_run(fleet, timeout_s=0.0)
    fleet.describe_run(FACTS)
    fleet.set_run_state(RunState.STARTING)
    assert wait_for_run(fleet, timeout_s=0.0) == FACTS
