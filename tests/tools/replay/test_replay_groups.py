"""`slipstream replay groups`: every group that Redis holds, with what a person asks about it."""

from pathlib import Path

import pytest

from slipstream.common.process.connection import connect
from slipstream.replay.buffer.listing import find_group, list_groups
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.tools.cli.cli import main
from slipstream.tools.lab.loopback_server import start_server
from tests.learner.publisher.offers import empty_offer
from tests.replay.records.attempts import Views, ticket
from tests.tools.replay.inspected import Inspected
from tests.waiting import wait_until


def test_groups_are_listed_with_their_state_holder_members_step_and_lag(inspected: Inspected) -> None:
    inspected.filled(1, 2, 3, 4, 5, policy_version=2)
    inspected.fill(actor="actor-1")
    assert [group.ticket.group_id for group in inspected.buffer.learner.claim(7, 1, policy_version=4, max_lag=9)] == [1]
    inspected.fill(members=(1,), actor="actor-2", policy_version=3)
    inspected.buffer.people.quarantine(5, "looks odd")
    assert [row["group_id"] for row in inspected.json("groups", "--state", "ready")] == [2]
    groups = {row["group_id"]: row for row in inspected.json("groups")}
    states = dict(enumerate(("claimed", "ready", "leased", "queued", "quarantined"), start=1))
    assert {group_id: row["state"] for group_id, row in groups.items()} == states
    assert groups[1]["uses"] == [7] and groups[2]["uses"] == []
    assert groups[3]["holder"] == "actor-2" and 500 < groups[3]["lease_left_s"] <= 600
    assert (groups[3]["num_stored"], groups[3]["num_members"], groups[3]["newest_policy_version"]) == (1, 2, 3)
    assert groups[4]["holder"] == "" and groups[4]["lease_left_s"] is None
    assert groups[2]["task"] == "shop/train/2" and groups[2]["attempts"] == 1
    assert all(0 <= row["changed_s"] <= row["opened_s"] < 600 for row in groups.values())
    assert groups[3]["lag"] is None, "nothing is published yet"
    Bulletin(inspected.client, inspected.run_id).announce(empty_offer(5))
    assert inspected.json("groups", "--state", "leased")[0]["lag"] == 2


def test_times_are_the_servers_and_begin_anew_with_each_state(inspected: Inspected) -> None:
    inspected.open(1)
    wait_until(lambda: found(inspected)["opened_s"] >= 0.2, "some time to pass")
    opened_s = found(inspected)["opened_s"]
    inspected.fill(members=())
    group = found(inspected)
    assert group["changed_s"] < group["opened_s"] and group["opened_s"] > opened_s
    inspected.buffer.people.requeue([1])
    assert found(inspected)["opened_s"] > opened_s


def found(inspected: Inspected) -> dict[str, float]:
    [group] = inspected.json("groups")
    return group


def test_people_get_a_table_and_hear_that_there_is_more(inspected: Inspected) -> None:
    inspected.open(*range(1, 9))
    lines = inspected("groups", "--limit", "3").splitlines()
    assert lines[0].split()[:3] == ["group", "state", "s"] and len(lines) == 5
    assert [lines[1].split()[place] for place in (0, 1, 3)] == ["1", "queued", "shop/train/1"]
    assert lines[-1] == "these are the first 3 groups; give --limit for more"


def test_thousands_of_groups_are_listed_while_others_work(buffer: Views) -> None:
    for first in range(0, 5000, 1000):
        buffer.learner.open([ticket(group_id) for group_id in range(first, first + 1000)])
    groups = list_groups(buffer.client, buffer.run_id)
    assert next(groups).group_id == 0
    buffer.learner.drop([1, 2, 3, 4999], "test")  # 1 to 3 are on the page that was read, 4999 is not
    assert [group.group_id for group in groups] == list(range(1, 4999))
    assert find_group(buffer.client, buffer.run_id, 3) is None


def test_a_hostile_actors_name_cannot_reach_the_terminal(inspected: Inspected) -> None:
    inspected.filled(1, members=(), actor="\x1b[2Jevil\n[red]x\u202e")
    said = inspected("groups")
    assert r"\x1b[2Jevil\n[red]x\u202e" in said and len(said.splitlines()) == 2
    assert inspected.json("groups")[0]["holder"] == "\x1b[2Jevil\n[red]x\u202e"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["groups", "--state", "lost"], "invalid choice: 'lost'"),
        (["show"], "replay show takes GROUP [MEMBER], numbers, and the run's NAME, got nothing"),
        (["show", "1", "2", "3"], "replay show takes GROUP [MEMBER], numbers, and the run's NAME, got 1 2 3"),
        (["show", "first"], "replay show takes GROUP [MEMBER], numbers, and the run's NAME, got first"),
        (["requeue"], "replay requeue takes GROUP ..., numbers, and the run's NAME, got nothing"),
        (["export"], "the following arguments are required: FILE"),
        (["quarantine", "3"], "the following arguments are required: --reason"),
        (["export", "a.jsonl", "--steps", "5"], "must be FIRST:LAST, as in 1:20, got '5'"),
        (["groups", "--limit", "-1"], "--limit"),
        (["dance"], "`slipstream replay` takes one of audit, repair, groups, show,"),
    ],
)
def test_bad_arguments_are_explained(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", *arguments])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_every_question_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for question in ("audit", "groups", "show", "quarantine", "requeue", "failures", "quarantined", "export"):
        with pytest.raises(SystemExit) as ended:
            main(["replay", question, "--help"])
        assert ended.value.code == 0
        assert f"usage: slipstream replay {question}" in capsys.readouterr().out


def test_who_may_only_read_can_ask_everything_that_changes_nothing(
    tmp_path: Path, run_id: str, capsys: pytest.CaptureFixture[str], inspected: Inspected
) -> None:
    with start_server(tmp_path / "redis") as server, connect(server.admin_url) as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read", "+ping", "+select", "+time")
        run = Inspected(client, f"redis://reader:secret@127.0.0.1:{server.port}", run_id, inspected.root, capsys)
        run.filled(1, 2)
        assert len(run.buffer.learner.claim(1, 1, policy_version=4, max_lag=9)) == 1
        assert [group["group_id"] for group in run.json("groups")] == [2, 1]
        assert "turn 1" in run("show", "1", "1")
        assert run.json("failures") == run.json("quarantined") == []
        assert "2 trajectories" in run("export", str(tmp_path / "rows.jsonl"))
        assert "no permissions to run the 'evalsha' command" in run("requeue", "2", code=2)
        assert run.buffer.learner.ledger().queued == 1
