"""Measures success on held-out tasks at one policy version: actors play each task once sampled and once greedy."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable

from slipstream.common.config.config import Config
from slipstream.common.process.long_work import LongWork
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import Sampling, Task
from slipstream.envhub.catalogue import num_held_out
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.lead.tally import EvalResult
from slipstream.learner.supply.supply import SupplyDried, failures_since
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.records.ticket import Group, Ticket

STREAM = "eval"
POLL_S = 0.05
ANY_LAG = 1 << 31
MAX_CLAIM = 64  # groups per claim, so that one claim does not block the server for long
_STEP = 1  # evaluation groups belong to no optimizer step: any number will do, and they are settled once counted

log = logging.getLogger(__name__)


class Evaluation:
    """One evaluation: its tickets are opened, played by actors that serve its version, and counted.

    An actor takes a ticket only while it serves this version. It then keeps this version until no ticket is left.
    """

    def __init__(self, buffer: LearnerBuffer, config: Config, progress: Progress) -> None:
        """Open tickets for the version of `progress`; what is left of an earlier evaluation is dropped."""
        drop_open_groups(buffer)
        self._buffer = buffer
        self._config = config
        self._num_tasks = num_held_out(config)
        self.policy_version = progress.policy_version
        self.step = progress.step
        self._before = buffer.ledger()
        self._first_group_id = self._before.last_group_id + 1
        self._solved: dict[int, bool] = {}  # by place: the first half is sampled, the second greedy
        self.num_mixed = 0  # episodes in which another version sampled tokens; they are not counted
        self._begun = time.monotonic()
        self._idle_since: float | None = None  # when no actor was first seen to play it
        self.lasted_s = 0.0  # from opening it to the last `collect`
        self._num_tickets = 2 * self._num_tasks
        buffer.open([self._ticket(place) for place in range(self._num_tickets)])

    def finish(self, shutdown: Shutdown, check: Callable[[], None]) -> EvalResult | None:
        """Wait for the result; None if a stop was requested. Raises SupplyDried after `learner.claim_timeout_s`.

        `check` is called again and again meanwhile, and may raise to end the wait. Episodes that were quarantined
        because their environment kept failing are not counted.
        """
        deadline = time.monotonic() + self._config.learner.claim_timeout_s
        work = LongWork(f"evaluation of version {self.policy_version}, episodes", self._num_tickets)
        while self.collect():
            work.at(len(self._solved) + self.num_mixed)
            if shutdown.requested.is_set():
                return None
            check()
            if time.monotonic() > deadline:
                raise SupplyDried(
                    f"the evaluation of version {self.policy_version} did not finish within "
                    f"{self._config.learner.claim_timeout_s:.0f} s (learner.claim_timeout_s); are actors running?"
                )
            time.sleep(POLL_S)
        result = self.result()
        if result is None:
            why = failures_since(self._before, self._buffer.ledger(), self._buffer.failures())
            raise SupplyDried(
                f"the evaluation has no sampled or no greedy episode: {'; '.join(why) or 'no attempt failed'}; mend "
                "the environment, or set `eval.num_tasks=0` if it has no held-out tasks"
            )
        return result

    def collect(self) -> bool:
        """Count the finished episodes; return whether some are still missing."""
        ledger, groups = self._buffer.ledger(), []
        if ledger.ready:
            groups = self._buffer.claim(_STEP, min(ledger.ready, MAX_CLAIM), policy_version=0, max_lag=ANY_LAG)
            for group in groups:
                self._count(group)
            self._buffer.settle(_STEP)
        now = time.monotonic()
        self._idle_since = None if ledger.ready or ledger.leased else self._idle_since or now
        self.lasted_s = now - self._begun
        return ledger.ready + ledger.queued + ledger.leased > len(groups)

    def result(self) -> EvalResult | None:
        """The result so far; None while one of the halves has no episode."""
        num_tasks = self._num_tasks
        sampled = [solved for place, solved in self._solved.items() if place < num_tasks]
        greedy = [solved for place, solved in self._solved.items() if place >= num_tasks]
        if not sampled or not greedy:
            return None
        return EvalResult(
            sampled=sum(sampled) / len(sampled),
            greedy=sum(greedy) / len(greedy),
            num_tasks=min(len(sampled), len(greedy)),
            sampled_in=self._solved_in(range(num_tasks)),
            greedy_in=self._solved_in(range(num_tasks, 2 * num_tasks)),
        )

    def _solved_in(self, places: range) -> dict[str, float]:
        """The solved fraction of each environment of the mixture; empty for a run with only one environment."""
        if not self._config.env.mixture:
            return {}
        solved = defaultdict[str, list[bool]](list)
        for place in places:
            if place in self._solved:
                solved[self._task(place).env].append(self._solved[place])
        return {label: sum(found) / len(found) for label, found in solved.items()}

    def is_untouched(self) -> bool:
        """Whether every ticket still waits for an actor at this version."""
        return self._buffer.ledger().queued == self._num_tickets

    def is_abandoned(self) -> bool:
        """Whether no actor has played it for as long as a lease lasts: the actors at this version have left."""
        idle_since = self._idle_since
        return idle_since is not None and time.monotonic() - idle_since > self._config.replay.lease_ttl_s

    def _count(self, group: Group) -> None:
        place, (episode,) = group.ticket.group_id - self._first_group_id, group.trajectories
        if place < 0:  # a learner before this one opened it
            return
        if episode.oldest_policy_version == self.policy_version == episode.newest_policy_version:
            self._solved[place] = episode.success
            return
        self.num_mixed += 1
        log.warning(
            "not counting an episode of the evaluation of version %d: versions %d to %d sampled it",
            self.policy_version,
            episode.oldest_policy_version,
            episode.newest_policy_version,
        )

    def _task(self, place: int) -> Task:
        """The held-out task at `place`: the environments of a mixture take turns, each from its first task on."""
        envs = list(self._config.env.entries())
        index, env = divmod(place % self._num_tasks, len(envs))
        return Task(env=envs[env], split="held_out", index=index)

    def _ticket(self, place: int) -> Ticket:
        num_tasks, sampling = self._num_tasks, self._config.sampling
        return Ticket(
            group_id=self._first_group_id + place,
            task=self._task(place),
            num_members=1,
            min_policy_version=self.policy_version,
            sampling=Sampling(
                temperature=sampling.temperature if place < num_tasks else 0.0,
                top_p=1.0,
                top_k=0,
                max_turn_tokens=sampling.max_turn_tokens,
            ),
            seed=self._config.run.seed,
        )


class RegularEvaluation:
    """Evaluates a published version every `eval.every` steps, while training continues.

    There is one evaluation at a time. If no actor has started it when the next version is published, that version is
    evaluated instead: all actors were busy, or have skipped the version. If its actors have left, it is dropped.
    """

    def __init__(self, buffer: LearnerBuffer, config: Config, *, last_step: int) -> None:
        """`last_step` is the step of the last finished evaluation."""
        self._buffer = buffer
        self._config = config
        self._last_step = last_step
        self._current: Evaluation | None = None

    def advance(self, progress: Progress) -> Evaluation | None:
        """Collect the current evaluation, and begin one if due; called once a step. Return it when it is finished."""
        finished, current = None, self._current
        if current and not current.collect():
            finished, self._current, self._last_step = current, None, current.step
        elif current and current.is_abandoned() and not current.is_untouched():
            log.warning("dropping the evaluation of version %d: no actor plays it any more", current.policy_version)
            drop_open_groups(self._buffer)
            self._current = None
        published = progress.highest_published == progress.policy_version
        if published and self._is_due(progress.step) and (self._current is None or self._current.is_untouched()):
            self._current = Evaluation(self._buffer, self._config, progress)
        return finished

    def _is_due(self, step: int) -> bool:
        """Whether `step` starts an evaluation. The last step does not: the run ends with a separate one."""
        every = self._config.eval.every if num_held_out(self._config) else 0
        return every > 0 and step < self._config.learner.steps and step // every > self._last_step // every


def drop_open_groups(buffer: LearnerBuffer) -> None:
    """Drop all groups of evaluations that are still open; actors lose their leases on them."""
    ledger = buffer.ledger()
    if ledger.queued + ledger.leased + ledger.ready:
        buffer.drop(range(ledger.last_group_id + 1), reason="superseded")
