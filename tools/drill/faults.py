"""Faults for any live run: the stand-ins of chaos, and the whole run of a drill.

A fault is a function of the run and a random number generator. It returns its proof, or raises NotFired.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar

import psutil
import redis

from slipstream.common.process.connection import connect
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.buffer.audit import audit
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet
from slipstream.replay.records.failures import read_failures
from slipstream.replay.records.keys import epoch_key, key
from slipstream.replay.records.ledger import read_ledger
from slipstream.replay.records.ticket import Lease
from slipstream.replay.server.redis_server import Server
from slipstream.tools.run.child import Child
from slipstream.tools.run.link import Link

FIRES_S = 10.0  # within which a fault's proof must be seen
LEAVES_S = 120.0  # within which a process that is asked to end writes what it has, and ends
BRIEF_S = 0.4  # of what stands still within a lease's time
GARBAGE = (b"", b"\xff\xfe\x00", b"\xc1" * 50, b"[/x]\x1b[2J", b"9" * 400, b"-1", b"\x81\xa4name\x01")


class LiveRun(Protocol):
    """The interface of a run that faults need."""

    @property
    def run_id(self) -> str: ...

    @property
    def client(self) -> redis.Redis: ...

    @property
    def server(self) -> Server: ...

    @property
    def links(self) -> dict[str, Link]:
        """The link from each process to the server, by the name of the process."""

    @property
    def learner(self) -> Child: ...

    def second_learner(self) -> Child:
        """Another process of the run, not started yet."""

    def buffer(self) -> ActorBuffer: ...

    def later(self, seconds: float, undo: Callable[[], object]) -> None:
        """Call `undo` after so many seconds, or when all faults end."""

    def until(self, holds: Callable[[], bool], what: str) -> object:
        """Wait, and restart processes that have ended. Raises if it takes too long."""

    def until_answered(self) -> object:
        """Wait for an insert."""

    def saved_step(self) -> int:
        """The learner's newest durable step."""

    def end_of(self, child: Child) -> None:
        """Expect the next end of `child`, which a fault causes."""

    def kill(self, child: Child) -> None: ...

    def restart_server(self) -> object:
        """Kill the server, and start it again with the same data."""


R = TypeVar("R", bound=LiveRun)
Fault = Callable[[R, Random], str]
Who = Callable[[R, Random], Child]


class NotFired(RuntimeError):
    """The effect of a fault was not observed."""


def seen(holds: Callable[[], bool], what: str, *, within_s: float = FIRES_S) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise NotFired(f"{what}: not seen within {within_s:.0f} s")
        time.sleep(0.005)


# --- Processes x signals x moments.


def learner(stage: LiveRun, _: Random) -> Child:
    return stage.learner


def at_once(_: LiveRun) -> None:
    pass


def at_insert(stage: LiveRun) -> None:
    stage.until_answered()


def at_lease(stage: LiveRun) -> None:
    stage.until(lambda: read_ledger(stage.client, stage.run_id).leased > 0, "a group is leased")


def at_claim(stage: LiveRun) -> None:
    stage.until(lambda: read_ledger(stage.client, stage.run_id).claimed > 0, "a group is claimed")


def at_checkpoint(stage: LiveRun) -> None:
    before = stage.saved_step()
    stage.until(lambda: stage.saved_step() > before, "a checkpoint is written")


def kill(who: Who[R], moment: Callable[[R], None]) -> Fault[R]:
    def fault(stage: R, random: Random) -> str:
        moment(stage)
        child = _running(stage, who(stage, random))
        stage.kill(child)
        seen(lambda: child.exit_code == -signal.SIGKILL, f"{child.name} is killed")
        return f"{child.name} ended with -9"

    return fault


