"""Advantages as they arrive at the tokens of a batch."""

import math

import msgspec
import numpy as np
import pytest

from common.objective_config import ObjectiveConfig
from common.trajectory import Trajectory, Turn, pack_logprobs, pack_mask, pack_tokens
from learner.weigh import teaches, token_rewards, weighed_sequences
from replay.ticket import Group, Ticket
from tests.tiny_model import a_trajectory


def two_turns(first: float, second: float, *, states: tuple[str, str] = ("start", "end")) -> Trajectory:
    """Tokens 1 [2 3] 4 [5]; those in brackets were sampled, in turns that earned `first` and `second`."""
    bare = a_trajectory(
        tokens=pack_tokens([1, 2, 3, 4, 5]),
        behaviour_logprobs=pack_logprobs([0, -1, -1, 0, -1]),
        loss_mask=pack_mask([False, True, True, False, True]),
        branch_starts=[0],
    )
    turns = [
        Turn(start=start, stop=stop, state_key=state, rewards={"task": reward}, finish_reason="stop", valid_action=True,
             generate_s=0.0, env_s=0.0)
        for start, stop, state, reward in ((1, 3, states[0], first), (4, 5, states[1], second))
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


def test_gigpo_adds_what_turns_from_the_same_state_earned_to_what_the_episode_did() -> None:
    group = group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0), two_turns(0.0, 1.0, states=("start", "start")))
    # Returns to go by turn at gamma 1/2: (1/2, 1), (0, 0), (1/2, 1). Episodes: 1, 0, 1, with a mean of 2/3. In "start"
    # are 1/2, 0, 1/2 and 1, with a mean of 1/2; in "end" are 1 and 0.
    found = advantages([group], advantage="gigpo_centred", gamma=0.5, same_state_weight=3.0)
    assert found[0] == pytest.approx([1 / 3 + 0, 1 / 3 + 0, 1 / 3 + 3 / 2], rel=1e-5)
    assert found[1] == pytest.approx([-2 / 3 - 3 / 2, -2 / 3 - 3 / 2, -2 / 3 - 3 / 2], rel=1e-5)
    assert found[2] == pytest.approx([1 / 3 + 0, 1 / 3 + 0, 1 / 3 + 3 / 2], rel=1e-5)


def test_gigpo_divides_both_by_their_own_deviation() -> None:
    found = advantages([group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0, states=("start", "cul-de-sac")))],
                       advantage="gigpo", gamma=0.5)  # fmt: skip
    # Two values are always 1/sqrt(2) deviations away from their mean: the episodes', and those of "start".
    assert found[0] == pytest.approx([math.sqrt(2), math.sqrt(2), math.sqrt(1 / 2)], rel=1e-5)
    assert found[1] == pytest.approx([-math.sqrt(2), -math.sqrt(2), -math.sqrt(1 / 2)], rel=1e-5)


def test_without_weight_or_without_states_gigpo_is_grpo() -> None:
    known = [group_of(two_turns(0.0, 1.0), two_turns(0.5, 0.0))]
    unknown = [group_of(two_turns(0.0, 1.0, states=("", "")), two_turns(0.5, 0.0, states=("", "")))]
    grpo = advantages(known, advantage="group_standardised")
    assert advantages(known, advantage="gigpo", same_state_weight=0.0) == grpo
    assert advantages(unknown, advantage="gigpo", gamma=0.5) == grpo
    assert advantages(known, advantage="gigpo", gamma=0.5) != grpo


def test_groups_are_strangers_to_each_others_states() -> None:
    first, second = group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0)), group_of(two_turns(1.0, 1.0), two_turns(0, 5))
    together = advantages([first, second], advantage="gigpo", gamma=0.9)
    assert together == advantages([first], advantage="gigpo", gamma=0.9) + advantages(
        [second], advantage="gigpo", gamma=0.9
    )


def test_a_group_teaches_where_something_in_it_has_an_advantage() -> None:
    same_end = group_of(two_turns(1.0, 0.0), two_turns(0.0, 1.0))  # the same return, one of them sooner
    grpo, gigpo = ObjectiveConfig(), ObjectiveConfig(advantage="gigpo", gamma=0.9)
    assert not teaches(same_end, objective=grpo)
    assert teaches(same_end, objective=gigpo)
    assert not teaches(same_end, objective=ObjectiveConfig(advantage="gigpo", gamma=0.9, same_state_weight=0.0))
    for objective in (grpo, gigpo):
        assert teaches(group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0)), objective=objective)
        assert not teaches(group_of(two_turns(0.0, 1.0), two_turns(0.0, 1.0)), objective=objective)
        assert not teaches(group_of(two_turns(0.0, 0.3), two_turns(0.0, 0.1 + 0.2)), objective=objective)
