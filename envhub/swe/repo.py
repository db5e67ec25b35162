"""Draws small repositories with bugs: their files, the tests that show the bugs, and the calls that judge a repair.

A test belongs to one function and has its name. It fails if any of its calls returns a wrong value. The repository's
own tests make a few calls of each function. The judging tests make other calls, and a policy never sees their results.
"""

import functools
import inspect
import json
import random
from dataclasses import dataclass
from typing import Any

from slipstream.envhub.name_list import name_list
from slipstream.envhub.swe.bug import Bug, draw_bug
from slipstream.envhub.swe.functions import FUNCTIONS, RepoFunction

_source = functools.cache(inspect.getsource)
NUM_SHOWN, NUM_JUDGING = 3, 8  # calls of each function
FUNCTIONS_PER_FILE = 4
ADJECTIVES = name_list(
    """
    amber, brisk, calm, dusty, eager, faint, giant, hollow, ivory, jolly, keen, lucid, mellow, noble, odd,
    plain, quick, rapid, solid, tidy
    """
)
NOUNS = name_list(
    """
    anchor, basin, cellar, drum, engine, fiddle, garden, hammer, island, jacket, kettle, ladder, marble, needle,
    oven, pillow, quarry, ribbon, saddle, tunnel
    """
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Test:
    """The calls that judge one function, and their correct results: `["gives", value]` or `["raises", name]`."""

    module: str
    calls: tuple[str, ...]
    right: list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repo:
    package: str
    files: dict[str, str]  # path -> content, with the bugs
    right_files: dict[str, str]  # path -> content, without the bugs
    bugs: dict[str, Bug]  # by function
    examples: tuple[str, ...]  # for each bug: a call that shows it, its result and the correct result
    tests: dict[str, Test]  # the judging tests, by function: FAIL_TO_PASS and PASS_TO_PASS


def draw_name(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}_{rng.choice(NOUNS)}"


def draw_repo(rng: random.Random, *, split: str, package: str, num_files: int, num_bugs: int) -> Repo | None:
    """Return a repository with bugs of `split`; None if a drawn bug fails no shown call or no judging call."""
    modules = {name: _draw_functions(rng, name) for name in sorted(rng.sample(list(FUNCTIONS), num_files))}
    entries = {entry.function.__name__: entry for chosen in modules.values() for entry in chosen}
    sources = {name: _source(entry.function) for name, entry in entries.items()}
    wrong_sources, bugs = dict(sources), {}
    for name in rng.sample(list(entries), num_bugs):
        bug = draw_bug(rng, sources[name], split=split)
        if bug is None:
            return None
        bugs[name], wrong_sources[name] = bug, _with_bug(sources[name], bug)
    calls = {name: _draw_calls(rng, entry) for name, entry in entries.items()}
    right, wrong = _results(sources, calls), _results(wrong_sources, calls)
    for name in bugs:
        differs = [one != other for one, other in zip(right[name], wrong[name], strict=True)]
        if not any(differs[:NUM_SHOWN]) or not any(differs[NUM_SHOWN:]):
            return None
    module_of = {entry.function.__name__: module for module, chosen in modules.items() for entry in chosen}
    return Repo(
        package=package,
        files=_files(package, module_of, wrong_sources, calls, right),
        right_files=_files(package, module_of, sources, calls, right),
        bugs=bugs,
        examples=tuple(_example(calls[name], right[name], wrong[name]) for name in bugs),
        tests={
            name: Test(
                module=f"{package}.{module_of[name]}",
                calls=tuple(calls[name][NUM_SHOWN:]),
                right=json.loads(json.dumps(right[name][NUM_SHOWN:])),
            )
            for name in entries
        },
    )


def _draw_functions(rng: random.Random, module: str) -> list[RepoFunction]:
    """Return some functions of a file and the functions that they use, in the order of the file."""
    chosen = rng.sample(FUNCTIONS[module], FUNCTIONS_PER_FILE)
    names = {entry.function for entry in chosen} | {used for entry in chosen for used in entry.uses}
    return [entry for entry in FUNCTIONS[module] if entry.function in names]


def _draw_calls(rng: random.Random, entry: RepoFunction) -> list[str]:
    """Return distinct calls of a function, as source. There are fewer if its arguments are few."""
    calls: dict[str, None] = {}
    for _ in range(20 * (NUM_SHOWN + NUM_JUDGING)):
        arguments = ", ".join(_written(argument) for argument in entry.draw(rng))
        calls[f"{entry.function.__name__}({arguments})"] = None
        if len(calls) == NUM_SHOWN + NUM_JUDGING:
            break
    return list(calls)


def _with_bug(source: str, bug: Bug) -> str:
    lines = source.splitlines()
    lines[bug.line - 1] = bug.wrong
    return "\n".join(lines) + "\n"


def _results(sources: dict[str, str], calls: dict[str, list[str]]) -> dict[str, list[list[Any]]]:
    """Run each call and return its results. `sources` are safe: functions of this package with a small mutation."""
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
    position = next(position for position, result in enumerate(right) if result != wrong[position])
    verb, value = wrong[position]
    result = _written(value) if verb == "gives" else value
    return f"{calls[position]} {verb} {result} and should give {_written(right[position][1])}"


def _files(
    package: str,
    module_of: dict[str, str],
    sources: dict[str, str],
    calls: dict[str, list[str]],
    right: dict[str, list[list[Any]]],
) -> dict[str, str]:
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
    """Return `value` as Python source, with double quotes around a string."""
    return json.dumps(value) if isinstance(value, str) else repr(value)
