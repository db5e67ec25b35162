"""`slipstream replay`: quarantine, requeue and repair; the lists of failures and quarantined groups."""

from slipstream.common.records.trajectory import Outcome
from slipstream.replay.records.keys import key
from tests.replay.records.attempts import leased, ticket
from tests.tools.replay.inspected import Inspected


def test_a_group_is_set_aside_with_a_reason_and_begins_anew(inspected: Inspected) -> None:
    inspected.filled(1, 2)
    assert inspected("quarantine", "1", "--reason", "rewards look hacked") == "group 1: quarantined; it was ready\n"
    assert inspected.buffer.learner.ledger().quarantined == 1
    [aside] = inspected.json("quarantined")
    assert aside["group_id"] == 1 and aside["reason"] == "rewards look hacked" and aside["actor"] is None
    assert inspected("requeue", "1") == "group 1: queued; it was quarantined\n"
    ledger = inspected.buffer.learner.ledger()
    assert ledger.queued == 2 and ledger.dropped_trajectories == {"requeued": 2}
    assert inspected.buffer.audit() == []


def test_a_group_that_is_not_ready_is_set_aside_and_queued_again_as_well(inspected: Inspected) -> None:
    inspected.buffer.learner.open([ticket(1, is_judged=True), ticket(2), ticket(3)])
    inspected.fill()
    inspected.fill(members=(0,))
    for number, state in (("1", "judging"), ("2", "leased"), ("3", "queued")):
        assert inspected("quarantine", number, "--reason", "odd") == f"group {number}: quarantined; it was {state}\n"
        assert inspected("requeue", number) == f"group {number}: queued; it was quarantined\n"
        assert inspected.buffer.audit() == []


def test_a_change_that_the_state_of_a_group_forbids_is_refused_with_code_1(inspected: Inspected) -> None:
    inspected.filled(1, 2, 3)
    inspected.fill()
    assert len(inspected.buffer.learner.claim(1, 1, policy_version=4, max_lag=9)) == 1
    claimed = "group 1: not changed: it is claimed: a step trains or was trained on it, and no further step will"
    assert inspected("quarantine", "1", "--reason", "late", code=1) == f"{claimed}\n"
    assert "it is not in Redis" in inspected("quarantine", "9", "--reason", "who", code=1)
    said = inspected("requeue", "1", "2", "3", "9", code=1)
    assert [line.split(";")[0] for line in said.splitlines()] == [
        claimed,
        "group 2: queued",
        "group 3: not changed: it is queued already",
        "group 9: not changed: it is not in Redis",
    ]
    assert [line["done"] for line in inspected.json("requeue", "2", "9", code=1)] == [False, False]
    assert inspected("quarantine", "2", "--reason", "odd")
    assert "it is quarantined already" in inspected("quarantine", "2", "--reason", "odd", code=1)
    assert inspected.buffer.audit() == []


def test_a_group_that_a_step_was_trained_on_is_used_no_more_and_still_counts(inspected: Inspected) -> None:
    inspected.filled(1)
    assert len(inspected.buffer.learner.claim(1, 1, policy_version=4, max_lag=9, max_uses=2)) == 1
    [group] = inspected.json("groups")
    assert group["state"] == "ready" and group["uses"] == [1]
    assert "a step was trained on it, so it cannot be queued again" in inspected("requeue", "1", code=1)
    assert "it is claimed: a step trains or was trained on it" in inspected("quarantine", "1", "--reason", "x", code=1)
    assert inspected.buffer.learner.ledger().claimed == 1 and inspected.buffer.audit() == []


def test_failures_are_listed_newest_first(inspected: Inspected) -> None:
    inspected.open(1)
    lease = leased(inspected.buffer, "actor-0")
    for member, reason in ((0, "the database is gone"), (1, "\x1b[2J[red]gone")):
        inspected.buffer.actor.fail(lease, member, attempt=0, outcome=Outcome.ENV_FAILURE, reason=reason)
    assert [row["reason"] for row in inspected.json("failures")] == ["\x1b[2J[red]gone", "the database is gone"]
    said = inspected("failures", "--limit", "1").splitlines()
    assert len(said) == 2 and said[1].split()[3:] == ["env_failure", r"\x1b[2J[red]gone"]


def test_damaged_books_are_repaired_and_each_line_of_it_is_printed(inspected: Inspected) -> None:
    inspected.filled(1, 2)
    inspected.client.delete(key(inspected.run_id, "train", "group", 1))
    assert "WRONG group 1 is ready, and its hash is missing" in inspected("audit", code=1)
    said = inspected("repair")
    assert "group 1 (ready) lacks num_members: removed\n" in said
    assert "2 of trajectories:inserted are counted as trajectories:dropped:damaged\n" in said
    assert said.count(" belonged to no group: removed\n") == 2
    ledger = inspected.buffer.learner.ledger()
    assert ledger.dropped == {"damaged": 1} and ledger.repairs == 1 and ledger.balanced
    assert "WRONG" not in inspected("audit")


def test_an_audit_counts_the_records_of_processes_that_cannot_be_read(inspected: Inspected) -> None:
    inspected.client.hset(key(inspected.run_id, "fleet"), "evil\x1b[2J", b"\xff\xfe")
    said = inspected("audit", code=1)
    assert "WRONG 1 records in" in said and "\x1b" not in said
