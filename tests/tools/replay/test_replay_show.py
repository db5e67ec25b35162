"""`slipstream replay show`: one trajectory, word for word, and no word of it can do anything but be read."""

import math
import re

import pytest

from slipstream.common.process.run_dir import RunDir
from tests.common.text.small_tokenizer import END
from tests.tools.replay.inspected import Inspected

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Clears the screen, hides, goes back in its line, reverses what follows, is markup of `rich`, forges a line of ours.
HOSTILE = "\x1b[2J\x1b[8m\rover\x9b31m\u202etxt\u2028[bold red]loud[/] :bomb:\nturn 9: reward task 100; valid action"


def test_a_trajectory_is_shown_turn_by_turn_and_a_program_gets_the_same_as_json(inspected: Inspected) -> None:
    inspected.filled(1)
    said = inspected("show", "1", "1")
    lines = said.splitlines()
    assert lines[0] == "shop/train/1: group 1, member 1, attempt 0, ready"
    assert "return 1, score 1, success; stop reason done, outcome policy" in said
    assert "policy versions 4 to 4" in said and "0.50 s by actor-0 on host (reserved, $0 per hour)" in said
    turn = lines.index("turn 0: prompt")
    prompt = ["  | <|im_start|>user", "  | find plain dress<|im_end|>", "  | <|im_start|>assistant"]
    assert lines[turn + 1 : turn + 4] == prompt
    assert lines[lines.index("turn 0: state") + 1] == "  | state 0"
    assert f"  | click[1]{END}" in lines
    assert "  | red small<|im_end|>" in lines  # what the environment answered
    assert "log-probability -0.500 mean, -0.500 minimum, 0.25 s" in said
    assert "turn 1: reward task 1; valid action, ended by stop, environment 0.12 s" in lines

    [facts] = inspected.json("show", "1", "0")
    assert (facts["group_id"], facts["member"], facts["state"], facts["return"]) == (1, 0, "ready", 0.0)
    first, second = facts["turns"]
    assert first["action"] == f"click[0]{END}" and second["rewards"] == {"task": 0.0}
    assert first["policy_versions"] == [4] and first["logprob_min"] == -0.5 and first["valid_action"]
    assert [first["state_key"], second["state_key"]] == ["state 0", "state 1"]
    assert facts["kept_tokens_mean"] is None
    assert facts["sampling"]["temperature"] == 1.0 and facts["instance_kind"] == "reserved"


def test_the_parts_of_a_reward_are_shown_and_a_number_that_json_does_not_have_is_null(inspected: Inspected) -> None:
    inspected.filled(1, part_values={"clear": 0.75, "long": 0.0}, duration_s=math.inf)
    assert "parts of the reward, without their weights: clear 0.75, long 0; 0.00 s" in inspected("show", "1", "0")
    [facts] = inspected.json("show", "1", "0")
    assert facts["part_values"] == {"clear": 0.75, "long": 0.0}
    assert facts["duration_s"] is None and facts["return"] == 0.0


def test_a_group_is_shown_member_by_member(inspected: Inspected) -> None:
    inspected.filled(1, members=(1,))
    inspected.buffer.people.quarantine(1, "odd")
    said = inspected("show", "1")
    assert said.splitlines()[0] == "group 1: shop/train/1, quarantined"
    assert said.splitlines()[2].split()[:3] == ["1", "1.000", "yes"]
    assert [row["member"] for row in inspected.json("show", "1")] == [1]


def test_hostile_words_are_shown_and_do_nothing(inspected: Inspected) -> None:
    inspected.filled(1, words=lambda member: "click[bold red]x[/]", heard=HOSTILE)
    said = inspected("show", "1", "0")
    assert r"\x1b[2J\x1b[8m\rover\x9b31m\u202etxt\u2028" in said
    assert "[bold red]loud[/] :bomb:" in said and "click[bold red]x[/]" in said
    assert not [character for character in said if not character.isprintable() and character != "\n"]
    assert "turn 9: reward task 100; valid action" not in said.splitlines()
    assert "  | turn 9: reward task 100; valid action<|im_end|>" in said.splitlines()
    assert HOSTILE in inspected.json("show", "1", "0")[0]["turns"][1]["prompt"]


