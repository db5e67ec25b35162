"""The six faults of `slipstream drill`: each waits until all that it causes is over, and returns what was seen."""

import json
import signal
import time
from collections.abc import Callable

from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.tools.drill.stage import DrillFailed, Stage
from slipstream.tools.run.child import Child

LEASE_TTL_S = 4.0
SLOW_S = 0.05  # of a slow link, for each piece and each way
SLOW_FOR_S = 10.0


def _in_mid_episode(stage: Stage, host: Child) -> int:
    """Stop the actor of `host` where it holds leases; return how many."""
    while True:
        stage.until(lambda: stage.num_held(host) > 0, f"the actor on {host.name} plays")
        stage.actor(host).send_signal(signal.SIGSTOP)
        num_held = stage.num_held(host)
        if num_held:
            return num_held
        stage.actor(host).send_signal(signal.SIGCONT)


def _expire(stage: Stage, before: int, num_held: int) -> str:
    stage.until(lambda: stage.ledger().expired_leases >= before + num_held, "its leases expire")
    return f"{num_held} leases expired, and others got them"


def kill_actor(stage: Stage) -> str:
    before = stage.ledger().expired_leases
    num_held = _in_mid_episode(stage, stage.near)
    dead = stage.actor(stage.near)
    names = {member.name for member in stage.members(stage.near)}
    stage.end_of(stage.near)  # a host gives up on actors that end too often
    dead.kill()
    seen = _expire(stage, before, num_held)
    stage.until(
        lambda: any(member.name not in names and member.generated_tokens for member in stage.members(stage.near)),
        "another actor serves in its place",
    )
    return seen + ", and an actor is in its place"


def stop_actor(stage: Stage) -> str:
    before = stage.ledger().expired_leases
    num_held = _in_mid_episode(stage, stage.near)
    stopped = stage.actor(stage.near)
    try:
        seen = _expire(stage, before, num_held)
    finally:
        stopped.send_signal(signal.SIGCONT)
    stage.until(lambda: stage.num_held(stage.near) > 0, "it plays again")
    return seen + "; it came back, and plays"


def slow_link(stage: Stage) -> str:
    stage.links["far"].delay_s = SLOW_S
    inserted, ended = stage.ledger().inserted, time.monotonic() + SLOW_FOR_S
    stage.until(lambda: time.monotonic() > ended and stage.ledger().inserted > inserted, "trajectories come")
    stage.links["far"].delay_s = 0.0
    return f"{stage.ledger().inserted - inserted} trajectories came in {SLOW_FOR_S:.0f} s or so"


def partition(stage: Stage) -> str:
    before, link, num_held = stage.ledger().expired_leases, stage.links["far"], 0
    while not num_held:
        link.is_cut = False
        stage.until(lambda: stage.num_held(stage.far) > 0, "the actor behind the link plays")
        link.is_cut = True
        num_held = stage.num_held(stage.far)
    try:
        seen = _expire(stage, before, num_held)
    finally:
        link.is_cut = False
    stage.until(lambda: stage.num_held(stage.far) > 0, "it plays again")
    return seen + f"; {link.num_held} pieces were held up, and it plays again"


def restart_server(stage: Stage) -> str:
    inserted = stage.ledger().inserted
    stage.restart_server()
    held = stage.ledger().inserted
    stage.until(lambda: stage.ledger().inserted > held, "trajectories come again")
    if held < inserted:
        raise DrillFailed(f"{inserted} trajectories were stored before, and {held} after it")
    return f"{inserted} trajectories were there before and after; all processes continued"


def preempt(stage: Stage) -> str:
    before = stage.ledger()
    stage.until(lambda: stage.num_held(stage.far) > 0, "the actor behind the link plays")
    stage.cloud.notice = json.dumps({"action": "terminate", "time": "in two minutes"})
    exit_code = stage.ended(stage.far)
    after = stage.ledger()
    stage.cloud.notice = ""  # another host comes
    if exit_code != EXIT_PREEMPTED:
        raise DrillFailed(f"the host ended with {exit_code}, not {EXIT_PREEMPTED}; see {stage.far.log}")
    if after.expired_leases > before.expired_leases:
        raise DrillFailed(f"{after.expired_leases - before.expired_leases} leases expired that were to be given back")
    parts = after.partials_handed_in - before.partials_handed_in
    return f"the host left with code {EXIT_PREEMPTED}, and handed in {parts} parts of episodes; no lease expired"


SIX: dict[str, Callable[[Stage], str]] = {
    "kill": kill_actor,
    "stop": stop_actor,
    "slow": slow_link,
    "partition": partition,
    "redis": restart_server,
    "preempt": preempt,
}
