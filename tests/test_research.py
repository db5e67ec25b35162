"""Research: what each tool shows, that the computed answers are what the files hold, and what a program may see."""

import asyncio
import random
import re

import pytest

from common.trajectory import Task
from envhub.isolation.file_tree import file as file_of
from envhub.research.research import ResearchState, ResearchWorld, make_research
from envhub.research.calculator import calculate
from envhub.research.corpus import KINDS, LINKS, draw_corpus
from envhub.research.question import ENDINGS
from envhub.isolation.sandbox import Limits, run_in_sandbox
from envhub.world import Change

RELATION = re.compile(rf"the ({'|'.join(relation for links in LINKS.values() for relation in links)}) of")


def world(level: int = 2, index: int = 0) -> ResearchWorld:
    task = Task(env="research", split="train", index=index)
    return make_research(task, profile="small", level=level, num_pages=24, limits=Limits(wall_s=20))


def act(world: ResearchWorld, action: str, state: ResearchState | None = None) -> Change[ResearchState]:
    return asyncio.run(world.act(world.first if state is None else state, action))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2 * 3", "7"), ("(1 + 2) * 3", "9"), ("7 / 2", "3.5"), ("6/2", "3"), ("-2 - -3", "1"), ("1 . 5 * 2", "3"),
     ("10 / 3", "3.3333333333"), ("0.1 + 0.2", "0.3")],
)  # fmt: skip
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [("", "signs"), ("2 ** 9", "only"), ("7 // 2", "only"), ("1 +", "not an expression"), ("1 / 0", "division"),
     ("9" * 300, "200 signs"), ("(" * 150, "not an expression"), ("__import__('os')", "signs"), ("1 2", "not an"),
     ("(1)(2)", "only")],
)  # fmt: skip
def test_the_calculator_says_why_it_does_not(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        calculate(expression)


def test_a_page_says_everything_that_questions_are_asked_about() -> None:
    corpus = draw_corpus(random.Random(1), num_pages=24)
    assert len(corpus.pages) == 24
    for page in corpus.pages.values():
        said = page.text.replace(".", " ")
        for told in (*page.traits, *page.facts.values(), *page.links.values()):
            assert told in said, (page.title, told)
        assert page.file_name in page.text
        assert set(page.links) == set(LINKS[page.kind])
        assert all(corpus.pages[other].kind == LINKS[page.kind][relation] for relation, other in page.links.items())
    assert set(corpus.files) == {page.file_name for page in corpus.pages.values() if page.kind != "person"}
    assert {page.kind for page in corpus.pages.values()} == set(KINDS)


def test_the_first_page_is_found_by_what_the_question_tells_of_it() -> None:
    for index in range(30):
        here = world(level=1, index=index)
        searched = act(here, f"search({here.question.search})")
        first = here.corpus.pages[here.question.way[0]]
        assert f"{first.kind} {first.title}" in searched.text.splitlines()
        assert first.title in searched.state.found
        others = [page for page in here.corpus.pages.values() if set(page.traits) == set(first.traits)]
        assert others == [first]


def test_following_the_links_that_a_question_names_leads_to_its_last_page() -> None:
    """The relations, read back from the question's own words, against what the pages say."""
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


def test_what_is_not_there_is_refused() -> None:
    for action in (
        "open(nowhere)",
        "read(nowhere.csv)",
        "read()",
        "search( )",
        "calculate(x)",
        "python",
    ):
        assert not act(world(), action).valid, action


def test_a_file_is_read_only_by_who_has_opened_its_page() -> None:
    here = world()
    *pages, name = here.question.way
    assert not act(here, f"read({name})").valid
    opened = ResearchState(read=frozenset(pages[-1:]))
    assert act(here, f"read({name})", opened).text == here.corpus.files[name].strip()
    listed = "python import os; print(sorted(os.listdir('.')))"
    assert act(here, listed).text == "['program.py']"
    assert act(here, listed, opened).text == str(sorted([name, "program.py"]))


def test_a_program_that_fails_or_says_nothing_or_never_ends_is_told_so() -> None:
    assert "ZeroDivisionError" in act(world(), "python print(1 / 0)").text
    assert act(world(), "python\n```python\nx = 1\n```").text == "(nothing)"
    slow = make_research(Task(env="research", split="train", index=0), profile="small", level=2, num_pages=24,
                         limits=Limits(wall_s=1))  # fmt: skip
    assert "killed" in act(slow, "python while True: pass").text


def test_an_answer_is_judged_as_gaia_judges() -> None:
    here = world(level=2)
    assert here.question.answer.isdigit()
    for said, score in ((f"${here.question.answer}.0", 1.0), (f"{here.question.answer} or so", 0.0), ("no", 0.0)):
        change = act(here, f"answer({said})")
        assert (change.over, change.score) == (True, score)


@pytest.mark.parametrize("kind", ENDINGS, ids=str)
def test_every_sum_gives_the_answer_when_it_is_really_done(kind: tuple[int, str]) -> None:
    """The answers are computed here; the calculator and the programs must come to the same."""
    rng = random.Random(7)
    corpus = draw_corpus(rng, num_pages=48)
    pages = [page for page in corpus.pages.values() if page.kind == kind[1]]
    for draw in ENDINGS[kind]:
        for page in pages[:3]:
            content = corpus.files[page.file_name]
            ending = draw(rng, page, content)
            if not ending.answer:
                continue
            if ending.sum_action.startswith("calculate("):
                assert calculate(ending.sum_action[len("calculate(") : -1]) == ending.answer
                continue
            program = ending.sum_action.split("```")[1].removeprefix("python\n")
            tree = {page.file_name: file_of(content), "program.py": file_of(program)}
            finished = asyncio.run(run_in_sandbox("/usr/bin/python3 -I program.py", tree, limits=Limits(wall_s=20)))
            assert finished.output.strip() == ending.answer


def test_an_answer_stands_on_no_page_but_those_of_the_way_and_in_no_search() -> None:
    for index in range(20):
        here = world(level=1, index=index)
        last = here.corpus.pages[here.question.way[-1]]
        assert here.question.answer in last.text
        assert here.question.answer not in act(here, f"search({here.question.search})").text
