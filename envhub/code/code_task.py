"""Draws the programs to write: operations on a list of whole numbers, in English and in Python."""

import random
from dataclasses import dataclass

NUM_EXAMPLES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation on the list `v`: in words, and as a Python expression."""

    text: str
    python: str  # the new list; in the last operation, the arguments of print


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    text: str
    program: str  # a correct one
    examples: tuple[tuple[str, str], ...]  # input, output: part of the text
    tests: tuple[tuple[str, str], ...]  # input, output: they judge the program and are never shown


# The text, the expression, and the range of the number `{k}` in both, if they have one.
OPERATIONS: tuple[tuple[str, str, tuple[int, int] | None], ...] = (
    ("Keep the even numbers.", "[x for x in v if x % 2 == 0]", None),
    ("Keep the numbers above {k}.", "[x for x in v if x > {k}]", (-9, 15)),
    ("Drop the multiples of {k}.", "[x for x in v if x % {k}]", (3, 7)),
    ("Add {k} to each number.", "[x + {k} for x in v]", (2, 30)),
    ("Multiply each number by {k}.", "[x * {k} for x in v]", (2, 9)),
    ("Square each number.", "[x * x for x in v]", None),
    ("Sort the numbers, the largest first.", "sorted(v, reverse=True)", None),
    ("Reverse the order of the numbers.", "v[::-1]", None),
    ("Where a number occurs more than once, keep only the first.", "list(dict.fromkeys(v))", None),
    ("Move the first {k} to the end.", "v[{k}:] + v[:{k}]", (1, 3)),
    (
        "Replace each number by the sum of all numbers up to it, itself included.",
        "[sum(v[:i + 1]) for i in range(len(v))]",
        None,
    ),
)
PRINTS: tuple[tuple[str, str, tuple[int, int] | None], ...] = (
    ("Print the numbers, separated by spaces.", "*v", None),
    ("Print their sum.", "sum(v)", None),
    ("Print how many numbers there are.", "len(v)", None),
    ("Print the largest number, or {k} if there is none.", "max(v, default={k})", (100, 999)),
)


def draw_problem(rng: random.Random, *, num_steps: int, num_tests: int) -> Problem:
    """Return a problem of `num_steps` operations and a last one that prints."""
    operations = [_draw(rng, *form) for form in rng.sample(OPERATIONS, num_steps)]
    operations.append(_draw(rng, *rng.choice(PRINTS)))
    cases: list[tuple[str, str]] = []
    while len(cases) < num_tests + NUM_EXAMPLES:
        numbers = [rng.randint(-20, 40) for _ in range(rng.randrange(0 if len(cases) > NUM_EXAMPLES else 4, 10))]
        case = (" ".join(map(str, numbers)) + "\n", _output(operations, numbers))
        if case not in cases:
            cases.append(case)
    steps = "".join(f"v = {operation.python}\n" for operation in operations[:-1])
    return Problem(
        text=_text(operations, cases[:NUM_EXAMPLES]),
        program=f"v = [int(word) for word in input().split()]\n{steps}print({operations[-1].python})\n",
        examples=tuple(cases[:NUM_EXAMPLES]),
        tests=tuple(cases[NUM_EXAMPLES:]),
    )


def _draw(rng: random.Random, text: str, python: str, bounds: tuple[int, int] | None) -> Operation:
    k = rng.randint(*bounds) if bounds else 0
    return Operation(text=text.format(k=k), python=python.format(k=k))


def _text(operations: list[Operation], examples: list[tuple[str, str]]) -> str:
    numbered = " ".join(f"{number}. {operation.text}" for number, operation in enumerate(operations, 1))
    shown = "\n".join(f"Input: {given.strip()}\nOutput: {output}" for given, output in examples)
    return f"Read one line of whole numbers. It may be empty. {numbered}\n{shown}"


def _output(operations: list[Operation], numbers: list[int]) -> str:
    """Return what the program prints. Only expressions of the tables above are evaluated."""
    for operation in operations[:-1]:
        numbers = eval(operation.python, {"v": numbers})
    return " ".join(map(str, eval(f"[{operations[-1].python}]", {"v": numbers})))
