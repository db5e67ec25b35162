"""One attempt of an evaluation, and the ways to choose among attempts at a task."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from slipstream.common.records.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One episode of an evaluation."""

    index: int  # of the task
    success: bool
    score: float
    num_turns: int
    num_invalid: int  # turns whose action was invalid
    num_tokens: int  # of all its sequences, prompts included
    num_written: int  # tokens that the policy sampled
    mean_logprob: float  # of those tokens
    end: str  # its last action, and the state in which that was chosen; equal for equal ends
    value: float | None = None  # by which a reward model ranks it; None without one

    @classmethod
    def of(cls, record: Trajectory, *, action: str | None, value: float | None = None) -> Self:
        """Of a finished episode. Its end has its last `action`; None: the tokens of its last turn."""
        last = record.turns[-1]
        done = record.token_array()[last.start : last.stop].tolist() if action is None else action
        return cls(
            index=record.task.index,
            success=record.success,
            score=record.score,
            num_turns=len(record.turns),
            num_invalid=sum(not turn.valid_action for turn in record.turns),
            num_tokens=record.num_tokens,
            num_written=sum(turn.stop - turn.start for turn in record.turns),
            mean_logprob=float(record.behaviour_logprob_array()[record.loss_mask_array()].mean()),
            end=f"{last.state_key} {done}",
            value=value,
        )


def likeliest(attempts: Sequence[Played]) -> Played:
    """The attempt whose tokens have the highest mean log-probability; among equal ones, the first."""
    return max(attempts, key=lambda each: each.mean_logprob)


def most_common(attempts: Sequence[Played]) -> Played:
    """The attempt whose end most attempts share; among equally common ends, the likeliest. Wang et al. 2203.11171."""
    counts = Counter(each.end for each in attempts)
    return max(attempts, key=lambda each: (counts[each.end], each.mean_logprob))


def most_valuable(attempts: Sequence[Played]) -> Played:
    """The attempt that the reward model ranks first; among equal ones, the first."""
    return max(attempts, key=lambda each: each.value or 0.0)


WAYS: dict[str, Callable[[Sequence[Played]], Played]] = {
    "likelihood": likeliest,
    "majority": most_common,
    "reward_model": most_valuable,
}


def chosen(attempts: Sequence[Played], *, way: str, size: int) -> tuple[float, float]:
    """Success of the choice among each `size` attempts at a task, and the tokens that they wrote: means over the parts.

    The attempts are divided in parts of `size`. A smaller rest counts only if there is no whole part.
    """
    whole = len(attempts) // size * size
    parts = [attempts[start : start + size] for start in range(0, whole, size)] or [attempts]
    success = statistics.fmean(WAYS[way](part).success for part in parts)
    return success, statistics.fmean(sum(each.num_written for each in part) for part in parts)
