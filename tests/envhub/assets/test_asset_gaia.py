"""GAIA, from files in its true form that are written here: metadata.jsonl or .parquet, and what is attached."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.envhub.catalogue import make_env
from tests.adapters.held import ALWAYS, acted
from tests.envhub import test_env_contract as contract
from tests.envhub.dataset.rows import write_rows
from tests.envhub.env_cases import Case, said

# As in 2023/validation/metadata.jsonl.
NAMES = ("task_id", "Question", "Level", "Final answer", "file_name", "Annotator Metadata")
STEPS = {"Steps": "1. add", "Number of steps": "1"}
ROWS = [
    ("c61d22de-5f6c-4958-a7f6-5e9707bd3466", "What is 600 + 634?", 1, "1234", "", STEPS),
    ("32102e3e-d12a-4209-9163-7b3a104efe5d", "What is the sum of the column?", 2, "42", "32102e3e.csv", {}),
    ("99c9cc74-fdc8-46c6-8f8d-3ce2d3bfeea3", "Which bytes?", 3, "pie, 3", "99c9cc74.mp3", {}),
]
QUESTIONS: list[dict[str, Any]] = [dict(zip(NAMES, row, strict=True)) for row in ROWS]
CHECKS = [*ALWAYS, contract.test_step_after_the_end_is_an_error]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "metadata.jsonl", QUESTIONS)
    rows = [{key: value for key, value in row.items() if key != "Annotator Metadata"} for row in QUESTIONS]
    rows = [row | {"Level": str(row["Level"])} for row in rows]  # texts, in the parquet files
    write_rows(tmp_path / "metadata.parquet", rows)
    (tmp_path / QUESTIONS[1]["file_name"]).write_text("thing,count\na,40\nb,2\n")
    (tmp_path / QUESTIONS[2]["file_name"]).write_bytes(b"\xff\xfb" + bytes(5 << 20))
    return tmp_path


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_gaia_keeps_the_contract(check: Callable[[Case], None], folder: Path) -> None:
    path = str(folder / "metadata.jsonl")
    samples = ("calculate(2 * 3)", f"read({QUESTIONS[1]['file_name']})")
    case = Case("gaia", 5, 0, {"train": path, "held_out": path}, is_spaced=False, samples=samples, share=0.05)
    if check is contract.test_reset_leaves_nothing_of_the_episode_before:
        case.options["level"] = 2  # where a file can be read
    check(case)


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.parquet"])
def test_a_question_is_scored_as_gaia_does(folder: Path, name: str) -> None:
    for answer, score in (("1234", 1.0), ("$1,234.0", 1.0), ("1235", 0.0)):
        assert acted("gaia", {"train": str(folder / name)}, 0, [f"answer({answer})"])[-1].score == score
    end = acted("gaia", {"train": str(folder / name), "level": 3}, 0, ["answer(Pie,3)"])[-1]
    assert (end.terminated, end.success) == (True, True)


def test_an_attached_file_is_named_read_and_there_for_python(folder: Path) -> None:
    name = QUESTIONS[1]["file_name"]
    program = f"python\n```python\nprint(sum(int(line.split(',')[1]) for line in list(open('{name}'))[1:]))\n```"
    actions = [f"read({name})", program, "calculate(40 + 2)", "answer(42)"]
    opening, read, printed, reckoned, end = acted("gaia", {"train": str(folder / "metadata.jsonl")}, 1, actions)
    assert said(opening) == f"What is the sum of the column?\nAttached: {name}"
    assert (said(read), said(printed), said(reckoned), end.score) == ("thing,count\na,40\nb,2", "42", "42", 1.0)


def test_what_is_no_text_is_opened_by_python_alone_and_large_files_reach_it(folder: Path) -> None:
    name = QUESTIONS[2]["file_name"]
    actions = [f"read({name})", f"python print(len(open('{name}', 'rb').read()))"]
    read, printed = acted("gaia", {"train": str(folder / "metadata.jsonl")}, 2, actions)[1:]
    assert (read.valid_action, said(read)) == (False, f"{name} is no text; open it with python")
    assert said(printed) == str((5 << 20) + 2)


def test_nothing_but_the_attached_file_can_be_read(folder: Path) -> None:
    attempts = ["read(metadata.jsonl)", "read(../metadata.jsonl)", f"read({QUESTIONS[2]['file_name']})", "read()"]
    assert not any(o.valid_action for o in acted("gaia", {"train": str(folder / "metadata.jsonl")}, 1, attempts)[1:])
    ask = "python import os; print(*sorted(os.listdir('.')))"
    listed = acted("gaia", {"train": str(folder / "metadata.jsonl")}, 1, [ask])[-1]
    assert said(listed).split() == sorted(["program.py", QUESTIONS[1]["file_name"]])


def test_an_attached_program_is_not_the_one_that_is_run(folder: Path) -> None:
    lines = folder / "program.jsonl"
    lines.write_text(json.dumps(QUESTIONS[0] | {"file_name": "program.py"}))
    (folder / "program.py").write_text("print('attached')")
    printed = acted("gaia", {"train": str(lines)}, 0, ["python print(open('program.py').read())"])[-1]
    assert said(printed) == "print('attached')"


def test_what_is_missing_is_said_with_what_to_fetch(folder: Path) -> None:
    lines = folder / "lines.jsonl"
    for row, why in (
        ({"Final answer": "?"}, "use the validation split"),
        ({"file_name": "gone.png"}, "the attached file gone.png is not in the same folder; get gaia-benchmark/GAIA"),
        ({"file_name": "../metadata.jsonl"}, "is not in the same folder"),
        ({"Final answer": None}, "lines.jsonl, line 1"),
    ):
        lines = lines.with_stem(f"{lines.stem}x")  # a file is read once in a process
        lines.write_text(json.dumps(QUESTIONS[0] | row))
        with pytest.raises(ValueError, match=why.replace("lines.jsonl", lines.name)):
            make_env("gaia", {"train": str(lines)})
    with pytest.raises(ValueError, match=r"must be set; get gaia-benchmark/GAIA from huggingface\.co"):
        make_env("gaia", {})
    alone = lines.with_stem("alone")
    alone.write_text(json.dumps(QUESTIONS[0]))
    with pytest.raises(ValueError, match="has no questions of level 2"):
        make_env("gaia", {"train": str(alone), "level": 2})
