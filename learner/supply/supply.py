"""The learner's side of the buffer: admits work for actors, and chooses the groups of each step."""

import itertools
import logging
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import MAX_TURNS, Sampling, Task
from slipstream.common.records.version_lag import oldest_within
from slipstream.envhub.rewards.part import actors_judge, judged_envs, reward_parts
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.credit.token_advantages import compares_returns, teaches
from slipstream.learner.credit.tree import why_not_trained
from slipstream.learner.supply.curriculum import Curriculum
from slipstream.learner.supply.haste import Haste
from slipstream.learner.supply.refusals import Refusals
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.records.failures import Failure
from slipstream.replay.records.ledger import Ledger
from slipstream.replay.records.ticket import Group, Ticket
from slipstream.replay.run.diagnosis import FEWEST_EPISODES, Diagnosis
from slipstream.replay.run.equal_returns import Outlook, outlook, useful_share

POLL_S = 0.02
EXPLAIN_EVERY_S = 10.0
USEFUL_WINDOW = 64  # claimed groups; the share of them that taught is expected of the next ones
MAX_FORK_TURN = 4  # a fork at random begins after 1 to this many turns of another attempt; a search's after any
IS_JUDGE_RUNNING = "is `slipstream serve judge` running? See its log"
ARE_ACTORS_RUNNING = "are actors running, and do their episodes end?"

log = logging.getLogger(__name__)


class SupplyDried(RuntimeError):
    """No complete batch within `learner.claim_timeout_s`; the message says why, and what the buffer contains."""


