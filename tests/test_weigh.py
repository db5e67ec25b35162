"""Advantages as they arrive at the tokens of a batch."""

import math

import msgspec
import numpy as np
import pytest

from common.objective_config import ObjectiveConfig
from common.trajectory import Trajectory, Turn, pack_logprobs, pack_mask, pack_tokens
from learner.weigh import token_rewards, weighed_sequences
from replay.ticket import Group, Ticket
from tests.tiny_model import a_trajectory


def two_turns(first: float, second: float) -> Trajectory:
    """Tokens 1 [2 3] 4 [5]; those in brackets were sampled, in turns that earned `first` and `second`."""
    bare = a_trajectory(
        tokens=pack_tokens([1, 2, 3, 4, 5]),
        behaviour_logprobs=pack_logprobs([0, -1, -1, 0, -1]),
        loss_mask=pack_mask([False, True, True, False, True]),
        branch_starts=[0],
    )
    turns = [
        Turn(start=start, stop=stop, rewards={"task": reward}, finish_reason="stop", valid_action=True,
             generate_s=0.0, env_s=0.0)
        for start, stop, reward in ((1, 3, first), (4, 5, second))
    ]  # fmt: skip
    return msgspec.structs.replace(bare, turns=turns)


def group_of(*trajectories: Trajectory) -> Group:
    ticket = Ticket(
        group_id=0, task=trajectories[0].task, num_members=len(trajectories), min_policy_version=0,
        sampling=trajectories[0].sampling, seed=0,
    )  # fmt: skip
    return Group(ticket=ticket, num_uses=1, trajectories=list(trajectories))


def advantages(groups: list[Group], **changes: object) -> list[list[float]]:
    """Of the loss tokens of each sequence."""
    sequences = weighed_sequences(groups, objective=ObjectiveConfig(**changes))
    return [sequence.advantages[sequence.loss_mask].tolist() for sequence in sequences]


@pytest.mark.parametrize(
    ("name", "won", "lost"),
    [
        ("group_standardised", 1 / math.sqrt(2), -1 / math.sqrt(2)),
        ("group_centred", 0.5, -0.5),
        ("leave_one_out", 1.0, -1.0),
    ],
)
def test_group_relative_advantages_go_to_every_token_of_the_trajectory(name: str, won: float, lost: float) -> None:
    found = advantages([group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0))], advantage=name)
    assert found[0] == pytest.approx([won] * 3, rel=1e-5)
    assert found[1] == pytest.approx([lost] * 3, rel=1e-5)


def test_reinforce_pp_compares_each_tokens_return_to_go_with_the_whole_batch() -> None:
    groups = [group_of(two_turns(1.0, 1.0), two_turns(1.0, 0.0)), group_of(two_turns(0.0, 0.0), two_turns(0.0, 0.0))]
    # Returns to go by turn: (2, 2, 1), (1, 1, 0), and zeros; over 12 tokens, mean 7/12.
    to_go = [[2, 2, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    flat = [value for row in to_go for value in row]
    mean = sum(flat) / 12
    deviation = math.sqrt(sum((value - mean) ** 2 for value in flat) / 12)
    found = advantages(groups, advantage="reinforce_pp", allocation="per_turn")
    for row, expected in zip(found, to_go, strict=True):
        assert row == pytest.approx([(value - mean) / deviation for value in expected], rel=1e-5)


def test_gamma_discounts_by_sampled_tokens_and_not_by_what_the_environment_said() -> None:
    found = advantages([group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0))], advantage="reinforce_pp", gamma=0.5)
    mean = 1.75 / 6  # of 0.25, 0.5, 1 and three zeros
    above = [value - mean for value in (0.25, 0.5, 1)]
    assert [value / found[0][0] for value in found[0]] == pytest.approx([value / above[0] for value in above], rel=1e-4)


@pytest.mark.parametrize(
    ("allocation", "expected"),
    [
        ("last_token", [0, 0, 3]),
        ("uniform_positive", [1, 1, 1]),
        ("discounted", [0, 1, 2]),
        ("per_turn", [0, 1, 2]),
    ],
)
def test_rewards_go_to_the_tokens_that_the_allocation_names(allocation: str, expected: list[float]) -> None:
    objective = ObjectiveConfig(allocation=allocation, allocation_discount=0.5)
    assert token_rewards(two_turns(1.0, 2.0), objective=objective).tolist() == pytest.approx(expected)


def test_tokens_that_were_not_sampled_have_no_advantage_of_their_own() -> None:
    (first, _) = weighed_sequences(
        [group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0))], objective=ObjectiveConfig(advantage="reinforce_pp")
    )
    assert first.advantages[~first.loss_mask].tolist() == [0, 0]
    assert first.advantages.dtype == np.float32
