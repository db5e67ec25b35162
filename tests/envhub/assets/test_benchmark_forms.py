"""Ten rows in the form of each benchmark of docs/assets.md: what is right scores 1, and what is wrong scores less."""

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import ASSETS, make_env
from slipstream.envhub.env import Env
from tests.envhub.assets import test_asset_bfcl, test_asset_os, test_asset_textcraft, test_asset_webshop
from tests.envhub.assets.swebench_files import write_clone, write_environment
from tests.envhub.assets.test_asset_sql import ROWS, line
from tests.envhub.assets.test_freebase import Asked
from tests.envhub.dataset.rows import write_rows

NUMBERS = range(10)
Actions = list[str]
EXPERT: Actions = []  # what the file itself gives as its solution


@dataclass(kw_only=True)
class Form:
    """An environment on ten rows, with actions that are right, and actions that are wrong, for each."""

    env: str
    options: dict[str, Any]
    right: list[Actions]
    wrong: list[Actions]
    end: Callable[[], None] = lambda: None


def both(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    train = write_rows(path, rows)
    return {"train": train, "held_out": train}


def answers(right: list[str], wrong: list[str]) -> dict[str, list[Actions]]:
    return {"right": [[f"answer({each})"] for each in right], "wrong": [[f"answer({each})"] for each in wrong]}


TRUE = ["7", "1200", "St. Ives", "a, 2", "red; blue", "3.5", "Ada", "-4", "right", "10%"]
GIVEN = ["7.0", "$1,200", "st ives", "A,2", "Red;blue", "3.50", "ada ", "-4", "Right.", "10 %"]
FALSE = ["8", "1,201", "St. Ive", "2, a", "red", "3.4", "Ada L", "4", "left", "11%"]


def gaia(folder: Path) -> Form:
    rows = [
        {"task_id": str(n), "Question": f"Q{n}?", "Level": 1 + n % 3, "Final answer": TRUE[n], "file_name": ""}
        for n in NUMBERS
    ]
    return Form(env="gaia", options=both(folder / "metadata.jsonl", rows), **answers(GIVEN, FALSE))


def gaia_of_openmanus(folder: Path) -> Form:
    rows = [
        {"pid": str(n), "question": f"Q{n}?", "answer": TRUE[n], "task_id": str(n), "level": 1 + n % 3} for n in NUMBERS
    ]
    return Form(env="gaia", options=both(folder / "gaia.json", rows), **answers(GIVEN, FALSE))


def dbbench(folder: Path) -> Form:
    table = '"Team Results"'
    update, insert = f"UPDATE {table} SET \"Win %\"='60' WHERE Team='Yale'", f"INSERT INTO {table} VALUES ('Penn', '9')"
    asked = [(["Yale"], "other", '["Yale"]', '["Brown"]'), (["2.0"], "counting", "[2]", "[3]")]
    asked += [(["Brown", "Yale"], "ranking", '["Yale", "Brown"]', '["Yale"]')]
    asked += [(["45"], "aggregation-AVG", "[45]", "[4]")]
    asked += [(["none"], "other", '["none"]', "[]"), (["50"], "aggregation-MAX", '["50"]', '["40"]')]
    changes = [(update, "UPDATE"), (insert, "INSERT"), (insert, "INSERT")]
    changes += [(f"DELETE FROM {table} WHERE Team='Brown'", "DELETE")]
    lines = [line(f"Q{n}?", label, kind, ROWS) for n, (label, kind, *_) in enumerate(asked)]
    lines += [line(f"Change {n}.", [statement], kind, ROWS) for n, (statement, kind) in enumerate(changes)]
    right = [*([f"answer {given}"] for *_, given, _ in asked), *([f"sql {each}", "commit"] for each, _ in changes)]
    wrong = [*([f"answer {given}"] for *_, given in asked), *([f"sql {update} OR 1", "commit"] for _ in changes)]
    return Form(env="dbbench", options=both(folder / "standard.jsonl", lines), right=right, wrong=wrong)


def questions_of_sql(folder: Path, *, query: str) -> Form:
    """BIRD's form, or Spider's, by the name of the column with the query."""
    (folder / "databases" / "shop").mkdir(parents=True)
    connection = sqlite3.connect(folder / "databases" / "shop" / "shop.sqlite")
    with connection:
        connection.execute("CREATE TABLE sales (item TEXT, number INTEGER)")
        connection.executemany("INSERT INTO sales VALUES (?, ?)", [(f"item{n}", n) for n in NUMBERS])
    connection.close()
    select = "SELECT number FROM sales WHERE item = 'item{}'"
    rows = [{"db_id": "shop", "question": f"How many of item{n}?", query: select.format(n)} for n in NUMBERS]
    options = both(folder / "dev.json", rows) | {"databases": str(folder / "databases")}
    right, wrong = [[f"commit SELECT {n}"] for n in NUMBERS], [[f"commit SELECT {n + 1}"] for n in NUMBERS]
    return Form(env="bird", options=options, right=right, wrong=wrong)


def bird(folder: Path) -> Form:
    return questions_of_sql(folder, query="SQL")


def spider(folder: Path) -> Form:
    return questions_of_sql(folder, query="query")


def agentbench_os(folder: Path) -> Form:
    options = test_asset_os.written(folder)
    words = [
        {"description": f"Word {n}?", "create": {"init": f"echo w{n} > /root/word"}, "evaluation": {"match": f"w{n}"}}
        for n in range(2)
    ]
    fruit = [{"description": f"{each}?", "evaluation": {"match": {"regex": f"^{each}$"}}} for each in "abcdef"]
    files = test_asset_os.asked("Files?", "mkdir /d && touch /d/1 /d/2 /d/3", "ls /d | wc -l")
    rows = [*words, *fruit, files, test_asset_os.MODES]
    (folder / "data/5/new.json").write_text(json.dumps(rows))
    given = ["w0", "w1", *"abcdef", "3"]
    right = [*([f"Act: answer({each})"] for each in given), ["bash chmod 660 ~/notes/*", "Act: finish"]]
    wrong = [*([f"Act: answer({each}0)"] for each in given), ["Act: finish"]]
    return Form(env="agentbench_os", options={"train": options["train"]}, right=right, wrong=wrong)


class Makers(Asked):
    """An endpoint that knows of each maker m.N that it makes m.1N and m.2N, and of nothing else."""

    def reply(self, query: str) -> bytes:
        (number,) = re.findall(r"ns:m\.(\d+) ns:made\.by\.it \?x", query)
        if "COUNT" in query:
            rows: list[dict[str, Any]] = [{"n": {"value": "2"}}]
        else:
            rows = [{"x": {"value": f"http://rdf.freebase.com/ns/m.{tens}{number}"}} for tens in (1, 2)]
        return json.dumps({"results": {"bindings": rows}}).encode()


def agentbench_kg(folder: Path) -> Form:
    makers = Makers()
    found = [["2"] if n % 2 else [f"m.1{n}", f"m.2{n}"] for n in NUMBERS]
    rows = [
        {
            "qid": f"{n}_grailqa",
            "question": f"What does {n} make?",
            "entities": {f"maker {n}": f"m.{n}"},
            "answer": [{"answer_type": "Entity", "answer_argument": each} for each in found[n]],
            "actions": [],
        }
        for n in NUMBERS
    ]
    (folder / "vocab.json").write_text(json.dumps({"relations": ["made.by.it"], "attributes": [], "classes": []}))
    (folder / "fb_roles").write_text("maker made.by.it thing\n")
    options = both(folder / "std.json", rows) | {"ontology": str(folder), "sparql_url": makers.freebase.url}
    ways = [
        [f"get_neighbors(m.{n},made.by.it)", *(["count(#0)", "answer(#1)"] if n % 2 else ["answer(#0)"])]
        for n in NUMBERS
    ]
    wrong = [
        [*way[:-1], f"get_neighbors(m.{9 - n},made.by.it)", "answer(#0)" if n % 2 else "answer(#1)"]
        for n, way in enumerate(ways)
    ]
    return Form(env="agentbench_kg", options=options, right=ways, wrong=wrong, end=makers.close)


def webshop(folder: Path) -> Form:
    other = ["search[Acme1 lamp]", "click[B000000001]", "click[Buy Now]"]  # dear, and without an option
    options = {"folder": test_asset_webshop.written(folder)}
    return Form(env="webshop", options=options, right=[EXPERT] * 10, wrong=[other] * 10)


def textcraft(folder: Path) -> Form:
    for name, recipe in test_asset_textcraft.RECIPES.items():
        (folder / f"{name}.json").write_text(json.dumps(recipe))
    return Form(env="textcraft", options={"recipes": str(folder)}, right=[EXPERT] * 10, wrong=[["get 1 coal"]] * 10)


def swebench(folder: Path) -> Form:
    instance = write_clone(folder / "clones")
    write_environment(folder / "environments" / "acme__fruit-1.2")
    rows = [instance | {"instance_id": f"acme__fruit-{n}"} for n in NUMBERS]
    options = {name: str(folder / name) for name in ("clones", "environments", "checkouts")}
    options |= both(folder / "test.jsonl", rows)
    half = ["edit src/fruit/scales.py 9\n    return max(sorted(weights), key=weights.get)", "submit"]
    return Form(env="swebench", options=options, right=[EXPERT] * 10, wrong=[half] * 10)


def bfcl(folder: Path) -> Form:
    answers = [[{"book": {"days": [n], "city": ["Bern", ""]}}, {"book": {"days": [n + 20]}}] for n in NUMBERS]
    path = test_asset_bfcl.written(folder, *answers, functions=[test_asset_bfcl.function("book", "days")])
    said = [test_asset_bfcl.said(("book", {"days": n + 20}), ("book", {"days": n, "city": "bern"})) for n in NUMBERS]
    right, wrong = [[reply] for reply in said], [[reply.replace("days", "day", 1)] for reply in said]
    return Form(env="bfcl", options={"train": path}, right=right, wrong=wrong)


def recorded_calls(folder: Path) -> Form:
    """ToolBench's and tau-bench's kind: tools whose results were recorded, then an answer."""
    calls = [[{"function": {"name": "weather", "arguments": json.dumps({"town": n})}}] for n in NUMBERS]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Weather of town {n}?"},
                {"role": "assistant", "content": None, "tool_calls": calls[n]},
                {"role": "tool", "content": f"{n + 20} degrees"},
                {"role": "assistant", "content": f"{n + 20}"},
            ],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
            "answer": n + 20,
        }
        for n in NUMBERS
    ]
    call = '<tool_call>{{"name": "weather", "arguments": {{"town": {}}}}}</tool_call>'
    options = both(folder / "trips.jsonl", rows) | {"conversation": "messages", "tools": "tools", "check": "number"}
    right = [[call.format(n), f"{n + 20} degrees"] for n in NUMBERS]
    wrong = [[call.format(n), f"{n} degrees"] for n in NUMBERS]
    return Form(env="dataset", options=options, right=right, wrong=wrong)


