"""Rolling out what a lease gives: the missing members of one group, side by side."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from actors.engine import Engine, EngineDied
from actors.refresh import serving_version
from actors.resume import resumed_tape
from actors.rollout import Allowance, EpisodeFailed, fresh_env, rollout
from actors.tape import Attempt, Tape
from common.action_format import ActionFormat
from common.env_config import PartConfig
from common.trajectory import InvalidTrajectory, Provenance, StopReason, Trajectory, Turn
from replay.buffer import Buffer
from replay.ticket import InsertResult, Lease

FULL_RETRY_S = 0.5

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Episodes:
    """How many episodes an actor is playing, and what came of those that it has played."""

    num_running: int = 0
    kept_tokens: int = 0  # sampled here, in trajectories that are stored and in parts that were handed in


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What every episode of an actor is played with."""

    run_id: str
    actor: str
    envs: dict[str, PartConfig]  # by `Task.env`
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    action_format: ActionFormat
    allowance: Allowance
    provenance: Provenance
    episodes: Episodes


Unstored = dict[int, Tape | Trajectory]
"""What the members of a group have that the buffer has not: an episode that runs, or one that is over."""


async def rollout_group(lease: Lease, *, stage: Stage, buffer: Buffer) -> None:
    """Play every missing member of `lease` and account for each.

    When this is cancelled or the engine dies, what the members have so far is stored for others to go on from, and the
    rest goes back; nobody has failed. Raises EngineDied. What nobody foresaw is raised as well, and leaves the lease to
    expire, which counts the attempt: a task that ends its actors must not end all of them.
    """
    unstored: Unstored = {}
    let_go = _give_back
    try:
        async with asyncio.TaskGroup() as members:
            for member, attempt in lease.missing.items():
                members.create_task(_play_member(lease, member, attempt, unstored, stage, buffer))
    except ExceptionGroup as errors:
        error = errors.exceptions[0]  # where the engine died, each member says so
        if not isinstance(error, EngineDied):
            let_go = _hand_in
        raise error from None
    finally:
        num_handed_in = await asyncio.shield(asyncio.to_thread(let_go, lease, unstored, buffer))
        stage.episodes.kept_tokens += num_handed_in  # not in one with the await, in which other groups add to it


def _give_back(lease: Lease, unstored: Unstored, buffer: Buffer) -> int:
    """Let go of the group at once, not when its lease expires, and first of what its members have so far.

    Return how many tokens of it were sampled here.
    """
    try:
        return _hand_in(lease, unstored, buffer)
    finally:
        buffer.release(lease)


def _hand_in(lease: Lease, unstored: Unstored, buffer: Buffer) -> int:
    """Let go of what the members have so far; return how many tokens of it were sampled here."""
    num_turns, num_tokens = 0, 0
    for made in unstored.values():
        if _store_so_far(lease, made, buffer):
            num_turns += len(made.turns)
            num_tokens += _num_sampled_here(lease, made)
    if unstored:
        log.info(
            "group %d goes back: %d whole turns of %d episodes are handed in; what was sampled since is lost",
            lease.ticket.group_id,
            num_turns,
            len(unstored),
        )
    return num_tokens


def _store_so_far(lease: Lease, made: Tape | Trajectory, buffer: Buffer) -> bool:
    """Store what a member has; False where that is no turn yet, or there is no room for it, or nobody wants it."""
    if not made.turns:
        return False
    try:
        result = buffer.insert(lease, made) if isinstance(made, Trajectory) else buffer.hand_in(lease, made.partial())
    except InvalidTrajectory as error:
        log.warning("a member of group %d cannot be handed in: %s", lease.ticket.group_id, error)
        return False
    return result in (InsertResult.STORED, InsertResult.DUPLICATE)


def _num_sampled_here(lease: Lease, made: Tape | Trajectory) -> int:
    """The sampled tokens of an attempt, less those that it was handed over with."""
    identity = made.attempt if isinstance(made, Tape) else made
    earlier = lease.partials.get(identity.member) if _goes_on(lease, identity.member, identity.attempt) else None
    return _num_sampled(made.turns) - (_num_sampled(earlier.turns) if earlier else 0)


def _num_sampled(turns: Iterable[Turn]) -> int:
    return sum(turn.stop - turn.start for turn in turns)


def _goes_on(lease: Lease, member: int, attempt: int) -> bool:
    """Whether the attempt is one that a preempted actor began; a later one is another."""
    return member in lease.partials and attempt == lease.missing[member]


async def _play_member(
    lease: Lease, member: int, attempt: int | None, unstored: Unstored, stage: Stage, buffer: Buffer
) -> None:
    """Play one member until it is stored, or until there is no attempt left to make.

    Waits until the engine serves a policy as new as the ticket asks for.
    """
    stage.episodes.num_running += 1
    try:
        await serving_version(stage.engine, lease.ticket.min_policy_version)
        while attempt is not None:
            attempt = await _play_once(lease, member, attempt, unstored, stage, buffer)
    finally:
        stage.episodes.num_running -= 1


async def _play_once(
    lease: Lease, member: int, attempt: int, unstored: Unstored, stage: Stage, buffer: Buffer
) -> int | None:
    """Play and insert; return the attempt to make next where this one failed by no doing of the policy's."""
    tape = _tape(lease, member, attempt, stage)
    unstored[member] = tape
    try:
        async with fresh_env(stage.envs, tape.attempt.task, timeout_s=stage.allowance.step_timeout_s) as env:
            trajectory = await rollout(
                tape,
                env=env,
                sampler=stage.engine,
                tokenizer=stage.tokenizer,
                action_format=stage.action_format,
                allowance=stage.allowance,
            )
            unstored[member] = trajectory
        if await _insert(lease, trajectory, buffer):
            stage.episodes.kept_tokens += _num_sampled_here(lease, trajectory)
    except EpisodeFailed as failure:
        del unstored[member]
        log.warning("%s member %d: %s: %s", lease.ticket.task.task_id, member, failure.outcome.value, failure)
        return await asyncio.to_thread(
            buffer.fail, lease, member, attempt=attempt, outcome=failure.outcome, reason=str(failure)
        )
    del unstored[member]
    return None


async def _insert(lease: Lease, trajectory: Trajectory, buffer: Buffer) -> bool:
    """Insert, once the buffer has room; False where the lease was lost.

    Raises EpisodeFailed for a record that the buffer refuses: the engine's doing.
    """
    try:
        while (result := await asyncio.to_thread(buffer.insert, lease, trajectory)) is InsertResult.FULL:
            log.warning("the buffer is full: waiting with group %d member %d", trajectory.group_id, trajectory.member)
            await asyncio.sleep(FULL_RETRY_S)
    except InvalidTrajectory as error:
        raise EpisodeFailed(StopReason.INFRA_ERROR, str(error)) from error
    return result is not InsertResult.FENCED


def _tape(lease: Lease, member: int, attempt: int, stage: Stage) -> Tape:
    """Where the attempt stands at first: at its beginning, or where a preempted actor left it."""
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
    if _goes_on(lease, member, attempt):
        return resumed_tape(identity, lease.partials[member])
    return Tape(attempt=identity)