class Supply:
    """Opens tickets and claims groups for one step after another."""

    def __init__(
        self,
        buffer: LearnerBuffer,
        config: Config,
        *,
        first_group_id: int,
        refusals: Refusals | None = None,
        found: Callable[[], Diagnosis | None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """The first group id is `first_group_id`, or above every opened one; `sleep` is called to wait for actors.

        `refusals` are those of the run's weights, and `found` is the state of the run.
        """
        self._found = found
        self._refusals = refusals
        self._sleep = sleep
        self._buffer = buffer
        self._config = config
        self._next_group_id = first_group_id
        self._curriculum = Curriculum(config.env, seed=config.run.seed)
        self._judged_envs = judged_envs(config.env.entries())
        self._taught = deque[bool](maxlen=USEFUL_WINDOW)
        self._haste = Haste()
        # The groups dropped for the present step, by reason, and the returns of their members.
        self._dropped, self._dropped_returns = Counter[str](), list[float]()
        # Of the members of the groups that were dropped for the present step because all had the same return.
        self._equal_returns, self._equal_successes = list[float](), list[float]()
        self._awaited = set[int]()  # ids of a synchronous step's groups that were not claimed at the last look
        self._early = dict[int, Group]()  # by id, claimed ones that wait for groups with lower ids
        replay = config.replay
        # The number of groups that a step's groups are chosen from.
        self._num_candidates = math.ceil(replay.groups_per_step / replay.keep_fraction)
        self._in_order = replay.target_lag == 0 and replay.max_uses == 1
        # Whether it is known of each ready group if it teaches. A synchronous learner claims in the order of ids.
        self._all_teach = not (
            replay.drop_zero_variance and config.objective.compares_siblings and not config.objective.returns_come_later
        )
        self._equal_is_useless = (
            not self._all_teach and compares_returns(config.objective) and not (self._judged_envs or self._in_order)
        )

    def next_batch(self, progress: Progress, shutdown: Shutdown) -> Batch | None:
        """The batch of the optimizer step after `progress`; None if a stop was requested.

        Consumes ready groups; waits for actors to finish enough of them; produces tickets, so that actors always have
        `target_lag` steps of work ahead. Groups that teach nothing (see `teaches`) are dropped and replaced by others;
        the surplus of a synchronous step is dropped, even while it is played. Version numbers that a resumed learner
        skipped do not count as lag. If no batch is complete at the deadline because the tasks are solved,
        the batch has no groups. Raises SupplyDried.
        """
        started, before = time.monotonic(), self._buffer.ledger()
        step, published = progress.step + 1, progress.highest_published
        wanted, self._dropped, self._dropped_returns = self._num_candidates, Counter(), []
        self._equal_returns, self._equal_successes = [], []
        kept: list[Group] = []
        last_logged, waited = started, False
        while len(kept) < wanted and not shutdown.requested.is_set():
            self.admit(step, kept, published_version=published)
            claimed = self._claim(progress, wanted - len(kept))
            self._curriculum.observe(claimed)
            useful, rejected = self._sorted_out(claimed)
            for reason, groups in rejected.items():
                self._drop(groups, reason)
            kept += useful
            if not claimed and self._is_solved(started):
                self._drop(kept, "surplus")
                return self._batch([])
            if not claimed:
                waited = True
                last_logged = self._wait(step, started, last_logged, before)
        if len(kept) < wanted:
            return None
        self._drop_surplus()
        self._haste.after_step(waited=waited)
        self.admit(step, kept, published_version=published)
        return self._batch(self._chosen(kept))

    def _batch(self, groups: list[Group]) -> Batch:
        return Batch(
            groups=groups,
            num_dropped=dict(self._dropped),
            dropped_returns=self._dropped_returns,
            next_group_id=self._next_group_id,
        )

    def _claim(self, progress: Progress, num_missing: int) -> list[Group]:
        """Groups for the rest of the step after `progress`, ordered by id; [] if fewer are ready.

        A synchronous learner takes one group at a time, in the order of ids. Those that are ready before it wait here.
        So which groups it opens and trains depends on no group's speed: the same seed gives the same batches.
        """
        if not self._in_order:
            return self._claim_ready(progress, num_missing)
        if not self._is_next_here():
            if num_ready := self._buffer.ledger().ready:
                claimed = self._claim_ready(progress, num_ready)
                self._early |= {group.ticket.group_id: group for group in claimed}
            self._awaited = self._buffer.unclaimed()  # a learner before this one may have opened some
        return [self._early.pop(min(self._early))] if self._is_next_here() else []

    def _is_next_here(self) -> bool:
        """Whether the synchronous step's next group, by id, has been claimed."""
        return bool(self._early) and min(self._early) < min(self._awaited, default=math.inf)

    def _claim_ready(self, progress: Progress, num_groups: int) -> list[Group]:
        replay, version = self._config.replay, progress.policy_version
        oldest = oldest_within(replay.max_lag, policy_version=version, resumptions=progress.resumptions)
        claimed = self._buffer.claim(
            progress.step + 1,
            num_groups,
            policy_version=version,
            max_lag=version - oldest,
            max_uses=replay.max_uses,
            beside_equal=self._equal_is_useless,
        )
        return sorted(claimed, key=lambda group: group.ticket.group_id)

    def _chosen(self, candidates: list[Group]) -> list[Group]:
        """A step's groups, ordered by id: of more candidates (`replay.keep_fraction`) those whose returns differ most.

        The order is that of ids, so that the result of a step does not depend on which group was finished first.
        """
        ranked = sorted(candidates, key=lambda group: (-spread(group), group.ticket.group_id))
        num_groups = self._config.replay.groups_per_step
        self._drop(ranked[num_groups:], "low_variance")
        return sorted(ranked[:num_groups], key=lambda group: group.ticket.group_id)

    def _drop(self, groups: Collection[Group], reason: str) -> None:
        if groups:
            self._buffer.drop([group.ticket.group_id for group in groups], reason=reason)
            self._dropped[reason] += len(groups)
            self._dropped_returns += itertools.chain.from_iterable(map(_returns, groups))

    def _drop_surplus(self) -> None:
        """Drop what was opened for a synchronous step that is complete without it. Unfinished ones have no returns."""
        if not self._in_order:
            return
        self._drop(self._early.values(), "surplus")
        self._early.clear()
        if unclaimed := self._buffer.unclaimed():
            before = self._buffer.ledger().dropped.get("surplus", 0)
            self._buffer.drop(unclaimed, reason="surplus")  # some may have failed, and are dropped already
            if num_new := self._buffer.ledger().dropped.get("surplus", 0) - before:
                self._dropped["surplus"] += num_new

    def _sorted_out(self, claimed: list[Group]) -> tuple[list[Group], dict[str, list[Group]]]:
        """The groups to learn from, and the others by the reason for dropping them; remember how many taught."""
        sampling, useful, rejected = self._config.sampling, list[Group](), dict[str, list[Group]]()
        for group in claimed:
            used = group.ticket.sampling
            distribution = (sampling.temperature, sampling.top_p, sampling.top_k)
            is_unfit = why_not_trained(group.trajectories, self._config.objective) != ""
            if is_unfit or (used.temperature, used.top_p, used.top_k) != distribution:
                # From before a restart with another configuration.
                rejected.setdefault("other_sampling", []).append(group)
            elif not self._config.replay.drop_zero_variance or teaches(group, objective=self._config.objective):
                useful.append(group)
            else:
                rejected.setdefault("zero_variance", []).append(group)
                self._equal_returns += _returns(group)
                self._equal_successes += [float(trajectory.success) for trajectory in group.trajectories]
        for did, groups in ((True, useful), (False, rejected.get("zero_variance", []))):
            self._taught += [did for group in groups if group.num_uses == 1]  # new ones: only these are opened
        return useful, rejected

    def admit(self, step: int, kept: list[Group], *, published_version: int) -> None:
        """Open tickets until there is as much work in progress as the lag allows, but no more than the run may need.

        `kept` are the groups of `step` so far. Groups that will teach nothing are expected in the share of the newest
        ones, and others are opened for them at once: to wait for them first would leave actors without work. Once this
        step has its groups, or finds them ready, the next ones wait for the newest weights if these are still on their
        way and the learner is in no haste: to play them by older ones at once would only make the data staler.
        """
        replay, learner = self._config.replay, self._config.learner
        steps = min(replay.target_lag + 1, learner.steps - step + 1)
        ledger = self._buffer.ledger()
        in_time = step + steps <= learner.steps  # else the last step would leave groups over
        is_unsure = in_time and (replay.target_lag or self._in_order)
        useful = useful_share(self._taught, assumed=self._num_candidates) if is_unsure else 1.0
        room = self._room(ledger, kept, num_uses=self._num_candidates * steps - len(kept), useful=useful)
        # A learner before this one opened these.
        self._next_group_id = max(self._next_group_id, ledger.last_group_id + 1)
        if room <= 0:
            return
        ids = range(self._next_group_id, self._next_group_id + room)
        oldest = max(0, published_version - replay.target_lag)
        has_its_groups = len(kept) + self._sure(ledger) >= self._num_candidates
        preferred = published_version if has_its_groups and not self._haste else oldest
        self._buffer.open(
            self._ticket(group_id, min_policy_version=oldest, preferred_policy_version=preferred) for group_id in ids
        )
        self._next_group_id += room

    def _ticket(self, group_id: int, *, min_policy_version: int, preferred_policy_version: int) -> Ticket:
        task = self._curriculum.choose(group_id)
        ticket = ticket_of(group_id, task, self._config, min_policy_version=min_policy_version)
        return msgspec.structs.replace(
            ticket, preferred_policy_version=preferred_policy_version, is_judged=task.env in self._judged_envs
        )

    def _room(self, ledger: Ledger, kept: list[Group], *, num_uses: int, useful: float) -> int:
        """The number of groups to open so that `num_uses` more uses are possible, the rest of this step's included.

        Each group may be used `max_uses` times, but only once per step. With one use each: (queued + leased + judging)
        * u + ready <= candidates * min(target_lag + 1, steps left) - kept, where candidates are those of a step, u,
        `useful`, is the expected share of groups that teach, and ready are those that do. If that is not known of a
        ready group, it counts as an unfinished one; so do the early groups of a synchronous step.
        """
        max_uses, sure = self._config.replay.max_uses, self._sure(ledger)
        unfinished = ledger.queued + ledger.leased + ledger.judging + len(self._early)
        unsure = unfinished if self._all_teach or self._equal_is_useless else unfinished + ledger.ready
        still_ready = sum(group.num_uses < max_uses for group in kept)
        for_all = (num_uses + ledger.ready_uses) / max_uses - sure
        for_this = self._num_candidates - len(kept) + still_ready - sure
        return math.ceil(max(for_all, for_this) / useful - unsure)

    def _sure(self, ledger: Ledger) -> int:
        """The number of ready groups that are known to teach."""
        if self._all_teach:
            return ledger.ready
        return ledger.ready - ledger.ready_equal if self._equal_is_useless else 0

    def _is_solved(self, started: float) -> bool:
        """Whether the wait since `started` is over, and the one reason is that the tasks are solved."""
        is_late = time.monotonic() - started > self._config.learner.claim_timeout_s
        if not is_late or len(self._equal_returns) < FEWEST_EPISODES or ((found := self._found()) and found.is_fault):
            return False
        return self._outlook() is Outlook.SOLVED

    def _outlook(self) -> Outlook:
        return outlook(
            success=statistics.fmean(self._equal_successes), mean_return=statistics.fmean(self._equal_returns)
        )

    def _wait(self, step: int, started: float, last_logged: float, before: Ledger) -> float:
        """Sleep for one poll; log what is missing every `EXPLAIN_EVERY_S`.

        Raises SupplyDried at the deadline, AllRefuse if no actor can use the weights.

        `before` is the ledger from when the wait for this step began. Returns the time of the last log line.
        """
        if self._refusals:
            self._refusals.check()
        now, timeout_s = time.monotonic(), self._config.learner.claim_timeout_s
        if now - started > timeout_s:
            raise SupplyDried(
                f"step {step}: no complete batch within {timeout_s:.0f} s (learner.claim_timeout_s): "
                f"{self._why(before)}"
            )
        if now - last_logged > EXPLAIN_EVERY_S:
            log.info("step %d: has waited for actors for %.0f s: %s", step, now - started, self._why(before))
            last_logged = now
        self._sleep(POLL_S)
        return last_logged

    def _why(self, before: Ledger) -> str:
        """The reasons why there is no complete batch since `before`, most likely first, and the buffer's counts."""
        ledger, reasons = self._buffer.ledger(), list[str]()
        if (found := self._found()) and found.is_fault:
            reasons.append(str(found))
        num_equal = ledger.dropped.get("zero_variance", 0) - before.dropped.get("zero_variance", 0)
        if num_equal and self._equal_returns:
            mean = statistics.fmean(self._equal_returns)
            reasons.append(
                f"in {num_equal} groups all members had the same return, {mean:.3g} on average, so there is nothing to "
                f"compare; {self._outlook().value}"
            )
        if self._refusals and (refused := self._refusals.last_reason()):
            reasons.append(refused)
        reasons += failures_since(before, ledger, self._buffer.failures())
        if ledger.judging:
            own = actors_judge(reward_parts(self._config.env.entries()).values())
            judge = "the actors judge them: are any running? See their logs" if own else IS_JUDGE_RUNNING
            reasons.append(f"{ledger.judging} groups wait for their judge: {judge}")
        if not reasons:
            reasons.append(ARE_ACTORS_RUNNING)
        return f"{'; '.join(reasons)} ({ledger.unclaimed})"


def failures_since(before: Ledger, now: Ledger, failures: Sequence[Failure]) -> list[str]:
    """The problems between two states of the ledger, as text; `failures` are the last ones, newest first.

    A failure from before the first state cannot be the cause of what happened after it.
    """
    reasons = []
    num_expired = now.expired_leases - before.expired_leases
    if num_expired > 0:
        reasons.append(
            f"{num_expired} leases expired: an actor stopped sending heartbeats without returning its groups; see its "
            "log"
        )
    num_failed, num_before = sum(now.failed.values()), sum(before.failed.values())
    last = f"the last one: {failures[0].outcome}: {failures[0].reason}" if failures else ""
    if failures and num_failed > num_before:
        reasons.append(f"{num_failed - num_before} attempts failed; {last}")
    elif failures and not reasons:
        reasons.append(
            f"{ARE_ACTORS_RUNNING} No attempt has failed since this wait began; {num_failed} failed before it, {last}"
        )
    return reasons


def ticket_of(group_id: int, task: Task, config: Config, *, min_policy_version: int) -> Ticket:
    """The ticket of group `group_id`: its task and sampling settings."""
    max_fork_turn = MAX_TURNS if config.replay.search else MAX_FORK_TURN
    return Ticket(
        group_id=group_id,
        task=task,
        num_members=config.replay.group_size,
        num_trees=config.replay.num_trees,
        max_fork_turn=min(max_fork_turn, config.env.max_turns - 1) if config.replay.trees else 0,
        search=config.replay.search,
        min_policy_version=min_policy_version,
        sampling=msgspec.convert(config.sampling, Sampling, from_attributes=True),
        seed=config.run.seed,
    )


def _returns(group: Group) -> list[float]:
    return [trajectory.total_reward for trajectory in group.trajectories]


def spread(group: Group) -> float:
    """The standard deviation of the siblings' returns."""
    return statistics.pstdev(_returns(group))
