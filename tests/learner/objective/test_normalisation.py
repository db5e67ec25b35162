import dataclasses

import pytest
import torch

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.objective.normalisation import loss_divisor, token_weights
from tests.learner.policies import Tokens, any_batch, float64, of_lengths


def normalised(losses: torch.Tensor, lengths: tuple[int, ...], normalisation: str, *, constant: int = 512) -> float:
    objective = ObjectiveConfig(normalisation=normalisation, normalisation_tokens=constant)
    weights = token_weights(losses, sequences=of_lengths(*lengths), objective=objective)
    divisor = loss_divisor(num_loss_tokens=len(losses), num_trajectories=len(lengths), objective=objective)
    return float((weights * losses).sum() / divisor)


def test_a_rewritten_history_changes_nothing_about_a_trajectorys_weight() -> None:
    losses, whole = float64(1, 1, 1, 4), of_lengths(3, 1)
    branched = dataclasses.replace(
        of_lengths(1, 2, 1), trajectories=torch.tensor([0, 0, 1]), trajectory_tokens=torch.tensor([3, 3, 1])
    )
    for normalisation in ("tokens", "sequences", "constant"):
        objective = ObjectiveConfig(normalisation=normalisation)
        weights = [token_weights(losses, sequences=each, objective=objective).tolist() for each in (whole, branched)]
        assert weights[0] == weights[1]
        if normalisation == "sequences":
            assert weights[1] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])


@any_batch
def test_normalisations_equal_a_derivation_sequence_by_sequence(tokens: Tokens) -> None:
    losses = tokens.advantages
    lengths = tuple(len(members) for members in tokens.members)
    sums = [sum(float(losses[i]) for i in members) for members in tokens.members]
    means = [total / length for total, length in zip(sums, lengths, strict=True)]
    assert normalised(losses, lengths, "tokens") == pytest.approx(sum(sums) / sum(lengths), abs=1e-12)
    assert normalised(losses, lengths, "sequences") == pytest.approx(sum(means) / len(means), abs=1e-12)
    assert normalised(losses, lengths, "constant", constant=7) == pytest.approx(sum(sums) / len(sums) / 7, abs=1e-12)
