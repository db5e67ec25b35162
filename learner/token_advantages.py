"""Per-token advantages of a batch: groups in, token sequences with advantages out, by `objective.advantage`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int

from common.objective_config import BATCH_SHRUNK, DISTILLATION, TREE, WITH_CRITIC, ObjectiveConfig
from common.trajectory import Trajectory
from learner.measure import Measured, Numbers
from learner.objective import allocation
from learner.objective.advantage import (
    RETURN_RESOLUTION,
    batch_standardised_advantages,
    centred_advantages,
    gigpo_advantages,
    leave_one_out_advantages,
    own_advantages,
    returns_differ,
    returns_to_go,
    standardised_advantages,
)
from learner.objective.baseline import gradient_energy, shrunk_advantages
from learner.objective.gae import bi_level_gae, gae
from learner.objective.kl import k1
from learner.objective.tree import TurnCredit, tree_advantages
from learner.objective.vtrace import vtrace
from learner.pack import TokenSequence, numbered, sequences_of
from learner.tree import leaves_of
from replay.ticket import Group

GROUP_RELATIVE = {
    "group_standardised": standardised_advantages,
    "group_centred": centred_advantages,
    "leave_one_out": leave_one_out_advantages,
}
TURN_RELATIVE = {"gigpo": standardised_advantages, "gigpo_centred": centred_advantages}
# How the KL penalties of siblings are compared. Never in standard deviations: if all siblings had the same return, the
# penalties alone would make up the deviation, and their coefficient would cancel.
PENALTY_RELATIVE = GROUP_RELATIVE | {"group_standardised": centred_advantages}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTrajectory:
    """A trajectory, with numbers for each of its sampled tokens in order; 0 if the objective does not need them."""

    trajectory: Trajectory
    penalties: Numbers  # KL penalty, subtracted from the token's reward
    values: Numbers  # of the critic
    current_logprobs: Numbers
    lagged_ratios: Numbers  # current / behaviour


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageEstimate:
    """Numbers for each sampled token of an episode."""

    advantages: Numbers
    returns: Numbers  # the critic's targets


def sequences_with_advantages(
    groups: Sequence[Group], *, objective: ObjectiveConfig, measured: Measured | None = None
) -> list[TokenSequence]:
    """Every sequence of a batch, with the advantage of each token.

    With a critic, also with its values and targets. `measured` must be of this batch; it may be left out if the
    objective needs no measurements.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    episodes = _episodes(trajectories, objective=objective, measured=measured or Measured())
    if objective.advantage in GROUP_RELATIVE or "advantage" in objective.own_parts:
        return numbered(_advantages_by_group(_members(groups, episodes), objective))
    if objective.advantage in TURN_RELATIVE:
        return numbered(_advantages_by_turn(_members(groups, episodes), objective))
    if objective.advantage == TREE:
        return numbered(_advantages_by_tree(groups, _members(groups, episodes), objective))
    if objective.advantage in BATCH_SHRUNK:
        return numbered(_advantages_by_task(_members(groups, episodes), objective))
    if objective.advantage == DISTILLATION:
        return numbered(_advantages_by_teacher(episodes))
    if objective.advantage in WITH_CRITIC:
        return numbered(_advantages_by_critic(episodes, objective))
    return numbered(_advantages_by_batch(episodes, objective))


def teaches(group: Group, *, objective: ObjectiveConfig) -> bool:
    """Whether any token of the group can have an advantage other than 0; if not, the surrogate has no gradient."""
    if not objective.compares_siblings or objective.returns_come_later:
        return True
    if objective.advantage in TURN_RELATIVE:
        rewards = [_turn_rewards(trajectory) for trajectory in group.trajectories]
        compared = TURN_RELATIVE[objective.advantage]
        advantages = _turn_advantages(group.trajectories, rewards, objective, compared=compared)
        return any(bool((abs(each) > RETURN_RESOLUTION).any()) for each in advantages)
    if objective.allocation == "per_turn" and objective.advantage in GROUP_RELATIVE:
        compared = GROUP_RELATIVE[objective.advantage]
        return any(bool((abs(each) > RETURN_RESOLUTION).any()) for each in _of_turns(group.trajectories, compared))
    returns = [trajectory.total_reward for trajectory in group.trajectories]
    if "advantage" in objective.own_parts:
        return bool((abs(own_advantages(objective.advantage, returns)) > RETURN_RESOLUTION).any())
    return returns_differ(returns)


