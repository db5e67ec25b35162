"""The buffer in plain Python, without Redis: what each verb should answer, and what the books should say afterwards."""

from collections import Counter
from dataclasses import dataclass, field

from slipstream.replay.records.ledger import STATES, Ledger
from slipstream.replay.records.ticket import InsertResult

NO_STEP = 1 << 53
COUNTED = ["opened", "trained", "finished", "inserted", "trained_trajectories", "dedup_hits", "redone_members"]
COUNTED += ["partials_handed_in", "partials_resumed", "fenced_inserts", "expired_leases", "expired_judgings"]
COUNTED += ["fenced_verdicts"]


@dataclass
class ModelGroup:
    """What a group should be."""

    num_members: int
    state: str = "queued"
    fence: int = 0  # of the lease that holds it
    attempts: Counter[int] = field(default_factory=Counter)
    stored: dict[int, tuple[int, int]] = field(default_factory=dict)  # member -> (attempt, fence)
    partials: dict[int, tuple[int, int]] = field(default_factory=dict)
    died: dict[int, int] = field(default_factory=dict)  # member -> the attempt during which an engine died
    returns: list[float] = field(default_factory=list)  # of the stored members
    newest: int = -1  # policy version
    finished: int = 0
    uses: list[int] = field(default_factory=list)  # steps
    poisoned: bool = False
    set_aside: int = 0  # the order of it
    is_judged: bool = False
    judge_fence: int = 0  # of the judge's lease
    num_judgings: int = 0  # in vain
    verdict_fence: int = 0

    @property
    def is_equal(self) -> bool:
        return not (self.is_judged or self.missing()) and len(set(self.returns)) == 1

    def missing(self) -> dict[int, int]:
        return {member: self.attempts[member] for member in range(self.num_members) if member not in self.stored}


