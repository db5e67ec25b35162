"""What a person does to groups: set aside, let begin anew; and the lists of what went wrong."""

from common.trajectory import Outcome
from replay.keys import key
from replay.sampler import Reuse
from tests.inspected import Inspected


def test_a_group_is_set_aside_with_a_reason_and_begins_anew(inspected: Inspected) -> None:
    inspected.open(1, 2)
    inspected.fill()
    assert inspected("quarantine", "1", "--reason", "rewards look hacked") == "group 1: quarantined; it was ready\n"
    assert inspected.buffer.ledger().quarantined == 1
    [aside] = inspected.json("quarantined")
    assert aside["group_id"] == 1 and aside["reason"] == "rewards look hacked" and aside["actor"] is None
    assert inspected("requeue", "1") == "group 1: queued; it was quarantined\n"
    ledger = inspected.buffer.ledger()
    assert ledger.queued == 2 and ledger.dropped_trajectories == {"requeued": 2}
    assert inspected.buffer.audit() == []


def test_what_cannot_be_done_is_said_and_ends_with_code_1(inspected: Inspected) -> None:
    inspected.open(1, 2, 3)
    inspected.fill()
    inspected.fill()
    assert len(inspected.buffer.claim(1, 1, policy_version=4, max_lag=9)) == 1
    said = inspected("quarantine", "1", "--reason", "late", code=1)
    assert said == "group 1: nothing done: it is claimed, so a step is or was trained on it, and no other will be\n"
    assert "Redis does not hold it" in inspected("quarantine", "9", "--reason", "who", code=1)
    said = inspected("requeue", "1", "2", "3", "9", code=1)
    assert [line.split(";")[0] for line in said.splitlines()] == [
        "group 1: nothing done: it is claimed, so a step is or was trained on it, and no other will be",
        "group 2: queued",
        "group 3: nothing done: it is queued already",
        "group 9: nothing done: Redis does not hold it",
    ]
    lines = inspected.json("requeue", "2", "9", code=1)
    assert [line["done"] for line in lines] == [False, False]
    assert inspected("quarantine", "2", "--reason", "odd", code=0) and "aside already" in inspected(
        "quarantine", "2", "--reason", "odd", code=1
    )
    assert inspected.buffer.audit() == []


def test_a_group_that_a_step_was_trained_on_is_used_no_more_and_still_counts(inspected: Inspected) -> None:
    inspected.open(1)
    inspected.fill()
    twice = Reuse(max_uses=2, samples_per_insert=0.0, error_buffer=0.0)
    assert len(inspected.buffer.claim(1, 1, policy_version=4, max_lag=9, reuse=twice)) == 1
    [group] = inspected.json("groups")
    assert group["state"] == "ready" and group["uses"] == [1]
    assert "a step was trained on it, so it cannot begin anew" in inspected("requeue", "1", code=1)
    assert "it is claimed, so a step is or was trained on it" in inspected("quarantine", "1", "--reason", "odd", code=1)
    assert inspected.buffer.ledger().claimed == 1 and inspected.buffer.audit() == []


def test_failures_are_listed_newest_first(inspected: Inspected) -> None:
    inspected.open(1)
    lease = inspected.buffer.lease("actor-0")
    assert lease is not None
    for member, reason in ((0, "the database is gone"), (1, "\x1b[2J[red]gone")):
        inspected.buffer.fail(lease, member, attempt=0, outcome=Outcome.ENV_FAILURE, reason=reason)
    assert [row["reason"] for row in inspected.json("failures")] == ["\x1b[2J[red]gone", "the database is gone"]
    said = inspected("failures", "--limit", "1").splitlines()
    assert len(said) == 2 and said[1].split()[3:] == ["env_failure", r"\x1b[2J[red]gone"]


def test_poison_is_listed_with_its_sender(inspected: Inspected) -> None:
    inspected.open(1)
    inspected.fill(actor="actor-7")
    [blob] = inspected.client.scan_iter(f"{key(inspected.run_id, 'train', 'blob')}:1:0:*")
    inspected.client.set(blob, b"rubbish")
    assert inspected.buffer.claim(1, 1, policy_version=4, max_lag=9) == []
    [poison] = inspected.json("quarantined")
    assert (poison["group_id"], poison["member"], poison["actor"]) == (1, 0, "actor-7")
    assert "actor-7" in inspected("quarantined")
