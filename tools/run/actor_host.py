"""`slipstream actors`: start this host's actors, restart those that crash, and end them in order."""

import contextlib
import itertools
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis

from slipstream.actors.host.join import process_name
from slipstream.actors.host.preemption import watch_notices
from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect, connect_or_explain
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import LEAVE_S, Flag, Shutdown
from slipstream.envhub.rewards.part import reward_parts
from slipstream.replay.fleet.fleet import Fleet
from slipstream.tools.run.child import Child, failed_code, print_failure, verb_command
from slipstream.tools.run.devices import VARIABLE, visible_devices

POLL_S = 0.2
ASK_EVERY_S = 1.0  # how often Redis is asked for the wanted number of actors
GRACE_S = LEAVE_S + 2.0  # after the drain; an actor ends by itself sooner


def host_actors(config: Config) -> int:
    """Run `actors.count` actors, or the number that `slipstream scale` set, until the run is over; return the code."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; name the Redis server of the run, as redis.url=redis://host:6379")
    reward_parts(config.env.entries())  # the run's own count, but this file is usually the same
    connect_or_explain(config.redis.url).close()
    shutdown = Shutdown()
    if config.actors.notices != "none":
        watch_notices(config.actors.notices, shutdown)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as settings:
        settings.write(dump_config(config))
        settings.flush()

        def command(name: str) -> list[str]:
            return [sys.executable, "-P", "-m", "slipstream.actors", name, settings.name]

        host = Host(config, command, devices=config.actors.devices or visible_devices())
        threading.Thread(target=_follow, args=[host, config, shutdown.requested], name="follow", daemon=True).start()
        with host_relay(config, Path(settings.name)) as relay:
            failed = _watch(host, relay, shutdown)
            host.end()
        if failed:
            print_failure("actors", failed)
            return failed_code(failed)
        return shutdown.exit_code


class Host:
    """Supervises the actors of this host, one in each slot. On GPUs, a slot has the devices of one engine."""

    def __init__(self, config: Config, command: Callable[[str], list[str]], *, devices: list[str]) -> None:
        """`command` starts an actor; `devices` are the GPUs, none on a CPU. Raises ConfigError for too few of them."""
        together, self.count = config.actors.tensor_parallel, config.actors.count
        if 0 < len(devices) < together:
            raise ConfigError(
                f"`actors.tensor_parallel` must be <= {len(devices)}, the GPUs of this host, got {together}; lower it"
            )
        if 0 < len(devices) < self.count * together and not config.actors.limits_memory:
            raise ConfigError(
                f"`actors.count` must be <= {len(devices) // together} for the GPUs of this host "
                f"({', '.join(devices)}), got {self.count}, each with actors.tensor_parallel={together}; lower it, or "
                "let them share GPUs by `actors.kv_cache_bytes`"
            )
        self._config = config
        self._command = command
        starts = range(0, len(devices) - together + 1, together)
        self._devices = [",".join(devices[start : start + together]) for start in starts]
        self._slots: dict[int, Child] = {}
        self._leaving: set[int] = set()
        self._renamed: set[int | None] = set()  # ended processes whose slot already has its next name
        self._name = process_name()
        self._numbers = itertools.count()

    @property
    def is_done(self) -> bool:
        """Whether every actor that is wanted has ended with its run."""
        return len(self._slots) == self.count and all(actor.exit_code == 0 for actor in self._slots.values())

    def want(self, count: int) -> None:
        """Keep `count` actors running from now on: at least one, and no more than the devices allow."""
        count = max(min(count, len(self._devices) or count), 1)
        if count != self.count:
            print(f"changing the number of actors from {self.count} to {count}", flush=True)
        self.count = count

    def update(self) -> Child | None:
        """Start missing actors, restart crashed ones, end surplus ones; return one that cannot be restarted.

        An actor that drains keeps its slot until it has ended.
        """
        for slot in sorted(self._slots.keys() | range(self.count)):
            actor = self._slots.get(slot)
            if actor is None:
                self._start(slot)
            elif slot in self._leaving:
                if actor.exit_code is not None:
                    actor.wait(0.0)
                    self._leaving.remove(slot)
                    del self._slots[slot]
            elif slot >= self.count:
                actor.ask_to_end()
                self._leaving.add(slot)
            else:
                if actor.exit_code not in (None, 0) and actor.pid not in self._renamed:
                    self._renamed.add(actor.pid)
                    actor.command = self._command(self._new_name())  # the record and cost of the ended process stay
                if not actor.keep_up():
                    return actor
        return None

    def end(self) -> None:
        """Ask all actors to drain, and wait until they have ended."""
        for actor in self._slots.values():
            actor.ask_to_end()
        deadline = time.monotonic() + self._config.actors.drain_s + GRACE_S
        for actor in self._slots.values():
            actor.wait(max(deadline - time.monotonic(), 0.0))

    def _start(self, slot: int) -> None:
        environment = {"OMP_NUM_THREADS": "1"}
        if self._devices:
            environment[VARIABLE] = self._devices[slot % len(self._devices)]
        name, log = self._new_name(), RunDir(self._config.run.root, self._config.run.name).log(f"actor-{slot}")
        actor = Child(f"actor-{slot}", self._command(name), log=log, environment=environment)
        self._slots[slot] = actor
        actor.start()
        where = f" on GPU {environment[VARIABLE]}" if self._devices else ""
        print(f"actor {name}{where}: {log}", flush=True)

    def _new_name(self) -> str:
        return f"{self._name}-{next(self._numbers)}"


@contextlib.contextmanager
def host_relay(config: Config, settings: Path) -> Iterator[Child | None]:
    """Run this host's relay until the actors have ended; yield None if its actors need none."""
    if config.actors.transport != "relay":
        yield None
        return
    relay = Child(
        "relay",
        verb_command("serve", "relay", str(settings)),
        log=RunDir(config.run.root, config.run.name).log("relay"),
        environment={"OMP_NUM_THREADS": "1"},
    )
    relay.start()
    print(f"relay: {relay.log}", flush=True)
    try:
        yield relay
    finally:
        relay.end(GRACE_S)


def _watch(host: Host, relay: Child | None, shutdown: Shutdown) -> Child | None:
    """Supervise until the actors are done or a shutdown is requested; return a child that cannot be restarted."""
    while not host.is_done and not shutdown.requested.wait(POLL_S):
        failed = host.update()
        if failed:
            return failed
        if relay and not relay.keep_up():
            return relay
    return None


def _follow(host: Host, config: Config, ended: Flag) -> None:
    """Apply the wanted number of actors to `host`, in a thread: a Redis that hangs must not delay a notice."""
    name = socket.gethostname()
    with connect(config.redis.url, patience_s=0) as client:
        fleet, is_begun = Fleet(client, config.run.name), False
        while not ended.is_set():
            with contextlib.suppress(redis.RedisError):  # Redis is away for a moment: keep the number
                if not is_begun:
                    fleet.forget_wanted_actors(name)
                    is_begun = True
                wanted = fleet.wanted_actors(name)
                if wanted is not None:
                    host.want(wanted)
            ended.wait(ASK_EVERY_S)
