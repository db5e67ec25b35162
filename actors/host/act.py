"""The actor's main loop: one engine plays many episodes at a time, from leases to inserted trajectories."""

import asyncio
import contextlib
import functools
import logging
import random
import socket

import msgspec
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Engine, EngineDied
from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.group.episode_reward import Scoring
from slipstream.actors.group.group import Episodes, EpisodeSetup, rollout_group
from slipstream.actors.host.beat import LastKnown, Leases, Pulse, keep_beating
from slipstream.actors.host.judging import JudgeSetup, keep_judging
from slipstream.actors.host.own_judge import OwnJudge
from slipstream.actors.host.pin import Pin
from slipstream.actors.host.poll_interval import PollInterval
from slipstream.actors.host.refresh import RefreshCounts, keep_fresh
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.config.config import Config
from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.process.shutdown import EXIT_PREEMPTED, Shutdown
from slipstream.common.records.trajectory import Provenance
from slipstream.common.text.action_format import format_of
from slipstream.common.text.tokenizer import text_root
from slipstream.envhub.rewards.part import group_parts, judge_by, read_as, reward_parts
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.buffer.judge_buffer import JudgeBuffer
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.replay.records.ticket import Lease

IDLE_S = 0.02
EVAL_STREAM = "eval"
EVAL_SHARE = 0.25  # of an actor's episodes are an evaluation's while there is training to do
EXIT_RUN_FAILED = 1  # the supervisor starts this actor again, which then waits until the learner is back
MAX_KV_USE = 0.9  # above this, a new group would only evict running requests from the KV cache

log = logging.getLogger(__name__)


async def act(
    setup: EpisodeSetup,
    *,
    buffers: dict[str, ActorBuffer],
    bulletin: Bulletin,
    fleet: Fleet,
    actors: ActorsConfig,
    shutdown: Shutdown,
    judge_buffer: JudgeBuffer | None = None,
    play_root: str = "",
) -> int:
    """Produce trajectories until the run is over or this actor is asked to leave; return the exit code.

    Consumes leases from the buffers; waits for room in the engine; produces inserted trajectories. Unblocked by tickets
    that the learner opens. With a `judge_buffer` it also judges complete groups. `play_root` is that of its facts.
    Raises EngineDied, and RunChanged if the run has another `play_root`, after it has given its groups back; then the
    process must end.
    """
    leases, counts, pin, interval, run_failed = Leases(), RefreshCounts(), Pin(), PollInterval(), False
    refreshing = asyncio.create_task(keep_fresh(setup.engine, bulletin.later, counts, pin, interval))
    judging = asyncio.create_task(_keep_judging(setup, judge_buffer, interval, shutdown))
    pulse = Pulse(setup, counts=counts, actors=actors, shutdown=shutdown)
    beating = asyncio.create_task(
        keep_beating(
            pulse,
            actor=setup.actor,
            buffers=buffers,
            fleet=fleet,
            last_known=LastKnown(fleet, actors.join_timeout_s, play_root=play_root),
            leases=leases,
            interval=interval,
        )
    )
    try:
        while not shutdown.requested.is_set() and not beating.done():
            _raise_first_error(refreshing, judging, *leases.tasks())
            if pin.stuck:
                _give_back_what_waits(setup, leases)
            if not await _lease_one(setup, buffers, leases, pin, interval):
                # Random, so that actors do not ask together; environments may have the global generator.
                await asyncio.sleep(interval.seconds(IDLE_S) * random.SystemRandom().uniform(0.5, 1.5))
        if beating.done():
            run_failed = beating.result() is RunState.FAILED
        else:
            await _drain(setup, leases, actors)
    except RedisAway as error:
        if not shutdown.requested.is_set():
            raise
        log.warning("Redis is unreachable: abandoning %d leases and exiting: %s", len(leases.playing), error)
    finally:
        background = [refreshing, beating, judging, *leases.tasks()]
        for task in background:
            task.cancel()
        # A cancelled group gives its missing members back before its task ends.
        await asyncio.gather(*background, return_exceptions=True)
        await _leave(fleet, pulse, setup.actor)
    if shutdown.requested.is_set():
        return EXIT_PREEMPTED
    return EXIT_RUN_FAILED if run_failed else 0


async def _leave(fleet: Fleet, pulse: Pulse, actor: str) -> None:
    """Leave the fleet with a last heartbeat, whose numbers the run keeps."""
    with contextlib.suppress(RedisAway):  # then this member expires
        with contextlib.suppress(EngineDied):  # then the last heartbeat stays as it is
            await asyncio.to_thread(fleet.beat, pulse.member())
        await asyncio.to_thread(fleet.leave, actor)


async def _keep_judging(
    setup: EpisodeSetup, buffer: JudgeBuffer | None, interval: PollInterval, shutdown: Shutdown
) -> None:
    """Judge complete groups of `buffer` until this actor is asked to leave; others then judge those it gives back.

    It takes another group if the engine has room, and weights that may play it.
    """
    if buffer is None:
        return

    def may_judge(oldest: int) -> bool:
        return setup.engine.policy_version >= oldest and setup.engine.load().kv_use <= MAX_KV_USE

    parts = setup.scoring.parts if setup.scoring else {}
    judge = JudgeSetup(
        name=setup.actor,
        buffer=buffer,
        parts={env: group_parts(of_env) for env, of_env in parts.items()},
        interval=interval,
        may_judge=may_judge,
    )
    await keep_judging(judge, is_done=shutdown.requested.is_set)


