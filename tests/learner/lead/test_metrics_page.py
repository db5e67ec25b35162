"""docs/metrics.md and the code name the same metrics, and the overview shows what there is."""

import ast
import json
import re
from pathlib import Path
from urllib.parse import parse_qsl

from slipstream.common.process.metrics import Metrics
from slipstream.learner.lead.cost import ActorCost, Cost
from slipstream.learner.lead.overview import FLEET, LINES, PINNED, SHOWN, describe, pinned_link, place_of
from slipstream.learner.lead.report import add_cost, add_fleet
from slipstream.replay.records.ledger import ledger_of
from tests.replay.buffer.every_verb import MEMBER

REPOSITORY = Path(__file__).parents[3]


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
                case "clock.lap" | "clock.mark":
                    names.add(f"time/{pattern(call.args[0])}_s")
    return names - {"time/<>_s"}


def pattern(name: ast.expr) -> str:
    if isinstance(name, ast.JoinedStr):
        return "".join(pattern(part) for part in name.values)
    return str(name.value) if isinstance(name, ast.Constant) else "<>"


def explained() -> dict[str, list[str]]:
    """The rows of the page by name, `<>` for what a run brings; the first cell has this name alone."""
    rows = [
        line.split("|")[1:-1]
        for line in (REPOSITORY / "docs" / "metrics.md").read_text().splitlines()
        if re.match(r"\| (\*\*)?`\w+/", line)
    ]
    named = [(name.strip(), row[1:]) for row in rows for name in row[0].split(",")]
    found = {re.sub(r"<\w+>", "<>", name.strip("*`")): [name, *rest] for name, rest in named}
    assert len(found) == len(named)
    assert [name for name, row in found.items() if len(row) != 3 or not row[1].strip()] == [], "not explained"
    return found


def test_every_metric_is_of_one_of_twelve_groups_and_explained_and_what_is_explained_is_there() -> None:
    names, groups = emitted(), "produced trained eval lag mismatch replay fleet learner optim perf time fit"
    assert names == set(explained())
    assert {name.split("/")[0] for name in names} == set(groups.split())


def test_the_first_chart_has_the_success_of_all_finished_episodes_beside_that_of_held_out_tasks() -> None:
    first = next(iter(PINNED))
    lines = {place.run: name for name, place in LINES.items() if place.tag == first}
    assert lines == {"produced": "produced/success", "trained": "trained/success", "held_out": "eval/success_sampled"}


def test_every_metric_has_a_place_of_its_own_in_tensorboard() -> None:
    places = [place for name in emitted() if (place := place_of(name.replace("<>", "x")))]
    assert len(places) == len(set(places))
    assert len({place.run for place in places} | {FLEET, ""}) * 5 <= 40, "TensorBoard shows up to 40 runs at once"


def test_the_page_names_in_bold_what_is_shown_under_its_own_name_and_the_rest_is_for_debugging() -> None:
    for name, row in explained().items():
        place = place_of(name.replace("<>", "x"))
        is_shown = place is None or not place.tag.startswith("rest/")
        assert row[0].strip().startswith("**") == is_shown, name
    shown = [name for name in explained() if (place := place_of(name)) and not place.tag.startswith("rest/")]
    assert len(shown) <= 60


def test_what_is_shown_by_the_clock_is_written_by_the_clock() -> None:
    metrics, books = Metrics(), ledger_of({b"dropped:too_old": b"1", b"failed:env_failure": b"1"})
    add_fleet(metrics, ledger=books, actors=[MEMBER])
    share = ActorCost(instance_kind="spot", price_per_hour=1.0, dollars=1.0)
    names = ("dollars", "dollars_per_million_tokens", "dollars_per_hour", "spot_dollars_per_hour")
    prices = dict.fromkeys(names, 1.0)
    add_cost(metrics, Cost(shares=[share], **prices, tokens_trained=1, wasted_tokens={"too_old": 1}))
    by_the_clock = {name for name in emitted() if place_of(name.replace("<>", "x")) is None}
    written = {re.sub(r"(total_dropped|total_failed|wasted_tokens)_\w+", r"\1_<>", name) for name in metrics.means()}
    assert written == by_the_clock


def test_the_link_pins_charts_that_are_there_and_fit_its_question() -> None:
    address, _, query = pinned_link("http://127.0.0.1:6006").partition("?")
    ((name, cards),) = parse_qsl(query.removesuffix("#timeseries"))
    assert (address, name) == ("http://127.0.0.1:6006/", "pinnedCards")
    tags = [card["tag"] for card in json.loads(cards) if card["plugin"] == "scalars"]
    lines = {place.tag for place in LINES.values()}
    assert tags == list(PINNED) and set(tags) <= set(explained()) | lines
    assert len(query) < 1500 and re.fullmatch(r"[\w%.+=#-]+", query)  # a terminal takes all of it for one link


def test_every_chart_describes_itself_in_tensorboard() -> None:
    """Histograms have no descriptions."""
    scalars = [name.replace("<>", "x") for name, row in explained().items() if "histogram" not in row[1]]
    charts = {place.tag if (place := place_of(name)) else name for name in scalars if not name.startswith("fit/")}
    assert [tag for tag in charts if not describe(tag)] == []
    patterns = {name.replace("*", "x") for name in SHOWN}
    assert patterns <= charts, "a description of a chart that is not there"
