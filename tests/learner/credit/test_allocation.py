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
def test_every_allocation_conserves_the_return(turns: list[tuple[float, int]]) -> None:
    rewards, tokens = np.array([turn[0] for turn in turns]), np.array([turn[1] for turn in turns])
    for found in (last_token(rewards, tokens), per_turn(rewards, tokens)):
        assert len(found) == tokens.sum()
        assert found.sum() == pytest.approx(rewards.sum(), abs=1e-9)


@given(TURNS)
def test_per_turn_conserves_each_turns_reward_as_well(turns: list[tuple[float, int]]) -> None:
    rewards, tokens = np.array([turn[0] for turn in turns]), np.array([turn[1] for turn in turns])
    of_turns = np.split(per_turn(rewards, tokens), np.cumsum(tokens)[:-1])
    assert [float(of_turn.sum()) for of_turn in of_turns] == rewards.tolist()


GROUPS = st.lists(TURNS, min_size=2, max_size=5)
ALLOCATIONS = ("last_token", "per_turn")


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


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("advantage", COMPARED)
@given(group=GROUPS)
def test_every_allocation_conserves_a_group_relative_advantage(
    advantage: str, allocation: str, group: list[list[tuple[float, int]]]
) -> None:
    """The shares of the tokens add up to the advantage: the first token, to which all is to come, has the whole."""
    whole = COMPARED[advantage]([sum(reward for reward, _ in turns) for turns in group])
    for of_tokens, expected in zip(advantages(group, advantage=advantage, allocation=allocation), whole, strict=True):
        shares = of_tokens - np.append(of_tokens[1:], 0.0)
        assert shares.sum() == pytest.approx(expected, abs=1e-4)
        assert of_tokens[0] == pytest.approx(expected, abs=1e-4)


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
