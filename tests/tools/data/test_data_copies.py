"""`slipstream data --noise`: copies of rows with typing errors and the same actions."""

import random
from pathlib import Path

from slipstream.tools.data.row_noise import noisy
from tests.tools.cli.verbs import Output
from tests.tools.data.test_data import Row, as_jsonl, read, talk


def replies(row: Row) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def test_noise_swaps_inner_letters_of_observations_and_of_no_word_that_the_assistant_writes() -> None:
    observed = "You are standing in the kitchen near a wooden cupboard, 1234, B07XYZ1"
    messages = talk("Find the wooden spoon please", "open cupboard", observed, "look around", observed)["messages"]
    messages = [{**message, "role": "system" if at == 0 else message["role"]} for at, message in enumerate(messages)]
    copy = noisy(messages, share=1.0, dice=random.Random(3))
    assert copy is not None and copy == noisy(messages, share=1.0, dice=random.Random(3))
    assert [new == old for new, old in zip(copy, messages, strict=True)] == [True, True, False, True, False]
    for new, old in zip(copy[2]["content"].split(), observed.split(), strict=True):
        assert sorted(new) == sorted(old) and (new[0], new[-1]) == (old[0], old[-1])
    assert "cupboard" in copy[2]["content"] and "1234, B07XYZ1" in copy[2]["content"]
    assert "standing" not in copy[2]["content"] and copy[2]["content"] != copy[4]["content"]
    assert noisy(messages, share=0.0, dice=random.Random(3)) is None
    some = [noisy(messages, share=0.2, dice=random.Random(seed)) for seed in range(200)]
    pairs = [zip(copy[2]["content"].split(), observed.split(), strict=True) for copy in some if copy]
    changed = sum(new != old for words in pairs for new, old in words)
    assert 120 < changed < 200, "four words can change, each with probability 0.2 in 200 copies"


def test_noise_adds_copies_of_the_kept_rows_and_of_none_that_is_held_out(tmp_path: Path, printed: Output) -> None:
    rows = [talk(f"task {task}", f"go {task}", "The kitchen is closed today", "wait") for task in range(40)]
    as_jsonl(tmp_path / "rows.jsonl", [*rows, talk("no observation", "done")])
    command = ["data", f"{tmp_path}/out.jsonl", f"--data={tmp_path}/rows.jsonl", "--noise=0.5", "--held-out=0.3"]
    said = printed(*command)
    kept, apart = read(tmp_path / "out.jsonl"), read(tmp_path / "out.held-out.jsonl")
    copies = [row for row in kept if "perturbed" in row]
    assert apart and not any("perturbed" in row for row in apart)
    for at, row in enumerate(kept):
        if "perturbed" in row:
            assert row["source"] == kept[at - 1]["source"] and row["task"] == kept[at - 1]["task"]
            assert replies(row) == replies(kept[at - 1]) and row["messages"] != kept[at - 1]["messages"]
    assert f"and {len(copies)} copies with errors" in said
    printed(*command, "--force", "run.seed=1")
    assert read(tmp_path / "out.jsonl") != kept
