"""What it costs to watch a large run: `make bench-see`.

An hour of 300 simulated actors is written at once, by the learner's own record and by the fleet's charts, into a real
Redis and real event files: a step each second, the fleet every ten seconds, with the clock of an hour. Then TensorBoard
is loaded in Debian's Chromium, and `slipstream top` watches the run.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import pty
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import psutil
import redis
from msgspec.structs import replace

from slipstream.common.config.config import dump_config, load_config
from slipstream.common.process.connection import PASSWORD_VARIABLE, connect
from slipstream.common.process.events import Events
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.lead.descriptions import describe
from slipstream.learner.lead.fleet_watch import fleet_metrics
from slipstream.learner.lead.links import join_run
from slipstream.learner.lead.overview import FLEET, PINNED, pinned_link
from slipstream.learner.lead.run_record import RunRecord
from slipstream.learner.lead.tally import Tally
from slipstream.learner.model.flops import Flops
from slipstream.learner.objective.guard import Evidence
from slipstream.learner.objective.lag import BUCKETS, LagMetrics
from slipstream.learner.publisher.publish import PublishStats
from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.learner.supply.refusals import Refusals
from slipstream.replay.fleet.fleet import Fleet, Member, MemberState, RunState
from slipstream.replay.records.ticket import Group
from slipstream.replay.run.observer import Observer
from slipstream.replay.server.server import start_private_server
from slipstream.tools.lab.bench.benchmark import Row
from slipstream.tools.lab.bench.benchmark import Run as BenchmarkRun
from slipstream.tools.lab.bench.load.replay_load import RUN_ID, TRAJECTORY, Groups, attempts_at, groups_of
from slipstream.tools.run.up import free_port

NUM_ACTORS, HOUR_S, STEP_S, EVERY_S = 300, 3600, 1.0, 10
TIMED_STEPS = 60
GROUPS, GROUP_SIZE = 8, 8
WATCHED_S = 30.0
LOADS = 5
CHROMIUM = "/usr/bin/chromium"
MB = 1e6


def main() -> int:
    """Measure, and write docs/benchmarks/see.json."""
    bench = BenchmarkRun("see")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder), RUN_ID)
        run_dir.create()
        with start_private_server(run_dir.redis) as server, connect(server.secret_url) as client:
            os.environ[PASSWORD_VARIABLE] = server.password
            with _beating(client):
                recorded_s, cpu_s = _write_the_hour(client, run_dir, server.url)
                rows = [
                    _at_most("TensorBoard's files of an hour", [_size_mb(run_dir.tensorboard)], "MB", 300),
                    _at_most("metrics of a step, share of a step of 1 s", [recorded_s / STEP_S], "of a step", 0.01),
                    _at_most("the same, the learner's own CPU time", [cpu_s / STEP_S], "of a step", 0.01),
                    _at_most("CPU of `slipstream top`", [_watched(run_dir)], "of a core", 0.05),
                    _at_most("TensorBoard's page with the overview drawn", _load_times_s(run_dir), "s", 3),
                ]
    return bench.end(rows, versions={})


def _at_most(name: str, values: Sequence[float], unit: str, most: float) -> Row:
    return Row.of(name, values, unit=unit, against=[most] * len(values), goal=f"value <= {most:g}")


def _write_the_hour(client: redis.Redis, run_dir: RunDir, url: str) -> tuple[float, float]:
    """Write every point of the hour; return the mean seconds of the learner's record of a step, and of its CPU time."""
    config = load_config(None, [f"run.name={RUN_ID}", f"run.root={run_dir.path.parent}", f"redis.url={url}"])
    config.learner.steps = 2 * HOUR_S
    run_dir.config.write_text(dump_config(config))
    links = join_run(
        client, config, model_folder=run_dir.path, model_files=[], vocab_size=100, tokenizer_root="", own_modules={}
    )
    links.fleet.set_run_state(RunState.TRAINING)
    groups = groups_of(client, "train")  # becomes the run's learner after `links`, which only reads from now on
    started_at_s = time.time() - HOUR_S
    record = RunRecord.begin(
        links,
        run_dir,
        Fence(run_dir.checkpoints),
        tally=Tally(),
        step=0,
        started_at_s=started_at_s,
        flops=Flops(per_token=1.0, per_pair=1.0, peak=None),
        config=config,
        decode=str,
    )
    refusals, taken_s, cpu_s = Refusals(links.fleet, links.bulletin), list[float](), list[float]()
    events = Events(run_dir.tensorboard / FLEET, describe=describe)
    observer = Observer([client], RUN_ID, max_lag=config.replay.max_lag)
    for step in range(round(HOUR_S / STEP_S)):
        is_timed = step >= HOUR_S / STEP_S - TIMED_STEPS
        batch = _played(groups, step)
        before = Progress(step=step, policy_version=step, highest_published=step, next_group_id=0, tokens_trained=0)
        started, cpu = time.perf_counter(), time.thread_time()
        record.write_step(batch, _step(), before=before, times_s=TIMES_S, publish=PublishStats(), refusals=refusals)
        if is_timed:  # at a run's own pace, as the fleet is read by the clock
            taken_s.append(time.perf_counter() - started)
            cpu_s.append(time.thread_time() - cpu)
            time.sleep(STEP_S)
        if step % EVERY_S == 0:
            metrics = fleet_metrics(observer.facts([]), tokens_trained=record.tally.tokens_trained)
            events.write(step, metrics.means(), time_s=started_at_s + step)
    events.close()
    record.close()
    for repertoire in links.repertoires:
        repertoire.close()
    return statistics.mean(taken_s), statistics.mean(cpu_s)


