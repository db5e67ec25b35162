"""`slipstream actors`: start this host's actors, keep them up, and take them down in order."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import redis

from actors.notices import watch_notices
from common.config import Config, dump_config
from common.config_error import ConfigError
from common.connection import connect, connect_or_explain
from common.run_dir import RunDir
from common.shutdown import LEAVE_S, Shutdown
from replay.fleet import Fleet
from tools.child import Child, say_last_words

POLL_S = 0.2
ASK_EVERY_S = 1.0  # for the number of actors that is wanted here
GRACE_S = LEAVE_S + 2.0  # after the drain; by then an actor has ended itself
NVIDIA_SMI_TIMEOUT_S = 20.0


def host_actors(config: Config) -> int:
    """Run `actors.count` actors, or as many as are wanted since, until their run is over; return the exit code.

    When the host is about to be taken away, by a signal or a notice, they drain, and the code is 75.
    """
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; say which Redis the run is on, as in redis.url=redis://host:6379")
    connect_or_explain(config.redis.url).close()
    shutdown = Shutdown()
    if config.actors.notices != "none":
        watch_notices(config.actors.notices, config.actors.notices_url, shutdown)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as settings:
        settings.write(dump_config(config))
        settings.flush()
        command = partial(actor_command, settings=Path(settings.name))
        host = Host(config, command, devices=config.actors.devices or visible_devices())
        threading.Thread(target=_follow, args=[host, config, shutdown.requested], name="follow", daemon=True).start()
        with host_relay(config, Path(settings.name)) as relay:
            failed = _watch(host, relay, shutdown)
            host.end()
        if failed:
            say_last_words("actors", failed)
            return failed.exit_code or 1
        return shutdown.exit_code


class Host:
    """The actors of this host, one in each slot. Where there are GPUs, a slot has those of one engine."""

    def __init__(self, config: Config, command: Callable[[str], list[str]], *, devices: list[str]) -> None:
        """`command` starts an actor of a name; `devices` are the GPUs, none on a CPU.

        Raises ConfigError for fewer GPUs than an engine is to have.
        """
        together = config.actors.tensor_parallel
        if 0 < len(devices) < together:
            raise ConfigError(
                f"`actors.tensor_parallel` is {together}, and this host has {len(devices)} GPUs; lower it"
            )
        self.count = config.actors.count
        self._config = config
        self._command = command
        starts = range(0, len(devices) - together + 1, together)
        self._devices = [",".join(devices[start : start + together]) for start in starts]
        self._slots: dict[int, Child] = {}
        self._leaving: set[int] = set()
        self._renamed: set[int | None] = set()  # processes that ended, and whose slot has its next name already
        self._life = secrets.token_hex(4)  # containers may have one name, and the same process ids
        self._num_named = 0

    @property
    def is_done(self) -> bool:
        """Whether every actor that is wanted has ended with its run."""
        return len(self._slots) == self.count and all(actor.exit_code == 0 for actor in self._slots.values())

    def want(self, count: int) -> None:
        """Keep up so many actors from now on: at least one, and no more than there are devices for."""
        count = max(min(count, len(self._devices) or count), 1)
        if count != self.count:
            print(f"{count} actors are wanted, {self.count} were", flush=True)
        self.count = count

    def tend(self) -> Child | None:
        """Start what is missing and what crashed, and ask to leave what is too many; return one that failed for good.

        An actor that leaves has its slot until it is gone.
        """
        for slot in sorted(self._slots.keys() | range(self.count)):
            actor = self._slots.get(slot)
            if actor is None:
                self._start(slot)
            elif slot in self._leaving:
                if actor.exit_code is not None:
                    self._leaving.remove(slot)
                    del self._slots[slot]
            elif slot >= self.count:
                actor.ask_to_end()
                self._leaving.add(slot)
            else:
                if actor.exit_code not in (None, 0) and actor.pid not in self._renamed:
                    self._renamed.add(actor.pid)
                    actor.command = self._command(self._new_name())  # its former life keeps its own record and cost
                if not actor.keep_up():
                    return actor
        return None

    def end(self) -> None:
        """Ask all to leave, and wait until they have."""
        for actor in self._slots.values():
            actor.ask_to_end()
        deadline = time.monotonic() + self._config.actors.drain_s + GRACE_S
        for actor in self._slots.values():
            actor.wait(max(deadline - time.monotonic(), 0.0))

    def _start(self, slot: int) -> None:
        environment = {"OMP_NUM_THREADS": "1"}
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[slot % len(self._devices)]
        name, log = self._new_name(), RunDir(self._config.run.root, self._config.run.name).log(f"actor-{slot}")
        actor = Child(f"actor-{slot}", self._command(name), log=log, environment=environment)
        self._slots[slot] = actor
        actor.start()
        where = f" on GPU {environment['CUDA_VISIBLE_DEVICES']}" if self._devices else ""
        print(f"actor {name}{where}: {log}", flush=True)

    def _new_name(self) -> str:
        self._num_named += 1
        return f"{socket.gethostname()}-{os.getpid()}-{self._life}-{self._num_named - 1}"


def actor_command(name: str, settings: Path) -> list[str]:
    """What starts the actor `name`."""
    return [sys.executable, "-m", "actors", name, str(settings)]


def visible_devices() -> list[str]:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES where it is set, else all; none on a CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device.strip() for device in visible.split(",") if device.strip()]
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    listed = subprocess.run(
        [command, "--query-gpu=index", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S,
    )  # fmt: skip
    if listed.returncode:
        said = (listed.stdout + listed.stderr).strip()
        raise ConfigError(
            f"{command} does not list the GPUs ({said}); mend it, or say which in `actors.devices`, or set "
            "CUDA_VISIBLE_DEVICES, to nothing for none"
        )
    return listed.stdout.split()


@contextlib.contextmanager
def host_relay(config: Config, settings: Path) -> Iterator[Child | None]:
    """This host's relay, which leaves after its actors; None where it is to have none."""
    if not config.actors.relay:
        yield None
        return
    relay = Child(
        "relay",
        [sys.executable, "-m", "tools.cli", "relay", str(settings)],
        log=RunDir(config.run.root, config.run.name).log("relay"),
        environment={"OMP_NUM_THREADS": "1"},
    )
    relay.start()
    print(f"relay: {relay.log}", flush=True)
    try:
        yield relay
    finally:
        relay.ask_to_end()
        relay.wait(GRACE_S)


def _watch(host: Host, relay: Child | None, shutdown: Shutdown) -> Child | None:
    """Keep all up until the actors are done or they are asked to leave; return who failed for good."""
    while not host.is_done and not shutdown.requested.wait(POLL_S):
        failed = host.tend()
        if failed:
            return failed
        if relay and not relay.keep_up():
            return relay
    return None


def _follow(host: Host, config: Config, ended: threading.Event) -> None:
    """Keep `host` to the number of actors that is wanted of it: in a thread, as a Redis that hangs must not hold up a
    notice."""
    name = socket.gethostname()
    with connect(config.redis.url, patience_s=0) as client:
        fleet, is_begun = Fleet(client, config.run.name), False
        while not ended.is_set():
            with contextlib.suppress(redis.RedisError):  # away for a moment: as many as before
                if not is_begun:
                    fleet.forget_wanted_actors(name)
                    is_begun = True
                wanted = fleet.wanted_actors(name)
                if wanted is not None:
                    host.want(wanted)
            ended.wait(ASK_EVERY_S)