def leave(who: Who[R]) -> Fault[R]:
    def fault(stage: R, random: Random) -> str:
        child = _running(stage, who(stage, random))
        stage.end_of(child)
        child.ask_to_end()
        seen(lambda: child.exit_code is not None, f"{child.name} leaves", within_s=LEAVES_S)
        if child.exit_code not in (EXIT_PREEMPTED, -signal.SIGTERM):  # the latter: before it could listen
            raise NotFired(f"{child.name} ended with {child.exit_code}: {child.last_log_lines()}")
        return f"{child.name} left with {child.exit_code}"

    return fault


def stop(who: Who[R], seconds: float, moment: Callable[[R], None]) -> Fault[R]:
    def fault(stage: R, random: Random) -> str:
        moment(stage)
        child = _running(stage, who(stage, random))
        child.send(signal.SIGSTOP)
        proof = f"{child.name} is {stopped(child.pid)}"  # before its time begins: a busy machine may look late
        stage.later(seconds, partial(child.send, signal.SIGCONT))
        return proof

    return fault


def second_learner(stage: LiveRun, _: Random) -> str:
    """Start a second learner, which fences the first out. The first is restarted and fences out the second."""
    second = stage.second_learner()
    epoch = _epoch(stage)
    stage.end_of(stage.learner)
    second.start()
    stage.until(lambda: _epoch(stage) > epoch, "the second learner takes over")
    stage.later(BRIEF_S, second.kill)
    return f"epoch {epoch} became {_epoch(stage)}"


def _epoch(stage: LiveRun) -> int:
    epoch: Any = stage.client.get(epoch_key(stage.run_id))
    return int(epoch or 0)


def _running(stage: LiveRun, child: Child) -> Child:
    stage.until(lambda: child.exit_code is None, f"{child.name} runs")
    return child


def stopped(pid: int | None) -> str:
    assert pid is not None
    seen(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, f"process {pid} stands still")
    return "stopped"


# --- The server.


def kill_server(moment: Callable[[LiveRun], None]) -> Fault[LiveRun]:
    def fault(stage: LiveRun, _: Random) -> str:
        moment(stage)
        before = stage.server.process.pid
        stage.restart_server()
        return f"server {before} became {stage.server.process.pid}"

    return fault


def stop_server(seconds: float) -> Fault[LiveRun]:
    def fault(stage: LiveRun, _: Random) -> str:
        process = stage.server.process
        process.send_signal(signal.SIGSTOP)
        proof = f"the server is {stopped(process.pid)}"
        stage.later(seconds, partial(process.send_signal, signal.SIGCONT))
        return proof

    return fault


def flush_scripts(stage: LiveRun, _: Random) -> str:
    stage.client.script_flush()
    return "the server knows no script"


def break_connections(stage: LiveRun, _: Random) -> str:
    killed: Any = stage.client.client_kill_filter(_type="normal", skipme=True)
    if not killed:
        raise NotFired("no connection was there to break")
    return f"{killed} connections were broken by the server"


def rewrite_log(stage: LiveRun, _: Random) -> str:
    before = stage.client.info("persistence")["aof_current_size"]
    stage.client.bgrewriteaof()
    return f"the append-only file of {before} bytes is rewritten"