FORMS: tuple[Callable[[Path], Form], ...] = (
    *(gaia, gaia_of_openmanus, dbbench, bird, spider, agentbench_os, agentbench_kg, webshop, textcraft, swebench),
    *(bfcl, recorded_calls),
)


async def score(env: Env, task: Task, actions: Actions) -> float:
    seen = await env.reset(task)
    try:
        for action in actions:
            seen = await env.step(action)
        while actions is EXPERT and not seen.terminated:
            seen = await env.step(env.expert())
        return seen.score
    finally:
        await env.close()


@pytest.mark.parametrize(
    "form", [pytest.param(form, id=form.__name__, marks=[pytest.mark.long] * (form is swebench)) for form in FORMS]
)
def test_ten_rows_are_scored_right_and_wrong(form: Callable[[Path], Form], readable: Path) -> None:
    made, scores = form(readable), []
    for index, (right, wrong) in enumerate(zip(made.right, made.wrong, strict=True)):
        env, task = make_env(made.env, made.options), Task(env=made.env, split="train", index=index)
        scores.append((asyncio.run(score(env, task, right)), asyncio.run(score(env, task, wrong))))
    made.end()
    assert [right for right, _ in scores] == [1.0] * 10
    assert [wrong for _, wrong in scores if wrong >= 1] == []


def test_the_page_says_of_each_benchmark_how_it_is_scored_or_why_it_is_not_played() -> None:
    page = (Path(__file__).parents[3] / "docs" / "assets.md").read_text()
    played, others, *_ = (
        [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
        for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    )
    names = {re.findall(r"`(\w+)`", row[1])[0] for row in played}
    assert names == ASSETS.keys() - {"dataset"} == names & {form.__name__ for form in FORMS}
    assert [row for row in played if not all(row[:4])] == [] == [row for row in others if not all(row)]
    asked = "ToolBench, tau-bench, WebArena, OSWorld, AndroidWorld, TheAgentCompany"
    assert ", ".join(row[0] for row in others) == asked
