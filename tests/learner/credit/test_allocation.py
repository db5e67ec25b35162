import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.credit.grpo import COMPARED
from slipstream.learner.credit.token_advantages import sequences_with_advantages, teaches
from slipstream.learner.credit.token_rewards import last_token, per_turn
from tests.learner.even_game import group_of, recorded
from tests.replay.records.attempts import turn

TURNS = st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 5)), min_size=1, max_size=6)


@given(TURNS)
def test_allocations_conserve_the_return_and_one_by_turn_each_turns_reward(turns: list[tuple[float, int]]) -> None:
    rewards, tokens = np.array([turn[0] for turn in turns]), np.array([turn[1] for turn in turns])
    whole, by_turn = last_token(rewards, tokens), per_turn(rewards, tokens)
    assert len(whole) == len(by_turn) == tokens.sum()
    assert whole.sum() == pytest.approx(rewards.sum(), abs=1e-9)
    assert [float(each.sum()) for each in np.split(by_turn, np.cumsum(tokens)[:-1])] == rewards.tolist()


GROUPS = st.lists(TURNS, min_size=2, max_size=5)


def attempt(turns: list[tuple[float, int]]) -> Trajectory:
    """One token of the environment before each turn, which has a reward and a number of tokens."""
    sampled = [token > 0 for _, num_tokens in turns for token in range(num_tokens + 1)]
    stops = np.cumsum([num_tokens + 1 for _, num_tokens in turns]).tolist()
    records = [turn(stop - length, stop, reward) for stop, (reward, length) in zip(stops, turns, strict=True)]
    return recorded(range(len(sampled)), [-1.0 * each for each in sampled], sampled, turns=records)


def advantages(group: list[list[tuple[float, int]]], **settings: object) -> list[npt.NDArray[np.float64]]:
    """Of the sampled tokens of each member."""
    groups = [group_of([attempt(turns) for turns in group], group_id=0)]
    sequences = sequences_with_advantages(groups, objective=ObjectiveConfig(**settings))
    return [sequence.advantages[sequence.loss_mask].astype(np.float64) for sequence in sequences]


@pytest.mark.parametrize("allocation", ["last_token", "per_turn"])
@pytest.mark.parametrize("advantage", COMPARED)
@given(group=GROUPS)
def test_the_first_token_to_which_all_is_to_come_has_the_whole_group_relative_advantage(
    advantage: str, allocation: str, group: list[list[tuple[float, int]]]
) -> None:
    whole = COMPARED[advantage]([sum(reward for reward, _ in turns) for turns in group])
    found = advantages(group, advantage=advantage, allocation=allocation)
    assert [of_tokens[0] for of_tokens in found] == pytest.approx(whole, abs=1e-4)


@given(group=GROUPS)
def test_at_each_turn_the_centred_advantages_of_all_members_add_up_to_0(group: list[list[tuple[float, int]]]) -> None:
    """Those of members that have ended, with which the others are compared, too."""
    found = advantages(group, advantage="group_centred", allocation="per_turn")
    to_go = [[sum(reward for reward, _ in turns[k:]) for k in range(6)] for turns in group]
    for member, turns in enumerate(group):
        firsts = np.cumsum([0, *(num_tokens for _, num_tokens in turns[:-1])])
        for k, first in enumerate(firsts):
            mean = sum(each[k] for each in to_go) / len(group)
            assert found[member][first] == pytest.approx(to_go[member][k] - mean, abs=1e-4)


@pytest.mark.parametrize(
    ("allocation", "won", "lost"),
    [("last_token", [0.5] * 4, [-0.5] * 4), ("per_turn", [0.5, 0.5, 1.0, 1.0], [-0.5, -0.5, -1.0, -1.0])],
)
def test_a_token_gets_what_is_to_come_of_the_advantage(allocation: str, won: list[float], lost: list[float]) -> None:
    group = [[(0.0, 2), (2.0, 2)], [(1.0, 2), (0.0, 2)]]
    found = advantages(group, advantage="group_centred", allocation=allocation)
    assert [each.tolist() for each in found] == [pytest.approx(won), pytest.approx(lost)]


def test_equal_returns_of_unequal_turns_teach_by_turn_alone() -> None:
    apart = group_of([attempt([(1.0, 1), (0.0, 1)]), attempt([(0.0, 1), (1.0, 1)])], group_id=0)
    alike = group_of([attempt([(1.0, 1), (0.0, 1)]), attempt([(1.0, 1), (0.0, 1)])], group_id=0)
    for advantage in COMPARED:
        assert teaches(apart, objective=ObjectiveConfig(advantage=advantage, allocation="per_turn"))
        assert not teaches(alike, objective=ObjectiveConfig(advantage=advantage, allocation="per_turn"))
        assert not teaches(apart, objective=ObjectiveConfig(advantage=advantage, allocation="last_token"))