def fill_memory(stage: LiveRun, _: Random) -> str:
    used = stage.client.info("memory")["used_memory"]
    _limit_memory(stage, max(1, used // 2))
    stage.later(1.0, partial(_limit_memory, stage, 0))
    if _takes_writes(stage):
        raise NotFired("the server took a write beyond its memory")
    return f"the server takes nothing beyond {used // 2} bytes"


def _takes_writes(stage: LiveRun) -> bool:
    try:
        stage.client.set("filler", "x")
    except redis.OutOfMemoryError:
        return False
    return True


def _limit_memory(stage: LiveRun, num_bytes: int) -> None:
    with connect(stage.server.admin_url) as client:
        client.config_set("maxmemory", num_bytes)


# --- Links x delay, loss and cut.


def link_of(who: Who[R], stage: R, random: Random) -> Link:
    return stage.links[who(stage, random).name]


def cut(who: Who[R], seconds: float) -> Fault[R]:
    def fault(stage: R, random: Random) -> str:
        link = link_of(who, stage, random)
        before = link.num_held
        link.is_cut = True
        stage.later(seconds, lambda: setattr(link, "is_cut", False))
        seen(lambda: link.num_held > before or not link.is_cut, "a piece is held up")
        return f"{link.num_held - before} pieces are held up"

    return fault


def slow(who: Who[R]) -> Fault[R]:
    def fault(stage: R, random: Random) -> str:
        link = link_of(who, stage, random)
        link.delay_s = 0.05
        stage.later(1.5, lambda: setattr(link, "delay_s", 0.0))
        before = link.num_passed
        seen(lambda: link.num_passed > before, "a piece passes")
        return "each piece takes 50 ms more"

    return fault


def reset(who: Who[R]) -> Fault[R]:
    def fault(stage: R, random: Random) -> str:
        link = link_of(who, stage, random)
        before = link.num_broken

        def broken() -> bool:
            link.reset()  # again, where none was there just now
            return link.num_broken > before

        stage.until(broken, "a connection is broken")
        return f"{link.num_broken - before} connections were reset"

    return fault


def lose_replies(who: Who[R]) -> Fault[R]:
    """Requests reach the server, and replies are lost."""

    def fault(stage: R, random: Random) -> str:
        link = link_of(who, stage, random)
        before = link.num_lost
        link.is_deaf = True

        def mend() -> None:
            link.reset()
            link.is_deaf = False

        stage.later(2.0, mend)
        seen(lambda: link.num_lost > before or not link.is_deaf, "a reply is lost")
        mend()
        return f"{link.num_lost - before} replies were lost"

    return fault


# --- Keys x damage: records that no account is kept by. Their readers must continue.


def damage(name: str, how: str) -> Fault[LiveRun]:
    def fault(stage: LiveRun, random: Random) -> str:
        garbage, at = random.choice(GARBAGE), key(stage.run_id, name)
        stage.until(partial(_takes_writes, stage), "the server takes writes")
        match how:
            case "field":
                stage.client.hset(at, f"stranger-{random.random()}", garbage)
            case "element":
                stage.client.lpush(at, garbage)
            case "type":
                stage.client.delete(at)
                stage.client.set(at, garbage)
        read_everything(stage)
        stage.client.delete(at)
        return f"{at} held {garbage[:12]!r}"

    return fault


def read_everything(stage: LiveRun) -> None:
    """Send the requests of a learner, an actor and a person."""
    fleet, bulletin = Fleet(stage.client, stage.run_id), Bulletin(stage.client, stage.run_id)
    fleet.members()
    fleet.everyone()
    bulletin.relays()
    bulletin.latest()
    read_failures(stage.client, key(stage.run_id, "train"))
    audit(stage.client, stage.run_id)


# --- Hostile members.


def steal(stage: LiveRun, _: Random) -> str:
    lease = lease_of(stage, "thief")
    return f"group {lease.ticket.group_id} is leased by somebody who never comes back"


def lease_of(stage: LiveRun, name: str) -> Lease:
    buffer = stage.buffer()
    leases: list[Lease] = []

    def leased() -> bool:
        lease = buffer.lease(name)
        leases.extend([lease] if lease else [])
        return bool(leases)

    stage.until(leased, "a lease is to be had")
    return leases[0]


def hold_connections(stage: LiveRun, _: Random) -> str:
    sockets = [socket.create_connection(("127.0.0.1", stage.server.port)) for _ in range(64)]
    held = contextlib.ExitStack()
    for one in sockets:
        held.enter_context(one)
    stage.later(2.0, held.close)
    for number, one in enumerate(sockets):
        one.sendall(os.urandom(50) if number % 2 else b"*1000000\r\n$")
    return f"{len(sockets)} connections of a stranger"
