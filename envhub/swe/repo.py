"""Small repositories with bugs in them: the files, the tests that show the bugs, and the calls that judge a repair.

A test is a function's name; it fails where any of its calls gives something else than it should. The repository's own
tests make a few calls of each function; those that judge are others, and a policy never sees what they should give.
"""

import functools
import inspect
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envhub.swe.bug import Bug, draw_bug
from envhub.swe.functions import PARTS, Part

NUM_SHOWN, NUM_JUDGING = 3, 8  # calls of each function
FUNCTIONS_A_FILE = 4
ADJECTIVES = ("amber", "brisk", "calm", "dusty", "eager", "faint", "giant", "hollow", "ivory", "jolly", "keen", "lucid",
              "mellow", "noble", "odd", "plain", "quick", "rapid", "solid", "tidy")  # fmt: skip
NOUNS = ("anchor", "basin", "cellar", "drum", "engine", "fiddle", "garden", "hammer", "island", "jacket", "kettle",
         "ladder", "marble", "needle", "oven", "pillow", "quarry", "ribbon", "saddle", "tunnel")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Test:
    """The calls that judge one function, and what came of each: `["gives", value]` or `["raises", name]`, as JSON."""

    module: str
    calls: tuple[str, ...]
    right: list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repo:
    package: str
    files: dict[str, str]  # by path, bugs and all
    right_files: dict[str, str]
    bugs: tuple[Bug, ...]
    examples: tuple[str, ...]  # for each bug a call that shows it, with what it gives and should give
    broken: tuple[str, ...]  # for each bug its function
    tests: dict[str, Test]  # by function, those that judge
    fail_to_pass: frozenset[str]  # names of tests that fail because of the bugs
    pass_to_pass: frozenset[str]  # and of those that must go on passing


def draw_name(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}_{rng.choice(NOUNS)}"


def draw_repo(rng: random.Random, *, split: str, package: str, num_files: int, num_bugs: int) -> Repo | None:
    """A repository with bugs of `split`; None where those that were drawn do not show in its tests, each of them."""
    modules = {name: _draw_parts(rng, name) for name in sorted(rng.sample(list(PARTS), num_files))}
    parts = {part.function.__name__: part for chosen in modules.values() for part in chosen}
    sources = {name: _source(part.function) for name, part in parts.items()}
    wrong_sources, bugs = dict(sources), {}
    for name in rng.sample(list(parts), num_bugs):
        bug = draw_bug(rng, sources[name], split=split)
        if bug is None:
            return None
        bugs[name], wrong_sources[name] = bug, _with_bug(sources[name], bug)
    calls = {name: _draw_calls(rng, part) for name, part in parts.items()}
    right, wrong = _results(sources, calls), _results(wrong_sources, calls)
    for name in bugs:
        differs = [one != other for one, other in zip(right[name], wrong[name], strict=True)]
        if not any(differs[:NUM_SHOWN]) or not any(differs[NUM_SHOWN:]):
            return None
    module_of = {part.function.__name__: module for module, chosen in modules.items() for part in chosen}
    failing = {name for name in parts if right[name][NUM_SHOWN:] != wrong[name][NUM_SHOWN:]}
    return Repo(
        package=package,
        files=_files(package, module_of, wrong_sources, calls, right),
        right_files=_files(package, module_of, sources, calls, right),
        bugs=tuple(bugs.values()),
        examples=tuple(_example(calls[name], right[name], wrong[name]) for name in bugs),
        broken=tuple(bugs),
        tests={
            name: Test(
                module=f"{package}.{module_of[name]}",
                calls=tuple(calls[name][NUM_SHOWN:]),
                right=json.loads(json.dumps(right[name][NUM_SHOWN:])),
            )
            for name in parts
        },
        fail_to_pass=frozenset(failing),
        pass_to_pass=frozenset(parts) - failing,
    )


@functools.cache
def _source(function: Callable[..., Any]) -> str:
    return inspect.getsource(function)


def _draw_parts(rng: random.Random, module: str) -> list[Part]:
    """Some functions of a file, in its order, with those that they use."""
    chosen = rng.sample(PARTS[module], FUNCTIONS_A_FILE)
    names = {part.function for part in chosen} | {used for part in chosen for used in part.uses}
    return [part for part in PARTS[module] if part.function in names]


def _draw_calls(rng: random.Random, part: Part) -> list[str]:
    """Different calls of a function, as source; some fewer where it has not so many."""
    calls: dict[str, None] = {}
    for _ in range(20 * (NUM_SHOWN + NUM_JUDGING)):
        arguments = ", ".join(_written(argument) for argument in part.draw(rng))
        calls[f"{part.function.__name__}({arguments})"] = None
        if len(calls) == NUM_SHOWN + NUM_JUDGING:
            break
    return list(calls)


def _with_bug(source: str, bug: Bug) -> str:
    lines = source.splitlines()
    lines[bug.line - 1] = bug.wrong
    return "\n".join(lines) + "\n"


def _results(sources: dict[str, str], calls: dict[str, list[str]]) -> dict[str, list[list[Any]]]:
    """What each call gives or raises. The sources are this package's own, but for one operator or number."""
    scope: dict[str, Any] = {}
    for source in sources.values():
        exec(source, scope)
    return {name: [_result(scope, call) for call in of_one] for name, of_one in calls.items()}


def _result(scope: dict[str, Any], call: str) -> list[Any]:
    try:
        return ["gives", eval(call, scope)]
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return ["raises", type(error).__name__]


def _example(calls: list[str], right: list[list[Any]], wrong: list[list[Any]]) -> str:
    position = next(place for place, result in enumerate(right) if result != wrong[place])
    verb, value = wrong[position]
    said = _written(value) if verb == "gives" else value
    return f"{calls[position]} {verb} {said} and should give {_written(right[position][1])}"


def _files(
    package: str, module_of: dict[str, str], sources: dict[str, str], calls: dict[str, list[str]],
    right: dict[str, list[list[Any]]],
) -> dict[str, str]:  # fmt: skip
    files = {f"{package}/__init__.py": ""}
    for module in sorted(set(module_of.values())):
        names = [name for name in sources if module_of[name] == module]
        files[f"{package}/{module}.py"] = "\n\n".join(sources[name] for name in names)
        tests = [f"from {package}.{module} import {', '.join(sorted(names))}\n"]
        for name in names:
            shown = zip(calls[name][:NUM_SHOWN], right[name], strict=False)
            asserts = [f"    assert {call} == {_written(value)}\n" for call, (_, value) in shown]
            tests.append(f"def test_{name}():\n{''.join(asserts)}")
        files[f"tests/test_{module}.py"] = "\n\n".join(tests)
    return files


def _written(value: object) -> str:
    """As a person would write it: with double quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)
