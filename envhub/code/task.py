"""Programs to write: steps on whole numbers, said in words, as Python, and done here for the right outputs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Numbers = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step on the list `v`: in words, as a line of Python, and as a function that does the same."""

    text: str
    python: str
    run: Callable[[Numbers], Numbers]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    text: str
    program: str  # a right one
    examples: tuple[tuple[str, str], ...]  # input, output: told
    tests: tuple[tuple[str, str], ...]  # those that count: never told


def draw_problem(rng: random.Random, *, num_steps: int, num_tests: int) -> Problem:
    steps = [draw(rng) for draw in rng.sample(STEPS, num_steps)]
    end = rng.choice(ENDS)(rng)
    lines = ["v = [int(word) for word in input().split()]", *(step.python for step in steps), end.python]
    texts = [*(step.text for step in steps), end.text]
    cases: list[tuple[str, str]] = []
    while len(cases) < num_tests + 2:
        numbers = [rng.randint(-20, 40) for _ in range(rng.randrange(0 if len(cases) > 2 else 4, 10))]
        case = (" ".join(map(str, numbers)) + "\n", _output([*steps, end], numbers))
        if case not in cases:
            cases.append(case)
    told = "\n".join(f"Input: {given.strip()}\nOutput: {output}" for given, output in cases[:2])
    return Problem(
        text="Read a line of whole numbers, perhaps an empty one. "
        + " ".join(f"{number}. {text}" for number, text in enumerate(texts, 1))
        + f"\n{told}",
        program="\n".join(lines) + "\n",
        examples=tuple(cases[:2]),
        tests=tuple(cases[2:]),
    )


def _output(steps: Sequence[Step], numbers: Numbers) -> str:
    for step in steps:
        numbers = step.run(numbers)
    return " ".join(map(str, numbers))


def _keep_even(_: random.Random) -> Step:
    return Step(text="Keep the even ones.", python="v = [x for x in v if x % 2 == 0]",
                run=lambda v: [x for x in v if x % 2 == 0])  # fmt: skip


def _keep_above(rng: random.Random) -> Step:
    k = rng.randint(-9, 15)
    return Step(text=f"Keep those above {k}.", python=f"v = [x for x in v if x > {k}]",
                run=lambda v: [x for x in v if x > k])  # fmt: skip


def _drop_multiples(rng: random.Random) -> Step:
    k = rng.randint(3, 7)
    return Step(text=f"Drop the multiples of {k}.", python=f"v = [x for x in v if x % {k}]",
                run=lambda v: [x for x in v if x % k])  # fmt: skip


def _add(rng: random.Random) -> Step:
    k = rng.randint(2, 30)
    return Step(text=f"Add {k} to each.", python=f"v = [x + {k} for x in v]", run=lambda v: [x + k for x in v])


def _multiply(rng: random.Random) -> Step:
    k = rng.randint(2, 9)
    return Step(text=f"Multiply each by {k}.", python=f"v = [x * {k} for x in v]", run=lambda v: [x * k for x in v])


def _square(_: random.Random) -> Step:
    return Step(text="Square each.", python="v = [x * x for x in v]", run=lambda v: [x * x for x in v])


def _sort_down(_: random.Random) -> Step:
    return Step(text="Sort them, the largest first.", python="v = sorted(v, reverse=True)",
                run=lambda v: sorted(v, reverse=True))  # fmt: skip


def _reverse(_: random.Random) -> Step:
    return Step(text="Turn their order round.", python="v = v[::-1]", run=lambda v: v[::-1])


def _unique(_: random.Random) -> Step:
    return Step(text="Of equal ones keep the first only.", python="v = list(dict.fromkeys(v))",
                run=lambda v: list(dict.fromkeys(v)))  # fmt: skip


def _rotate(rng: random.Random) -> Step:
    k = rng.randint(1, 3)
    return Step(text=f"Move the first {k} behind the others.", python=f"v = v[{k}:] + v[:{k}]",
                run=lambda v: v[k:] + v[:k])  # fmt: skip


def _running_sums(_: random.Random) -> Step:
    def run(v: Numbers) -> Numbers:
        return [sum(v[: end + 1]) for end in range(len(v))]

    return Step(text="Replace each by the sum of all up to it.", python="v = [sum(v[:i + 1]) for i in range(len(v))]",
                run=run)  # fmt: skip


def _print_all(_: random.Random) -> Step:
    return Step(text="Print them with a space between any two.", python="print(*v)", run=lambda v: v)


def _print_sum(_: random.Random) -> Step:
    return Step(text="Print their sum.", python="print(sum(v))", run=lambda v: [sum(v)])


def _print_count(_: random.Random) -> Step:
    return Step(text="Print how many there are.", python="print(len(v))", run=lambda v: [len(v)])


def _print_largest(rng: random.Random) -> Step:
    k = rng.randint(100, 999)
    return Step(text=f"Print the largest, or {k} if there is none.", python=f"print(max(v, default={k}))",
                run=lambda v: [max(v, default=k)])  # fmt: skip


STEPS: tuple[Callable[[random.Random], Step], ...] = (
    _keep_even, _keep_above, _drop_multiples, _add, _multiply, _square, _sort_down, _reverse, _unique, _rotate,
    _running_sums,
)  # fmt: skip
ENDS: tuple[Callable[[random.Random], Step], ...] = (_print_all, _print_sum, _print_count, _print_largest)
