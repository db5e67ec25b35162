"""The actor: one engine, many episodes at a time, from leases to inserted trajectories."""

import asyncio
import contextlib
import functools
import logging
import random
import socket
from pathlib import Path

from transformers import AutoTokenizer

from actors.beat import Leases, Pulse, keep_beating
from actors.engine import Engine, EngineDied
from actors.group import Episodes, Stage, rollout_group
from actors.pin import Pin
from actors.refresh import RefreshCounts, keep_fresh
from actors.rollout import Allowance
from common.action_format import FORMATS
from common.config import Config
from common.actors_config import ActorsConfig
from common.patience import RedisAway
from common.shutdown import EXIT_PREEMPTED, Shutdown
from common.trajectory import Provenance
from replay.buffer import Buffer
from replay.bulletin import Bulletin
from replay.fleet import Fleet, RunState
from replay.ticket import Lease

IDLE_S = 0.05
EVAL_STREAM = "eval"
EXIT_RUN_FAILED = 1  # its supervisor starts this actor again, which waits for the learner to come back
MAX_KV_USE = 0.9  # above this, a new group would only push running requests out of the KV cache

log = logging.getLogger(__name__)


async def act(
    stage: Stage,
    *,
    buffers: dict[str, Buffer],
    bulletin: Bulletin,
    fleet: Fleet,
    actors: ActorsConfig,
    shutdown: Shutdown,
) -> int:
    """Produce trajectories until the run is over or this actor is told to leave; return the exit code.

    Consumes leases, from the first buffer that has one; waits for room in the engine; produces inserted trajectories.
    Unblocked by tickets that the learner opens. Raises EngineDied: its groups go back, and the process must end.
    """
    leases, counts, pin, run_failed = Leases(), RefreshCounts(), Pin(), False
    newest = bulletin.stored if actors.transport == "disk" else bulletin.latest
    refreshing = asyncio.create_task(keep_fresh(stage.engine, newest, counts, pin))
    pulse = Pulse(stage, counts=counts, actors=actors, shutdown=shutdown)
    beating = asyncio.create_task(keep_beating(pulse, actor=stage.actor, buffers=buffers, fleet=fleet, leases=leases))
    try:
        while not shutdown.requested.is_set() and not beating.done():
            _raise_first_error(refreshing, *leases.tasks())
            if pin.stuck:
                _give_back_what_waits(stage, leases)
            if not await _lease_one(stage, buffers, leases, pin, actors):
                await asyncio.sleep(IDLE_S * random.uniform(0.5, 1.5))  # so that a fleet does not ask in step
        if beating.done():
            run_failed = beating.result() is RunState.FAILED
        else:
            await _drain(stage, leases, actors)
    except RedisAway as error:
        if not shutdown.requested.is_set():
            raise
        log.warning("leaving, and what is leased with it: %s", error)
    finally:
        background = [refreshing, beating, *leases.tasks()]
        for task in background:
            task.cancel()
        # Groups that are cancelled here give their missing members back before they end.
        await asyncio.gather(*background, return_exceptions=True)
        with contextlib.suppress(RedisAway):  # then it is missed
            with contextlib.suppress(EngineDied):  # then its books end with the last beat
                await asyncio.to_thread(fleet.beat, pulse.member())
            await asyncio.to_thread(fleet.leave, stage.actor)
    if shutdown.requested.is_set():
        return EXIT_PREEMPTED
    return EXIT_RUN_FAILED if run_failed else 0


async def _drain(stage: Stage, leases: Leases, actors: ActorsConfig) -> None:
    """Let what is being played end, for as long as there is time, and keep nobody waiting for this actor meanwhile."""
    stage.engine.leave_broadcasts()
    if leases.playing:
        log.info("draining %d groups for at most %.0f s", len(leases.playing), actors.drain_s)
        await asyncio.wait(leases.tasks(), timeout=actors.drain_s)


