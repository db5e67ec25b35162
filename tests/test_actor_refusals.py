"""What a faulty actor says in its verbs is refused before any change."""

import pytest
import redis

from common.trajectory import Outcome
from tests.attempts import Views, leased, partial_of, ticket


@pytest.mark.parametrize("outcome", list(Outcome))
def test_any_outcome_but_the_policys_own_is_a_failure(buffer: Views, outcome: Outcome) -> None:
    buffer.learner.open([ticket(0)])
    lease = leased(buffer)
    if outcome is Outcome.POLICY:
        with pytest.raises(redis.ResponseError, match="malformed outcome"):
            buffer.actor.fail(lease, 0, attempt=0, outcome=outcome, reason="why")
    else:
        assert buffer.actor.fail(lease, 0, attempt=0, outcome=outcome, reason="why") == 1
        assert buffer.learner.ledger().failed == {outcome.value: 1}


def test_only_known_outcomes_and_reasons_become_accounts(buffer: Views, run_id: str) -> None:
    buffer.learner.open([ticket(0)])
    lease = leased(buffer)
    buffer.actor.hand_in(lease, partial_of(lease, 1, run_id=run_id))
    partial = buffer.client.hget(f"{buffer.base}:group:0", "partial:1")
    with pytest.raises(redis.ResponseError, match="malformed outcome"):
        buffer.actor._verbs.call("fail", 0, 0, 0, lease.fence, b"\xff", b"why")
    with pytest.raises(redis.ResponseError, match="malformed reason"):
        buffer.actor._verbs.call("discard", 0, 1, partial, b"\xff")
    ledger = buffer.learner.ledger()
    assert (ledger.failed, ledger.partials_discarded, ledger.partials_held, ledger.repairs) == ({}, {}, 1, 0)