async def _drain(setup: EpisodeSetup, leases: Leases, actors: ActorsConfig) -> None:
    """Let running episodes finish for up to `actors.drain_s`, and take part in no broadcast meanwhile."""
    setup.engine.leave_broadcasts()
    if leases.playing:
        log.info("draining %d groups for at most %.0f s", len(leases.playing), actors.drain_s)
        await asyncio.wait(leases.tasks(), timeout=actors.drain_s)


async def _lease_one(
    setup: EpisodeSetup, buffers: dict[str, ActorBuffer], leases: Leases, pin: Pin, interval: PollInterval
) -> bool:
    """Start one more group if the engine has room and a buffer has one; return whether to ask for another at once.

    Evaluations, the first of `buffers`, come first until they have their share of the room, then last.
    An actor that has its share of a queue waits before it asks again: otherwise the first one to ask would play the few
    groups of a synchronous step alone.
    """
    if setup.episodes.num_running >= setup.episodes.max_running or setup.engine.load().kv_use > MAX_KV_USE:
        return False
    order = list(buffers.items())
    if pin.num_groups >= EVAL_SHARE * setup.episodes.max_running:
        order.reverse()
    for stream, buffer in order:
        lease_from = _lease_evaluation if stream == EVAL_STREAM else _lease_training
        lease = await lease_from(setup, buffer, pin)
        if lease is not None:
            try:
                setup.engine.load()
            except EngineDied:  # meanwhile: what it could not play counts no death
                await asyncio.to_thread(buffer.release, lease)
                raise
            task = asyncio.create_task(rollout_group(lease, setup=setup, buffer=buffer))
            key = (stream, lease.ticket.group_id)
            if key in leases.playing:  # its lease was lost, and this actor has leased the group again
                leases.playing[key][1].cancel()
            leases.playing[key] = (lease, task)
            task.add_done_callback(functools.partial(_forget, leases, key))
            if stream == EVAL_STREAM:
                pin.took()
                task.add_done_callback(lambda _: pin.ended())
            for _ in ("the group's task begins", "its members begin, and count as running"):
                await asyncio.sleep(0)
            num_own = len(leases.playing)  # its share is of its own groups and the queued ones
            return num_own * interval.num_members < num_own + lease.num_queued
    return False


async def _lease_evaluation(setup: EpisodeSetup, buffer: ActorBuffer, pin: Pin) -> Lease | None:
    """Lease an evaluation group of exactly the version that the engine serves; others are released again."""
    if not pin.may_lease(setup.engine.policy_version):
        return None
    with pin.leasing():
        lease = await asyncio.to_thread(buffer.lease, setup.actor)
        if lease is None:
            pin.found_none()
        elif lease.ticket.min_policy_version != setup.engine.policy_version:
            pin.skips(setup.engine.policy_version)
            await asyncio.to_thread(buffer.release, lease)
        else:
            return lease
    return None


async def _lease_training(setup: EpisodeSetup, buffer: ActorBuffer, pin: Pin) -> Lease | None:
    """Lease a training group; release it again if it needs newer weights and this engine may not get them soon.

    If this engine will get them soon, the group waits for the weights that it prefers.
    """
    if pin.stays and setup.engine.policy_version < pin.asked_version:
        return None
    lease = await asyncio.to_thread(buffer.lease, setup.actor)
    if lease is not None and pin.stays and setup.engine.policy_version < lease.ticket.min_policy_version:
        pin.asked_version = lease.ticket.min_policy_version
        await asyncio.to_thread(buffer.release, lease)
        return None
    if lease is not None and not pin.stays:
        newest = max(lease.ticket.min_policy_version, lease.ticket.preferred_policy_version)
        ticket = msgspec.structs.replace(lease.ticket, min_policy_version=newest)
        lease = msgspec.structs.replace(lease, ticket=ticket)
    return lease


def _give_back_what_waits(setup: EpisodeSetup, leases: Leases) -> None:
    """Give back the groups that wait for weights which this actor cannot get."""
    for lease, task in leases.playing.values():
        waits = setup.engine.policy_version < lease.ticket.min_policy_version
        if waits and not task.cancelling():  # only once: a second cancel would interrupt the giving back
            task.cancel()


def _forget(leases: Leases, key: tuple[str, int], done: asyncio.Task[None]) -> None:
    """Remove a group whose task has ended; one with an error stays, for `_raise_first_error`."""
    _, playing = leases.playing.get(key, (None, None))
    if playing is done and (done.cancelled() or done.exception() is None):
        del leases.playing[key]


def _raise_first_error(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


def make_setup(
    engine: Engine, *, name: str, run: Config, actors: ActorsConfig, tokenizer: PreTrainedTokenizerBase
) -> EpisodeSetup:
    """The setup of every episode of `run` on this actor. Raises ConfigError for a malformed part of a reward."""
    allowance, parts = Allowance.of(run), reward_parts(run.env.entries())
    episodes = Episodes(max_running=actors.max_episodes)
    judge_by(OwnJudge(sampler=engine, tokenizer=tokenizer, model=allowance.model, episodes=episodes), parts)
    read_as(text_root(tokenizer), parts)
    return EpisodeSetup(
        run_id=run.run.name,
        actor=name,
        envs=run.env.entries(),
        engine=engine,
        tokenizer=tokenizer,
        action_format=format_of(run.env),
        allowance=allowance,
        provenance=Provenance(
            host=socket.gethostname(), instance_kind=actors.instance_kind, price_per_hour=actors.price_per_hour
        ),
        episodes=episodes,
        parse=engine.parse if run.model.tool_parser or run.model.reasoning_parser else None,
        scoring=Scoring(parts=parts, tokenizer=tokenizer, allowance=allowance),
    )
