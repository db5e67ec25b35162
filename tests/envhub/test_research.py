"""Research: the result of each tool, the computed answers against the files, and which files a program can read."""

import asyncio
import json
import random
import re

import pytest

from slipstream.envhub.isolation.file_tree import file as file_of
from slipstream.envhub.isolation.sandbox import Limits, run_in_sandbox
from slipstream.envhub.research.calculator import calculate
from slipstream.envhub.research.corpus import LINKS, Page
from slipstream.envhub.research.corpus_question import ENDINGS
from slipstream.envhub.research.research import ResearchState, ResearchWorld, make_research
from slipstream.envhub.world import InvalidAction
from tests.envhub.env_cases import act, task_of

RELATION = re.compile(rf"the ({'|'.join(relation for links in LINKS.values() for relation in links)}) of")


def world(level: int = 2, index: int = 0) -> ResearchWorld:
    return make_research(task_of("research", index), level=level, num_pages=24)


def test_the_calculator_calculates() -> None:
    values = {"1 + 2 * 3": "7", "(1 + 2) * 3": "9", "7 / 2": "3.5", "6/2": "3", "-2 - -3": "1"}
    values |= {"1 . 5 * 2": "3", "10 / 3": "3.3333333333", "0.1 + 0.2": "0.3"}
    assert {expression: calculate(expression) for expression in values} == values


@pytest.mark.parametrize(
    ("reason", "expressions"),
    [
        ("200 characters: numbers", ["", "9" * 300, "__import__('os')"]),
        (r"only \+ - \* / are supported", ["2 ** 9", "7 // 2", "(1)(2)"]),
        ("not a valid expression", ["1 +", "(" * 150, "1 2"]),
        ("division", ["1 / 0"]),
    ],
)
def test_the_calculator_explains_a_refusal(reason: str, expressions: list[str]) -> None:
    for expression in expressions:
        with pytest.raises(InvalidAction, match=reason):
            calculate(expression)


def test_following_the_links_that_a_question_names_leads_to_its_last_page() -> None:
    """Compares the relations in the text of the question with the links of the pages."""
    for level in (1, 2, 3):
        for index in range(20):
            question, corpus = world(level, index).question, world(level, index).corpus
            relations = RELATION.findall(question.text)
            title = question.way[0]
            for relation in reversed(relations):
                title = corpus.pages[title].links[relation]
            pages = [name for name in question.way if name in corpus.pages]
            assert (title, len(pages)) == (pages[-1], level + 1), question.text
            assert len(question.way) == len(relations) + 1 + (level > 1)


def test_a_missing_page_file_or_argument_is_refused() -> None:
    for action in ("open(nowhere)", "read(nowhere.csv)", "read()", "search( )", "calculate(x)", "python"):
        assert not act(world(), action).valid, action


def test_a_file_can_be_read_only_after_its_page_was_opened() -> None:
    here = world()
    *pages, name = here.question.way
    assert not act(here, f"read({name})").valid
    opened = ResearchState(read=frozenset(pages[-1:]))
    assert act(here, f"read({name})", opened).text == here.corpus.files[name].strip()
    listed = "python import os; print(sorted(os.listdir('.')))"
    assert act(here, listed).text == "['program.py']"
    assert act(here, listed, opened).text == str(sorted([name, "program.py"]))


def test_a_program_that_fails_prints_nothing_or_never_ends_gets_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ZeroDivisionError" in act(world(), "python print(1 / 0)").text
    assert act(world(), "python\n```python\nx = 1\n```").text == "(nothing)"
    monkeypatch.setattr("slipstream.envhub.research.research.LIMITS", Limits(wall_s=1))
    assert "killed" in act(world(), "python while True: pass").text


def test_an_answer_is_scored_as_in_gaia() -> None:
    here = world(level=2)
    assert here.question.answer.isdigit()
    for answer, score in ((f"${here.question.answer}.0", 1.0), (f"{here.question.answer} or so", 0.0), ("no", 0.0)):
        change = act(here, f"answer({answer})")
        assert (change.over, change.score) == (True, score)


SEASONS = {season: {"adults": 60, "children": 20} for season in ("spring", "summer", "autumn", "winter")}
FILES = {
    "firm": ("a.csv", "month,units,price\njanuary,30,2\nfebruary,95,2\n"),
    "town": ("a.json", json.dumps(SEASONS | {"summer": {"adults": 70, "children": 30}})),
    "ship": ("a.txt", "day 1: 30 miles to ashby\nday 2: 90 miles to denby\n"),
}
ANSWERS = {
    "_units_of_two": ["125"],
    "_takings_of_one": ["60", "190"],
    "_more_adults": ["40"],
    "_miles_of_all": ["120"],
    "_takings_of_all": ["250"],
    "_months_above": ["february"],
    "_best_season": ["summer"],
    "_visitors_of_all": ["340"],
    "_ports_far_off": ["denby"],
}


@pytest.mark.parametrize("kind", ENDINGS, ids=str)
def test_every_sum_action_returns_the_answer(kind: tuple[int, str]) -> None:
    """Compares the answers with those worked out by hand, and with what the programs print in the sandbox."""
    name, content = FILES[kind[1]]
    page = Page(title="a", kind=kind[1], traits=("", ""), links={}, facts={}, file_name=name, text="")
    for draw in ENDINGS[kind]:
        ending = draw(random.Random(7), page, content)
        assert ending.answer in ANSWERS[draw.__name__]
        if ending.sum_action.startswith("calculate("):
            assert calculate(ending.sum_action[len("calculate(") : -1]) == ending.answer
            continue
        program = ending.sum_action.split("```")[1].removeprefix("python\n")
        tree = {name: file_of(content), "program.py": file_of(program)}
        finished = asyncio.run(run_in_sandbox("/usr/bin/python3 -I program.py", tree, limits=Limits(wall_s=20)))
        assert finished.output.strip() == ending.answer
