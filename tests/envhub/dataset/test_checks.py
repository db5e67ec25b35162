"""The checks of data sets: what they accept, wrong answers of rows, and hostile replies."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.envhub.catalogue import make_env
from slipstream.envhub.dataset import check_client
from slipstream.envhub.dataset.checks import CHECKS, MAX_REPLY_CHARS, last_number
from slipstream.envhub.env import EnvError
from tests.adapters.held import acted
from tests.envhub.dataset.test_dataset_env import expert_of, on_rows
from tests.waiting import wait_until

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
DOUBLE = [{"input": "2\n", "output": "4"}, {"input": "-3\n", "output": "-6"}]
ASSERTS = ["assert double(2) == 4", "assert double(-3) == -6"]
PROGRAM = "```python\nprint(2 * int(input()))\n```"
FUNCTION = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```"
BOUND_S = 45.0  # far above the limits of a comparison, for a busy machine


def scored(check: str, reply: str, answer: Any) -> float:
    return asyncio.run(CHECKS[check].score(reply, answer))


@pytest.mark.parametrize(
    ("check", "reply", "answer", "expected"),
    [
        ("exact", "The  Eiffel tower.", "Eiffel Tower", 1),
        ("exact", "Eiffel", "Eiffel Tower", 0),
        ("exact", " + ", "+", 1),
        ("exact", "Kyiv", ["Kiev", "Kyiv"], 1),
        ("exact", "False", False, 1),
        ("f1", "the tall Eiffel tower", "Eiffel Tower", 0.8),  # 2 of 3 words are right, and 2 of 2 are found
        ("f1", "nothing", "Eiffel Tower", 0),
        ("f1", "no no no", "no", 0.5),
        ("number", "so 3 apples, and 1,234 in all.", "The sum\n#### 1234", 1),
        ("number", "10-20", 20, 1),
        ("number", "it is -5", -5, 1),
        ("number", "x = \N{MINUS SIGN}5", -5, 1),
        ("number", "x = \N{MINUS SIGN}5", 5, 0),
        ("number", "7", "\N{MINUS SIGN}7", 0),
        ("number", "a loss of -$1,234.50", -1234.5, 1),
        ("number", "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH DIGIT FIVE}", -5, 1),
        ("number", "3/4", 0.75, 1),
        ("number", "1/0", 0.75, 0),
        ("number", ".5", "0.50", 1),
        ("number", "1e-3", 0.001, 1),
        ("number", "none", 0, 0),
        ("number", "2", True, ValueError),
        ("number", "2", "two", ValueError),
        ("choice", "A looks well, but the answer is (B).", "B", 1),
        ("choice", "B or perhaps C", "B", 0),
        ("choice", "I'd say D's right", "D", 0),
        ("choice", "B", "beta", ValueError),
        ("regex", "The year was 1969.", r"\b19\d\d\b", 1),
        ("regex", "x", "(", ValueError),
        ("json", '```json\n{"b": [1, 2.0], "a": true}\n```', {"a": True, "b": [1, 2]}, 1),
        ("json", '{"a": 1}', {"a": True}, 0),
        ("json", "[1, 2]", "[1, 2]", 1),
        ("json", "[" * 100_000, "[1]", 0),
        ("json", "no", "{", ValueError),
        ("json", "no", "[" * 100_000, ValueError),
        ("math", r"So it is \boxed{\frac{2}{4}}.", "1/2", 1),
        ("math", "so $(x+1)^2$", "x^2+2x+1", 1),
        ("math", r"\boxed{\{2, 1\}}", r"$\{1,2\}$", 1),
        ("math", "x = 5, so the answer is 5", 5, 1),
        ("math", r"\boxed{0.3}", r"\frac{1}{3}", 0),
        ("math", "I cannot tell.", "7", 0),
        ("math", r"\boxed{8}", ["7", "8"], 1),
        ("regex", "1969", [r"\d{5}", r"\d{4}"], 1),
        ("schema", '```json\n{"name": "Ada", "age": 36}\n```', PERSON, 1),
        ("schema", '{"name": "Ada"}', json.dumps(PERSON), 1),
        ("schema", '{"name": "ada"}', PERSON, 0),
        ("schema", "Ada", PERSON, 0),
        ("code", PROGRAM, DOUBLE, 1),
        ("code", PROGRAM, {"inputs": ["2", "3"], "outputs": ["4", "7"]}, 0.5),
        ("code", PROGRAM, json.dumps(DOUBLE), 1),
        ("code", "print(4)", DOUBLE, 0.5),
        ("code", "", DOUBLE, 0),
        ("code", FUNCTION, ASSERTS, 1),
        ("code", FUNCTION, "\n".join(ASSERTS), 1),
        ("code", FUNCTION.replace("2 * x", "x * x"), ASSERTS, 0),
    ],
)
def test_a_check_scores_as_stated(check: str, reply: str, answer: Any, expected: float | type[Exception]) -> None:
    if isinstance(expected, type):
        with pytest.raises(expected, match="the answer"):
            scored(check, reply, answer)
    else:
        assert scored(check, reply, answer) == pytest.approx(expected)
    assert [last_number(text) for text in ("", "no", "1/0", "-", "..")] == [None] * 5


SAME = [
    (72.0, "72"), ("-5", "\u22125"), ("-5", "(\u20135)."), ("1234", "1,234"), ("1,234", "1234.0"), ("1,2", "1, 2"),
    ("50%", "50 %"), ("5 km", "5.0km."), ("1/2", "0.5"), ("3/4", "3 / 4"), ("1/0", "1/0"), ("$5", "$5.00"),
    ("72", "$72$"), ("72", "**72**!"), ("72", "#### 72"), ("8:05", "08:05"), ("2025-01-02", "2025-1-2"),
    ("01/02/2025", "1/2/2025"), ("1.10", "1.1"), ("1e3", "1000"), ("1e-3", "0.001"), (1e16, "1" + "0" * 16),
    (1e-5, "0.00001"), ("033", "33"), ("+5", "5"), (".5", "0.5"), ("-0", "0"), ("10-20", "10 \u2013 20"),
    ("C++", "c++."), ("U.S.", "US"), ("don't", "Dont"), ("Spider-Man", "spider man"), ("COVID-19", "covid 19"),
    ("Kyiv", "_Kyiv_"), ("A", "A."), ("\u5317\u4eac", "\u5317\u4eac\u3002"), ("$5 or $6", "$5.0 or $6.0"),
    (True, "true"), ("-x", "\u2212x"), ("- x", "x"), ("-5", "\uff0d5"), ("5", "\uff08\uff15\uff09\uff01"),
    ("caf\u00e9", "cafe\u0301"), ("1" * 40, "1" * 40 + ".0"),
]  # fmt: skip
DIFFERENT = [
    (-5, "5"), ("3.14", "314"), ("20:25", "2025"), ("20:25", "20.25"), ("12", "1,2"), ("3,14", "314"), ("50%", "50"),
    ("5 km", "5 m"), ("5 km", "-5 km"), ("1/2", "12"), ("1/0", "10"), ("$5", "5"), ("$5", "-$5"), ("8:05", "805"),
    ("2025-01-02", "20250102"), ("1.2.10", "1.2.1"), ("192.168.1.10", "192.168.1.1"), ("v1.10", "v1.1"),
    ("1e-3", "1e3"), (".5", "5"), ("10-20", "1020"), ("2^10", "210"), ("5'11\"", "511"), ("C++", "C"), ("C#", "C"),
    ("x-1", "x+1"), ("x - 1", "x 1"), ("3 * 4", "3 4"), ("a<b", "a>b"), ("\u00b15", "5"), ("snake_case", "snakecase"),
    ("", "+"), ("!", "?"), ("1" * 40, "1" * 39 + "2"), ("-x", "x"), ("-\u221e", "\u221e"),
    (r"-\frac{1}{2}", r"\frac{1}{2}"), ("-\u221a2", "\u221a2"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), [*SAME, *DIFFERENT], ids=str)
def test_numbers_compare_as_numbers_and_only_punctuation_of_sentences_is_dropped(one: Any, other: str) -> None:
    is_same = float((one, other) in SAME)
    assert scored("exact", other, one) == scored("exact", str(one), other) == is_same
    assert (scored("f1", other, one) == 1) == is_same


@pytest.mark.parametrize(
    ("check", "answer", "message"),
    [
        ("math", "   ", "the answer '   ' contains no mathematics"),
        ("regex", "(", "the answer '(' is not a regular expression"),
        ("schema", "{", "the answer '{' is not a JSON schema"),
        ("schema", {"type": "number!"}, "is not a JSON schema: 'number!' is not valid under any of the given schemas"),
        ("schema", [PERSON, 3], "the answer 3 is not a JSON schema: it must be an object"),
        ("code", [], "must contain an answer"),
        ("code", "[]", "the answer must have 1 to 100 tests, has 0"),
        ("code", {"inputs": ["1"], "outputs": []}, "lists inputs and outputs of equal length"),
        ("code", [{"input": "1"}], "must be a list of tests with input and output"),
        ("code", {"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}, "the answer has tests that call a function"),
        ("code", [{"input": "1", "output": "2", "testtype": "functional"}], "write such tests as Python statements"),
        ("code", "def", "the answer 'def' contains no Python statements"),
        ("code", '""', "the answer '' contains no Python statements: every program would pass it"),
        ("code", "# assert f(1) == 2", "contains no Python statements: every program would pass it"),
        ("code", r'[{"input": "\ud800", "output": ""}]', "an input of the answer has half a character"),
        ("code", DOUBLE * 51, "the answer must have 1 to 100 tests, has 102; remove some"),
    ],
)
def test_a_row_whose_answer_none_could_match_is_refused(check: str, answer: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 1: ") as error:
        make_env("dataset", on_rows(tmp_path, [{"prompt": "x", "answer": answer}], check=check))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("check", "reply", "answer"),
    [
        ("math", r"\boxed{9^{9^{9^{9^{9}}}}}", "5"),
        pytest.param("math", r"\boxed{" + "(" * 5_000 + "1" + ")" * 5_000 + "}", "5", marks=pytest.mark.long),
        ("math", "$" + "{" * MAX_REPLY_CHARS, "5"),
        pytest.param("math", r"\boxed{" + r"\frac{1}{" * 500 + "1" + "}" * 500 + "}", "5", marks=pytest.mark.long),
        ("math", "$1$ " * 5_000, "5"),
        ("math", "\ud800\0", "5"),
        ("regex", "a" * 40 + "!", "^(a|aa)+$"),
        ("schema", json.dumps("a" * 40 + "!"), {"pattern": "^(a|aa)+$"}),
        ("schema", "[" * MAX_REPLY_CHARS, {"type": "number"}),
        ("schema", "[" * 900 + "]" * 900, {"$ref": "#/$defs/x", "$defs": {"x": {"contains": {"$ref": "#/$defs/x"}}}}),
        ("json", "```" + "\n" * MAX_REPLY_CHARS, {"a": 1}),
        ("number", "1" * MAX_REPLY_CHARS, 5),
        ("number", "1,111" * 5_000, 5),
        ("exact", "1,111" * 5_000, 5),
        ("exact", "1" * MAX_REPLY_CHARS, 5),
        ("exact", "$1/" * 6_000, 5),
        ("code", "import time\ntime.sleep(99)", DOUBLE[:1]),
        ("code", "print('4' * 100_000_000)", DOUBLE),
        ("code", "import os\nwhile True:\n    os.fork()", ASSERTS),
        ("code", "import sys\nsys.exit(0)", ASSERTS),
        ("code", "import os\nopen('passed', 'w').write('x')\nos._exit(0)", ASSERTS),
        ("code", "```python\n" + "```" * 6_000, DOUBLE),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_hostile_reply_is_wrong_and_never_hangs(check: str, reply: str, answer: Any) -> None:
    started = time.monotonic()
    assert scored(check, reply, answer) == 0
    assert time.monotonic() - started < BOUND_S


def test_a_catastrophic_answer_pattern_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.envhub.dataset.dataset.MAX_MATCH_S", 0.2)
    options = on_rows(tmp_path, [{"prompt": "x", "answer": "y"}], answer_pattern="^((?:a|aa)+)$")
    started = time.monotonic()
    assert acted("dataset", options, 0, ["a" * 60 + "!"])[1].score == 0
    assert time.monotonic() - started < BOUND_S


async def test_comparisons_run_side_by_side_and_a_killed_server_is_replaced() -> None:
    score = CHECKS["math"].score
    right = [score(rf"\boxed{{{each}}}", each) for each in range(3)]
    assert await asyncio.gather(score(r"\boxed{9^{9^{9^{9}}}}", "5"), *right) == [0, 1, 1, 1]
    assert check_client._server is not None
    check_client._server[0].send_signal(signal.SIGKILL)
    check_client._server[0].wait()
    assert await score("7", "7") == 1


def test_the_answer_of_a_row_that_was_not_tried_fails_the_attempt_and_not_the_policy(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}?", "answer": number} for number in range(20)] + [{"prompt": "x", "answer": " "}]
    with pytest.raises(EnvError, match=r"`env.options.check` cannot be used for a row: .* contains no mathematics"):
        acted("dataset", on_rows(tmp_path, rows, check="math"), 20, ["5"])


def test_the_server_ends_with_its_parent() -> None:
    program = (
        "import os; from slipstream.envhub.dataset import check_client as c; assert c.ask('math', '1', 1) == 1; "
        "print(c._server[0].pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)), "the end of the server")


def test_the_expert_replies_rightly_or_needs_a_solution(tmp_path: Path) -> None:
    half = r"\frac{1}{2}"
    assert scored("math", expert_of(on_rows(tmp_path, [{"prompt": "x", "answer": half}], check="math")), half) == 1
    for check, answer in (("schema", PERSON), ("code", ASSERTS), ("regex", r"\d")):
        (folder := tmp_path / check).mkdir()  # what is read of a path is cached
        with pytest.raises(NotImplementedError, match="name a column with whole replies"):
            expert_of(on_rows(folder, [{"prompt": "x", "answer": answer}], check=check))
