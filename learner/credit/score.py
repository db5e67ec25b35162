"""Adds a reward model's score to each episode, as a named reward of its last turn, or of each turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.reward_protocol import CRITICS, OUTCOME, PROCESS, ScoredEpisode
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.learner.batch.batch import Batch
from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.credit.measure import of_each_token
from slipstream.learner.credit.token_rewards import Numbers
from slipstream.learner.model.packed_model import ModelSettings, PackedModel
from slipstream.learner.model.reward_model import RewardModel, load_reward_model
from slipstream.learner.objective.turn_labels import probability, progress
from slipstream.learner.ranks.ranks import Ranks

COMPONENT = "reward_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScorer:
    """A reward model of outcome or of the process, or an exported critic."""

    model: RewardModel
    weight: float  # factor of the rewards
    micro_batch_tokens: int
    ranks: Ranks

    def scored(self, batch: Batch) -> Batch:
        """The batch with the reward `reward_model` in every episode. Every rank calls it.

        A model of outcome rewards the last turn with its score, one of the process each turn with its `progress`.
        """
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        values = self.values([ScoredEpisode.of(trajectory) for trajectory in trajectories])
        rewards = iter([self.weight * (progress(each) if self.model.kind == PROCESS else each) for each in values])
        groups = [
            msgspec.structs.replace(
                group, trajectories=[rewarded(trajectory, next(rewards)) for trajectory in group.trajectories]
            )
            for group in batch.groups
        ]
        return msgspec.structs.replace(batch, groups=groups)

    def values(self, episodes: Sequence[ScoredEpisode]) -> list[Numbers]:
        """The probability of success after each turn of each episode; of a model of outcome, its one score.

        Of a critic, the expected return at each of `turn_stops`: of the whole episode or to go, by the model's kind.
        A model of outcome reads only the last branch of an episode, at the last token that the policy sampled, as
        `slipstream fit reward` trains it. Every rank calls it. Raises ConfigError for a score that is not finite.
        """
        kind = self.model.kind
        ends = [episode.turn_stops[-1:] if kind == OUTCOME else episode.turn_stops for episode in episodes]
        found = of_each_token(
            {"scores": self.model},
            [branch for episode, stops in zip(episodes, ends, strict=True) for branch in branches(episode, stops)],
            micro_batch_tokens=self.micro_batch_tokens,
            ranks=self.ranks,
            share_prefixes=self.model.shares_prefixes,
        )["scores"]
        if not np.isfinite(found).all():
            raise ConfigError(f"the reward model {self.model.folder} has a score that is not finite; train it again")
        stops = np.cumsum([len(each) for each in ends])
        return np.split(probability(found) if kind == PROCESS else found + self.model.offset, stops[:-1])


def load_reward_scorer(
    objective: ObjectiveConfig, model: PackedModel, *, micro_batch_tokens: int, ranks: Ranks
) -> RewardScorer | None:
    """Load the reward model in `objective.reward_model`; None if that is empty. Every rank calls it.

    Raises ConfigError if the folder is not a reward model, or a critic, if its tokenizer is not that of the policy,
    `model`, or if it rewards turns and the objective compares only whole returns.
    """
    if not objective.reward_model:
        return None
    scorer = load_scorer(
        Path(objective.reward_model),
        policy=model.folder,
        settings=model.settings,
        weight=objective.reward_model_weight,
        micro_batch_tokens=micro_batch_tokens,
        ranks=ranks,
    )
    if scorer.model.kind in CRITICS:
        raise ConfigError(
            f"`objective.reward_model` {objective.reward_model} is a critic, whose values are no rewards; give a model "
            "of `slipstream fit reward` or `slipstream fit prm`"
        )
    if scorer.model.kind == PROCESS and not reads_turns(objective):
        raise ConfigError(
            f"`objective.reward_model` {objective.reward_model} is a process reward model, which rewards every turn, "
            f"but objective.advantage {objective.advantage} with objective.allocation {objective.allocation} adds the "
            "turns up; set objective.allocation=per_turn, or use an advantage that reads turns: bi_level_gae or gigpo"
        )
    return scorer


def reads_turns(objective: ObjectiveConfig) -> bool:
    """Whether the advantages depend on which turn earned a reward, and not on the return alone."""
    by_turn = objective.compares == "states" or objective.advantage == "bi_level_gae"
    return by_turn or objective.allocation == "per_turn"


def load_scorer(
    folder: Path,
    *,
    policy: Path | None,
    settings: ModelSettings,
    weight: float = 1.0,
    micro_batch_tokens: int,
    ranks: Ranks,
) -> RewardScorer:
    """Load the reward model in `folder` for episodes of the model in the folder `policy`; of any policy if None.

    Every rank calls it. Raises ConfigError if it is no reward model, or has another tokenizer or chat template than
    the policy.
    """
    model = load_reward_model(folder, ranks=ranks, settings=settings)
    if policy is not None:
        _check_tokenizer(folder, policy)
    return RewardScorer(model=model, weight=weight, micro_batch_tokens=micro_batch_tokens, ranks=ranks)


def _check_tokenizer(folder: Path, policy: Path) -> None:
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


def rewarded(trajectory: Trajectory, rewards: Numbers) -> Trajectory:
    """The trajectory with the reward model's `rewards` in its last turns; they replace earlier ones."""
    first = len(trajectory.turns) - len(rewards)
    last = [
        msgspec.structs.replace(turn, rewards=turn.rewards | {COMPONENT: reward})
        for turn, reward in zip(trajectory.turns[first:], rewards.tolist(), strict=True)
    ]
    return msgspec.structs.replace(trajectory, turns=[*trajectory.turns[:first], *last])


def branches(episode: ScoredEpisode, ends: Sequence[int]) -> list[TokenSequence]:
    """The branches in which turns end, up to the last of `ends` in each; only the token before each end is marked."""
    tokens, marked, found = episode.token_array(), np.array(ends) - 1, []
    for start, stop in pairwise([*episode.branch_starts, len(tokens)]):
        places = marked[(marked >= start) & (marked < stop)] - start
        if len(places):
            num_tokens = int(places[-1]) + 1
            mask = np.isin(np.arange(num_tokens), places)
            found.append(TokenSequence.bare(tokens[start : start + num_tokens], mask))
    return found