def _played(groups: Groups, step: int) -> Batch:
    """One group that went through the buffer, and as many more as a step trains on."""
    groups.open(1, group_size=1)
    lease = groups.actor.lease("actor-0")
    assert lease is not None
    for at, attempt in attempts_at(lease):
        groups.actor.insert(at, attempt)
    (played,) = groups.learner.claim(step + 1, 1, policy_version=step, max_lag=1 << 30)
    groups.learner.settle(step + 1)
    trained = [replace(TRAJECTORY, member=member) for member in range(GROUP_SIZE)]
    group = Group(ticket=played.ticket, num_uses=1, trajectories=trained)
    return Batch(groups=[group] * GROUPS, num_dropped={}, next_group_id=step)


TIMES_S = {"wait": 0.2, "archive": 0.01, "pack": 0.02, "forward": 0.3, "backward": 0.4, "optimizer": 0.05} | {
    "publish": 0.01,
    "evaluate": 0.01,
}


def _step() -> StepMetrics:
    """The metrics of a step, in as many buckets of lag as a step has at most."""
    lag = LagMetrics(fraction=0.1, ratio_mean=1.0, effective_sample_size=0.9, clip_fraction=0.1, masked_fraction=0.1)
    numbers = {field.name: random.random() for field in dataclasses.fields(StepMetrics)}
    of_step = {
        "evidence": Evidence(weight_mean=1.0, token_ess=0.9, trajectory_ess=0.9),
        "by_lag": {str(bucket): lag for bucket in BUCKETS},
        "trajectory_ratios": [random.lognormvariate(0, 0.1) for _ in range(GROUPS * GROUP_SIZE)],
        "values": None,
        "tokens": (),
    }
    return StepMetrics(**(numbers | of_step))  # type: ignore[arg-type]


@contextlib.contextmanager
def _beating(client: redis.Redis) -> Iterator[None]:
    """Send the heartbeats of all actors, each one as often as an actor does."""
    fleet, ending = Fleet(client, RUN_ID), threading.Event()

    def beat() -> None:
        while True:
            started = time.monotonic()
            for number in range(NUM_ACTORS):
                fleet.beat(replace(ACTOR, name=f"actor-{number}", instance_kind=("spot", "reserved")[number % 2]))
            if ending.wait(max(0.0, BEAT_S - (time.monotonic() - started))):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


