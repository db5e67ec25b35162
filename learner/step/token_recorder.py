"""Writes what a step did with each sampled token, for `slipstream view`."""

import logging
from collections.abc import Sequence

import numpy as np

from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.batch.batch import Batch
from slipstream.learner.batch.pack import Bin, TokenSequence
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.step.loss import PolicyLoss
from slipstream.replay.records.step_tokens import SequenceTokens, StepTokens, write_tokens

MAX_TOKENS = 1 << 18  # sampled tokens that a rank records of a step; they take 1.3 MB, and less when compressed

log = logging.getLogger(__name__)


def record_tokens(
    run_dir: RunDir,
    batch: Batch,
    sequences: Sequence[TokenSequence],
    *,
    bins: Sequence[Bin],
    losses: Sequence[PolicyLoss],
    before: Progress,
    rank: int,
) -> None:
    """Write this rank's tokens of the step that followed `before`: whole sequences, up to MAX_TOKENS.

    `bins` are its micro-batches of `sequences`, and `losses` what the loss made of them. A disk without room costs the
    record, not the run.
    """
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    firsts, room, found = _first_tokens(sequences, trajectories), MAX_TOKENS, list[SequenceTokens]()
    for each, loss in zip(bins, losses, strict=True):
        ratios, fates = loss.ratios.cpu().numpy(), loss.fates.cpu().numpy()
        start = 0
        for index in each.members:
            sequence = sequences[index]
            advantages = sequence.advantages[sequence.loss_mask].astype(np.float16)
            part = slice(start, start + len(advantages))
            start = part.stop
            if len(advantages) > room:
                continue
            room -= len(advantages)
            trajectory = trajectories[sequence.trajectory]
            found.append(
                SequenceTokens(
                    group_id=trajectory.group_id,
                    member=trajectory.member,
                    first=firsts[index],
                    advantages=advantages.tobytes(),
                    ratios=ratios[part].tobytes(),
                    fates=fates[part].tobytes(),
                )
            )
    tokens_of_step = StepTokens(policy_version=before.policy_version, sequences=found)
    try:
        write_tokens(run_dir.tokens, tokens_of_step, step=before.step + 1, rank=rank)
    except OSError as error:
        log.warning("step %d: what became of its tokens is not recorded for the viewer: %s", before.step + 1, error)


def _first_tokens(sequences: Sequence[TokenSequence], trajectories: Sequence[Trajectory]) -> list[int]:
    """Of each sequence, how many sampled tokens its trajectory has before those that this sequence trains.

    A sibling may train the first ones: see `slipstream.learner.credit.tree`.
    """
    counts, firsts = dict[int, int](), []
    for sequence in sequences:
        trajectory = trajectories[sequence.trajectory]
        num_sampled = sum(turn.stop - turn.start for turn in trajectory.turns)
        first = counts.setdefault(sequence.trajectory, num_sampled - sequence.trajectory_tokens)
        firsts.append(first)
        counts[sequence.trajectory] = first + int(sequence.loss_mask.sum())
    return firsts
