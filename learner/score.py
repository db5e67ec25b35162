"""Adds the reward model's score to each episode, as a named reward of its last turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from common.config import Config
from common.trajectory import Trajectory
from learner.measure import Numbers, of_each_token
from learner.model.packed_model import PackedModel
from learner.model.reward_model import RewardModel, load_reward_model
from learner.pack import TokenSequence, sequences_of
from learner.ranks import Ranks
from learner.reference import check_same_tokenizer
from learner.supply import Batch

COMPONENT = "reward_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScorer:
    """A reward model, and the weight of its score in the reward."""

    model: RewardModel
    weight: float
    micro_batch_tokens: int
    ranks: Ranks

    def scored(self, batch: Batch) -> Batch:
        """The batch with the reward `reward_model` in the last turn of every episode. Every rank calls it.

        Only the last branch of an episode is scored, at the last token that the policy sampled. `slipstream reward`
        trains the model on conversations that end there too.
        """
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        rewards = iter((self.weight * self._scores(trajectories)).tolist())
        groups = [
            msgspec.structs.replace(
                group, trajectories=[rewarded(trajectory, next(rewards)) for trajectory in group.trajectories]
            )
            for group in batch.groups
        ]
        return msgspec.structs.replace(batch, groups=groups)

    def _scores(self, trajectories: Sequence[Trajectory]) -> Numbers:
        ends = [_end_of(trajectory) for trajectory in trajectories]
        return of_each_token(
            {"scores": self.model},
            ends,
            micro_batch_tokens=self.micro_batch_tokens,
            ranks=self.ranks,
            share_prefixes=self.model.shares_prefixes,
        )["scores"]


def load_reward_scorer(config: Config, model: PackedModel, *, ranks: Ranks) -> RewardScorer | None:
    """Load the reward model in `objective.reward_model`; None if that is empty. Every rank calls it.

    Raises ConfigError if the folder is not a reward model, or if its tokenizer is not that of the policy, `model`.
    """
    if not config.objective.reward_model:
        return None
    folder = Path(config.objective.reward_model)
    reward_model = load_reward_model(folder, ranks=ranks, settings=model.settings)
    check_same_tokenizer("objective.reward_model", folder, model.folder)
    return RewardScorer(
        model=reward_model,
        weight=config.objective.reward_model_weight,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        ranks=ranks,
    )


def rewarded(trajectory: Trajectory, reward: float) -> Trajectory:
    """The trajectory with the reward model's `reward` in its last turn; it replaces an earlier score."""
    *turns, last = trajectory.turns
    last = msgspec.structs.replace(last, rewards=last.rewards | {COMPONENT: reward})
    return msgspec.structs.replace(trajectory, turns=[*turns, last])


def _end_of(trajectory: Trajectory) -> TokenSequence:
    """The last branch, with only its last token in the loss mask."""
    branch = sequences_of(trajectory, advantage=0.0)[-1]
    at_end = np.arange(branch.num_tokens) == branch.num_tokens - 1
    return TokenSequence(
        tokens=branch.tokens,
        loss_mask=at_end,
        behaviour_logprobs=branch.behaviour_logprobs,
        advantages=branch.advantages,
        kept=None,
    )
