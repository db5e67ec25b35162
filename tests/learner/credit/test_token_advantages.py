"""Advantages as they arrive at the tokens of a batch."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.config.config import load_config
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.credit.grpo import COMPARED
from slipstream.learner.credit.measure import Measured
from slipstream.learner.credit.token_advantages import sequences_with_advantages, teaches
from slipstream.learner.credit.token_rewards import last_token, per_turn
from slipstream.replay.records.ticket import Group
from tests.learner import even_game
from tests.learner.even_game import recorded
from tests.replay.records.attempts import turn


def two_turns(first: float, second: float, *, states: tuple[str, str] = ("start", "end")) -> Trajectory:
    """Tokens 1 [2 3] 4 [5]; those in brackets were sampled, in turns that earned `first` and `second`."""
    turns = [turn(1, 3, first, state=states[0]), turn(4, 5, second, state=states[1])]
    return recorded([1, 2, 3, 4, 5], [0, -1, -1, 0, -1], [False, True, True, False, True], turns=turns)


def group_of(*trajectories: Trajectory) -> Group:
    return even_game.group_of(trajectories)


WON_AND_LOST = group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0))


def credited(*groups: Group, measured: Measured | None = None, **changes: Any) -> list[TokenSequence]:
    return sequences_with_advantages(groups, objective=ObjectiveConfig(**changes), measured=measured)


def sampled(numbers: npt.NDArray[np.float32] | None, sequence: TokenSequence) -> list[float]:
    """Those of the loss tokens."""
    assert numbers is not None
    return numbers[sequence.loss_mask].tolist()


def advantages(groups: list[Group], **changes: Any) -> list[list[float]]:
    """Of the loss tokens of each sequence."""
    return [sampled(sequence.advantages, sequence) for sequence in credited(*groups, **changes)]


@pytest.mark.parametrize(
    ("name", "won"), [("group_standardised", 1 / math.sqrt(2)), ("group_centred", 0.5), ("leave_one_out", 1.0)]
)
def test_group_relative_advantages_go_to_every_token_of_the_trajectory(name: str, won: float) -> None:
    found = advantages([WON_AND_LOST], advantage=name)
    assert found == [pytest.approx([won] * 3, rel=1e-5), pytest.approx([-won] * 3, rel=1e-5)]


def test_reinforce_pp_compares_each_tokens_return_to_go_with_the_whole_batch() -> None:
    groups = [group_of(two_turns(1.0, 1.0), two_turns(1.0, 0.0)), group_of(two_turns(0.0, 0.0), two_turns(0.0, 0.0))]
    # Returns to go by turn: (2, 2, 1), (1, 1, 0), and zeros; over 12 tokens, mean 7/12.
    to_go = [[2, 2, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    mean, deviation = np.mean(to_go), np.std(to_go)
    found = advantages(groups, advantage="reinforce_pp", allocation="per_turn")
    for row, expected in zip(found, to_go, strict=True):
        assert row == pytest.approx([(value - mean) / deviation for value in expected], rel=1e-5)


def test_gamma_discounts_by_sampled_tokens_and_not_by_those_of_the_environment() -> None:
    found = advantages([WON_AND_LOST], advantage="reinforce_pp", gamma=0.5)
    mean = 1.75 / 6  # of 0.25, 0.5, 1 and three zeros
    above = [value - mean for value in (0.25, 0.5, 1)]
    assert [value / found[0][0] for value in found[0]] == pytest.approx([value / above[0] for value in above], rel=1e-4)


VALUES = np.array([0.5, 0.25, 0.75, 0.0, 0.0, 0.0])  # of the sampled tokens of two trajectories
VALUED = Measured(values=VALUES)
REFERENCE = np.array([-1.5, -1.0, -0.5, -1.0, -1.0, -1.0])  # behaviour's are -1: k1 is 0.5, 0, -0.5, and zeros
OF_GROUPS = ["group_standardised", "group_centred", "leave_one_out", "gigpo"]
GAE: dict[str, Any] = {"advantage": "gae", "critic": "own", "allocation": "per_turn"}
IN_REWARD: dict[str, Any] = {"kl_coefficient": 0.1, "kl_place": "reward"}


def test_gae_skips_tokens_of_the_environment_and_is_standardised_over_the_batch() -> None:
    first, second = credited(WON_AND_LOST, measured=VALUED, gae_lambda=0.5, **GAE)
    # The differences are 0.25 - 0.5, 0.75 - 0.25 and 1 - 0.75, each with half of what follows.
    expected = np.array([0.0625, 0.625, 0.25, 0.0, 0.0, 0.0])
    found = np.array(sampled(first.advantages, first) + sampled(second.advantages, second))
    assert found == pytest.approx((expected - expected.mean()) / expected.std(), rel=1e-4)
    assert first.returns.tolist() == [0.0, 0.5625, 0.875, 0.0, 1.0]
    assert first.old_values.tolist() == [0.0, 0.5, 0.25, 0.0, 0.75]


def test_branches_are_one_episode_to_the_critic() -> None:
    """Where history was rewritten, the value after a turn is that of the next turn in its new words."""
    branched = msgspec.structs.replace(two_turns(0.0, 1.0), branch_starts=[0, 3])
    first, second, _ = credited(group_of(branched, two_turns(0.0, 0.0)), measured=VALUED, gae_lambda=0.5, **GAE)
    assert [first.returns.tolist(), second.returns.tolist()] == [[0.0, 0.5625, 0.875], [0.0, 1.0]]


@pytest.mark.parametrize(("name", "expected"), [("gae", [3, 3, 3]), ("bi_level_gae", [3, 3, 2])])
def test_with_lambda_1_the_critics_targets_are_returns_to_go_for_any_values(name: str, expected: list[float]) -> None:
    """Bi-level GAE gives each turn its own."""
    group = group_of(two_turns(1.0, 2.0), two_turns(0.0, 0.0))
    first, _ = credited(group, measured=VALUED, advantage=name, critic="own", allocation="last_token")
    assert sampled(first.returns, first) == pytest.approx(expected)


def test_vtraces_advantages_have_the_ratio_in_them_and_are_as_they_are() -> None:
    current = np.log(np.array([0.5, 3.0, 1.0, 1.0, 1.0, 1.0])) - 1.0  # behaviour's are -1
    measured = Measured(values=VALUES, current_logprobs=current)
    first, _ = credited(WON_AND_LOST, measured=measured, **(GAE | {"advantage": "vtrace"}))
    # Targets from the last: 0.75 + 0.25; 0.25 + 0.5 + 0.25; 0.5 + 0.5 * -0.25 + 0.5 * (1 - 0.25).
    assert sampled(first.returns, first) == pytest.approx([0.75, 1.0, 1.0])
    assert sampled(first.advantages, first) == pytest.approx([0.5 * (1 - 0.5), 1 - 0.25, 1 - 0.75])


def test_the_divergence_is_taken_off_each_tokens_reward() -> None:
    measured = Measured(values=VALUES, reference_logprobs=REFERENCE)
    first, second = credited(WON_AND_LOST, measured=measured, **GAE, **IN_REWARD)
    assert sampled(first.returns, first) == pytest.approx([1.0, 1.05, 1.05])  # 1 - 0.05, + 0, + 0.05
    assert second.returns.tolist() == [0] * 5


def test_turns_pay_for_their_own_tokens_in_the_bi_level_estimate() -> None:
    measured = Measured(values=np.zeros(6), reference_logprobs=REFERENCE)
    first, _ = credited(WON_AND_LOST, measured=measured, advantage="bi_level_gae", critic="own", **IN_REWARD)
    assert sampled(first.returns, first) == pytest.approx([1.0, 1.0, 1.05])


def test_gigpo_adds_what_turns_from_the_same_state_earned_to_what_the_episode_did() -> None:
    group = group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0), two_turns(0.0, 1.0, states=("start", "start")))
    # Returns to go by turn at gamma 1/2: (1/2, 1), (0, 0), (1/2, 1). Episodes: 1, 0, 1, with a mean of 2/3. In "start"
    # are 1/2, 0, 1/2 and 1, with a mean of 1/2; in "end" are 1 and 0.
    found = advantages([group], advantage="gigpo_centred", gamma=0.5)
    assert found[0] == found[2] == pytest.approx([1 / 3 + 0, 1 / 3 + 0, 1 / 3 + 1 / 2], rel=1e-5)
    assert found[1] == pytest.approx([-2 / 3 - 1 / 2] * 3, rel=1e-5)


def test_groups_are_strangers_to_each_others_states() -> None:
    first, second = group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0)), group_of(two_turns(1.0, 1.0), two_turns(0, 5))
    changes: dict[str, Any] = {"advantage": "gigpo", "gamma": 0.9}
    assert advantages([first, second], **changes) == advantages([first], **changes) + advantages([second], **changes)


def test_a_group_teaches_where_something_in_it_has_an_advantage() -> None:
    same_end = group_of(two_turns(1.0, 0.0), two_turns(0.0, 1.0))  # the same return, one of them sooner
    grpo, gigpo = ObjectiveConfig(), ObjectiveConfig(advantage="gigpo", gamma=0.9)
    assert not teaches(same_end, objective=grpo)
    assert teaches(same_end, objective=gigpo)
    for objective in (grpo, gigpo):
        assert teaches(WON_AND_LOST, objective=objective)
        assert not teaches(group_of(two_turns(0.0, 1.0), two_turns(0.0, 1.0)), objective=objective)
        assert not teaches(group_of(two_turns(0.0, 0.3), two_turns(0.0, 0.1 + 0.2)), objective=objective)


@pytest.mark.parametrize("advantage", OF_GROUPS)
def test_a_divergence_in_the_reward_does_not_make_a_group_of_equal_returns_teach(advantage: str) -> None:
    equal, unlike = (group_of(two_turns(0.0, 1.0), two_turns(0.0, last)) for last in (1.0, 0.0))
    for place in ("reward", "loss"):
        objective = ObjectiveConfig(advantage=advantage, kl_coefficient=0.2, kl_place=place)
        assert not teaches(equal, objective=objective)
        assert teaches(unlike, objective=objective)


def with_divergence(group: Group, advantage: str, beta: float, divergences: list[float]) -> list[list[float]]:
    """Of the loss tokens of each member, whose divergence is all in its first token."""
    reference = np.concatenate([[-1.0 - nats, -1.0, -1.0] for nats in divergences])
    measured = Measured(reference_logprobs=reference, current_logprobs=np.full(len(reference), -1.0))
    in_reward = {"kl_coefficient": beta, "kl_place": "reward"}
    return advantages([group], advantage=advantage, measured=measured, gamma=0.5, **in_reward)


@pytest.mark.parametrize("advantage", [*OF_GROUPS, "gigpo_centred"])
def test_advantages_are_linear_in_the_coefficient_of_the_divergence(advantage: str) -> None:
    """Also where siblings earned all but the same: by their deviation it would be multiplied to any size."""
    for last in (0.0, 1.0 - 2e-6):
        group = group_of(two_turns(0.0, 1.0), two_turns(0.0, 1.0), two_turns(0.0, last))
        found = [with_divergence(group, advantage, beta, [3.0, 1.0, -1.0]) for beta in (0.0, 1e-3, 1e-1)]
        without, little, much = np.array(found)
        assert (much - without) == pytest.approx(100 * (little - without), abs=1e-4)
        assert abs(much - without).max() < 1.0


@pytest.mark.parametrize("changes", [{}, {"advantage": "gigpo"}, {"allocation": "per_turn"}], ids=str)
@pytest.mark.parametrize("last", [33333.3, 1e12 / 3])
def test_equal_returns_teach_nothing_however_large_they_are(changes: dict[str, str], last: float) -> None:
    group = group_of(*(two_turns(0.0, last) for _ in range(7)))
    assert not teaches(group, objective=ObjectiveConfig(**changes))
    assert not any(any(each) for each in advantages([group], **changes))


def test_siblings_pay_in_the_unit_of_their_standardised_advantage() -> None:
    # Standardised 0.7071 and -0.7071, less 0.1 times the divergence above its mean: 3 and 1 are 1 above and 1 below 2.
    first, second = with_divergence(WON_AND_LOST, "group_standardised", 0.1, [3.0, 1.0])
    assert first == pytest.approx([0.7071 - 0.1] * 3, abs=1e-4)
    assert second == pytest.approx([-0.7071 + 0.1] * 3, abs=1e-4)
    # GiGPO has the same twice where a turn began in the same state as the sibling's, and paid there: in the first turn.
    first, second = with_divergence(WON_AND_LOST, "gigpo", 0.1, [3.0, 1.0])
    assert first == pytest.approx([1.4142 - 0.2, 1.4142 - 0.2, 1.4142 - 0.1], abs=1e-4)
    assert second == pytest.approx([-1.4142 + 0.2, -1.4142 + 0.2, -1.4142 + 0.1], abs=1e-4)


def test_turns_pay_for_their_own_divergence_in_gigpo() -> None:
    # The first episode's divergence is 2 in its first turn and -2 in its second: rewards of -0.2 and 1.2.
    measured = Measured(reference_logprobs=np.array([-3.0, -1, 1, -1, -1, -1]))
    first, _ = credited(WON_AND_LOST, measured=measured, advantage="gigpo_centred", gamma=0.5, **IN_REWARD)
    assert sampled(first.advantages, first) == pytest.approx([0.5 + 0.4 / 2, 0.5 + 0.4 / 2, 0.5 + 1.2 / 2], rel=1e-5)


TURNS = st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 5)), min_size=1, max_size=6)
GROUPS = st.lists(TURNS, min_size=2, max_size=5)


@given(TURNS)
def test_allocations_conserve_the_return_and_one_by_turn_each_turns_reward(turns: list[tuple[float, int]]) -> None:
    rewards, tokens = np.array([turn[0] for turn in turns]), np.array([turn[1] for turn in turns])
    whole, by_turn = last_token(rewards, tokens), per_turn(rewards, tokens)
    assert len(whole) == len(by_turn) == tokens.sum()
    assert whole.sum() == pytest.approx(rewards.sum(), abs=1e-9)
    assert [float(each.sum()) for each in np.split(by_turn, np.cumsum(tokens)[:-1])] == rewards.tolist()


def attempt(turns: list[tuple[float, int]]) -> Trajectory:
    """One token of the environment before each turn, which has a reward and a number of tokens."""
    sampled = [token > 0 for _, num_tokens in turns for token in range(num_tokens + 1)]
    stops = np.cumsum([num_tokens + 1 for _, num_tokens in turns]).tolist()
    records = [turn(stop - length, stop, reward) for stop, (reward, length) in zip(stops, turns, strict=True)]
    return recorded(range(len(sampled)), [-1.0 * each for each in sampled], sampled, turns=records)


@pytest.mark.parametrize("allocation", ["last_token", "per_turn"])
@pytest.mark.parametrize("advantage", COMPARED)
@given(group=GROUPS)
def test_the_first_token_to_which_all_is_to_come_has_the_whole_group_relative_advantage(
    advantage: str, allocation: str, group: list[list[tuple[float, int]]]
) -> None:
    whole = COMPARED[advantage]([sum(reward for reward, _ in turns) for turns in group])
    found = advantages([group_of(*map(attempt, group))], advantage=advantage, allocation=allocation)
    assert [of_tokens[0] for of_tokens in found] == pytest.approx(whole, abs=1e-4)


@given(group=GROUPS)
def test_at_each_turn_the_centred_advantages_of_all_members_add_up_to_0(group: list[list[tuple[float, int]]]) -> None:
    """Those of members that have ended, with which the others are compared, too."""
    found = advantages([group_of(*map(attempt, group))], advantage="group_centred", allocation="per_turn")
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
    found = advantages([group_of(*map(attempt, group))], advantage="group_centred", allocation=allocation)
    assert found == [pytest.approx(won), pytest.approx(lost)]


def test_equal_returns_of_unequal_turns_teach_by_turn_alone() -> None:
    first, last = attempt([(1.0, 1), (0.0, 1)]), attempt([(0.0, 1), (1.0, 1)])
    apart, alike = group_of(first, last), group_of(first, first)
    for advantage in COMPARED:
        assert teaches(apart, objective=ObjectiveConfig(advantage=advantage, allocation="per_turn"))
        assert not teaches(alike, objective=ObjectiveConfig(advantage=advantage, allocation="per_turn"))
        assert not teaches(apart, objective=ObjectiveConfig(advantage=advantage, allocation="last_token"))


@pytest.mark.parametrize("preset", sorted(Path("conf/objective").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_group_that_teaches_nothing_has_no_advantage_beside_others(preset: Path) -> None:
    """Every preset accepts the option; those that compare no siblings train such groups whatever it says."""
    settings = ["replay.drop_zero_variance=false", *(["replay.trees=random:2"] if preset.stem == "tree" else [])]
    objective = load_config(None, settings, presets=[str(preset)]).objective
    equal = group_of(two_turns(0.0, 0.3), two_turns(0.0, 0.1 + 0.2))
    assert teaches(equal, objective=objective) != objective.compares_siblings
    if not objective.compares_siblings:
        return
    alone = sequences_with_advantages([WON_AND_LOST], objective=objective)
    beside = sequences_with_advantages([equal, WON_AND_LOST], objective=objective)
    for sequence in beside[:2]:
        np.testing.assert_allclose(sequence.advantages, 0.0, atol=1e-6)
    for sequence, same in zip(beside[2:], alone, strict=True):
        np.testing.assert_allclose(sequence.advantages, same.advantages, atol=1e-6)


def test_dapo_drops_such_groups_whatever_the_file_before_it_says() -> None:
    assert not load_config("conf/quickstart.yaml", []).replay.drop_zero_variance
    assert load_config("conf/quickstart.yaml", [], presets=["conf/objective/dapo.yaml"]).replay.drop_zero_variance