def token_rewards(trajectory: Trajectory, *, objective: ObjectiveConfig) -> Float[np.ndarray, " tokens"]:
    """The reward of each sampled token, in order, by `objective.allocation`."""
    return _allocated(_turn_rewards(trajectory), _turn_tokens(trajectory), objective)


def _allocated(
    turn_rewards: Float[np.ndarray, " turns"], turn_tokens: Int[np.ndarray, " turns"], objective: ObjectiveConfig
) -> Float[np.ndarray, " tokens"]:
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


def _episodes(
    trajectories: Sequence[Trajectory], *, objective: ObjectiveConfig, measured: Measured
) -> list[MeasuredTrajectory]:
    """Split what was measured of a whole batch by trajectory."""
    behaviour = [trajectory.behaviour_logprob_array()[trajectory.loss_mask_array()] for trajectory in trajectories]
    stops = np.cumsum([len(each) for each in behaviour])
    zeros = np.zeros(int(stops[-1]))
    sampled = np.concatenate(behaviour).astype(np.float64)
    penalties = values = current = ratios = zeros
    if measured.reference_logprobs is not None:
        divergence = k1(torch.from_numpy(measured.reference_logprobs), q_logprobs=torch.from_numpy(sampled))
        penalties = objective.kl_coefficient * divergence.numpy()
    if measured.values is not None:
        values = measured.values
    if measured.current_logprobs is not None:
        current = measured.current_logprobs
        ratios = np.exp(current - sampled)
    parts = [np.split(numbers, stops[:-1]) for numbers in (penalties, values, current, ratios)]
    return [
        MeasuredTrajectory(
            trajectory=trajectory, penalties=penalties, values=values, current_logprobs=current, lagged_ratios=ratios
        )
        for trajectory, penalties, values, current, ratios in zip(trajectories, *parts, strict=True)
    ]


def _members(groups: Sequence[Group], episodes: Sequence[MeasuredTrajectory]) -> list[list[MeasuredTrajectory]]:
    """The episodes of each group."""
    remaining = iter(episodes)
    return [[next(remaining) for _ in group.trajectories] for group in groups]


