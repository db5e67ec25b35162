"""Draws the programs to write: operations on a list of whole numbers, as English, as Python, and as functions."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUM_EXAMPLES = 2

Numbers = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation on the list `v`: in words, as a line of Python, and as a function with the same result."""

    text: str
    python: str
    run: Callable[[Numbers], Numbers]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    text: str
    program: str  # a correct one
    examples: tuple[tuple[str, str], ...]  # input, output: part of the text
    tests: tuple[tuple[str, str], ...]  # input, output: they judge the program and are never shown


def draw_problem(rng: random.Random, *, num_steps: int, num_tests: int) -> Problem:
    """Return a problem of `num_steps` operations and a last one that prints."""
    operations = [draw(rng) for draw in rng.sample(OPERATIONS, num_steps)]
    operations.append(rng.choice(PRINTS)(rng))
    cases: list[tuple[str, str]] = []
    while len(cases) < num_tests + NUM_EXAMPLES:
        numbers = [rng.randint(-20, 40) for _ in range(rng.randrange(0 if len(cases) > NUM_EXAMPLES else 4, 10))]
        case = (" ".join(map(str, numbers)) + "\n", _output(operations, numbers))
        if case not in cases:
            cases.append(case)
    lines = ["v = [int(word) for word in input().split()]", *(operation.python for operation in operations)]
    return Problem(
        text=_text(operations, cases[:NUM_EXAMPLES]),
        program="\n".join(lines) + "\n",
        examples=tuple(cases[:NUM_EXAMPLES]),
        tests=tuple(cases[NUM_EXAMPLES:]),
    )


def _text(operations: Sequence[Operation], examples: Sequence[tuple[str, str]]) -> str:
    numbered = " ".join(f"{number}. {operation.text}" for number, operation in enumerate(operations, 1))
    shown = "\n".join(f"Input: {given.strip()}\nOutput: {output}" for given, output in examples)
    return f"Read one line of whole numbers. It may be empty. {numbered}\n{shown}"


def _output(operations: Sequence[Operation], numbers: Numbers) -> str:
    for operation in operations:
        numbers = operation.run(numbers)
    return " ".join(map(str, numbers))


def _keep_even(_: random.Random) -> Operation:
    return Operation(
        text="Keep the even numbers.",
        python="v = [x for x in v if x % 2 == 0]",
        run=lambda v: [x for x in v if x % 2 == 0],
    )


def _keep_above(rng: random.Random) -> Operation:
    k = rng.randint(-9, 15)
    return Operation(
        text=f"Keep the numbers above {k}.",
        python=f"v = [x for x in v if x > {k}]",
        run=lambda v: [x for x in v if x > k],
    )


def _drop_multiples(rng: random.Random) -> Operation:
    k = rng.randint(3, 7)
    return Operation(
        text=f"Drop the multiples of {k}.",
        python=f"v = [x for x in v if x % {k}]",
        run=lambda v: [x for x in v if x % k],
    )


def _add(rng: random.Random) -> Operation:
    k = rng.randint(2, 30)
    return Operation(
        text=f"Add {k} to each number.", python=f"v = [x + {k} for x in v]", run=lambda v: [x + k for x in v]
    )


def _multiply(rng: random.Random) -> Operation:
    k = rng.randint(2, 9)
    return Operation(
        text=f"Multiply each number by {k}.", python=f"v = [x * {k} for x in v]", run=lambda v: [x * k for x in v]
    )


def _square(_: random.Random) -> Operation:
    return Operation(text="Square each number.", python="v = [x * x for x in v]", run=lambda v: [x * x for x in v])


def _sort_down(_: random.Random) -> Operation:
    return Operation(
        text="Sort the numbers, the largest first.",
        python="v = sorted(v, reverse=True)",
        run=lambda v: sorted(v, reverse=True),
    )


def _reverse(_: random.Random) -> Operation:
    return Operation(text="Reverse the order of the numbers.", python="v = v[::-1]", run=lambda v: v[::-1])


def _unique(_: random.Random) -> Operation:
    return Operation(
        text="Where a number occurs more than once, keep only the first.",
        python="v = list(dict.fromkeys(v))",
        run=lambda v: list(dict.fromkeys(v)),
    )


def _rotate(rng: random.Random) -> Operation:
    k = rng.randint(1, 3)
    return Operation(
        text=f"Move the first {k} to the end.", python=f"v = v[{k}:] + v[:{k}]", run=lambda v: v[k:] + v[:k]
    )


def _running_sums(_: random.Random) -> Operation:
    return Operation(
        text="Replace each number by the sum of all numbers up to it, itself included.",
        python="v = [sum(v[:i + 1]) for i in range(len(v))]",
        run=lambda v: [sum(v[: end + 1]) for end in range(len(v))],
    )


def _print_all(_: random.Random) -> Operation:
    return Operation(text="Print the numbers, separated by spaces.", python="print(*v)", run=lambda v: v)


def _print_sum(_: random.Random) -> Operation:
    return Operation(text="Print their sum.", python="print(sum(v))", run=lambda v: [sum(v)])


def _print_count(_: random.Random) -> Operation:
    return Operation(text="Print how many numbers there are.", python="print(len(v))", run=lambda v: [len(v)])


def _print_largest(rng: random.Random) -> Operation:
    k = rng.randint(100, 999)
    return Operation(
        text=f"Print the largest number, or {k} if there is none.",
        python=f"print(max(v, default={k}))",
        run=lambda v: [max(v, default=k)],
    )


OPERATIONS: tuple[Callable[[random.Random], Operation], ...] = (
    _keep_even,
    _keep_above,
    _drop_multiples,
    _add,
    _multiply,
    _square,
    _sort_down,
    _reverse,
    _unique,
    _rotate,
    _running_sums,
)
PRINTS: tuple[Callable[[random.Random], Operation], ...] = (_print_all, _print_sum, _print_count, _print_largest)
