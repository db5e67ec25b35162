"""The learner's side of the buffer: how much work is admitted, and which groups make a step."""

import logging
import math
import statistics
import time
from collections import Counter

import msgspec

from common.config import Config
from common.shutdown import Shutdown
from common.trajectory import Sampling, Task
from learner.curriculum import Curriculum
from learner.token_advantages import teaches
from replay.buffer import Buffer
from replay.ledger import Ledger
from replay.sampler import Order, Reuse
from replay.ticket import Group, Ticket

POLL_S = 0.02
EXPLAIN_EVERY_S = 10.0

log = logging.getLogger(__name__)


class SupplyDried(RuntimeError):
    """No batch came within `learner.claim_timeout_s`; the message says what the buffer holds."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step learns from."""

    groups: list[Group]
    num_dropped: dict[str, int]  # groups claimed for this step and dropped, by reason
    next_group_id: int  # of the first ticket that was not opened yet


class Supply:
    """Opens tickets and claims groups for one step after another."""

    def __init__(self, buffer: Buffer, config: Config, *, first_group_id: int, every: int = 1) -> None:
        """Group ids begin at `first_group_id` and rise by `every`."""
        self._buffer = buffer
        self._config = config
        self._next_group_id = first_group_id
        self._every = every
        self._curriculum = Curriculum(config.env, seed=config.run.seed)
        self._last_alike = 0.0  # mean return of the last group whose members earned the same
        replay = config.replay
        # A step's groups are chosen from so many.
        self._num_candidates = math.ceil(replay.groups_per_step / replay.keep_fraction)
        self._reuse = Reuse(
            max_uses=replay.max_uses,
            samples_per_insert=replay.samples_per_insert,
            # A step is claimed at once, so that it may go before the inserts that pay for it.
            error_buffer=self._num_candidates,
        )

    def next_batch(
        self, step: int, *, policy_version: int, published_version: int, shutdown: Shutdown, skipped_versions: int = 0
    ) -> Batch | None:
        """Return the groups that optimizer step `step` (counted from 1) learns from; None when told to stop.

        Consumes ready groups; waits for actors to finish enough of them; produces tickets, so that actors always find
        `target_lag` steps of work ahead. Groups that teach nothing (see `teaches`) are dropped and others take
        their place. Where there are more candidates than a step takes (`replay.keep_fraction`), those whose returns
        differ least are dropped. `skipped_versions` are no lag: see `Supplies`. Raises SupplyDried.
        """
        replay, started = self._config.replay, time.monotonic()
        wanted = self._num_candidates
        kept: list[Group] = []
        dropped: Counter[str] = Counter()
        last_said = started
        while len(kept) < wanted and not shutdown.requested.is_set():
            self.admit(step, kept, published_version=published_version)
            claimed = self._buffer.claim(
                step,
                wanted - len(kept),
                policy_version=policy_version,
                max_lag=replay.max_lag + skipped_versions,
                order=Order(replay.order),
                seed=self._config.run.seed,
                reuse=self._reuse,
            )
            self._curriculum.saw(claimed)
            useful, useless = self._sorted_out(claimed)
            for reason, groups in useless.items():
                self._drop(groups, reason, dropped)
            if replay.order == Order.PRIORITISED.value:  # by how far its returns lie apart: what it has to teach
                self._buffer.prioritise({group.ticket.group_id: spread(group) for group in useful})
            kept += useful
            if not claimed:
                last_said = self._wait(step, started, last_said)
        if len(kept) < wanted:
            return None
        self.admit(step, kept, published_version=published_version)
        kept.sort(key=lambda group: (-spread(group), group.ticket.group_id))
        self._drop(kept[replay.groups_per_step :], "low_variance", dropped)
        del kept[replay.groups_per_step :]
        # By id, so that a step's arithmetic does not depend on which group was finished first.
        kept.sort(key=lambda group: group.ticket.group_id)
        return Batch(groups=kept, num_dropped=dict(dropped), next_group_id=self._next_group_id)

    def _drop(self, groups: list[Group], reason: str, dropped: Counter[str]) -> None:
        if groups:
            self._buffer.drop([group.ticket.group_id for group in groups], reason=reason)
            dropped[reason] += len(groups)

    def _sorted_out(self, claimed: list[Group]) -> tuple[list[Group], dict[str, list[Group]]]:
        """The groups to learn from, and the others by reason."""
        sampling, useful, useless = self._config.sampling, list[Group](), dict[str, list[Group]]()
        for group in claimed:
            drawn = group.ticket.sampling
            if (drawn.temperature, drawn.top_p, drawn.top_k) != (sampling.temperature, sampling.top_p, sampling.top_k):
                # Of a life of this run with another configuration: the learner's softmax is of this one's.
                useless.setdefault("other_sampling", []).append(group)
            elif teaches(group, objective=self._config.objective):
                useful.append(group)
            else:
                useless.setdefault("zero_variance", []).append(group)
                self._last_alike = statistics.mean(_returns(group))
        return useful, useless

    def admit(self, step: int, kept: list[Group], *, published_version: int) -> None:
        """Open tickets until as much work is under way as the lag allows, and never more than the run needs.

        `kept` are the groups of `step` so far.
        """
        replay, learner = self._config.replay, self._config.learner
        steps = min(replay.target_lag + 1, learner.steps - step + 1)
        room = self._room(self._buffer.ledger(), kept, num_uses=self._num_candidates * steps - len(kept))
        if room <= 0:
            return
        ids = range(self._next_group_id, self._next_group_id + room * self._every, self._every)
        oldest_allowed = max(0, published_version - replay.target_lag)
        self._buffer.open(
            [
                ticket_of(group_id, self._curriculum.task(group_id), self._config, min_policy_version=oldest_allowed)
                for group_id in ids
            ]
        )
        self._next_group_id += room * self._every

    def _room(self, ledger: Ledger, kept: list[Group], *, num_uses: int) -> int:
        """How many groups are to be opened for `num_uses` more uses of groups to be had, the rest of this step's first.

        Each may be used `max_uses` times, but only once for this step, and as often as the limiter lets them. With one
        use each this is: queued + leased + ready + kept <= candidates of a step * min(target_lag + 1, steps left).
        """
        reuse, wanted = self._reuse, self._num_candidates - len(kept)
        unfinished = ledger.queued + ledger.leased
        uses_left = reuse.max_uses * (unfinished + ledger.ready) - ledger.ready_uses
        still_ready = sum(group.num_uses < reuse.max_uses for group in kept)
        room = max(
            math.ceil((num_uses - uses_left) / reuse.max_uses),
            wanted - (unfinished + ledger.ready - still_ready),
        )
        if reuse.samples_per_insert:
            needed = (ledger.claims + num_uses - reuse.error_buffer) / reuse.samples_per_insert
            room = max(room, math.ceil(needed) - ledger.finished - unfinished)
        return room

    def _wait(self, step: int, started: float, last_said: float) -> float:
        """Sleep a little. Say what is missing now and then, and give up at the deadline."""
        now, timeout_s = time.monotonic(), self._config.learner.claim_timeout_s
        if now - started > timeout_s:
            raise SupplyDried(
                f"step {step}: no whole batch within {timeout_s:.0f} s (learner.claim_timeout_s): {self._why()}"
            )
        if now - last_said > EXPLAIN_EVERY_S:
            log.info("step %d: waiting for actors since %.0f s: %s", step, now - started, self._why())
            last_said = now
        time.sleep(POLL_S)
        return last_said

    def _why(self) -> str:
        """What keeps a batch from coming, the likeliest first, and what the buffer holds."""
        ledger, failures = self._buffer.ledger(), self._buffer.failures()
        reasons = []
        if num_alike := ledger.dropped.get("zero_variance", 0):
            reasons.append(
                f"in {num_alike} groups all members earned the same ({self._last_alike:.3g} in the last), which leaves "
                "nothing to compare: warm-start, take easier tasks or larger groups, or an objective.advantage without "
                "siblings, as reinforce_pp"
            )
        if failures:
            num_failed = sum(ledger.failed.values())
            reasons.append(f"{num_failed} attempts failed; the last, {failures[0].outcome}: {failures[0].reason}")
        if not reasons:
            reasons.append("are actors running, and do their episodes end?")
        counts = f"{ledger.queued} groups queued, {ledger.leased} leased, {ledger.ready} ready"
        return f"{'; '.join(reasons)} ({counts})"


def ticket_of(group_id: int, task: Task, config: Config, *, min_policy_version: int) -> Ticket:
    """The ticket of group `group_id`: its task, and how its episodes are sampled."""
    sampling = config.sampling
    return Ticket(
        group_id=group_id,
        task=task,
        num_members=config.replay.group_size,
        min_policy_version=min_policy_version,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_turn_tokens=sampling.max_turn_tokens,
        ),
        seed=config.run.seed,
    )


def _returns(group: Group) -> list[float]:
    return [trajectory.total_reward for trajectory in group.trajectories]


def spread(group: Group) -> float:
    """How far the returns of siblings lie apart: their standard deviation."""
    return statistics.pstdev(_returns(group))
