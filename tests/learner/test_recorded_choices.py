"""What is reported of the states and kept sets that trajectories record."""

import msgspec
import pytest

from slipstream.common.process.metrics import Metrics
from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.batch.batch import Batch
from slipstream.learner.lead.report import _add_choices
from slipstream.replay.records.ticket import Group
from tests.replay.records.attempts import attempt_at, lease_of, ticket


def reported(*groups: list[Trajectory]) -> dict[str, float]:
    metrics = Metrics()
    batch = [Group(ticket=ticket(number), num_uses=1, trajectories=group) for number, group in enumerate(groups)]
    _add_choices(metrics, Batch(groups=batch, num_dropped={}, next_group_id=len(groups)))
    return metrics.means()


def in_states(*states: str) -> Trajectory:
    """A turn in each; the report does not look at where they are."""
    whole = attempt_at(lease_of(ticket(0)), 0, run_id="run")
    turns = [msgspec.structs.replace(whole.turns[0], state_key=state) for state in states]
    return msgspec.structs.replace(whole, turns=turns)


def test_a_state_is_shared_by_turns_of_one_group_and_an_unknown_one_by_none() -> None:
    group, stranger = [in_states("a", "b", ""), in_states("a", "c", "")], [in_states("b", "c")]
    assert reported(group, stranger) == {
        "learner/shared_state_fraction": pytest.approx(2 / 8),
        "learner/distinct_state_fraction": pytest.approx((3 + 2) / (4 + 2)),
        "trained/temperature": 1.0,
    }
    assert reported([in_states("", "")]) == {"learner/shared_state_fraction": 0.0, "trained/temperature": 1.0}


def test_what_was_kept_is_a_mean_over_sampled_tokens() -> None:
    some = msgspec.structs.replace(in_states("a"), kept=kept_sets([[1], [1, 2, 3]]))
    more = msgspec.structs.replace(in_states("b"), kept=kept_sets([[4, 5], [4, 5], [4, 5], [6, 7]]))
    assert reported([some, more])["mismatch/kept_tokens"] == pytest.approx(12 / 6)
