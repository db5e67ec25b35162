"""BFCL's questions and answers, in files of their true form that are written here."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.actors.host.rehearse import check_template
from slipstream.common.config.config import load_config
from slipstream.envhub.catalogue import make_env
from tests.adapters.held import ALWAYS, acted, keeps
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case

KINDS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "price": {"type": "float"},
    "is_new": {"type": "boolean"},
    "rooms": {"type": "array", "items": {"type": "string"}},
    "size": {"type": "tuple", "items": {"type": "float"}},
    "guest": {"type": "dict"},
    "beds": {"type": "array", "items": {"type": "dict"}},
}


def function(name: str, *required: str) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "dict", "properties": KINDS, "required": list(required)}}


def written(folder: Path, *asked: list[dict[str, Any]], functions: list[dict[str, Any]], name: str = "asked") -> str:
    """Write a file of questions, with the calls that each is answered by, and return its path."""
    (folder / "possible_answer").mkdir(exist_ok=True)
    path = folder / f"BFCL_v4_{name}.json"
    said = [[[{"role": "user", "content": f"Book {n}."}]] for n in range(len(asked))]
    rows = [{"id": f"{name}_{n}", "question": words, "function": functions} for n, words in enumerate(said)]
    truths = [{"id": f"{name}_{n}", "ground_truth": calls} for n, calls in enumerate(asked)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path.parent / "possible_answer" / path.name).write_text("".join(json.dumps(row) + "\n" for row in truths))
    return str(path)


def said(*calls: tuple[str, dict[str, Any]]) -> str:
    return "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': what})}</tool_call>\n" for name, what in calls)


def scored(path: str, *replies: str) -> list[float]:
    """The score of each reply to the first question."""
    return [acted("bfcl", {"train": path}, 0, [reply])[-1].score for reply in replies]


@pytest.mark.parametrize("check", [*ALWAYS, contract.test_the_expert_solves_its_tasks], ids=lambda each: each.__name__)
def test_bfcl_keeps_the_contract(check: Callable[..., None], tmp_path: Path) -> None:
    answers = [[{"book": {"city": ["", "Bern"], "days": [n], "price": ["", 2.5]}}] * (1 + n % 2) for n in range(8)]
    path = written(tmp_path, *answers, functions=[function("book", "city")])
    keeps(check, Case("bfcl", 10, 0, {"train": path, "held_out": path}, is_spaced=False))


@pytest.mark.parametrize(
    ("argument", "options", "right", "wrong"),
    [
        ("city", ["New York, NY", "Jim's"], ["new york NY", "New-York NY", 'jim"s'], ["New York", ["New York, NY"], 1]),
        ("days", [5], [5], [5.0, "5", True, 6]),
        ("days", [5.0], [5, 5.0], ["5"]),  # an option of another type than the declared one
        ("days", ["count"], ["count"], ["Count", 5]),  # a variable is compared as it is
        ("price", [2.0], [2, 2.0], [2.5, "2", 10**400]),
        ("is_new", [True], [True], [1, "true", False]),
        ("rooms", [["A 1", "b"], ["c"]], [["a1", "B"], ["C"]], [["b", "a1"], [], "c", ["c", 1]]),
        ("rooms", [["c"], ""], [["c"], []], [["d"]]),
        ("rooms", [["c"], 3], [["c"]], [["d"], 3]),  # an option that is no list matches nothing
        ("size", [[1.0, 2.0]], [[1.0, 2.0]], [[1, 2.0], [2.0, 1.0]]),
        ("guest", [{"name": ["Al", "Bo"], "age": [7, ""]}], [{"name": "al"}, {"name": "Bo", "age": 7}], [{"age": 7}]),
        ("guest", [{"name": ["Al"]}], [{"name": "Al"}], [{"name": "Al", "x": 1}, "Al", {"name": "Bo"}]),
        ("beds", [[{"n": [1]}, {"n": [2]}]], [[{"n": 1}, {"n": 2}]], [[{"n": 2}, {"n": 1}], [{"n": 1}], {"n": 1}]),
    ],
)
def test_an_argument_is_of_its_type_and_an_admissible_value(
    argument: str, options: list[Any], right: list[Any], wrong: list[Any], tmp_path: Path
) -> None:
    path = written(tmp_path, [{"book": {argument: options}}], functions=[function("book")])
    assert scored(path, *(said(("book", {argument: each})) for each in right)) == [1.0] * len(right)
    assert scored(path, *(said(("book", {argument: each})) for each in wrong)) == [0.0] * len(wrong)


def test_what_may_be_left_out_may_and_nothing_is_added(tmp_path: Path) -> None:
    truth = {"book": {"city": ["Bern"], "days": ["", 3], "price": ["", 1.5]}}
    path = written(tmp_path, [truth], functions=[function("other"), function("book", "city", "days")])
    least = {"city": "Bern", "days": 3}
    assert scored(path, said(("book", least)), "I book it: " + said(("book", least | {"price": 1.5}))) == [1, 1]
    refused: list[tuple[str, dict[str, Any]]]
    refused = [("book", {"city": "Bern"}), ("book", least | {"is_new": True}), ("other", least), ("book", {"days": 3})]
    assert scored(path, *map(said, refused), said(("book", least), ("book", least)), "Bern", "<tool_call>{") == [0] * 7


def test_several_calls_come_in_any_order_and_each_counts_once(tmp_path: Path) -> None:
    bern, rome = ("book", {"city": "Bern"}), ("book", {"city": "Rome"})
    calls = [{"book": {"city": ["Bern"]}}, {"book": {"city": ["Rome", "Roma"]}}]
    path = written(tmp_path, calls, functions=[function("book")])
    assert scored(path, said(bern, rome), said(rome, bern)) == [1, 1]
    assert scored(path, said(bern), said(bern, bern), said(bern, rome, rome)) == [0, 0, 0]


def test_what_is_not_scored_is_named(tmp_path: Path) -> None:
    right = [{"book": {"city": ["Bern"]}}]
    java = {"name": "book", "parameters": {"type": "dict", "properties": {"x": {"type": "HashMap"}}, "required": []}}
    with pytest.raises(ValueError, match="asked_0: 'HashMap' is not known; only calls in Python are scored"):
        make_env("bfcl", {"train": written(tmp_path, right, functions=[java])})
    with pytest.raises(ValueError, match="unnamed_0: 'name' is not known"):
        make_env("bfcl", {"train": written(tmp_path, right, functions=[{"parameters": {}}], name="unnamed")})
    path = written(tmp_path, right, functions=[function("book")], name="bare")
    (tmp_path / "possible_answer" / "BFCL_v4_bare.json").unlink()
    with pytest.raises(ValueError, match=r"`env.options.held_out`: .*possible_answer/BFCL_v4_bare.json does not exist"):
        make_env("bfcl", {"held_out": path})


def test_a_prompt_is_checked_where_only_held_out_tasks_exist(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, [{"book": {"city": ["Bern"]}}], functions=[function("book")])
    config = load_config(None, ["env.name=bfcl", f"env.options.held_out={path}"])
    with caplog.at_level(logging.WARNING):
        check_template(config, byte_tokenizer(CHATML))
    assert caplog.text == ""