async def _lease_one(
    stage: Stage, buffers: dict[str, Buffer], leases: Leases, pin: Pin, actors: ActorsConfig
) -> bool:  # fmt: skip
    """Start on one more group, if the engine has room and a buffer has one: the first of them, or any of the others."""
    if stage.episodes.num_running >= actors.max_episodes or stage.engine.load().kv_use > MAX_KV_USE:
        return False
    (evaluations, first), *shards = buffers.items()
    for stream, buffer in [(evaluations, first), *random.sample(shards, len(shards))]:
        lease_from = _lease_evaluation if stream == EVAL_STREAM else _lease_training
        lease = await lease_from(stage, buffer, pin)
        if lease is not None:
            task = asyncio.create_task(rollout_group(lease, stage=stage, buffer=buffer))
            key = (stream, lease.ticket.group_id)
            _cancel_former(leases, key)
            leases.playing[key] = (lease, task)
            task.add_done_callback(functools.partial(_forget, leases, key))
            if stream == EVAL_STREAM:
                pin.took()
                task.add_done_callback(lambda _: pin.ended())
            for _ in ("the group's task begins", "its members begin, and count as running"):
                await asyncio.sleep(0)
            return True
    return False


async def _lease_evaluation(stage: Stage, buffer: Buffer, pin: Pin) -> Lease | None:
    """An evaluation group of exactly the version that the engine serves; others are for others, or for later."""
    if not pin.may_lease(stage.engine.policy_version):
        return None
    with pin.leasing():
        lease = await asyncio.to_thread(buffer.lease, stage.actor)
        if lease is None:
            pin.found_none()
        elif lease.ticket.min_policy_version != stage.engine.policy_version:
            pin.passes_over(stage.engine.policy_version)
            await asyncio.to_thread(buffer.release, lease)
        else:
            return lease
    return None


async def _lease_training(stage: Stage, buffer: Buffer, pin: Pin) -> Lease | None:
    """A training group; none that would wait for newer weights where nobody knows when they come."""
    if pin.stays and stage.engine.policy_version < pin.asked_version:
        return None
    lease = await asyncio.to_thread(buffer.lease, stage.actor)
    if lease is not None and pin.stays and stage.engine.policy_version < lease.ticket.min_policy_version:
        pin.asked_version = lease.ticket.min_policy_version
        await asyncio.to_thread(buffer.release, lease)
        return None
    return lease


def _give_back_what_waits(stage: Stage, leases: Leases) -> None:
    """Let go of the groups that wait for weights which this actor cannot get."""
    for lease, task in leases.playing.values():
        waits = stage.engine.policy_version < lease.ticket.min_policy_version
        if waits and not task.cancelling():  # once: the next would be of its giving back
            task.cancel()


def _cancel_former(leases: Leases, key: tuple[str, int]) -> None:
    """A group that was lost, and comes back to this actor before that was noticed, is played once."""
    if key in leases.playing:
        _, former = leases.playing[key]
        former.cancel()


def _forget(leases: Leases, key: tuple[str, int], done: asyncio.Task[None]) -> None:
    """Let go of a group that ended; one that ended in an error stays, for `_raise_first_error` to find."""
    _, playing = leases.playing.get(key, (None, None))
    if playing is done and (done.cancelled() or done.exception() is None):
        del leases.playing[key]


def _raise_first_error(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


def make_stage(
    engine: Engine, *, name: str, run: Config, actors: ActorsConfig, model_path: Path
) -> Stage:  # fmt: skip
    """What episodes of `run` are played with on this actor."""
    return Stage(
        run_id=run.run.name,
        actor=name,
        envs=run.env.parts(),
        engine=engine,
        tokenizer=AutoTokenizer.from_pretrained(model_path),
        action_format=FORMATS[run.env.action_format],
        allowance=Allowance(
            max_turns=run.env.max_turns,
            max_tokens=run.model.max_tokens,
            step_timeout_s=run.env.step_timeout_s,
            episode_timeout_s=run.env.episode_timeout_s,
        ),
        provenance=Provenance(
            host=socket.gethostname(), instance_kind=actors.instance_kind, price_per_hour=actors.price_per_hour
        ),
        episodes=Episodes(),
    )
