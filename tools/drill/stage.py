"""The processes of a drill, on this machine: a server, a learner and two hosts of actors, each behind a link."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import redis

from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.connection import PASSWORD_VARIABLE, connect
from slipstream.common.process.metrics import newest_metrics
from slipstream.common.process.output import write_whole
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import LEAVE_S
from slipstream.replay.buffer.listing import list_groups
from slipstream.replay.fleet.fleet import Fleet, Member
from slipstream.replay.records.ledger import Ledger, read_ledger
from slipstream.replay.server.redis_server import Server, start_server
from slipstream.tools.drill.cloud import Cloud
from slipstream.tools.run.child import Child
from slipstream.tools.run.link import Link

POLL_S = 0.05
PATIENCE_S = 240.0  # for what takes seconds; a vLLM engine takes 15 s to start on an idle machine
LEARNER_GRACE_S = 60.0


class DrillFailed(RuntimeError):
    """An expected event did not happen. The message names the event and the logs."""


class Stage:
    """One run. Call it from the main thread: its processes end with the thread that started them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dir = RunDir(config.run.root, config.run.name)
        self.dir.create()
        self.server: Server = start_server(self.dir.redis)
        self.links = {name: Link(self.server.port).__enter__() for name in ("learner", "near", "far")}
        self.cloud = Cloud()
        config.redis.url = self.server.url
        write_whole(self.dir.config, dump_config(config))
        self.client: redis.Redis = connect(self.server.secret_url, patience_s=PATIENCE_S)
        self.learner = self._child("learner", "learner")
        self.near = self._child("near", "actors", f"actors.transport={config.actors.transport}")
        self.far = self._child(
            "far",
            "actors",
            f"run.root={self.dir.path}/far",
            "actors.transport=pull",
            f"actors.notices=aws@{self.cloud.url}",
        )
        self.everyone = [self.learner, self.near, self.far]
        self._asked: set[Child] = set()  # whose next end is a fault's doing
        self._awaited: set[Child] = set()  # whose exit code `ended` waits for

    def start(self) -> None:
        """Return once both hosts serve, and the learner makes steps."""
        for child in self.everyone:
            child.start()
        self.until(lambda: self.serves(self.near) and self.serves(self.far), "both hosts serve")
        self.until(lambda: self.last_step() >= 2, "the learner makes steps")

    def end(self) -> None:
        """Ask every process to end, the learner last, with a checkpoint."""
        for child in (self.near, self.far):
            child.ask_to_end()
        for child in (self.near, self.far):
            child.wait(self.config.actors.drain_s + LEAVE_S + 5)
        self.learner.ask_to_end()
        self.learner.wait(LEARNER_GRACE_S)

    def close(self) -> None:
        """Kill every process that still runs."""
        self.server.process.send_signal(signal.SIGCONT)
        for child in self.everyone:
            child.kill()
        self.client.close()
        for link in self.links.values():
            link.__exit__()
        self.cloud.close()
        self.server.stop()

    def restart_server(self) -> None:
        """Kill the server, and start it again with the same data."""
        self.server.process.kill()
        self.server.process.wait()
        self.server.keep_up()

    def end_of(self, child: Child) -> None:
        """Expect the next end of `child`, which a fault causes, and start it again after it."""
        self._asked.add(child)

    def ended(self, child: Child) -> int:
        """Return the exit code of its next end, which a fault causes, and start it again."""
        self._awaited.add(child)
        self.until(lambda: child.exit_code is not None, f"the {child.name} ends")
        exit_code = child.exit_code
        assert exit_code is not None
        child.start()
        self._awaited.remove(child)
        return exit_code

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait, and restart each process that a fault has ended. Raises DrillFailed."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            self._tick(what)
            if time.monotonic() > deadline:
                raise DrillFailed(f"{what}: not within {PATIENCE_S:.0f} s; see {self.dir.log('*')}")
            time.sleep(POLL_S)

    def _tick(self, what: str) -> None:
        for child in self.everyone:
            if child.exit_code in (None, 0) or child in self._awaited:
                continue
            if child not in self._asked:
                raise DrillFailed(f"{what}: never, as the {child.name} ended with {child.exit_code}; see {child.log}")
            self._asked.remove(child)
            child.start()

    def until_step(self) -> None:
        """Wait for a step."""
        now = time.time()
        self.until(lambda: self._last_record().get("time", 0.0) > now, "a step is made")

    def ledger(self) -> Ledger:
        return read_ledger(self.client, self.config.run.name)

    def last_step(self) -> int:
        """The newest step in the metrics."""
        return int(self._last_record().get("step", 0))

    def _last_record(self) -> dict[str, float]:
        """The newest record of the metrics; {} before there is one."""
        records = newest_metrics(self.dir.metrics, 1)
        return records[0] if records else {}

    def members(self, host: Child) -> list[Member]:
        """The actors that `host` has started and that send heartbeats."""
        members = Fleet(self.client, self.config.run.name).members()
        return [member for member in members if f"-{host.pid}-" in member.name]

    def serves(self, host: Child) -> bool:
        return any(member.generated_tokens for member in self.members(host))

    def actor(self, host: Child) -> psutil.Process:
        """The actor process of `host`, once it is there."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(host.pid).children()
                found.extend(child for child in children if "slipstream.actors" in child.cmdline())
            return bool(found)

        self.until(is_there, f"an actor runs on {host.name}")
        return found[0]

    def num_held(self, host: Child) -> int:
        """The groups that actors of `host` lease."""
        leased = list_groups(self.client, self.config.run.name, states=["leased"])
        return sum(f"-{host.pid}-" in group.holder for group in leased)

    def _child(self, name: str, verb: str, *settings: str) -> Child:
        url = f"redis.url=redis://127.0.0.1:{self.links[name].port}/0"
        command = [sys.executable, "-P", "-m", "slipstream.tools.cli.cli", verb, str(self.dir.config), url, *settings]
        environment = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            PASSWORD_VARIABLE: self.server.password,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")])),
        }
        return Child(name, command, log=self.dir.log(name), environment=environment)
