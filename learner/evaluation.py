"""Success on held-out tasks, measured by the actors at one policy version: each task once sampled, once greedy."""

import time

from common.config import Config
from common.shutdown import Shutdown
from common.trajectory import Sampling, Task
from learner.supply import SupplyDried
from learner.tally import EvalResult
from replay.buffer import Buffer
from replay.ticket import Ticket

STREAM = "eval"
POLL_S = 0.05
ANY_LAG = 1 << 31
MAX_CLAIM = 64  # groups at once, so that others get a turn at the server
_STEP = 1  # evaluation groups belong to no optimizer step; they are settled as soon as they are counted


class Evaluation:
    """One evaluation: opened, played by whichever actors there are, and counted. Weights must not change meanwhile."""

    def __init__(self, buffer: Buffer, config: Config, *, policy_version: int) -> None:
        """Open its tickets, to be played at `policy_version`."""
        self._buffer = buffer
        self._config = config
        self._policy_version = policy_version
        self._first_group_id = buffer.ledger().last_group_id + 1
        self._solved: dict[int, bool] = {}  # by place: first the sampled half, then the greedy half
        buffer.open([self._ticket(place) for place in range(2 * config.eval.num_tasks)])

    def finish(self, shutdown: Shutdown) -> EvalResult | None:
        """Wait for the result; None when told to stop. Raises SupplyDried after `learner.claim_timeout_s`.

        An episode that could not be had, because its environment kept failing, is in neither sum nor count.
        """
        deadline = time.monotonic() + self._config.learner.claim_timeout_s
        while self._collect():
            if shutdown.requested.is_set():
                return None
            if time.monotonic() > deadline:
                raise SupplyDried(
                    f"the evaluation of version {self._policy_version} did not end within "
                    f"{self._config.learner.claim_timeout_s:.0f} s (learner.claim_timeout_s); are actors running?"
                )
            time.sleep(POLL_S)
        num_tasks = self._config.eval.num_tasks
        sampled = [solved for place, solved in self._solved.items() if place < num_tasks]
        greedy = [solved for place, solved in self._solved.items() if place >= num_tasks]
        if not sampled or not greedy:
            raise SupplyDried(f"no evaluation episode could be had; the environment failed: {self._buffer.failures()}")
        return EvalResult(
            sampled=sum(sampled) / len(sampled),
            greedy=sum(greedy) / len(greedy),
            num_tasks=min(len(sampled), len(greedy)),
        )

    def _collect(self) -> bool:
        """Count what is ready; return whether more is to come."""
        ledger = self._buffer.ledger()
        if ledger.ready:
            num_groups = min(ledger.ready, MAX_CLAIM)
            for group in self._buffer.claim(_STEP, num_groups, policy_version=0, max_lag=ANY_LAG):
                place = group.ticket.group_id - self._first_group_id
                if place >= 0:  # else it was opened by a learner that is gone
                    self._solved[place] = group.trajectories[0].success
            self._buffer.settle(_STEP)
        return ledger.ready + ledger.queued + ledger.leased > 0

    def _ticket(self, place: int) -> Ticket:
        num_tasks, sampling = self._config.eval.num_tasks, self._config.sampling
        return Ticket(
            group_id=self._first_group_id + place,
            task=Task(env=self._config.env.name, split="held_out", index=place % num_tasks),
            num_members=1,
            min_policy_version=self._policy_version,
            sampling=Sampling(
                temperature=sampling.temperature if place < num_tasks else 0.0,
                top_p=1.0,
                top_k=0,
                max_turn_tokens=sampling.max_turn_tokens,
            ),
            seed=self._config.run.seed,
        )
