"""The record with which an attempt begins if a preempted actor, or a sibling, has played its first turns.

Nothing is sampled or encoded again: tokens, log-probabilities and versions stay as recorded. The environment must get
into the same state again, and not every environment can restore a snapshot. So the rollout does the recorded actions in
a fresh environment, and the record compares every answer with its own: its tokens, its rewards and the state_key.
"""

import msgspec

from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord
from slipstream.common.records.kept_sets import no_sets
from slipstream.common.records.trajectory import Fork, Trajectory


def resumed_record(attempt: Attempt, partial: Trajectory) -> EpisodeRecord:
    """The record as it was when `partial` was handed in; `attempt` continues it."""
    record = _record_until(partial.num_tokens, attempt, partial)
    record.turns, record.fork = list(partial.turns), partial.fork
    record.score, record.success, record.earlier_s = partial.score, partial.success, partial.duration_s
    return record


def forked_record(attempt: Attempt, parent: Trajectory, fork: Fork) -> EpisodeRecord:
    """The record of an attempt that begins with the first turns of a finished sibling, `parent`.

    Rewards are left open until they are replayed: parts of `env.rewards` may have changed those of the parent.
    """
    record = _record_until(parent.turns[fork.num_turns].start, attempt, parent)
    record.turns = [msgspec.structs.replace(turn, rewards={}) for turn in parent.turns[: fork.num_turns]]
    record.fork = fork
    return record


def _record_until(stop: int, attempt: Attempt, earlier: Trajectory) -> EpisodeRecord:
    """The record of `attempt` with the tokens of `earlier` before `stop`, and without its turns."""
    num_sampled = int(earlier.loss_mask_array()[:stop].sum())
    return EpisodeRecord(
        attempt=attempt,
        tokens=earlier.token_array()[:stop].tolist(),
        logprobs=earlier.behaviour_logprob_array()[:stop].tolist(),
        loss_mask=earlier.loss_mask_array()[:stop].tolist(),
        kept=[earlier.kept.between(0, num_sampled) if earlier.kept else no_sets(num_sampled)],
        branch_starts=[start for start in earlier.branch_starts if start < stop],
        version_spans=[span for span in earlier.version_spans if span.stop <= stop],
        prompt_stop=stop,
        started_at_s=earlier.started_at_s,  # a prompt may show the date
    )
