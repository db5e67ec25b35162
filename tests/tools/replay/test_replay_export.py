"""`slipstream replay export`: rows in TRL's conversational format, with no message that the tokens do not give."""

import json

from slipstream.replay.records.ledger import STATES
from slipstream.tools.replay.run_records import RunRecords
from tests.common.text.small_tokenizer import byte_tokenizer
from tests.tools.replay.inspected import Inspected


def exported(inspected: Inspected, *options: str) -> list[dict[str, object]]:
    inspected("export", str(inspected.root / "rows.jsonl"), "--force", *options)
    return [json.loads(line) for line in (inspected.root / "rows.jsonl").read_text().splitlines()]


def test_a_row_has_the_messages_of_its_trajectory_and_what_it_earned(inspected: Inspected) -> None:
    inspected.filled(1, heard="漢\x1b[2J")
    said = inspected("export", str(inspected.root / "rows.jsonl"))
    exact = "the messages of 2 give exactly the trained tokens"
    assert said == f"{inspected.root}/rows.jsonl: 2 trajectories; {exact}\n"
    rows = [json.loads(line) for line in (inspected.root / "rows.jsonl").read_text().splitlines()]
    assert rows[1] == {
        "messages": [
            {"role": "user", "content": "find plain dress"},
            {"role": "assistant", "content": "click[1]"},
            {"role": "user", "content": "漢\x1b[2J"},
            {"role": "assistant", "content": "click[buy]"},
        ],
        "tools": None,
        "rewards": [{"turn": 0, "name": "task", "value": 0.0}, {"turn": 1, "name": "task", "value": 1.0}],
        "state_keys": ["state 0", "state 1"],
        "return": 1.0,
        "score": 1.0,
        "success": True,
        "fidelity": "tokens",
        "segments": None,
        "run_id": inspected.run_id,
        "task": "shop/train/1",
        "group_id": 1,
        "member": 1,
        "attempt": 0,
        "actor": "actor-0",
        "state": "ready",
        "step": None,
        "policy_versions": [4],
        "num_turns": 2,
        "num_tokens": rows[1]["num_tokens"],
        "num_branches": 1,
        "stop_reason": "done",
    }


def test_rows_are_chosen_by_state_step_and_reward(inspected: Inspected) -> None:
    inspected.filled(1, 2, 3)
    inspected.fill(rewards=(0.25, 0.75))
    inspected.fill(members=(0,))
    groups = inspected.buffer.learner.claim(5, 1, policy_version=4, max_lag=9)
    assert len(exported(inspected)) == 5
    assert [row["group_id"] for row in exported(inspected, "--state", "ready")] == [2, 2]
    assert [row["return"] for row in exported(inspected, "--min-reward", "0.75")] == [0.75, 1.0]
    inspected.archive(5, groups)
    rows = exported(inspected, "--steps", "4:6")
    assert [(row["step"], row["state"], row["member"]) for row in rows] == [(5, "archived", 0), (5, "archived", 1)]
    # Without a choice: what was trained on once, though Redis holds it too, and then the rest.
    rows = exported(inspected)
    expected = [(1, "archived"), (1, "archived"), (3, "leased"), (2, "ready"), (2, "ready")]
    assert [(row["group_id"], row["state"]) for row in rows] == expected
    none = ["export", str(inspected.root / "none.jsonl"), "--steps", "6:9"]
    assert "no step from 6 to 9 is archived" in inspected(*none, code=2)


def test_a_file_that_cannot_be_written_is_named_and_an_old_one_is_kept_unless_asked(inspected: Inspected) -> None:
    inspected.open(1)
    path = inspected.root / "rows.jsonl"
    assert f"nothing is written to {path}: no trajectory matches" in inspected("export", str(path), code=2)
    said = inspected("export", str(inspected.root / "nowhere" / "rows.jsonl"), code=2)
    assert "is not a directory; create it, or choose another" in said
    assert "the file name must end in .jsonl or .parquet, got rows.csv" in inspected("export", "rows.csv", code=2)
    assert not list(inspected.root.glob("rows*"))
    inspected.fill()
    path.mkdir()
    assert f"cannot write {path}" in inspected("export", str(path), "--force", code=2)
    assert list(inspected.root.glob("rows*")) == [path]
    path.rmdir()
    path.write_text("precious")
    assert "exists; choose another file, or overwrite it with --force" in inspected("export", str(path), code=2)
    assert path.read_text() == "precious"
    assert len(exported(inspected)) == 2


def test_messages_that_the_tokens_do_not_give_are_not_made_up(inspected: Inspected) -> None:
    """The run's model folder has another template than the one that the trajectories were made with."""
    inspected.filled(1)
    other = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    byte_tokenizer(other).save_pretrained(inspected.root / "model")
    said = inspected("export", str(inspected.root / "rows.jsonl"))
    assert "2 trajectories; the messages of 0 give exactly" in said and "2 have segments and no messages" in said
    row = json.loads((inspected.root / "rows.jsonl").read_text().splitlines()[0])
    assert row["messages"] is None and row["fidelity"] == "none"
    assert [segment["kind"] for segment in row["segments"]] == ["prompt", "action", "prompt", "action"]
    assert row["segments"][1]["text"] == "click[0]<|im_end|>"


def test_a_group_that_is_trained_while_it_is_exported_is_not_called_unreadable(inspected: Inspected) -> None:
    inspected.filled(1, 2)
    inspected.fill()
    assert len(inspected.buffer.learner.claim(1, 1, policy_version=4, max_lag=9)) == 1
    groups = RunRecords(inspected.config, stream="train").held(STATES)
    assert next(groups).ticket.group_id == 2
    inspected.buffer.learner.settle(1)  # group 1 leaves, and its page is read already
    assert list(groups) == []
