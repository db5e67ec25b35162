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
    return EpisodeRecord(
        attempt=attempt,
        tokens=partial.token_array().tolist(),
        logprobs=partial.behaviour_logprob_array().tolist(),
        loss_mask=partial.loss_mask_array().tolist(),
        kept=[partial.kept or no_sets(int(partial.loss_mask_array().sum()))],
        branch_starts=list(partial.branch_starts),
        version_spans=list(partial.version_spans),
        turns=list(partial.turns),
        fork=partial.fork,
        prompt_stop=partial.num_tokens,
        score=partial.score,
        success=partial.success,
        started_at_s=partial.started_at_s,
        earlier_s=partial.duration_s,
    )


def forked_record(attempt: Attempt, parent: Trajectory, fork: Fork) -> EpisodeRecord:
    """The record of an attempt that begins with the first turns of a finished sibling, `parent`.

    Rewards are left open until they are replayed: parts of `env.rewards` may have changed those of the parent.
    """
    stop = parent.turns[fork.num_turns].start
    num_sampled = int(parent.loss_mask_array()[:stop].sum())
    return EpisodeRecord(
        attempt=attempt,
        tokens=parent.token_array()[:stop].tolist(),
        logprobs=parent.behaviour_logprob_array()[:stop].tolist(),
        loss_mask=parent.loss_mask_array()[:stop].tolist(),
        kept=[parent.kept.between(0, num_sampled) if parent.kept else no_sets(num_sampled)],
        branch_starts=[start for start in parent.branch_starts if start < stop],
        version_spans=[span for span in parent.version_spans if span.stop <= stop],
        turns=[msgspec.structs.replace(turn, rewards={}) for turn in parent.turns[: fork.num_turns]],
        fork=fork,
        prompt_stop=stop,
        started_at_s=parent.started_at_s,  # a prompt may show the date
    )