BEAT_S = 5.0
ACTOR = Member(
    name="",
    host="host",
    role="actor",
    zone="eu-1a",
    instance_kind="spot",
    price_per_hour=0.5,
    engine="scripted",
    transport="pull",
    policy_version=HOUR_S,
    num_episodes=24,
    max_episodes=32,
    used_slots=24.0,
    generated_tokens=1_000_000,
    kept_tokens=900_000,
    tokens_per_s=500.0,
    kv_use=0.5,
    state=MemberState.SERVING,
    started_at_s=1.7e9,
    served_s=1800.0,
    last_pause_s=0.01,
    num_refreshes=100,
    refusal=None,
)


def _size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MB


def _watched(run_dir: RunDir) -> float:
    """The share of a core that `slipstream top` uses in a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    settings = [f"run.name={RUN_ID}", f"run.root={run_dir.path.parent}"]
    command = [sys.executable, "-P", "-m", "slipstream.tools.cli.cli", "top", *settings]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}) as top:
        os.close(theirs)
        shown = threading.Event()
        threading.Thread(target=_drain, args=(ours, shown), daemon=True).start()
        if not shown.wait(120):
            raise RuntimeError("`slipstream top` shows nothing")
        process = psutil.Process(top.pid)
        time.sleep(5)  # its first look reads the whole file
        before, started = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(WATCHED_S)
        share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - started)
        top.terminate()
    return share


def _drain(handle: int, shown: threading.Event) -> None:
    """Read what `top` draws, and note its first actors."""
    drawn = b""
    with contextlib.suppress(OSError):
        while part := os.read(handle, 1 << 16):
            drawn = (drawn + part)[-(1 << 16) :]
            if b"serving" in drawn:
                shown.set()


def _load_times_s(run_dir: RunDir) -> list[float]:
    """Seconds from opening the page until every pinned chart with data is drawn, each time in a new browser."""
    port = free_port(6006)
    board = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run_dir.tensorboard), "--port", str(port)]
    with _serving(board, f"http://127.0.0.1:{port}/data/runs") as runs:
        deadline = time.monotonic() + 120
        while len(runs()) < NUM_LINES:
            if time.monotonic() > deadline:
                raise RuntimeError(f"TensorBoard has read only {runs()}")
            time.sleep(0.2)
        return [asyncio.run(_load_s(pinned_link(f"http://127.0.0.1:{port}"))) for _ in range(LOADS)]


NUM_LINES = 4  # "learner", "fleet", "produced" and "trained"; nothing was dropped or evaluated
DRAWN = """
[...document.querySelectorAll("metrics-pinned-view scalar-card")]
    .filter(card => card.querySelector("line-chart") && !card.querySelector("mat-spinner")).length
"""


async def _load_s(page: str) -> float:
    """Open the page in a new browser, by Chromium's DevTools protocol."""
    port = free_port(0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=2100,1160"]
        command = [CHROMIUM, *options, f"--user-data-dir={profile}", f"--remote-debugging-port={port}", "about:blank"]
        with _serving(command, f"http://127.0.0.1:{port}/json/list") as tabs:
            address = next(tab["webSocketDebuggerUrl"] for tab in tabs() if tab["type"] == "page")
            async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as tab:
                started = time.monotonic()
                await _asked(tab, "Page.navigate", url=page)
                while (await _asked(tab, "Runtime.evaluate", expression=DRAWN))["result"].get("value", 0) < len(PINNED):
                    if time.monotonic() - started > 60:
                        raise RuntimeError("the page does not draw its charts")
                    await asyncio.sleep(0.05)
                return time.monotonic() - started


async def _asked(tab: aiohttp.ClientWebSocketResponse, method: str, **parameters: str) -> Any:
    await tab.send_json({"id": 1, "method": method, "params": parameters})
    while True:
        answer = await tab.receive_json(timeout=60)
        if answer.get("id") == 1:
            return answer["result"]


@contextlib.contextmanager
def _serving(command: Sequence[str], url: str) -> Iterator[Callable[[], Any]]:
    """Start a server, wait until it answers at `url`; yield a function that asks it again."""

    def ask() -> Any:
        with urlopen(url, timeout=60) as answer:
            return json.load(answer)

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                ask()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield ask
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
