"""The processes of a drill, on this machine: a server, a learner, a host of actors beside it and one behind a link."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import redis

from common.config import Config, dump_config
from common.connection import PASSWORD_VARIABLE, connect
from common.metrics import read_metrics
from common.run_dir import RunDir
from common.shutdown import LEAVE_S
from replay.fleet import Fleet, Member
from replay.ledger import Ledger, read_ledger
from replay.listing import list_groups
from replay.server import Server, start_server
from tools.child import Child
from tools.link import Link

POLL_S = 0.1
PATIENCE_S = 240.0  # for what takes seconds; a vLLM engine takes 15 s to start on an idle machine
LEARNER_GRACE_S = 60.0


class DrillFailed(RuntimeError):
    """What had to be seen was not seen; the message says what, and where the logs are."""


class Stage:
    """One run. Call it from the main thread: its processes end with the thread that started them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dir = RunDir(config.run.root, config.run.name)
        self.dir.create()
        self.server: Server = start_server(self.dir.redis)
        self.link = Link(self.server.port).__enter__()
        self.cloud = _Cloud()
        config.redis.url = self.server.url
        self.dir.config.write_text(dump_config(config))
        self.client: redis.Redis = connect(self.server.secret_url, patience_s=PATIENCE_S)
        self.learner = self._child("learner", "learner")
        self.near = self._child("near", "actors", "actors.transport=broadcast")
        self.far = self._child(
            "far", "actors", f"redis.url=redis://127.0.0.1:{self.link.port}/0", f"run.root={self.dir.path}/far",
            "actors.transport=pull", "actors.notices=aws", f"actors.notices_url={self.cloud.url}",
        )  # fmt: skip
        self.everyone = [self.learner, self.near, self.far]

    def start(self) -> None:
        """Return once both hosts serve, and the learner makes steps."""
        for child in self.everyone:
            child.start()
        self.until(lambda: self.serves(self.near) and self.serves(self.far), "both hosts serve")
        self.until(lambda: self.last_step() >= 2, "the learner makes steps")

    def end(self) -> None:
        """Have everyone leave in order, the learner last, with a checkpoint."""
        for child in (self.near, self.far):
            child.ask_to_end()
        for child in (self.near, self.far):
            child.wait(self.config.actors.drain_s + LEAVE_S + 5)
        self.learner.ask_to_end()
        self.learner.wait(LEARNER_GRACE_S)

    def close(self) -> None:
        """End whatever still runs, at once."""
        for child in self.everyone:
            child.kill()
        self.client.close()
        self.link.__exit__()
        self.cloud.close()
        self.server.stop()

    def restart_server(self) -> None:
        """kill -9, and the same server again with what it held."""
        self.server.process.kill()
        self.server.process.wait()
        self.server.keep_up()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait, and keep up what crashed meanwhile. Raises DrillFailed."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            for child in self.everyone:
                if child.exit_code is not None and child is not self.far:
                    raise DrillFailed(
                        f"{what}: never, as the {child.name} ended with {child.exit_code}; see {child.log}"
                    )
            if time.monotonic() > deadline:
                raise DrillFailed(f"{what}: not within {PATIENCE_S:.0f} s; see {self.dir.log('*')}")
            time.sleep(POLL_S)

    def ledger(self) -> Ledger:
        return read_ledger(self.client, self.config.run.name)

    def last_step(self) -> int:
        """The newest that is recorded."""
        return max((int(record["step"]) for record in read_metrics(self.dir.metrics)), default=0)

    def members(self, host: Child) -> list[Member]:
        """The actors that `host` has started and that are alive in the others' eyes."""
        return [
            member for member in Fleet(self.client, self.config.run.name).members() if f"-{host.pid}-" in member.name
        ]

    def serves(self, host: Child) -> bool:
        return any(member.generated_tokens for member in self.members(host))

    def actor(self, host: Child) -> psutil.Process:
        """The actor process of `host`."""
        for process in psutil.Process(host.pid).children():
            with contextlib.suppress(psutil.Error):
                if "actors" in process.cmdline():
                    return process
        raise DrillFailed(f"the {host.name} has no actor; see {host.log}")

    def num_held(self, host: Child) -> int:
        """The groups that actors of `host` lease."""
        leased = list_groups(self.client, self.config.run.name, states=["leased"])
        return sum(f"-{host.pid}-" in group.holder for group in leased)

    def _child(self, name: str, verb: str, *settings: str) -> Child:
        command = [sys.executable, "-m", "tools.cli", verb, str(self.dir.config), *settings]
        environment = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            PASSWORD_VARIABLE: self.server.password,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")])),
        }
        return Child(name, command, log=self.dir.log(name), environment=environment)


class _Cloud:
    """As AWS's metadata service: a token for whoever asks, and no notice until there is one."""

    def __init__(self) -> None:
        self.notice = ""  # JSON
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._say(200, "token")

            def do_GET(self) -> None:
                is_there = cloud.notice and self.path.endswith("/spot/instance-action")
                self._say(*((200, cloud.notice) if is_there else (404, "")))

            def _say(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="cloud", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
