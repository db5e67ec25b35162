"""Adds a reward model's score to each episode, as a named reward of its last turn, or of each turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from common.config import Config
from common.config_error import ConfigError
from common.objective_config import GIGPO
from common.tokenizer import load_tokenizer
from common.trajectory import Trajectory, pack_mask
from learner.measure import Numbers, of_each_token
from learner.model.packed_model import ModelSettings, PackedModel
from learner.model.reward_model import RewardModel, load_reward_model
from learner.objective.turn_labels import probability, progress
from learner.pack import TokenSequence, sequences_of
from learner.ranks import Ranks
from learner.supply import Batch

COMPONENT = "reward_model"
BY_TURN = (*GIGPO, "bi_level_gae")  # advantages that read the rewards of turns without an allocation


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScorer:
    """A reward model of outcome or of the process."""

    model: RewardModel
    weight: float  # factor of the rewards
    micro_batch_tokens: int
    ranks: Ranks

    def scored(self, batch: Batch) -> Batch:
        """The batch with the reward `reward_model` in every episode. Every rank calls it.

        A model of outcome rewards the last turn with its score, one of the process each turn with its `progress`.
        """
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        values = self.values(trajectories)
        rewards = iter([self.weight * (progress(each) if self.model.is_process else each) for each in values])
        groups = [
            msgspec.structs.replace(
                group, trajectories=[rewarded(trajectory, next(rewards)) for trajectory in group.trajectories]
            )
            for group in batch.groups
        ]
        return msgspec.structs.replace(batch, groups=groups)

    def values(self, trajectories: Sequence[Trajectory]) -> list[Numbers]:
        """The probability of success after each turn of each episode; of a model of outcome, its one score.

        A model of outcome reads only the last branch of an episode, at the last token that the policy sampled, as
        `slipstream reward` trains it. Every rank calls it. Raises ConfigError for a score that is not finite.
        """
        is_process = self.model.is_process
        read = [_turn_ends(each) if is_process else [_end_of(each)] for each in trajectories]
        found = of_each_token(
            {"scores": self.model},
            [sequence for sequences in read for sequence in sequences],
            micro_batch_tokens=self.micro_batch_tokens,
            ranks=self.ranks,
            share_prefixes=self.model.shares_prefixes,
        )["scores"]
        if not np.isfinite(found).all():
            raise ConfigError(f"the reward model {self.model.folder} has a score that is not finite; train it again")
        stops = np.cumsum([len(trajectory.turns) if is_process else 1 for trajectory in trajectories])
        return np.split(probability(found) if is_process else found, stops[:-1])


def load_reward_scorer(config: Config, model: PackedModel, *, ranks: Ranks) -> RewardScorer | None:
    """Load the reward model in `objective.reward_model`; None if that is empty. Every rank calls it.

    Raises ConfigError if the folder is not a reward model, if its tokenizer is not that of the policy, `model`, or if
    it rewards turns and the objective compares only whole returns.
    """
    objective = config.objective
    if not objective.reward_model:
        return None
    scorer = load_scorer(
        Path(objective.reward_model),
        policy=model.folder,
        settings=model.settings,
        weight=objective.reward_model_weight,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        ranks=ranks,
    )
    if scorer.model.is_process and objective.allocation != "per_turn" and objective.advantage not in BY_TURN:
        raise ConfigError(
            f"`objective.reward_model` {objective.reward_model} is a process reward model, which rewards every turn, "
            f"but objective.advantage {objective.advantage} with objective.allocation {objective.allocation} adds the "
            f"turns up; set objective.allocation=per_turn, or use an advantage that reads turns ({', '.join(BY_TURN)})"
        )
    return scorer


def load_scorer(
    folder: Path,
    *,
    policy: Path,
    settings: ModelSettings,
    weight: float = 1.0,
    micro_batch_tokens: int,
    ranks: Ranks,
) -> RewardScorer:
    """Load the reward model in `folder` for episodes of the model in the folder `policy`. Every rank calls it.

    Raises ConfigError if it is no reward model, or has another tokenizer or chat template than the policy.
    """
    model = load_reward_model(folder, ranks=ranks, settings=settings)
    theirs, ours = (load_tokenizer(each) for each in (folder, policy))
    for what, differs in (
        ("tokenizer", theirs.get_vocab() != ours.get_vocab()),
        ("chat template", theirs.chat_template != ours.chat_template),
    ):
        if differs:
            raise ConfigError(
                f"the reward model {folder} has another {what} than the policy in {policy}, so it would score other "
                "text than it was trained on; train one from a model of the same family"
            )
    return RewardScorer(model=model, weight=weight, micro_batch_tokens=micro_batch_tokens, ranks=ranks)


def rewarded(trajectory: Trajectory, rewards: Numbers) -> Trajectory:
    """The trajectory with the reward model's `rewards` in its last turns; they replace earlier ones."""
    first = len(trajectory.turns) - len(rewards)
    last = [
        msgspec.structs.replace(turn, rewards=turn.rewards | {COMPONENT: reward})
        for turn, reward in zip(trajectory.turns[first:], rewards.tolist(), strict=True)
    ]
    return msgspec.structs.replace(trajectory, turns=[*trajectory.turns[:first], *last])


def _turn_ends(trajectory: Trajectory) -> list[TokenSequence]:
    """The branches in which turns end, with only the last token of each turn in the loss mask."""
    at_ends = np.zeros(trajectory.num_tokens, dtype=np.bool_)
    at_ends[[turn.stop - 1 for turn in trajectory.turns]] = True
    marked = msgspec.structs.replace(trajectory, loss_mask=pack_mask(at_ends.tolist()), kept=None)
    return [branch for branch in sequences_of(marked, advantage=0.0) if branch.loss_mask.any()]


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
