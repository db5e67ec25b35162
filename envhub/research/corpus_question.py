"""Draws questions about a corpus: a first page, links to follow, and what to find on the last page or in its file."""

import csv
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from slipstream.envhub.research.calculator import calculate
from slipstream.envhub.research.corpus import LINKS, SEASONS, Corpus, Page

FACTS = {
    "birth": "in what year was {} born?",
    "languages": "which languages does {} speak, in alphabetical order?",
    "people": "how many people live in {}?",
    "flag": "which colour is the flag of {}?",
    "foundation": "in what year was {} founded?",
    "staff": "how many people work for {}?",
    "length": "how many metres long is {}?",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The part of a question about the last page."""

    text: str  # with {} for the page
    answer: str
    sum_action: str = ""  # the action that computes the answer from the file; "" if there is nothing to compute


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    text: str
    search: str  # a query that finds the first page
    way: tuple[str, ...]  # the titles of the pages to open, then the name of the file to read, if any
    sum_action: str
    answer: str


def draw_question(rng: random.Random, corpus: Corpus, *, level: int) -> Question | None:
    """Return a question that follows `level` links, from level 2 on to a file; None if this draw gave no question."""
    page = rng.choice(list(corpus.pages.values()))
    search = " ".join(page.traits)
    way, phrase = [page.title], f"the {page.kind} known for {page.traits[0]} and {page.traits[1]}"
    for _ in range(level):
        relation = rng.choice(list(LINKS[page.kind]))
        page = corpus.pages[page.links[relation]]
        way.append(page.title)
        phrase = f"the {relation} of {phrase}"
    if len(set(way)) < len(way) or way[0] not in corpus.found(search):
        return None
    if level == 1:
        fact = rng.choice(list(page.facts))
        ending = Ending(text=FACTS[fact], answer=page.facts[fact])
    else:
        if not page.file_name:
            return None
        ending = rng.choice(ENDINGS[level, page.kind])(rng, page, corpus.files[page.file_name])
        way.append(page.file_name)
    if not ending.answer:
        return None
    return Question(
        text=ending.text.format(phrase),
        search=search,
        way=tuple(way),
        sum_action=ending.sum_action,
        answer=ending.answer,
    )


def _calculated(text: str, expression: str) -> Ending:
    return Ending(text=text, answer=calculate(expression), sum_action=f"calculate({expression})")


def _rows(content: str) -> list[dict[str, str]]:
    return list(csv.DictReader(content.splitlines()))


def _units_of_two(rng: random.Random, page: Page, content: str) -> Ending:
    one, other = rng.sample(_rows(content), 2)
    return _calculated(
        f"in {one['month']} and {other['month']} together, how many units were sold by {{}}?",
        f"{one['units']} + {other['units']}",
    )


def _takings_of_one(rng: random.Random, page: Page, content: str) -> Ending:
    row = rng.choice(_rows(content))
    text = f"in {row['month']}, how much, units times price, was taken by {{}}?"
    return _calculated(text, f"{row['units']} * {row['price']}")


def _more_adults(rng: random.Random, page: Page, content: str) -> Ending:
    season = rng.choice(SEASONS)
    counts = json.loads(content)[season]
    text = f"in {season}, how many more adults than children came to {{}}?"
    return _calculated(text, f"{counts['adults']} - {counts['children']}")


def _miles_of_all(rng: random.Random, page: Page, content: str) -> Ending:
    miles = [line.split()[2] for line in content.splitlines()]
    return _calculated("how many miles in all are in the log of {}?", " + ".join(miles))


# By the kind of a page: the lines of a program that read its file.
_READING = {
    "firm": "import csv\nrows = csv.DictReader(open('{}'))",
    "town": "import json\nseasons = json.load(open('{}'))",
    "ship": "days = [line.split() for line in open('{}')]",
}


def _computed(page: Page, content: str, text: str, expression: str) -> Ending:
    """Return an ending whose answer a program prints: one of this module's own, so it runs in this process too."""
    program = f"{_READING[page.kind].format(page.file_name)}\nprint({expression})"
    printed: list[str] = []
    exec(program, {"open": lambda _: io.StringIO(content), "print": lambda value: printed.append(str(value))})
    return Ending(text=text, answer=printed[0], sum_action=f"python\n```python\n{program}\n```")


def _takings_of_all(rng: random.Random, page: Page, content: str) -> Ending:
    text = "in the whole year, how much, units times price, was taken by {}?"
    return _computed(page, content, text, "sum(int(row['units']) * int(row['price']) for row in rows)")


def _months_above(rng: random.Random, page: Page, content: str) -> Ending:
    bound = rng.randrange(40, 90)
    text = f"in which months, in their order, were more than {bound} units sold by {{}}?"
    return _computed(page, content, text, f"', '.join(row['month'] for row in rows if int(row['units']) > {bound})")


def _best_season(rng: random.Random, page: Page, content: str) -> Ending:
    text = "in which season did the most visitors, adults and children together, come to {}?"
    totals = [sum(counts.values()) for counts in json.loads(content).values()]
    ending = _computed(page, content, text, "max(seasons, key=lambda season: sum(seasons[season].values()))")
    return ending if totals.count(max(totals)) == 1 else replace(ending, answer="")


def _visitors_of_all(rng: random.Random, page: Page, content: str) -> Ending:
    text = "in the whole year, how many visitors, adults and children together, came to {}?"
    return _computed(page, content, text, "sum(sum(counts.values()) for counts in seasons.values())")


def _ports_far_off(rng: random.Random, page: Page, content: str) -> Ending:
    bound = rng.randrange(40, 80)
    text = f"to which towns, day by day, do the days of more than {bound} miles lead in the log of {{}}?"
    return _computed(page, content, text, f"', '.join(day[-1] for day in days if int(day[2]) > {bound})")


ENDINGS: dict[tuple[int, str], tuple[Callable[[random.Random, Page, str], Ending], ...]] = {
    (2, "firm"): (_units_of_two, _takings_of_one),
    (2, "town"): (_more_adults,),
    (2, "ship"): (_miles_of_all,),
    (3, "firm"): (_takings_of_all, _months_above),
    (3, "town"): (_best_season, _visitors_of_all),
    (3, "ship"): (_ports_far_off,),
}
