"""What a faulty actor says in its verbs is refused before any change."""

import pytest
import redis

from slipstream.common.process.wire import encode
from slipstream.common.records.trajectory import Outcome
from slipstream.replay.records.failures import MAX_REASON_CHARS
from slipstream.replay.records.ticket import InsertResult, Verdict
from tests.replay.records.attempts import Views, ticket, verdict_on


@pytest.mark.parametrize("outcome", list(Outcome))
def test_any_outcome_but_the_policys_own_is_a_failure(buffer: Views, outcome: Outcome) -> None:
    lease = buffer.begin(ticket(0))
    if outcome is Outcome.POLICY:
        with pytest.raises(redis.ResponseError, match="malformed outcome"):
            buffer.actor.fail(lease, 0, attempt=0, outcome=outcome, reason="why")
    else:
        assert buffer.actor.fail(lease, 0, attempt=0, outcome=outcome, reason="why") == 1
        assert buffer.ledger.failed == {outcome.value: 1}


def test_only_known_outcomes_members_and_reasons_become_accounts(buffer: Views) -> None:
    lease = buffer.begin(ticket(0))
    buffer.actor.hand_in(lease, buffer.partial(lease, 1))
    partial = buffer.client.hget(f"{buffer.base}:group:0", "partial:1")
    with pytest.raises(redis.ResponseError, match="malformed outcome"):
        buffer.actor._verbs.call("fail", 0, 0, 0, lease.fence, b"\xff", b"why")
    with pytest.raises(redis.ResponseError, match="malformed member"):
        buffer.actor.fail(lease, 2, attempt=0, outcome=Outcome.ENV_FAILURE, reason="why")
    with pytest.raises(redis.ResponseError, match="malformed reason"):
        buffer.actor._verbs.call("discard", 0, 1, partial, b"\xff")
    ledger = buffer.ledger
    assert (ledger.failed, ledger.partials_discarded, ledger.partials_held, ledger.repairs) == ({}, {}, 1, 0)


def test_the_longest_reason_is_kept_and_a_longer_description_is_refused(buffer: Views) -> None:
    lease, reason = buffer.begin(ticket(0)), "\U0001f600" * MAX_REASON_CHARS
    assert buffer.actor.fail(lease, 0, attempt=0, outcome=Outcome.REPLAY_MISMATCH, reason=2 * reason) == 1
    with pytest.raises(redis.ResponseError, match="malformed description"):
        buffer.actor._verbs.call("fail", 0, 0, 1, lease.fence, "env_failure", b"x" * 9000)
    assert [failure.reason for failure in buffer.learner.failures()] == [reason]
    assert buffer.ledger.failed == {"replay_mismatch": 1}


def test_a_judges_longer_descriptions_and_verdicts_are_refused(buffer: Views) -> None:
    buffer.insert(buffer.begin(ticket(0, is_judged=True)))
    judging = buffer.judge.lease("j")
    with pytest.raises(redis.ResponseError, match="malformed description"):
        buffer.judge._verbs.call("fail_judging", 0, judging.fence, 0, b"x" * 9000)
    with pytest.raises(redis.ResponseError, match="malformed verdict"):
        buffer.judge._verbs.call("judged", 0, judging.fence, encode(Verdict(judge="j" * 60_000, members=[])))
    assert buffer.ledger.judging == 1 and buffer.learner.failures() == []
    assert buffer.judge.store(judging, verdict_on(judging)) is InsertResult.STORED


@pytest.mark.parametrize("verb", ["insert", "hand_in"])
@pytest.mark.parametrize(
    ("member", "actor", "why"),
    [
        ("0", "a" * 2000, "malformed record"),
        *((member, "a", "malformed member") for member in ("2", "999", "01", "-1", "x")),
    ],
)
def test_a_payload_of_no_member_or_with_an_endless_record_is_refused(
    buffer: Views, verb: str, member: str, actor: str, why: str
) -> None:
    lease = buffer.begin(ticket(0))
    name = f"{buffer.base}:blob:0:{member}:0:{lease.fence}"
    buffer.client.set(name, b"payload", ex=60)
    result = ["shop", "1.0", "1"] if verb == "insert" else []
    with pytest.raises(redis.ResponseError, match=why):
        buffer.actor._verbs._scripts[verb](
            keys=[buffer.base, name], args=[0, member, f"0:{lease.fence}:0:7:5:1:100:{actor}", *result]
        )
    assert buffer.client.ttl(name) > 0
    buffer.insert(lease)
    ledger = buffer.ledger
    assert (ledger.inserted, ledger.ready, ledger.partials_handed_in, ledger.repairs) == (2, 1, 0, 0)
    assert buffer.audit() == []


def test_a_group_without_its_size_waits_for_repair(buffer: Views, redis_client: redis.Redis) -> None:
    lease = buffer.begin(ticket(0))
    redis_client.hdel(f"{buffer.base}:group:0", "num_members")
    with pytest.raises(redis.ResponseError, match="DAMAGED"):
        buffer.actor._verbs._scripts["insert"](
            keys=[buffer.base, f"{buffer.base}:blob:0:0:0:{lease.fence}"],
            args=[0, 0, f"0:{lease.fence}:0:7:5:1:100:a", "shop", "1.0", "1"],
        )
    buffer.people.repair("its size is missing")
    assert buffer.actor.insert(lease, buffer.attempt(lease, 0)) is InsertResult.FENCED
