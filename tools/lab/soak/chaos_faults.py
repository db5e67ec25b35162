"""The catalogue of chaos: faults of any live run, and those of its stand-ins.

A fault is a function of the stage and a random number generator. It returns its proof, or raises NotFired.
"""

import time
from functools import partial
from random import Random
from typing import Any

from slipstream.common.records.trajectory import StopReason
from slipstream.replay.records.ticket import InsertResult
from slipstream.tools.drill.faults import (
    BRIEF_S,
    Fault,
    at_checkpoint,
    at_claim,
    at_insert,
    at_lease,
    at_once,
    break_connections,
    cut,
    damage,
    fill_memory,
    flush_scripts,
    hold_connections,
    kill,
    kill_server,
    learner,
    lease_of,
    leave,
    lose_replies,
    reset,
    rewrite_log,
    second_learner,
    seen,
    slow,
    steal,
    stop,
    stop_server,
)
from slipstream.tools.lab.soak.actor import an_attempt
from slipstream.tools.lab.soak.stage import LEASE_TTL_S, SoakStage
from slipstream.tools.run.child import Child

LONG_S = 1.5 * LEASE_TTL_S  # of what stands still: beyond a lease's time
HOUR_S = 3600


def actor(stage: SoakStage, random: Random) -> Child:
    return random.choice(stage.cast.actors)


def kill_all_actors(stage: SoakStage, random: Random) -> str:
    return "; ".join(kill(lambda *_, one=one: one, at_once)(stage, random) for one in stage.cast.actors)


def insert_without_lease(stage: SoakStage, random: Random) -> str:
    """The insert must be refused: whoever leases the group next makes that attempt again."""
    buffer, lease = stage.buffer(), lease_of(stage, "forger")
    buffer.release(lease)
    member, attempt = next(iter(lease.missing.items()))
    forged = an_attempt(stage.cast.work, lease, member, attempt, StopReason.DONE, chance=random)
    result = buffer.insert(lease, forged)
    if result is InsertResult.STORED:
        raise AssertionError(f"an insert under a lease that was given back is {result}")
    return f"an insert under a lease that was given back is {result}"


def clock_set(difference_s: int) -> Fault[SoakStage]:
    """The server's clock jumps, and later jumps back."""

    def fault(stage: SoakStage, _: Random) -> str:
        stage.until(lambda: stage.clock.difference_s == 0, "another jump is over")
        stage.clock.set(difference_s)
        stage.later(LONG_S, partial(stage.clock.set, 0))
        seen(lambda: abs(_server_ahead_s(stage) - difference_s) < HOUR_S / 2, "the server's clock jumps")
        return f"the server's clock is {_server_ahead_s(stage)} s ahead"

    return fault


def _server_ahead_s(stage: SoakStage) -> int:
    server_time: Any = stage.client.time()
    return int(server_time[0]) - int(time.time())


CATALOGUE: dict[str, Fault[SoakStage]] = {
    "actor killed": kill(actor, at_once),
    "actor killed at an insert": kill(actor, at_insert),
    "actor killed at a lease": kill(actor, at_lease),
    "actor killed at a claim": kill(actor, at_claim),
    "actor leaves": leave(actor),
    "actor stopped for a moment": stop(actor, BRIEF_S, at_once),
    "actor stopped beyond its leases": stop(actor, LONG_S, at_lease),
    "actor stopped at an insert": stop(actor, LONG_S, at_insert),
    "all actors killed": kill_all_actors,
    "learner killed": kill(learner, at_once),
    "learner killed at a claim": kill(learner, at_claim),
    "learner killed at a checkpoint": kill(learner, at_checkpoint),
    "learner killed at an insert": kill(learner, at_insert),
    "learner leaves": leave(learner),
    "learner stopped for a moment": stop(learner, BRIEF_S, at_once),
    "learner stopped at a claim": stop(learner, LONG_S, at_claim),
    "learner stopped at a checkpoint": stop(learner, LONG_S, at_checkpoint),
    "a second learner": second_learner,
    "server killed": kill_server(at_once),
    "server killed at an insert": kill_server(at_insert),
    "server killed at a claim": kill_server(at_claim),
    "server killed at a checkpoint": kill_server(at_checkpoint),
    "server stopped for a moment": stop_server(BRIEF_S),
    "server stopped beyond leases": stop_server(LONG_S),
    "server forgets its scripts": flush_scripts,
    "server breaks connections": break_connections,
    "server rewrites its file": rewrite_log,
    "server full": fill_memory,
    "server's clock an hour ahead": clock_set(HOUR_S),
    "server's clock an hour back": clock_set(-HOUR_S),
    "actor's link cut": cut(actor, 1.0),
    "actor's link cut beyond its leases": cut(actor, LONG_S),
    "actor's link slow": slow(actor),
    "actor's link reset": reset(actor),
    "actor's replies lost": lose_replies(actor),
    "learner's link cut": cut(learner, 1.0),
    "learner's link cut for long": cut(learner, LONG_S),
    "learner's link slow": slow(learner),
    "learner's link reset": reset(learner),
    "learner's replies lost": lose_replies(learner),
    "garbage in the fleet": damage("fleet", "field"),
    "the fleet is no hash": damage("fleet", "type"),
    "garbage among the deadlines": damage("fleet:deadlines", "type"),
    "garbage among the failures": damage("train:failures", "element"),
    "the failures are no list": damage("train:failures", "type"),
    "garbage on offer": damage("weights:latest", "type"),
    "garbage among the relays": damage("weights:relays", "type"),
    "a lease stolen": steal,
    "an insert without a lease": insert_without_lease,
    "a stranger's connections": hold_connections,
}
