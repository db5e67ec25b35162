"""A reward model's word on a batch: one more named reward, earned by the last turn of each episode."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from transformers import AutoTokenizer

from common.config import Config
from common.config_error import ConfigError
from common.trajectory import Trajectory
from learner.measure import Numbers, of_each_token
from learner.model.packed_model import PackedModel
from learner.pack import TokenSequence, sequences_of
from learner.ranks import Ranks
from learner.model.reward_model import RewardModel, load_reward_model
from learner.supply import Batch

COMPONENT = "reward_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """A reward model, and what its score counts."""

    model: RewardModel
    weight: float
    micro_batch_tokens: int
    ranks: Ranks

    def scored(self, batch: Batch) -> Batch:
        """The batch with the reward `reward_model` in the last turn of every episode. Every rank calls it.

        An episode is judged by its last branch, whose last token is the last that the policy sampled; that is where a
        conversation ends when `slipstream reward` fits the model.
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
        asked = {"scores": self.model}
        return of_each_token(asked, ends, micro_batch_tokens=self.micro_batch_tokens, ranks=self.ranks)["scores"]


def load_judge(config: Config, model: PackedModel, *, ranks: Ranks) -> Judge | None:
    """The judge that `objective.reward_model` names; None where that is empty. Every rank calls it.

    Raises ConfigError where the folder is no reward model, or reads other tokens than the policy, `model`, writes.
    """
    if not config.objective.reward_model:
        return None
    folder = Path(config.objective.reward_model)
    reward_model = load_reward_model(folder, ranks=ranks, dtype=config.model.dtype)
    theirs, ours = (AutoTokenizer.from_pretrained(each).get_vocab() for each in (folder, model.folder))
    if theirs != ours:
        raise ConfigError(
            f"`objective.reward_model` {folder} has another tokenizer than the policy in {model.folder}: it would "
            "judge other words than were written; fit one to a model of the same family"
        )
    return Judge(
        model=reward_model,
        weight=config.objective.reward_model_weight,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        ranks=ranks,
    )


def rewarded(trajectory: Trajectory, reward: float) -> Trajectory:
    """With `reward` among those of its last turn, in place of an earlier judgement."""
    *turns, last = trajectory.turns
    last = msgspec.structs.replace(last, rewards=last.rewards | {COMPONENT: reward})
    return msgspec.structs.replace(trajectory, turns=[*turns, last])


def _end_of(trajectory: Trajectory) -> TokenSequence:
    """The last branch, to be read at its last token."""
    branch = sequences_of(trajectory, advantage=0.0)[-1]
    at_end = np.arange(branch.num_tokens) == branch.num_tokens - 1
    return TokenSequence(
        tokens=branch.tokens,
        loss_mask=at_end,
        behaviour_logprobs=branch.behaviour_logprobs,
        advantages=branch.advantages,
        kept=None,
    )
