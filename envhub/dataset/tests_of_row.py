"""Programs that a reply contains, run in the sandbox against the tests of its row."""

import ast
import json
import secrets
from typing import Any

import msgspec

from slipstream.common.records.message import valid_text
from slipstream.envhub.isolation.file_tree import file
from slipstream.envhub.isolation.program import program_in, run_on_inputs
from slipstream.envhub.isolation.sandbox import Limits, run_in_sandbox

MAX_TESTS = 100
MAX_INPUT_BYTES = 4 << 20  # of all inputs together, which fit into the tree of one run
TOTAL_S, EACH_S = 10, 0.5  # CPU time of all tests together, and the least that each of many has; twice by the clock

# The tests and the token come by stdin and are read first, so a program that ends early has not passed.
_RUNNER = """
import json, sys
given = json.load(sys.stdin)
names = {"__name__": "program"}
exec(compile(open("program.py").read(), "program.py", "exec"), names)
exec(compile(given["tests"], "tests.py", "exec"), names)
with open("passed", "w") as passed:
    passed.write(given["token"])
"""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """An input of a program, and what it must print."""

    input: str
    output: str
    fn_name: str | None = None  # of data sets whose tests call a function
    testtype: str = ""


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The same as lists."""

    inputs: list[str]
    outputs: list[str]
    fn_name: str | None = None


def tests_in(answer: Any) -> tuple[Pair, ...] | str:
    """Return the tests of an answer: inputs with their outputs, or statements that run after the program.

    Raises ValueError if it has none, or too many.
    """
    found = _parsed(answer)
    if isinstance(found, list) and found and all(isinstance(each, str) for each in found):
        found = "\n".join(found)
    if isinstance(found, str):
        return _compiling(found)
    try:
        if isinstance(found, dict):
            columns = msgspec.convert(found, Columns)
            both, name = zip(columns.inputs, columns.outputs, strict=True), columns.fn_name
            found = [{"input": each, "output": out, "fn_name": name} for each, out in both]
        pairs = msgspec.convert(found, tuple[Pair, ...])
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(
            f"the answer {answer!r:.200} must be a list of tests with input and output, an object with lists inputs "
            f"and outputs of equal length, or Python statements: {error}"
        ) from None
    if any(pair.fn_name or pair.testtype == "functional" for pair in pairs):
        raise ValueError(
            "the answer has tests that call a function (fn_name, or testtype functional), and programs are tested by "
            "what they print; write such tests as Python statements: assert f(1) == 2"
        )
    if not 1 <= len(pairs) <= MAX_TESTS:
        raise ValueError(f"the answer must have 1 to {MAX_TESTS} tests, has {len(pairs)}; remove some")
    if any(valid_text(pair.input) != pair.input for pair in pairs):
        raise ValueError("an input of the answer has half a character; complete or remove it")
    num_bytes = sum(len(pair.input.encode()) for pair in pairs)
    if num_bytes > MAX_INPUT_BYTES:
        raise ValueError(f"the inputs of the answer must have at most {MAX_INPUT_BYTES} bytes, have {num_bytes}")
    return pairs


async def passed_share(reply: str, answer: Any) -> float:
    """Return the share of the tests that the program in the reply passes; statements pass together or not at all."""
    tests, program = tests_in(answer), program_in(reply)
    if not program:
        return 0.0
    if isinstance(tests, str):
        return float(await _passes_statements(program, tests))
    limits = Limits(wall_s=max(TOTAL_S, EACH_S * len(tests)))
    runs = await run_on_inputs(program, [pair.input for pair in tests], limits=limits)
    return sum(run.prints(pair.output) for run, pair in zip(runs, tests, strict=True)) / len(runs)


async def _passes_statements(program: str, statements: str) -> bool:
    token = secrets.token_hex(16)
    tree = {
        "program.py": file(program),
        "runner.py": file(_RUNNER),
        "given": file(json.dumps({"tests": statements, "token": token})),
    }
    command = "(rm given; exec /usr/bin/python3 -I runner.py) < given"
    finished = await run_in_sandbox(command, tree, limits=Limits(cpu_s=TOTAL_S, wall_s=2 * TOTAL_S))
    passed = (finished.tree or {}).get("passed")
    return finished.exit_code == 0 and passed is not None and passed.content == token.encode()


def _parsed(answer: Any) -> Any:
    """The value of a text that is JSON, as in APPS; any other answer as it is."""
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return answer


def _compiling(statements: str) -> str:
    try:
        parsed = ast.parse(statements, "tests")
        compile(parsed, "tests", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the answer {statements!r:.200} contains no Python statements: {error}") from None
    if not parsed.body:
        raise ValueError(f"the answer {statements!r:.200} contains no Python statements: every program would pass it")
    return statements
