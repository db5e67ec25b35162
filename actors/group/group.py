"""Rolls out a lease: plays the missing members of one group concurrently."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Engine, EngineDied
from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.actors.episode.resume import forked_record, resumed_record
from slipstream.actors.episode.rollout import EpisodeFailed, rollout
from slipstream.actors.group.episode_reward import Scoring, rewarded
from slipstream.actors.group.inserts import Inserts
from slipstream.actors.group.siblings import ParentLost, Siblings
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.records.trajectory import InvalidTrajectory, Provenance, StopReason, Trajectory, Turn
from slipstream.common.text.action_format import ActionFormat
from slipstream.envhub.driving import Parse
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.records.ticket import InsertResult, Lease

FULL_RETRY_S = 0.5
FREE_FAILURES = 8  # in a row; the pause is then FIRST_PAUSE_S, and doubles with each further one
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0  # of each slot

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Episodes:
    """Counters of an actor's episodes."""

    max_running: int = 1  # the actor's slots; the last group that it leases may exceed them
    num_running: int = 0  # without those that wait for their reward
    num_failed: int = 0  # attempts in a row, since the last one that was stored
    kept_tokens: int = 0  # sampled by this actor: in stored trajectories, in partials, and as answers of a judge
    _slot_s: float = 0.0  # until the last change
    _changed_at_s: float = field(default_factory=time.monotonic)

    def slot_s(self) -> float:
        """The time that slots have been in use, summed over the slots. An episode without a slot adds none."""
        return self._slot_s + min(self.num_running, self.max_running) * (time.monotonic() - self._changed_at_s)

    def pause_s(self) -> float:
        """Seconds to wait after a failure: longer and longer if nothing but failures comes, so that none is hurried."""
        return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.num_failed - FREE_FAILURES, 10))

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Count one more episode meanwhile."""
        return self._counting(1)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Do not count one episode meanwhile: another may begin in its place."""
        return self._counting(-1)

    @contextlib.contextmanager
    def _counting(self, change: int) -> Iterator[None]:
        self._add(change)
        try:
            yield
        finally:
            self._add(-change)

    def _add(self, change: int) -> None:
        self._slot_s, self._changed_at_s = self.slot_s(), time.monotonic()
        self.num_running += change


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSetup:
    """The setup of every episode of an actor: environments, engine, tokenizer, limits."""

    run_id: str
    actor: str
    envs: dict[str, MixtureEntry]  # by `Task.env`
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    action_format: ActionFormat
    allowance: Allowance
    provenance: Provenance
    episodes: Episodes
    inserts: Inserts = field(default_factory=Inserts)
    parse: Parse | None = None  # None: the run names no parser of answers
    scoring: Scoring | None = None  # None: the rewards of the environments are the whole reward


