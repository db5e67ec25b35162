"""What each token of a batch learns: groups in, token sequences with advantages out, as `objective.advantage` says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int

from common.objective_config import WITH_CRITIC, ObjectiveConfig
from common.trajectory import Trajectory
from learner.objective import allocation
from learner.objective.advantage import (
    RETURN_RESOLUTION,
    batch_standardised_advantages,
    centred_advantages,
    gigpo_advantages,
    leave_one_out_advantages,
    returns_differ,
    returns_to_go,
    standardised_advantages,
)
from learner.objective.gae import bi_level_gae, gae
from learner.objective.kl import k1
from learner.measure import Measured, Numbers
from learner.pack import TokenSequence, sequences_of
from learner.objective.vtrace import vtrace
from replay.ticket import Group

GROUP_RELATIVE = {
    "group_standardised": standardised_advantages,
    "group_centred": centred_advantages,
    "leave_one_out": leave_one_out_advantages,
}
TURN_RELATIVE = {"gigpo": standardised_advantages, "gigpo_centred": centred_advantages}


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A trajectory, and a number for each of its sampled tokens, in order; 0 where the objective does not ask."""

    trajectory: Trajectory
    penalties: Numbers  # what the divergence from the reference takes off the token's reward
    values: Numbers  # the critic's
    lagged_ratios: Numbers  # current / behaviour


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number for each sampled token of an episode."""

    advantages: Numbers
    returns: Numbers  # what the critic is trained towards


def weighed_sequences(
    groups: Sequence[Group], *, objective: ObjectiveConfig, measured: Measured | None = None
) -> list[TokenSequence]:
    """Every sequence of a batch, its tokens weighed by how much better they were than what they are compared with.

    With a critic, also what it said of them and what it is trained towards. `measured` is of this very batch, and may
    be left out where the objective asks for nothing.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    episodes = _episodes(trajectories, objective=objective, measured=measured or Measured())
    if objective.advantage in GROUP_RELATIVE:
        return _weighed_by_group(_members(groups, episodes), objective)
    if objective.advantage in TURN_RELATIVE:
        return _weighed_by_turn(_members(groups, episodes), objective)
    if objective.advantage in WITH_CRITIC:
        return _weighed_by_critic(episodes, objective)
    return _weighed_by_batch(episodes, objective)


def teaches(group: Group, *, objective: ObjectiveConfig) -> bool:
    """Whether anything in the group may have an advantage; without, nothing of the surrogate reaches the gradient."""
    if not objective.compares_siblings or objective.returns_come_later:
        return True
    if objective.advantage in TURN_RELATIVE:
        rewards = [_turn_rewards(trajectory) for trajectory in group.trajectories]
        advantages = _turn_advantages(group.trajectories, rewards, objective)
        return any(bool((abs(each) > RETURN_RESOLUTION).any()) for each in advantages)
    return returns_differ([trajectory.total_reward for trajectory in group.trajectories])


def token_rewards(trajectory: Trajectory, *, objective: ObjectiveConfig) -> Float[np.ndarray, " tokens"]:
    """The reward of each sampled token, in order, as `objective.allocation` says."""
    turn_rewards, turn_tokens = _turn_rewards(trajectory), _turn_tokens(trajectory)
    match objective.allocation:
        case "last_token":
            return allocation.last_token(turn_rewards, turn_tokens)
        case "uniform_positive":
            return allocation.uniform_positive(turn_rewards, turn_tokens)
        case "discounted":
            return allocation.discounted(turn_rewards, turn_tokens, discount=objective.allocation_discount)
        case "per_turn":
            return allocation.per_turn(turn_rewards, turn_tokens)
        case unknown:
            raise ValueError(f"no allocation {unknown!r}")


def _episodes(trajectories: Sequence[Trajectory], *, objective: ObjectiveConfig, measured: Measured) -> list[Episode]:
    """Cut what was measured of a whole batch into the pieces that belong to its trajectories."""
    behaviour = [trajectory.behaviour_logprob_array()[trajectory.loss_mask_array()] for trajectory in trajectories]
    stops = np.cumsum([len(each) for each in behaviour])
    zeros = np.zeros(int(stops[-1]))
    sampled = np.concatenate(behaviour).astype(np.float64)
    penalties = values = ratios = zeros
    if measured.reference_logprobs is not None:
        divergence = k1(torch.from_numpy(measured.reference_logprobs), torch.from_numpy(sampled))
        penalties = objective.kl_coefficient * divergence.numpy()
    if measured.values is not None:
        values = measured.values
    if measured.current_logprobs is not None:
        ratios = np.exp(measured.current_logprobs - sampled)
    parts = [np.split(numbers, stops[:-1]) for numbers in (penalties, values, ratios)]
    return [
        Episode(trajectory=trajectory, penalties=penalties, values=values, lagged_ratios=ratios)
        for trajectory, penalties, values, ratios in zip(trajectories, *parts, strict=True)
    ]


def _members(groups: Sequence[Group], episodes: Sequence[Episode]) -> list[list[Episode]]:
    """The episodes of each group."""
    remaining = iter(episodes)
    return [[next(remaining) for _ in group.trajectories] for group in groups]


def _weighed_by_group(groups: Sequence[Sequence[Episode]], objective: ObjectiveConfig) -> list[TokenSequence]:
    """One number a trajectory, compared with its siblings: its return, less all that the divergence takes off it."""
    advantages_of = GROUP_RELATIVE[objective.advantage]
    sequences: list[TokenSequence] = []
    for members in groups:
        advantages = advantages_of(
            [member.trajectory.total_reward - float(member.penalties.sum()) for member in members]
        )  # fmt: skip
        for member, advantage in zip(members, advantages, strict=True):
            sequences += sequences_of(member.trajectory, advantage=float(advantage))
    return sequences