class Model:
    """What the stream should be."""

    def __init__(self, *, max_attempts: int, max_quarantined: int, max_uses: int) -> None:
        self.max_attempts = max_attempts
        self.max_quarantined = max_quarantined
        self.max_uses = max_uses
        self.groups: dict[int, ModelGroup] = {}
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.dropped_trajectories: Counter[str] = Counter()
        self.work: Counter[str] = Counter()  # trajectories and partials, by the account of their tokens and turns
        self.discarded: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.last_step_made = NO_STEP  # as the newest learner knows
        self.num_set_aside = 0
        self.earned = 0.0
        self.expired_judgings: list[int] = []  # in the order of their deadlines; not noticed yet

    def in_state(self, *states: str) -> list[int]:
        return sorted(group_id for group_id, group in self.groups.items() if group.state in states)

    def ledger(self) -> Ledger:
        """What the books should say."""
        groups = self.groups.values()
        in_state, produced = Counter(group.state for group in groups), self.work["produced"]
        return Ledger(
            dropped=dict(self.dropped),
            dropped_trajectories=dict(+self.dropped_trajectories),
            partials_discarded=dict(self.discarded),
            partials_held=sum(len(group.partials) for group in groups),
            held_trajectories=sum(len(group.stored) for group in groups),
            ready_uses=sum(len(group.uses) for group in groups if group.state == "ready"),
            ready_equal=sum(group.is_equal for group in groups if group.state == "ready"),
            failed=dict(self.failed),
            last_group_id=self.counts["opened"] - 1,
            # Each is as `tests.replay.records.attempts.attempt_at` makes it: four tokens, one turn, a tenth of a
            # second, and a success in the shop.
            episodes={"shop": produced} if produced else {},
            successes={"shop": produced} if produced else {},
            returns={"shop": self.earned} if produced else {},
            tokens={account: 4 * number for account, number in self.work.items() if number},
            turns={account: number for account, number in self.work.items() if number},
            duration_ms={account: 100 * number for account, number in self.work.items() if number},
            **{state: in_state[state] for state in STATES},
            **{name: self.counts[name] for name in COUNTED},
        )

    # --- Actors.

    def lease(self, fence: int) -> int | None:
        """The group that is leased."""
        queued = self.in_state("queued")
        if not queued:
            return None
        group = self.groups[queued[0]]
        group.state, group.fence = "leased", fence
        return queued[0]

    def holds(self, group_id: int, fence: int) -> bool:
        group = self.groups.get(group_id)
        return group is not None and group.state == "leased" and group.fence == fence

    def insert(
        self, group_id: int, member: int, attempt: int, fence: int, policy_version: int, reward: float = 1.0
    ) -> InsertResult:
        group = self.groups.get(group_id)
        if group is not None and group.stored.get(member) == (attempt, fence):
            return self._counted("dedup_hits", InsertResult.DUPLICATE)
        if group is None or not self.holds(group_id, fence) or group.missing().get(member) != attempt:
            return self._counted("fenced_inserts", InsertResult.FENCED)
        group.stored[member] = (attempt, fence)
        self.earned += reward
        group.returns.append(reward)
        self.work["produced"] += 1
        group.newest = max(group.newest, policy_version)
        partial = group.partials.pop(member, None)
        if partial is not None and partial[1] == fence:
            self.discarded["superseded"] += 1
        elif partial is not None:
            self.counts["partials_resumed"] += 1
        if not group.missing() and group.is_judged:
            group.state = "judging"
        elif not group.missing():
            self._finish(group)
        return self._counted("inserted", InsertResult.STORED)

    def _finish(self, group: ModelGroup) -> None:
        self.counts["finished"] += 1
        group.state, group.finished = "ready", self.counts["finished"]

    def hand_in(self, group_id: int, member: int, attempt: int, fence: int) -> InsertResult:
        group = self.groups.get(group_id)
        if group is not None and group.partials.get(member) == (attempt, fence):
            return self._counted("dedup_hits", InsertResult.DUPLICATE)
        if group is None or not self.holds(group_id, fence) or group.missing().get(member) != attempt:
            return self._counted("fenced_inserts", InsertResult.FENCED)
        if member in group.partials:
            self.discarded["superseded"] += 1
        group.partials[member] = (attempt, fence)
        return self._counted("partials_handed_in", InsertResult.STORED)

    def _counted(self, name: str, result: InsertResult) -> InsertResult:
        self.counts[name] += 1
        return result

    def fail(self, group_id: int, member: int, attempt: int, fence: int, outcome: str) -> int | None:
        """The attempt to make next."""
        current = self.groups[group_id].missing().get(member) if self.holds(group_id, fence) else None
        if current != attempt:
            return current
        group = self.groups[group_id]
        self.failed[outcome] += 1
        if group.partials.pop(member, None):
            self._discard(outcome, 1)
        if attempt + 1 == self.max_attempts:
            self._close(group_id, outcome)
            return None
        self.counts["redone_members"] += 1
        group.attempts[member] += 1
        return attempt + 1

    def release(self, group_id: int, fence: int, *, died: bool = False) -> None:
        if not self.holds(group_id, fence):
            return
        group = self.groups[group_id]
        group.state = "queued"
        given_up = [m for m, attempt in group.missing().items() if died and group.died.get(m) == attempt]
        if died:
            group.died |= group.missing()
        for member in given_up:
            self.failed["infra_failure"] += 1
            self.counts["redone_members"] += 1
            group.attempts[member] += 1
            if group.partials.pop(member, None):
                self._discard("infra_failure", 1)
        if any(group.attempts[member] >= self.max_attempts for member in given_up):
            self._close(group_id, "infra_failure")

    def expire(self, group_ids: list[int]) -> None:
        """Their deadlines have passed, and somebody noticed."""
        for group_id in group_ids:
            group = self.groups[group_id]
            self.counts["expired_leases"] += 1
            for member in group.missing():
                group.attempts[member] += 1
                self.counts["redone_members"] += 1
            group.state = "queued"
            if max(group.missing().values()) >= self.max_attempts:
                self._close(group_id, "lease_expired")

    # --- Judges.

    def lease_judging(self, fence: int) -> list[int]:
        """The groups of which one is leased: call `begin_judging` for it. Groups of expired leases come first."""
        expired, self.expired_judgings = self.expired_judgings, []
        for place, group_id in enumerate(expired):
            if self.judged_by(group_id):
                self.counts["expired_judgings"] += 1
                if self._judged_in_vain(group_id):
                    self.expired_judgings = expired[place + 1 :]
                    return [group_id]
        return [group_id for group_id in self.in_state("judging") if not self.groups[group_id].judge_fence]

    def begin_judging(self, group_id: int, fence: int) -> None:
        self.groups[group_id].judge_fence = fence

    def judged_by(self, group_id: int) -> int:
        """The fence of the judge that leases a group; 0 if none does."""
        group = self.groups.get(group_id)
        return group.judge_fence if group is not None and group.state == "judging" else 0

    def judges(self, group_id: int, fence: int) -> bool:
        return self.judged_by(group_id) == fence

    def judged(self, group_id: int, fence: int) -> InsertResult:
        group = self.groups.get(group_id)
        if group is not None and group.verdict_fence == fence:
            return self._counted("dedup_hits", InsertResult.DUPLICATE)
        if group is None or not self.judges(group_id, fence):
            return self._counted("fenced_verdicts", InsertResult.FENCED)
        group.verdict_fence, group.judge_fence = fence, 0
        self._finish(group)
        return InsertResult.STORED

    def fail_judging(self, group_id: int, fence: int) -> bool:
        if not self.judges(group_id, fence):
            return False
        self.failed["judge_failed"] += 1
        return self._judged_in_vain(group_id)

    def release_judging(self, group_id: int, fence: int) -> None:
        if self.judges(group_id, fence):
            self.groups[group_id].judge_fence = 0

    def _judged_in_vain(self, group_id: int) -> bool:
        group = self.groups[group_id]
        group.judge_fence = 0
        group.num_judgings += 1
        if group.num_judgings == self.max_attempts:
            self._close(group_id, "judge_failed")
            return False
        return True

    # --- Learners.

    def open(self, num_groups: int, num_members: int, *, is_judged: bool = False) -> range:
        """The ids of the new groups."""
        first = self.counts["opened"]
        self.counts["opened"] += num_groups
        for group_id in range(first, first + num_groups):
            self.groups[group_id] = ModelGroup(num_members=num_members, is_judged=is_judged)
        return range(first, first + num_groups)

    def claim(
        self, step: int, num_groups: int, *, policy_version: int, max_lag: int, beside_equal: bool = False
    ) -> list[int]:
        """The groups that the learner gets, in order."""
        self.last_step_made = step - 1
        for group_id in self.in_state("ready"):
            if policy_version - self.groups[group_id].newest > max_lag:
                self._give_up(group_id, "too_old")
        ready = sorted(self.in_state("ready"), key=lambda group_id: self.groups[group_id].finished)
        usable = [i for i in ready if self.groups[i].uses[-1:] != [step] and len(self.groups[i].uses) < self.max_uses]
        chosen, beside = list[int](), list[int]()
        for group_id in usable:
            if len(chosen) < num_groups:
                (beside if beside_equal and self.groups[group_id].is_equal else chosen).append(group_id)
        claimed = (chosen if len(chosen) == num_groups else []) + beside
        for group_id in claimed:
            group = self.groups[group_id]
            group.uses.append(step)
            group.state = "claimed" if len(group.uses) == self.max_uses else "ready"
        poisoned = [group_id for group_id in claimed if self.groups[group_id].poisoned]
        for group_id in poisoned:
            self.quarantine(group_id, last_step_made=step - 1)
        return [group_id for group_id in claimed if group_id not in poisoned]

    def drop(self, group_ids: list[int], reason: str) -> None:
        for group_id in group_ids:
            if group_id in self.groups:
                self._take_back(group_id, self.last_step_made)
                self._give_up(group_id, reason)

    def settle(self, step: int) -> int:
        """How many are trained now."""
        self.last_step_made = max(self.last_step_made, step)
        done = [group_id for group_id in self.in_state("claimed") if self.groups[group_id].uses[-1] <= step]
        for group_id in done:
            self._close(group_id, "trained")
        return len(done)

    def take_over(self, step: int) -> int:
        """A learner of a new epoch continues from `step`. Return how many groups that reopens."""
        self.last_step_made = NO_STEP
        later = [i for i in self.in_state("ready", "claimed") if self.groups[i].uses and self.groups[i].uses[-1] > step]
        for group_id in later:
            self._take_back(group_id, step)
            self.groups[group_id].state = "ready"
        return len(later)

    # --- People.

    def quarantine(self, group_id: int, *, last_step_made: int = NO_STEP) -> bool:
        group = self.groups.get(group_id)
        if group is None:
            return False
        if group.state == "quarantined":
            return True
        self._take_back(group_id, last_step_made)
        if group.uses:
            group.state = "claimed"
            return False
        self.num_set_aside += 1
        group.state, group.set_aside = "quarantined", self.num_set_aside
        set_aside = sorted(self.in_state("quarantined"), key=lambda i: self.groups[i].set_aside)
        if len(set_aside) > self.max_quarantined:
            self._close(set_aside[0], "poison")
        return True

    def requeue(self, group_ids: list[int]) -> int:
        num_requeued = 0
        for group_id in group_ids:
            group = self.groups.get(group_id)
            if group is None or group.state not in ("quarantined", "leased", "judging", "ready") or group.uses:
                continue
            self.dropped_trajectories["requeued"] += len(group.stored)
            self.work["dropped:requeued"] += len(group.stored)
            self._discard_all(group, "requeued")
            self.groups[group_id] = ModelGroup(num_members=group.num_members, is_judged=group.is_judged)
            num_requeued += 1
        return num_requeued

    # ---

    def _take_back(self, group_id: int, step: int) -> None:
        group = self.groups[group_id]
        group.uses = [use for use in group.uses if use <= step]

    def _give_up(self, group_id: int, reason: str) -> None:
        if self.groups[group_id].uses:
            self.groups[group_id].state = "claimed"
        else:
            self._close(group_id, reason)

    def _close(self, group_id: int, reason: str) -> None:
        group = self.groups.pop(group_id)
        self._discard_all(group, reason)
        if reason == "trained":
            self.counts["trained"] += 1
            self.counts["trained_trajectories"] += len(group.stored)
            self.work["trained"] += len(group.stored)
        else:
            self.dropped[reason] += 1
            self.dropped_trajectories[reason] += len(group.stored)
            self.work[f"dropped:{reason}"] += len(group.stored)

    def _discard_all(self, group: ModelGroup, reason: str) -> None:
        if group.partials:
            self._discard(reason, len(group.partials))

    def _discard(self, reason: str, number: int) -> None:
        self.discarded[reason] += number
        self.work[f"discarded:{reason}"] += number
