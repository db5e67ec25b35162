"""docs/metrics.md and the code name the same metrics, and the overview shows what there is."""

import ast
import json
import re
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from learner.overview import OVERVIEW, PINNED, pinned_link

REPOSITORY = Path(__file__).parents[1]
GROUPS = (
    "produced",
    "trained",
    "eval",
    "lag",
    "mismatch",
    "replay",
    "fleet",
    "learner",
    "optim",
    "perf",
    "time",
    "fit",
)


def emitted() -> set[str]:
    """The first argument of every `metrics.add` and `metrics.add_histogram` of the learner, `<>` for what it fills in.

    The parts of a step's time are named where the clock is lapped.
    """
    names = set()
    for path in sorted((REPOSITORY / "learner").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            match ast.unparse(call.func):
                case "metrics.add" | "metrics.add_histogram":
                    names.add(pattern(call.args[0]))
                case "clock.lap":
                    names.add(f"time/{pattern(call.args[0])}_s")
                case "_lap" | "_mark":
                    names.add(f"time/{pattern(call.args[1])}_s")
    return names - {"time/<>_s"}


def pattern(name: ast.expr) -> str:
    if isinstance(name, ast.JoinedStr):
        return "".join(pattern(part) for part in name.values)
    return str(name.value) if isinstance(name, ast.Constant) else "<>"


def explained() -> dict[str, list[str]]:
    """The rows of the page by name, `<>` for what a run brings."""
    rows = [
        line.split("|")[1:-1]
        for line in (REPOSITORY / "docs" / "metrics.md").read_text().splitlines()
        if re.match(r"\| `\w+/", line)
    ]
    names = [re.sub(r"<\w+>", "<>", row[0].strip().strip("`")) for row in rows]
    assert len(names) == len(set(names))
    return dict(zip(names, rows, strict=True))


def test_every_metric_is_explained_and_what_is_explained_is_there() -> None:
    assert emitted() == set(explained())


def test_every_name_is_in_one_of_the_twelve_groups() -> None:
    assert {name.split("/")[0] for name in emitted()} == set(GROUPS)


def test_every_metric_has_a_meaning() -> None:
    for name, row in explained().items():
        assert len(row) == 5 and row[2].strip(), f"{name} is not explained"


@pytest.mark.parametrize("title", OVERVIEW)
def test_every_chart_of_the_overview_shows_something(title: str) -> None:
    for expression in OVERVIEW[title]:
        assert any(re.match(expression, name.replace("<>", "x")) for name in explained()), expression


def test_the_first_chart_has_the_success_of_all_finished_episodes_beside_that_of_held_out_tasks() -> None:
    first = next(iter(OVERVIEW.values()))
    shown = {name for name in explained() if any(re.match(expression, name) for expression in first)}
    assert shown == {"produced/success", "eval/success_sampled", "eval/success_greedy"}


def test_the_overview_fits_a_screen() -> None:
    assert 10 <= len(OVERVIEW) <= 16


def test_the_link_pins_charts_that_are_there_and_fit_its_question() -> None:
    address, _, query = pinned_link("http://127.0.0.1:6006").partition("?")
    ((name, cards),) = parse_qsl(query.removesuffix("#timeseries"))
    assert (address, name) == ("http://127.0.0.1:6006/", "pinnedCards")
    tags = [card["tag"] for card in json.loads(cards) if card["plugin"] == "scalars"]
    assert tags == list(PINNED) and set(tags) <= set(explained())
    assert len(query) < 1500 and re.fullmatch(r"[\w%.+=#-]+", query)  # a terminal takes all of it for one link