def _advantages_by_group(
    groups: Sequence[Sequence[MeasuredTrajectory]], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage per trajectory: its return and its penalties, each compared with those of its siblings.

        advantage = GROUP_RELATIVE(returns) - PENALTY_RELATIVE(kl_coefficient * summed k1)

    `objective.allocation` distributes the first term over the tokens; see `_distributed`. A function of the user's gets
    the returns alone; then penalties are centred.

    With group_standardised this is GRPO's balance: as in its loss, the divergence is weighed against one standard
    deviation of the returns. Returns (1, 0) and penalties (0.2, 0) give 0.707 - 0.1 and -0.707 + 0.1.
    """
    advantages_of = GROUP_RELATIVE.get(objective.advantage, partial(own_advantages, objective.advantage))
    penalties_of = PENALTY_RELATIVE.get(objective.advantage, centred_advantages)
    sequences: list[list[TokenSequence]] = []
    for members in groups:
        trajectories = [member.trajectory for member in members]
        losses = penalties_of([float(member.penalties.sum()) for member in members])
        if objective.allocation != "last_token":
            gains = _distributed(trajectories, objective, advantages_of)
            for trajectory, gain, loss in zip(trajectories, gains, losses, strict=True):
                sequences.append(sequences_of(trajectory, advantage=_over_all_tokens(trajectory, gain - loss)))
            continue
        advantages = advantages_of([trajectory.total_reward for trajectory in trajectories]) - losses
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            sequences.append(sequences_of(trajectory, advantage=float(advantage)))
    return sequences


def _distributed(
    trajectories: Sequence[Trajectory],
    objective: ObjectiveConfig,
    compared: Callable[[Sequence[float]], npt.NDArray[np.float64]],
) -> list[Float[np.ndarray, " _tokens"]]:
    """The advantage of each sampled token of a group: what is still to come of its trajectory's advantage.

        share = allocation(advantage of the trajectory)          its sum over tokens is that advantage
        advantage[t] = sum over tokens u >= t of share[u]

    So the first token has the whole advantage. With `last_token` every token has it, as in GRPO. With `per_turn` the
    rewards still to come are compared at each turn, with 0 for siblings that have ended: see `_of_turns`.
    """
    tokens = [_turn_tokens(trajectory) for trajectory in trajectories]
    if objective.allocation == "per_turn":
        return [
            np.repeat(of_turns, each) for of_turns, each in zip(_of_turns(trajectories, compared), tokens, strict=True)
        ]
    advantages = compared([trajectory.total_reward for trajectory in trajectories])
    gains = []
    for advantage, turn_tokens in zip(advantages, tokens, strict=True):
        whole = np.zeros(len(turn_tokens))
        whole[-1] = advantage
        gains.append(returns_to_go(_allocated(whole, turn_tokens, objective), gamma=1.0))
    return gains


def _of_turns(
    trajectories: Sequence[Trajectory], compared: Callable[[Sequence[float]], npt.NDArray[np.float64]]
) -> list[Float[np.ndarray, " _turns"]]:
    """The advantage of each turn of a group: its return-to-go, compared with those of its siblings at the same turn.

        advantage[i, k] = compared(returns-to-go of all members at turn k)[i]

    A sibling that has ended has nothing to come: 0. At the first turn this is the advantage of the trajectory.
    """
    to_go = [returns_to_go(_turn_rewards(trajectory), gamma=1.0) for trajectory in trajectories]
    last = max(len(each) for each in to_go)
    table = np.array([np.pad(each, (0, last - len(each))) for each in to_go])
    advantages = np.array([compared(column.tolist()) for column in table.T]).T
    return [of_member[: len(each)] for of_member, each in zip(advantages, to_go, strict=True)]


def _advantages_by_turn(
    groups: Sequence[Sequence[MeasuredTrajectory]], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage per turn, compared with the siblings and with the turns that began in the same state.

    Penalties are compared in the same way, but never in standard deviations: see `_advantages_by_group`.
    """
    compared = TURN_RELATIVE[objective.advantage]
    sequences: list[list[TokenSequence]] = []
    for members in groups:
        trajectories = [member.trajectory for member in members]
        rewards = [_turn_rewards(trajectory) for trajectory in trajectories]
        gains = _turn_advantages(trajectories, rewards, objective, compared=compared)
        penalties = [_turn_penalties(member) for member in members]
        losses = _turn_advantages(trajectories, penalties, objective, compared=centred_advantages)
        for member, gain, loss in zip(members, gains, losses, strict=True):
            of_sampled = np.repeat(gain - loss, _turn_tokens(member.trajectory))
            sequences.append(sequences_of(member.trajectory, advantage=_over_all_tokens(member.trajectory, of_sampled)))
    return sequences


def _turn_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[npt.NDArray[np.float64]],
    objective: ObjectiveConfig,
    *,
    compared: Callable[[Sequence[float]], npt.NDArray[np.float64]],
) -> list[Float[np.ndarray, " _turns"]]:
    return gigpo_advantages(
        rewards,
        [[turn.state_key for turn in trajectory.turns] for trajectory in trajectories],
        gamma=objective.gamma,
        same_state_weight=objective.same_state_weight,
        compared=compared,
    )