async def rollout_group(lease: Lease, *, setup: EpisodeSetup, buffer: ActorBuffer) -> None:
    """Play every missing member of `lease`, and store, fail or give back each of them.

    If this is cancelled or the engine dies, whole turns are handed in for other actors to continue, and the group is
    released; no attempt counts as failed, except one during which an engine died before. Raises EngineDied. An
    unexpected exception is raised too, and leaves the lease to expire, which counts the attempt: a task that kills its
    actors must not kill all of them.
    """
    played = _PlayedGroup(lease=lease, setup=setup, buffer=buffer, siblings=Siblings(lease))
    give_back_rest: Callable[[], int] = played.give_back
    try:
        async with asyncio.TaskGroup() as members:
            for member, attempt in lease.missing.items():
                members.create_task(
                    played.play(member, attempt),
                    name=f"member {member} of group {lease.ticket.group_id}, environment {lease.ticket.task.env!r}",
                )
    except ExceptionGroup as errors:
        error = errors.exceptions[0]  # if the engine died, every member raises the same
        has_died = isinstance(error, EngineDied)
        give_back_rest = partial(played.give_back, death=str(error)) if has_died else played.hand_in
        raise error from None
    finally:
        num_handed_in = await asyncio.shield(asyncio.to_thread(give_back_rest))
        setup.episodes.kept_tokens += num_handed_in  # a statement of its own: other groups add during the await


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlayedGroup:
    """A leased group while this actor plays it."""

    lease: Lease
    setup: EpisodeSetup
    buffer: ActorBuffer
    siblings: Siblings
    # By member: a running episode, or a finished one that is not stored yet.
    unstored: dict[int, EpisodeRecord | Trajectory] = field(default_factory=dict)

    def give_back(self, *, death: str = "") -> int:
        """Hand in the whole turns of all members, then release the group; return the tokens that were sampled here.

        `death` says how the engine died, if it did.
        """
        try:
            return self.hand_in()
        finally:
            self.buffer.release(self.lease, death=death)

    def hand_in(self) -> int:
        """Hand in the whole turns of all members; return how many of their tokens were sampled here."""
        num_turns, num_tokens = 0, 0
        for made in self.unstored.values():
            if self._store_so_far(made):
                num_turns += len(made.turns)
                num_tokens += self._num_sampled_here(made)
        if self.unstored:
            log.info(
                "group %d is given back: handed in %d whole turns of %d episodes; unfinished turns are lost",
                self.lease.ticket.group_id,
                num_turns,
                len(self.unstored),
            )
        return num_tokens

    def _store_so_far(self, made: EpisodeRecord | Trajectory) -> bool:
        """Store the whole turns of a member; return whether they are stored.

        False if there is no whole turn yet, turns of a parent are not replayed yet, the server has no memory left, or
        the lease is lost.
        """
        if not all(turn.rewards for turn in made.turns) or not made.turns:
            return False
        try:
            if isinstance(made, Trajectory):
                result = self.buffer.insert(self.lease, made)
            else:
                result = self.buffer.hand_in(self.lease, made.partial())
        except InvalidTrajectory as error:
            log.warning("a member of group %d cannot be handed in: %s", self.lease.ticket.group_id, error)
            return False
        return result in (InsertResult.STORED, InsertResult.DUPLICATE)

    def _num_sampled_here(self, made: EpisodeRecord | Trajectory) -> int:
        """The sampled tokens of an attempt, without those of the partial that it continues, or of its parent."""
        identity = made.attempt if isinstance(made, EpisodeRecord) else made
        if self._resumes(identity.member, identity.attempt):
            earlier = self.lease.partials[identity.member].turns
        else:
            earlier = made.turns[: made.fork.num_turns] if made.fork else []
        return _num_sampled(made.turns) - _num_sampled(earlier)

    def _resumes(self, member: int, attempt: int) -> bool:
        """Whether the attempt continues a partial; the attempts after it start from the beginning."""
        return member in self.lease.partials and attempt == self.lease.missing[member]

    async def play(self, member: int, attempt: int | None) -> None:
        """Play one member until it is stored or has no attempt left, or its group has none.

        Waits until the engine serves a policy version that is new enough for the ticket.
        """
        with self.setup.episodes.running():
            try:
                await self.setup.engine.serving(self.lease.ticket.min_policy_version)
                while attempt is not None:
                    attempt = await self._play_once(member, attempt)
            except ParentLost:
                group_id = self.lease.ticket.group_id
                log.info("group %d: member %d is not played: its parent is not stored", group_id, member)
            finally:
                self.siblings.end(member)

    async def _play_once(self, member: int, attempt: int) -> int | None:
        """Play and insert one attempt; return the number of the next attempt if it failed without the policy's fault.

        Raises ParentLost.
        """
        setup, record = self.setup, await self._begun(member, attempt)
        self.unstored[member] = record
        try:
            async with fresh_env(setup.envs, record.attempt.task, timeout_s=setup.allowance.step_timeout_s) as env:
                trajectory = await rollout(
                    record,
                    env=env,
                    sampler=setup.engine,
                    tokenizer=setup.tokenizer,
                    action_format=setup.action_format,
                    allowance=setup.allowance,
                    parse=setup.parse,
                )
                is_scored = setup.scoring is not None and bool(setup.scoring.parts_for(trajectory))
                if is_scored:
                    record.reopen_last_turn()  # without its reward it cannot be stored, but the other turns can
                else:
                    self.unstored[member] = trajectory
            if is_scored:
                with setup.episodes.aside():
                    trajectory = await rewarded(trajectory, record, scoring=setup.scoring)
                self.unstored[member] = trajectory
            if await self._insert(trajectory):
                setup.episodes.kept_tokens += self._num_sampled_here(trajectory)
                self.siblings.add(trajectory)
            setup.episodes.num_failed = 0
        except EpisodeFailed as failure:
            del self.unstored[member]
            task_id, outcome = record.attempt.task.task_id, failure.outcome
            log.warning("%s member %d: %s: %s", task_id, member, outcome.value, failure)
            again = await asyncio.to_thread(
                self.buffer.fail, self.lease, member, attempt=attempt, outcome=outcome, reason=str(failure)
            )
            setup.episodes.num_failed += 1
            await asyncio.sleep(setup.episodes.pause_s())
            return again
        del self.unstored[member]
        return None

    async def _insert(self, trajectory: Trajectory) -> bool:
        """Insert, and retry while the server is full; return False if the lease was lost.

        Raises EpisodeFailed if the buffer refuses the record: then the engine is at fault.
        """
        inserts, group_id, member = self.setup.inserts, trajectory.group_id, trajectory.member
        try:
            while (result := await inserts.insert(self.buffer, self.lease, trajectory)) is InsertResult.FULL:
                what = f"group {group_id} member {member}"
                log.warning("Redis has no memory left: retrying to insert %s in %.1f s", what, FULL_RETRY_S)
                await asyncio.sleep(FULL_RETRY_S)
        except InvalidTrajectory as error:
            raise EpisodeFailed(StopReason.INFRA_ERROR, str(error)) from error
        return result is not InsertResult.FENCED

    async def _begun(self, member: int, attempt: int) -> EpisodeRecord:
        """The record of an attempt: empty, as a preempted actor left it, or with the first turns of its parent.

        Waits until the parent is stored. Raises ParentLost.
        """
        ticket = self.lease.ticket
        identity = Attempt(
            run_id=self.setup.run_id,
            task=ticket.task,
            group_id=ticket.group_id,
            member=member,
            attempt=attempt,
            actor=self.setup.actor,
            sampling=ticket.sampling,
            seed=ticket.seed,
            provenance=self.setup.provenance,
        )
        if self._resumes(member, attempt):
            return resumed_record(identity, self.lease.partials[member])
        if forked := await self.siblings.parent_of(member):
            parent, fork = forked
            return forked_record(identity, parent, fork)
        return EpisodeRecord(attempt=identity)


def _num_sampled(turns: Iterable[Turn]) -> int:
    return sum(turn.stop - turn.start for turn in turns)
