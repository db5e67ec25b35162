"""`slipstream data`: what is kept, what is dropped and why, copies with errors, and what a failure leaves."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.records.message import Message
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.cli.cli import main
from slipstream.tools.data.fit_rows import read_samples
from slipstream.tools.data.near_duplicates import NearDuplicates
from slipstream.tools.data.row_noise import noisy
from tests.tools.cli.verbs import Output
from tests.tools.data.published_rows import published_rows

Row = dict[str, Any]


def talk(*texts: str, **more: Any) -> Row:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages} | more


def as_jsonl(path: Path, rows: Sequence[object]) -> Path:
    """A text among the rows is a line as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def sifted(folder: Path, *options: str) -> list[Row]:
    assert main(["data", f"{folder}/out.jsonl", f"--data={folder}/rows.jsonl", "--force", *options]) == 0
    return read(folder / "out.jsonl")


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


TAGGED = talk("a", "I go. <action>go</action>")
HI = {"messages": [{"role": "assistant", "content": "hi"}]}
HAT = "find the red hat in the shop and buy it"


@pytest.mark.parametrize(
    ("option", "rows", "reason"),
    [
        ("--successes", [talk("a", "b", success=True), talk("a", "c", success=False)], "no success"),
        ("--min-return=0.5", [talk("a", "b", **{"return": 1}), talk("a", "c", **{"return": 0.2})], "return below"),
        ("--action-format=action_tag", [TAGGED, talk("a", "go")], "a reply is not in the format action_tag"),
        ("--held-out=0", [talk("a", "b"), talk("a", "b", id="again")], "identical to another row"),
        ("--near-duplicates=0.7", [talk(HAT, "ok"), talk(HAT, "no")], "nearly identical to another row"),
        ("--held-out=0", [talk("a", "b"), talk("b")], "no assistant message to learn from"),
        ("--held-out=0", [talk("a", "b"), HI], "the first message is the assistant's"),
        ("--held-out=0", [talk("a", "b"), {"messages": None, "fidelity": "none"}], "without messages"),
    ],
)
def test_the_second_row_is_dropped_with_its_reason(
    option: str, rows: list[Row], reason: str, tmp_path: Path, printed: Output
) -> None:
    path = as_jsonl(tmp_path / "rows.jsonl", rows)
    assert f"\ndropped: 1 {reason}" in printed("data", f"{tmp_path}/out.jsonl", f"--data={path}", option)
    (kept,) = read(tmp_path / "out.jsonl")
    assert (kept["source"], kept["messages"]) == ("rows.jsonl:1", rows[0]["messages"])
    assert not (tmp_path / "out.quarantine.jsonl").exists()


def test_rows_that_cannot_be_read_are_quarantined_with_their_line(tmp_path: Path, printed: Output) -> None:
    pair = {"chosen": talk("a", "b")["messages"], "rejected": talk("a", "c")["messages"]}
    bad = ['{"messages": [', {"messages": [{"role": "robot"}]}, pair, talk("a", "d")]  # the last has no return
    rows = [talk("a", "b", **{"return": 1}), *bad]
    path = as_jsonl(tmp_path / "rows.jsonl", rows)
    said = printed("data", f"{tmp_path}/out.jsonl", f"--data={path}", "--min-return=0")
    assert "1 of 5 rows are kept, 0 dropped, 4 cannot be read; " in said and len(read(tmp_path / "out.jsonl")) == 1
    assert "\ncannot be read, see out.quarantine.jsonl: 1 is not JSON" in said
    quarantined = read(tmp_path / "out.quarantine.jsonl")
    assert [row["line"] for row in quarantined] == [2, 3, 4, 5]
    assert quarantined[0]["row"].startswith('{"messages": [') and "is not JSON" in quarantined[0]["why"]
    assert "robot" in quarantined[1]["why"] and "a pair" in quarantined[2]["why"]
    assert "`return` must be a number" in quarantined[3]["why"]


def test_a_number_that_json_lacks_is_quarantined_and_hides_no_later_row(tmp_path: Path) -> None:
    rows = ['{"return": NaN, ' + json.dumps(talk("a", "b"))[1:], talk("a", "b", **{"return": 1}), talk("a", "c")]
    as_jsonl(tmp_path / "rows.jsonl", rows)
    assert [row["source"] for row in sifted(tmp_path)] == ["rows.jsonl:2", "rows.jsonl:3"]
    (bad,) = read(tmp_path / "out.quarantine.jsonl")
    assert bad["why"] == "`return` must be a value of JSON, got nan"


