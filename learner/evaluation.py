"""Success on held-out tasks, measured by the actors at one policy version: each task once sampled, once greedy."""

import logging
import time
from collections import defaultdict

from common.config import Config
from common.shutdown import Shutdown
from common.trajectory import Sampling, Task
from learner.checkpoint import Progress
from learner.supply import SupplyDried
from learner.tally import EvalResult
from replay.buffer import Buffer
from replay.ticket import Group, Ticket

STREAM = "eval"
POLL_S = 0.05
ANY_LAG = 1 << 31
MAX_CLAIM = 64  # groups at once, so that others get a turn at the server
_STEP = 1  # evaluation groups belong to no optimizer step; they are settled as soon as they are counted

log = logging.getLogger(__name__)


class Evaluation:
    """One evaluation: opened, played by whichever actors are at its version, and counted.

    An actor takes one of its tickets only while it serves just that version, and then stays there until none is left.
    """

    def __init__(self, buffer: Buffer, config: Config, progress: Progress) -> None:
        """Open its tickets, to be played at the version of `progress`; what is left of another is given up."""
        self._buffer = buffer
        self._config = config
        self.policy_version = progress.policy_version
        self.step = progress.step
        give_up(buffer)
        self._first_group_id = buffer.ledger().last_group_id + 1
        self._solved: dict[int, bool] = {}  # by place: first the sampled half, then the greedy half
        self._num_mixed = 0  # episodes that another version had a part in: in neither sum nor count
        self._begun = time.monotonic()
        self._idle_since: float | None = None  # when it was first seen that nobody plays it
        self._lasted_s = 0.0
        buffer.open([self._ticket(place) for place in range(self._num_tickets)])

    def finish(self, shutdown: Shutdown) -> EvalResult | None:
        """Wait for the result; None when told to stop. Raises SupplyDried after `learner.claim_timeout_s`.

        An episode that could not be had, because its environment kept failing, is in neither sum nor count.
        """
        deadline = time.monotonic() + self._config.learner.claim_timeout_s
        while self.collect():
            if shutdown.requested.is_set():
                return None
            if time.monotonic() > deadline:
                raise SupplyDried(
                    f"the evaluation of version {self.policy_version} did not end within "
                    f"{self._config.learner.claim_timeout_s:.0f} s (learner.claim_timeout_s); are actors running?"
                )
            time.sleep(POLL_S)
        result = self.result()
        if result is None:
            raise SupplyDried(f"no evaluation episode could be had; the environment failed: {self._buffer.failures()}")
        return result

    def collect(self) -> bool:
        """Count what is ready; return whether more is to come."""
        ledger, groups = self._buffer.ledger(), []
        if ledger.ready:
            groups = self._buffer.claim(_STEP, min(ledger.ready, MAX_CLAIM), policy_version=0, max_lag=ANY_LAG)
            for group in groups:
                self._count(group)
            self._buffer.settle(_STEP)
        now = time.monotonic()
        self._idle_since = None if ledger.ready or ledger.leased else self._idle_since or now
        self._lasted_s = now - self._begun
        return ledger.ready + ledger.queued + ledger.leased > len(groups)

    def result(self) -> EvalResult | None:
        """What was counted; None where one of the halves has no episode."""
        num_tasks = self._config.eval.num_tasks
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
        """The fraction solved, by part of the mixture; nothing where there is only one environment."""
        if not self._config.env.mixture:
            return {}
        solved = defaultdict[str, list[bool]](list)
        for place in places:
            if place in self._solved:
                solved[self._task(place).env].append(self._solved[place])
        return {label: sum(found) / len(found) for label, found in solved.items()}

    @property
    def num_mixed(self) -> int:
        """Episodes that were thrown away because another version had a part in them."""
        return self._num_mixed

    @property
    def lasted_s(self) -> float:
        """From the opening to the last look at it."""
        return self._lasted_s

    def nobody_began(self) -> bool:
        """Whether every ticket waits still for an actor at its version."""
        return self._buffer.ledger().queued == self._num_tickets

    def stands_still(self) -> bool:
        """Whether nobody has played it for as long as a lease lasts: those at its version are gone."""
        idle_since = self._idle_since
        return idle_since is not None and time.monotonic() - idle_since > self._config.replay.lease_ttl_s

    @property
    def _num_tickets(self) -> int:
        return 2 * self._config.eval.num_tasks

    def _count(self, group: Group) -> None:
        place, (episode,) = group.ticket.group_id - self._first_group_id, group.trajectories
        if place < 0:  # it was opened by a learner that is gone
            return
        if episode.oldest_policy_version == self.policy_version == episode.newest_policy_version:
            self._solved[place] = episode.success
            return
        self._num_mixed += 1
        log.warning(
            "an episode of the evaluation of version %d is of versions %d to %d, and does not count",
            self.policy_version, episode.oldest_policy_version, episode.newest_policy_version,
        )  # fmt: skip

    def _task(self, place: int) -> Task:
        """The parts of a mixture take turns, each with its own first held-out tasks."""
        parts = list(self._config.env.parts())
        index, part = divmod(place % self._config.eval.num_tasks, len(parts))
        return Task(env=parts[part], split="held_out", index=index)

    def _ticket(self, place: int) -> Ticket:
        num_tasks, sampling = self._config.eval.num_tasks, self._config.sampling
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
    """Every `eval.every` steps an evaluation of the version that was published then, while training goes on.

    One at a time. One that nobody has begun when the next version is published moves on to that one: every actor was
    busy, or went past it. One that stands still, because the actors at its version are gone, is given up.
    """

    def __init__(self, buffer: Buffer, config: Config, *, last_step: int) -> None:
        """`last_step` is that of the last one that was finished."""
        self._buffer = buffer
        self._config = config
        self._last_step = last_step
        self._current: Evaluation | None = None

    def tend(self, progress: Progress) -> Evaluation | None:
        """Look at the one under way, and begin one that is due; called once a step. Return one that is finished."""
        finished, current = None, self._current
        if current and not current.collect():
            finished, self._current, self._last_step = current, None, current.step
        elif current and current.stands_still() and not current.nobody_began():
            log.warning("the evaluation of version %d is given up: nobody plays it", current.policy_version)
            give_up(self._buffer)
            self._current = None
        published = progress.highest_published == progress.policy_version
        if published and self._is_due(progress.step) and (self._current is None or self._current.nobody_began()):
            self._current = Evaluation(self._buffer, self._config, progress)
        return finished

    def _is_due(self, step: int) -> bool:
        """The run's end has an evaluation of its own."""
        every = self._config.eval.every if self._config.eval.num_tasks else 0
        return every > 0 and step < self._config.learner.steps and step // every > self._last_step // every


def give_up(buffer: Buffer) -> None:
    """Drop whatever is left of evaluations; leases on them are lost."""
    ledger = buffer.ledger()
    if ledger.queued + ledger.leased + ledger.ready:
        buffer.drop(range(ledger.last_group_id + 1), reason="superseded")
