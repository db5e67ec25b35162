"""Rolling out what a lease gives: the missing members of one group, side by side."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from actors.engine import Engine
from actors.refresh import serving_version
from actors.rollout import Allowance, EpisodeFailed, fresh_env, rollout
from actors.tape import Attempt, Tape
from common.action_format import ActionFormat
from common.trajectory import Provenance
from replay.buffer import Buffer
from replay.ticket import InsertResult, Lease

FULL_RETRY_S = 0.5

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Episodes:
    """How many episodes an actor is playing."""

    num_running: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What every episode of an actor is played with."""

    run_id: str
    actor: str
    env_name: str
    env_options: dict[str, Any]
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    action_format: ActionFormat
    allowance: Allowance
    provenance: Provenance
    episodes: Episodes


async def rollout_group(lease: Lease, *, stage: Stage, buffer: Buffer) -> None:
    """Play every missing member of `lease` and account for each; give back what misses when this is cancelled.

    Raises EngineDied, and gives back what misses; nobody has failed.
    """
    try:
        async with asyncio.TaskGroup() as members:
            for member, attempt in lease.missing.items():
                members.create_task(_play_member(lease, member, attempt, stage, buffer))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # where the engine died, each member says so
    finally:
        # A group that is let go returns at once, not when its lease expires.
        await asyncio.shield(asyncio.to_thread(buffer.release, lease))


async def _play_member(lease: Lease, member: int, attempt: int | None, stage: Stage, buffer: Buffer) -> None:
    """Play one member until it is stored, or until there is no attempt left to make.

    Waits until the engine serves a policy as new as the ticket asks for.
    """
    stage.episodes.num_running += 1
    try:
        await serving_version(stage.engine, lease.ticket.min_policy_version)
        while attempt is not None:
            attempt = await _play_once(lease, member, attempt, stage, buffer)
    finally:
        stage.episodes.num_running -= 1


async def _play_once(lease: Lease, member: int, attempt: int, stage: Stage, buffer: Buffer) -> int | None:
    """Play and insert; return the attempt to make next where this one failed by no doing of the policy's."""
    identity = Attempt(
        run_id=stage.run_id,
        task=lease.ticket.task,
        group_id=lease.ticket.group_id,
        member=member,
        attempt=attempt,
        actor=stage.actor,
        sampling=lease.ticket.sampling,
        seed=lease.ticket.seed,
        provenance=stage.provenance,
    )
    try:
        async with fresh_env(stage.env_name, stage.env_options, timeout_s=stage.allowance.step_timeout_s) as env:
            trajectory = await rollout(
                Tape(attempt=identity),
                env=env,
                sampler=stage.engine,
                tokenizer=stage.tokenizer,
                action_format=stage.action_format,
                allowance=stage.allowance,
            )
    except EpisodeFailed as failure:
        log.warning("%s member %d: %s: %s", identity.task.task_id, member, failure.outcome.value, failure)
        return await asyncio.to_thread(
            buffer.fail, lease, member, attempt=attempt, outcome=failure.outcome, reason=str(failure)
        )
    while await asyncio.to_thread(buffer.insert, lease, trajectory) is InsertResult.FULL:
        log.warning("the buffer is full: waiting with group %d member %d", identity.group_id, member)
        await asyncio.sleep(FULL_RETRY_S)
    return None