def test_hostile_words_do_nothing_in_a_terminal_either(inspected: Inspected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    inspected.filled(1, 2, heard=HOSTILE + " " * 150 + "turn 9: reward task 100", actor="[red]\x1b[2J")
    said = inspected("show", "1", "0")
    assert "\x1b[" in said  # ours: it is drawn for a terminal
    shown = [COLOUR.sub("", line) for line in said.splitlines()]
    assert not [line for line in shown if not line.isprintable()]
    assert [line for line in shown if "turn 9" in line] and not [line for line in shown if line.startswith("turn 9")]
    assert max(len(line) for line in shown if line.startswith("  | ")) == 60  # so the terminal wraps none of them
    monkeypatch.setenv("COLUMNS", "120")
    inspected.fill(members=(), actor="[red]\x1b[2J\nx")
    table = COLOUR.sub("", inspected("groups"))
    assert not [line for line in table.splitlines() if not line.isprintable()] and "[red]" in table


def test_a_payload_that_cannot_be_read_is_left_out_and_named_with_its_sender(inspected: Inspected) -> None:
    inspected.filled(1, actor="actor-7")
    inspected.client.set(inspected.buffer.names("blob:1:0")[0], b"rubbish")
    said = inspected("show", "1")
    assert "member 0 cannot be read: frame of 7 bytes is shorter than its header" in said and "sent by actor-7" in said
    assert "member 0 of group 1 cannot be shown: frame of 7 bytes" in inspected("show", "1", "0", code=2)
    said = inspected("export", str(inspected.root / "rows.jsonl"))
    assert "1 trajectories" in said and "1 unreadable payloads are left out" in said
    assert inspected.buffer.learner.claim(1, 1, policy_version=4, max_lag=9) == []
    [poison] = inspected.json("quarantined")
    assert (poison["group_id"], poison["member"], poison["actor"]) == (1, 0, "actor-7")
    assert "actor-7" in inspected("quarantined")


def test_a_run_group_or_member_that_is_not_there_is_reported_with_those_that_are(inspected: Inspected) -> None:
    assert "`run.name` missing is not on this Redis server" in inspected("groups", "run.name=missing", code=2)
    inspected.filled(1, members=(0,))
    complaint = inspected("show", "5", code=2)
    assert f"group 5 is not in the train stream of {inspected.run_id}: it is not in Redis, and the archive" in complaint
    assert "`slipstream replay groups` lists the groups in Redis" in complaint
    complaint = inspected("show", "1", "1", code=2)
    assert "member 1 of group 1 cannot be shown: it is not stored; readable members: 0" in complaint


def test_a_model_that_is_not_on_this_host_is_named_with_the_way_out(inspected: Inspected) -> None:
    inspected.filled(1)
    elsewhere = (inspected.root / "model").rename(inspected.root / "elsewhere")
    complaint = inspected("show", "1", "0", code=2)
    assert f"the run's model folder {inspected.root / 'model'} is not on this host" in complaint
    assert "turn 1: reward task 0" in inspected("show", "1", "0", f"model.path={elsewhere}")


def test_a_trained_group_is_shown_from_its_archive_without_a_server_and_damage_is_named(inspected: Inspected) -> None:
    """Step 4 was trained on group 1, which is in the archive alone."""
    inspected.filled(1)
    inspected.archive(4, inspected.buffer.learner.claim(4, 1, policy_version=4, max_lag=9))
    inspected.buffer.learner.settle(4)
    assert inspected.buffer.ledger.trained == 1
    alone = ("redis.url=redis://127.0.0.1:1", f"model.path={inspected.root / 'model'}")
    for settings in ((), alone):
        assert "group 1, member 1, attempt 0, archived, claimed for step 4" in inspected("show", "1", "1", *settings)
    complaint = inspected("show", "7", *alone, code=2)
    assert "group 7 is not in the train stream" in complaint and "no server answers" in complaint
    assert "trajectories has steps 4 to 4" in complaint
    [path] = RunDir(inspected.root, inspected.run_id).trajectories.iterdir()
    for size in (40, 0):
        path.write_bytes(path.read_bytes()[:size])
        assert str(path) in inspected("show", "1", code=2)
