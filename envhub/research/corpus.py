"""Draws a corpus of short pages about people, towns, firms and ships that link to each other. Most have a file."""

import json
import random
from dataclasses import dataclass

from slipstream.envhub.bm25 import Bm25
from slipstream.envhub.name_list import name_list

KINDS = ("person", "town", "firm", "ship")
NAMES = {
    "person": name_list("adele, bruno, celia, doran, edith, fabio, gilda, henri, ilona, jasper, kitty, lorenz"),
    "town": name_list(
        """
        ashby, burford, clifton, denby, epworth, filey, guiseley, hexham, ilkley, keswick, ludlow, morpeth
        """
    ),
    "firm": name_list("argon, brio, cobalt, dynamo, epsilon, fortis, garnet, helix, ibex, jetty, krypton, lyra"),
    "ship": name_list(
        """
        albatross, bittern, cormorant, dunlin, eider, fulmar, gannet, heron, ibis, jackdaw, kittiwake, lapwing
        """
    ),
}
LINKS = {  # kind of a page -> relation -> kind of the page that it leads to
    "person": {"birthplace": "town", "employer": "firm"},
    "town": {"mayor": "person", "twin town": "town"},
    "firm": {"founder": "person", "seat": "town", "largest ship": "ship"},
    "ship": {"captain": "person", "home port": "town", "owner": "firm"},
}
TEXTS = {  # kind of a page -> what it says about its links and facts
    "person": "{title} was born in {birthplace} in {birth}, works for {employer} and speaks {languages}.",
    "town": "it has {people} people and a {flag} flag. its mayor is {mayor}, its twin town {twin town}. "
    "visitors: {file}",
    "firm": "it was founded in {foundation} by {founder} and has its seat in {seat}, a staff of {staff} and "
    "{largest ship} as its largest ship. sales: {file}",
    "ship": "it is {length} metres long. its captain is {captain}, its home port {home port}, its owner {owner}. "
    "log: {file}",
}
FILE_ENDINGS = {"town": ".json", "firm": ".csv", "ship": ".txt"}
ADJECTIVES = name_list("blue, bright, crooked, golden, green, narrow, old, painted, quiet, stone, tall, wooden")
THINGS = name_list("bells, boats, bridges, clocks, doors, gardens, lamps, mirrors, roses, songs, stairs, wells")
COLOURS = ("black", "brown", "orange", "pink", "red", "violet", "white", "yellow")
LANGUAGES = ("czech", "danish", "dutch", "finnish", "greek", "irish", "polish", "welsh")
MONTHS = name_list("january, february, march, april, may, june, july, august, september, october, november, december")
SEASONS = ("spring", "summer", "autumn", "winter")
MAX_RESULTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    title: str
    kind: str
    traits: tuple[str, str]  # such as "blue doors"; no two pages have the same pair
    links: dict[str, str]  # relation -> title
    facts: dict[str, str]
    file_name: str = ""  # of the attached file; empty without one
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    pages: dict[str, Page]  # by title
    files: dict[str, str]  # name -> content
    index: Bm25  # over the texts of the pages, in the order of `pages`

    def found(self, query: str) -> list[str]:
        """Return the titles of the pages that fit best, the best first."""
        titles = list(self.pages)
        return [titles[position] for position in self.index.rank(query)[:MAX_RESULTS]]


def draw_corpus(rng: random.Random, *, num_pages: int) -> Corpus:
    """Return a corpus of about `num_pages` pages, with the same number of each kind."""
    titles = {kind: rng.sample(NAMES[kind], num_pages // len(KINDS)) for kind in KINDS}
    pages: dict[str, Page] = {}
    files: dict[str, str] = {}
    used_traits: set[frozenset[str]] = set()
    for kind in KINDS:
        for title in titles[kind]:
            links = {
                relation: rng.choice([other for other in titles[target] if other != title])
                for relation, target in LINKS[kind].items()
            }
            page = _page(title, kind, _traits(rng, used_traits), links, _facts(rng, kind))
            pages[title] = page
            if page.file_name:
                files[page.file_name] = _file(rng, page, titles["town"])
    return Corpus(pages=pages, files=files, index=Bm25([page.text for page in pages.values()]))


def _traits(rng: random.Random, used: set[frozenset[str]]) -> tuple[str, str]:
    while True:
        adjectives, things = rng.sample(ADJECTIVES, 2), rng.sample(THINGS, 2)
        one, other = (f"{adjective} {thing}" for adjective, thing in zip(adjectives, things, strict=True))
        if frozenset((one, other)) not in used:
            used.add(frozenset((one, other)))
            return one, other


def _facts(rng: random.Random, kind: str) -> dict[str, str]:
    if kind == "person":
        languages = sorted(rng.sample(LANGUAGES, rng.randint(2, 3)))
        return {"birth": str(rng.randrange(1920, 1999)), "languages": ", ".join(languages)}
    if kind == "town":
        return {"people": str(rng.randrange(1100, 9900, 100)), "flag": rng.choice(COLOURS)}
    if kind == "firm":
        return {"foundation": str(rng.randrange(1820, 1920)), "staff": str(rng.randrange(110, 990, 10))}
    return {"length": str(rng.randrange(20, 100))}


def _page(title: str, kind: str, traits: tuple[str, str], links: dict[str, str], facts: dict[str, str]) -> Page:
    file_name = f"{title}{FILE_ENDINGS[kind]}" if kind in FILE_ENDINGS else ""
    known = f"{title} is a {kind} known for {traits[0]} and {traits[1]}."
    text = f"{known} {TEXTS[kind].format(title=title, file=file_name, **links, **facts)}"
    return Page(title=title, kind=kind, traits=traits, links=links, facts=facts, file_name=file_name, text=text)


def _file(rng: random.Random, page: Page, towns: list[str]) -> str:
    """Return the attached file: the sales of a firm (CSV), the visitors of a town (JSON), the log of a ship (text)."""
    if page.kind == "firm":
        rows = [f"{month},{rng.randrange(10, 100)},{rng.randrange(2, 10)}" for month in MONTHS]
        return "\n".join(["month,units,price", *rows]) + "\n"
    if page.kind == "town":
        counts = {season: {"adults": rng.randrange(50, 100), "children": rng.randrange(10, 50)} for season in SEASONS}
        return json.dumps(counts) + "\n"
    days = range(1, rng.randrange(6, 10))
    return "".join(f"day {day}: {rng.randrange(10, 100)} miles to {rng.choice(towns)}\n" for day in days)