def test_a_task_that_is_null_is_that_of_the_prompt(tmp_path: Path) -> None:
    as_jsonl(tmp_path / "rows.jsonl", [talk("a", "b", task=None), talk("c", "d", task=None), talk("c", "e")])
    first, *others = (row["task"] for row in sifted(tmp_path))
    assert others[0] == others[1] != first and "None" not in (first, *others)


def test_all_rows_of_a_prompt_are_held_out_or_none_and_sft_reads_what_was_written(tmp_path: Path) -> None:
    rows = [talk(f"task {task}", f"{task} {member}") for task in range(60) for member in range(3)]
    as_jsonl(tmp_path / "rows.jsonl", rows)
    kept, held_out = sifted(tmp_path, "--held-out=0.3"), read(tmp_path / "out.held-out.jsonl")
    tasks, apart = {row["task"] for row in kept}, {row["task"] for row in held_out}
    assert len(kept) + len(held_out) == 180 and len(tasks) + len(apart) == 60
    assert 5 <= len(apart) <= 35 and not tasks & apart
    taught, _, _ = read_samples(FitOptions(data=str(tmp_path / "out.jsonl"), held_out=0), goal="sft")
    assert len(taught) == len(kept)


def test_published_rows_keep_their_marks_and_lose_their_repeats(tmp_path: Path) -> None:
    lines = [*published_rows(150, shape="instruct"), *published_rows(250, shape="flan")]
    path = as_jsonl(tmp_path / "rows.jsonl", lines)
    kept = sifted(tmp_path, "--near-duplicates=0.8", "--held-out=0.1")
    assert any("loss" in message for row in kept for message in row["messages"])
    repeats = sum(line.startswith("{") for line in path.read_text().splitlines()) - len(kept)
    assert repeats > len(read(tmp_path / "out.held-out.jsonl"))  # the repeats and near-duplicates among them


def test_nothing_is_left_where_nothing_is_kept_or_read(tmp_path: Path, refused: Output) -> None:
    rows = as_jsonl(tmp_path / "rows.jsonl", [talk("a", "b", success=False), "{"])
    (tmp_path / "bad.parquet").write_text("PAR1")
    (tmp_path / "out.jsonl").write_text("precious")

    def complaint(*options: str, force: str = "--force") -> str:
        return refused("data", str(tmp_path / "out.jsonl"), force, *options)

    good = f"--data={rows}"
    assert "1 no success, 1 cannot be read" in complaint(good, "--successes")
    all_held_out = as_jsonl(tmp_path / "few.jsonl", [talk("a", f"b{number}", task=number) for number in (1, 2)])
    assert "2 held out by --held-out, 0 cannot be read" in complaint(f"--data={all_held_out}", "--held-out=0.999")
    all_held_out.unlink()
    for name in ("", "\udcff.jsonl"):
        assert f"{name or '.'!r}".strip("'") in refused("data", name, good)
    assert "'\\udcff.jsonl' is not UTF-8" in complaint("--data=\udcff.jsonl")
    assert "bad.parquet cannot be read" in complaint(f"--data={rows},{tmp_path}/bad.parquet")
    assert "exists; choose another file" in complaint(good, force="run.seed=0")
    assert "nowhere.jsonl is not a file" in complaint("--data=nowhere.jsonl")
    assert "`--data` must name one file of conversations or several" in complaint()
    assert "`--near-duplicates` must be in [0, 1]" in complaint(good, "--near-duplicates=2")
    assert "did you mean react?" in complaint(good, "--action-format=reakt")
    assert main(["data", str(tmp_path / "out.parquet"), good]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.parquet", "out.jsonl", "rows.jsonl"]
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def test_texts_are_near_duplicates_where_they_share_most_runs_of_words() -> None:
    words = [f"w{index}" for index in range(400)]

    def found(similarity: float, changed: int) -> bool:
        near = NearDuplicates(similarity=similarity)
        others = [f"x{index}" for index in range(changed)]
        assert near.add([Message("user", " ".join(words))])
        other = [Message("system", "other rules"), Message("user", " ".join(words[: 400 - changed] + others))]
        return not near.add(other)

    # A text with n of 400 words replaced shares (396 - n) of (396 + n) runs: 0.95 for 10, 0.6 for 100, 0.33 for 200.
    assert found(0.8, 0) and found(0.8, 10)
    assert not found(0.8, 100) and not found(0.8, 200) and not found(0.8, 400)
    assert found(0.5, 100)


def test_short_texts_are_compared_as_a_whole() -> None:
    near = NearDuplicates(similarity=0.8)
    assert all(near.add([Message("user", text)]) for text in ("yes", "no", ""))
    assert not any(near.add([Message("user", text)]) for text in ("yes", ""))


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