def _advantages_by_tree(
    groups: Sequence[Group], episodes: Sequence[Sequence[MeasuredTrajectory]], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage for each turn, compared at the node where its segment begins; its weight in the loss multiplies it.

    Penalties are subtracted from the returns. A token that several attempts share is trained in one of them. Weights
    are scaled so that the loss stays a mean: over its tokens, or with normalisation `constant` over its attempts.
    """
    trajectories, credits = list[Trajectory](), list[TurnCredit]()
    for group, members in zip(groups, episodes, strict=True):
        returns = [member.trajectory.total_reward - float(member.penalties.sum()) for member in members]
        leaves = leaves_of(group.trajectories, returns)
        credits += tree_advantages(leaves, num_trees=group.ticket.num_trees or len(leaves))
        trajectories += group.trajectories
    tokens = [_turn_tokens(trajectory) for trajectory in trajectories]
    total_weight = sum(float((credit.weights * each).sum()) for credit, each in zip(credits, tokens, strict=True))
    num_trained = sum(int(each[credit.weights > 0].sum()) for credit, each in zip(credits, tokens, strict=True))
    scale = num_trained / total_weight
    if objective.normalisation == "constant":
        scale = len(trajectories) / sum(credit.weights[0] for credit in credits)
    sequences: list[list[TokenSequence]] = []
    for trajectory, credit, each in zip(trajectories, credits, tokens, strict=True):
        of_sampled = np.repeat(scale * credit.weights * credit.advantages, each)
        first = int(np.flatnonzero(credit.weights)[0])
        sequences.append(
            sequences_of(
                trajectory,
                advantage=_over_all_tokens(trajectory, of_sampled),
                trained_from=trajectory.turns[first].start,
            )
        )
    return sequences


def _advantages_by_task(
    groups: Sequence[Sequence[MeasuredTrajectory]], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage per trajectory: its return less its penalties, compared with siblings and batch."""
    returns = [
        np.array([member.trajectory.total_reward - float(member.penalties.sum()) for member in members])
        for members in groups
    ]
    energies = None
    if objective.advantage == "opob":
        energies = [
            np.array([gradient_energy(member.current_logprobs, ratios=member.lagged_ratios) for member in members])
            for members in groups
        ]
    sequences: list[list[TokenSequence]] = []
    for members, advantages in zip(groups, shrunk_advantages(returns, energies=energies), strict=True):
        for member, advantage in zip(members, advantages, strict=True):
            sequences.append(sequences_of(member.trajectory, advantage=float(advantage)))
    return sequences


def _advantages_by_batch(
    episodes: Sequence[MeasuredTrajectory], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage per token, compared with every loss token of the batch."""
    returns = [returns_to_go(_penalised_rewards(episode, objective), gamma=objective.gamma) for episode in episodes]
    sequences: list[list[TokenSequence]] = []
    for episode, advantages in zip(episodes, _standardised(returns), strict=True):
        sequences.append(sequences_of(episode.trajectory, advantage=_over_all_tokens(episode.trajectory, advantages)))
    return sequences


def _advantages_by_teacher(episodes: Sequence[MeasuredTrajectory]) -> list[list[TokenSequence]]:
    """One advantage per token: how much more likely the teacher finds it than the policy that sampled it.

        advantage[t] = kl_coefficient * (log teacher[t] - log behaviour[t])

    Its mean over tokens of the current policy is -KL(policy || teacher), the reverse divergence. This is on-policy
    distillation (https://arxiv.org/abs/2306.13649). A token is credited for itself alone: what it makes likely later is
    left out.

    With a teacher at -0.5 and a policy at -1, the advantage is 0.5.
    """
    return [
        sequences_of(episode.trajectory, advantage=_over_all_tokens(episode.trajectory, -episode.penalties))
        for episode in episodes
    ]


def _advantages_by_critic(
    episodes: Sequence[MeasuredTrajectory], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage per token, compared with the critic's value; except for V-trace, standardised over the batch.

    Every rank has the whole batch, so its mean and its deviation are the same on every rank.
    """
    estimates = [_estimate(episode, objective) for episode in episodes]
    advantages = [estimate.advantages for estimate in estimates]
    if objective.advantage != "vtrace":
        advantages = _standardised(advantages)
    sequences: list[list[TokenSequence]] = []
    for episode, estimate, of_sampled in zip(episodes, estimates, advantages, strict=True):
        sequences.append(
            sequences_of(
                episode.trajectory,
                advantage=_over_all_tokens(episode.trajectory, of_sampled),
                old_values=_over_all_tokens(episode.trajectory, episode.values),
                returns=_over_all_tokens(episode.trajectory, estimate.returns),
            )
        )
    return sequences


def _estimate(episode: MeasuredTrajectory, objective: ObjectiveConfig) -> AdvantageEstimate:
    values, rewards = episode.values, _penalised_rewards(episode, objective)
    match objective.advantage:
        case "gae":
            advantages = gae(rewards, values=values, gamma=objective.gamma, lam=objective.gae_lambda)
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
                rewards,
                values=values,
                lagged_ratio=episode.lagged_ratios,
                gamma=objective.gamma,
                max_rho=objective.max_rho,
            )
            return AdvantageEstimate(advantages=found.advantages, returns=found.targets)
        case unknown:
            raise ValueError(f"no advantage {unknown!r} with a critic")
    return AdvantageEstimate(advantages=advantages, returns=advantages + values)


def _penalised_rewards(episode: MeasuredTrajectory, objective: ObjectiveConfig) -> Numbers:
    """The reward of each sampled token, less its KL penalty."""
    rewards: Numbers = token_rewards(episode.trajectory, objective=objective) - episode.penalties
    return rewards


def _penalised_turn_rewards(episode: MeasuredTrajectory) -> Numbers:
    """The reward of each turn, less the KL penalties of its tokens."""
    rewards: Numbers = _turn_rewards(episode.trajectory) - _turn_penalties(episode)
    return rewards


def _turn_penalties(episode: MeasuredTrajectory) -> Numbers:
    turn_tokens = _turn_tokens(episode.trajectory)
    penalties: Numbers = np.add.reduceat(episode.penalties, np.cumsum(turn_tokens) - turn_tokens)
    return penalties


def _standardised(numbers: Sequence[npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float64]]:
    """Standardise over the tokens of all episodes together."""
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