def _weighed_by_turn(groups: Sequence[Sequence[Episode]], objective: ObjectiveConfig) -> list[TokenSequence]:
    """One number a turn, compared with the siblings and with the turns that began in the same state."""
    sequences: list[TokenSequence] = []
    for members in groups:
        rewards = [_penalised_turn_rewards(member) for member in members]
        advantages = _turn_advantages([member.trajectory for member in members], rewards, objective)
        for member, of_turns in zip(members, advantages, strict=True):
            of_sampled = np.repeat(of_turns, _turn_tokens(member.trajectory))
            sequences += sequences_of(member.trajectory, advantage=_over_all_tokens(member.trajectory, of_sampled))
    return sequences


def _turn_advantages(
    trajectories: Sequence[Trajectory], rewards: Sequence[npt.NDArray[np.float64]], objective: ObjectiveConfig
) -> list[Float[np.ndarray, " _turns"]]:
    return gigpo_advantages(
        rewards,
        [[turn.state_key for turn in trajectory.turns] for trajectory in trajectories],
        gamma=objective.gamma,
        same_state_weight=objective.same_state_weight,
        compared=TURN_RELATIVE[objective.advantage],
    )


def _weighed_by_batch(episodes: Sequence[Episode], objective: ObjectiveConfig) -> list[TokenSequence]:
    """One number a token, compared with every loss token of the batch."""
    returns = [returns_to_go(_penalised_rewards(episode, objective), gamma=objective.gamma) for episode in episodes]
    sequences: list[TokenSequence] = []
    for episode, advantages in zip(episodes, _standardised(returns), strict=True):
        sequences += sequences_of(episode.trajectory, advantage=_over_all_tokens(episode.trajectory, advantages))
    return sequences


def _weighed_by_critic(episodes: Sequence[Episode], objective: ObjectiveConfig) -> list[TokenSequence]:
    """One number a token, compared with what the critic expected; but for V-trace in standard deviations of the batch.

    Every rank holds the whole batch, so that its mean and its deviation are the same everywhere.
    """
    estimates = [_estimate(episode, objective) for episode in episodes]
    advantages = [estimate.advantages for estimate in estimates]
    if objective.advantage != "vtrace":
        advantages = _standardised(advantages)
    sequences: list[TokenSequence] = []
    for episode, estimate, of_sampled in zip(episodes, estimates, advantages, strict=True):
        sequences += sequences_of(
            episode.trajectory,
            advantage=_over_all_tokens(episode.trajectory, of_sampled),
            old_values=_over_all_tokens(episode.trajectory, episode.values),
            returns=_over_all_tokens(episode.trajectory, estimate.returns),
        )
    return sequences


def _estimate(episode: Episode, objective: ObjectiveConfig) -> Estimate:
    values, rewards = episode.values, _penalised_rewards(episode, objective)
    match objective.advantage:
        case "gae":
            advantages = gae(rewards, values, gamma=objective.gamma, lam=objective.gae_lambda)
        case "bi_level_gae":
            advantages = bi_level_gae(
                _penalised_turn_rewards(episode),
                values,
                _turn_tokens(episode.trajectory),
                turn_gamma=objective.turn_gamma,
                turn_lam=objective.turn_lambda,
                token_gamma=objective.gamma,
                token_lam=objective.gae_lambda,
            )
        case "vtrace":
            found = vtrace(
                rewards, values, episode.lagged_ratios,
                gamma=objective.gamma, max_rho=objective.max_rho, max_c=objective.max_c,
            )  # fmt: skip
            return Estimate(advantages=found.advantages, returns=found.targets)
        case unknown:
            raise ValueError(f"no advantage {unknown!r} with a critic")
    return Estimate(advantages=advantages, returns=advantages + values)


def _penalised_rewards(episode: Episode, objective: ObjectiveConfig) -> Numbers:
    """The reward of each sampled token, less what the divergence takes off it."""
    rewards: Numbers = token_rewards(episode.trajectory, objective=objective) - episode.penalties
    return rewards


def _penalised_turn_rewards(episode: Episode) -> Numbers:
    """The reward of each turn, less what the divergence takes off all of its tokens."""
    turn_tokens = _turn_tokens(episode.trajectory)
    penalties = np.add.reduceat(episode.penalties, np.cumsum(turn_tokens) - turn_tokens)
    rewards: Numbers = _turn_rewards(episode.trajectory) - penalties
    return rewards


def _standardised(numbers: Sequence[npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float64]]:
    """In standard deviations over all episodes together."""
    stops = np.cumsum([len(each) for each in numbers])[:-1]
    return np.split(batch_standardised_advantages(np.concatenate(numbers)), stops)


def _turn_rewards(trajectory: Trajectory) -> Float[np.ndarray, " turns"]:
    return np.array([math.fsum(turn.rewards.values()) for turn in trajectory.turns])


def _turn_tokens(trajectory: Trajectory) -> Int[np.ndarray, " turns"]:
    return np.array([turn.stop - turn.start for turn in trajectory.turns])


def _over_all_tokens(trajectory: Trajectory, of_sampled: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Each sampled token's number at its place, 0 elsewhere."""
    numbers = np.zeros(trajectory.num_tokens, dtype=np.float32)
    numbers[trajectory.loss_mask_array()] = of_sampled
    return numbers
