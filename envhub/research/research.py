"""`research`: questions like GAIA's over a generated corpus, with search, pages, files, a calculator and Python.

Answers are scored by GAIA's quasi-exact match (`envhub/research/gaia_score.py`).
"""

import re
from dataclasses import dataclass, field
from functools import partial

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.bm25 import words
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_range
from slipstream.envhub.isolation.file_tree import file
from slipstream.envhub.isolation.program import printed, program_to_run
from slipstream.envhub.isolation.sandbox import Limits, require_sandbox
from slipstream.envhub.research.calculator import calculate
from slipstream.envhub.research.corpus import Corpus, draw_corpus
from slipstream.envhub.research.corpus_question import Question, draw_question
from slipstream.envhub.research.gaia_score import is_gaia_match
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.world import Change, InvalidAction, WorldEnv, rules_in

MAX_SHOWN_CHARS = 2000
LIMITS = Limits()  # of a program
DRAWS_PER_CORPUS = 50  # a small corpus may have no question in the task's split
RULES = (
    "Answer the question from a collection of pages. search(words): titles of the best matching pages. open(title): a "
    "page. read(name): a file that a page names. calculate(expression): + - * / and brackets. Write python, then a "
    "program, bare or in a block, ```python ... ```, to run it and see what it prints; it can read the files of the "
    "pages you opened. End with answer(...): a number, a few words, or a list with commas, and nothing else."
)

_CALL = re.compile(r"\s*(search|open|read|calculate|answer)\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)


class ResearchState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the policy has seen so far. The collection never changes, so there is no other state."""

    found: frozenset[str] = frozenset()  # titles that a search has shown
    read: frozenset[str] = frozenset()  # titles of opened pages and names of read files
    is_computed: bool = False  # whether the calculator or Python has returned the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class ResearchWorld:
    """One corpus and one question about it."""

    opening: str
    corpus: Corpus
    question: Question
    first: ResearchState = field(default_factory=ResearchState)

    async def act(self, state: ResearchState, action: str) -> Change[ResearchState]:
        if (program := program_to_run(action)) is not None:
            if not program:
                raise InvalidAction("write a program after python")
            files = {name: file(content) for name, content in self._files(state).items()}
            return self._computed(state, await printed(program, files, limits=LIMITS, max_chars=MAX_SHOWN_CHARS))
        call = _CALL.fullmatch(action)
        if call is None or not call[2].strip():
            raise InvalidAction("no such call")
        tool, argument = call[1].lower(), call[2].strip()
        if tool == "answer":
            return Change(
                state=state, text="answered", over=True, score=float(is_gaia_match(argument, self.question.answer))
            )
        if tool == "search":
            return self._searched(state, argument)
        if tool == "calculate":
            return self._computed(state, calculate(argument))
        return self._read(state, tool, "".join(argument.lower().split()))

    def expert(self, state: ResearchState) -> str:
        """Return the next of these that is not done yet: search, open the pages, read the file, compute, answer."""
        missing = [name for name in self.question.way if name not in state.read]
        if missing == list(self.question.way) and missing[0] not in state.found:
            return f"search({self.question.search})"
        if missing:
            return f"{'open' if missing[0] in self.corpus.pages else 'read'}({missing[0]})"
        if self.question.sum_action and not state.is_computed:
            return self.question.sum_action
        return f"answer({self.question.answer})"

    def _searched(self, state: ResearchState, words: str) -> Change[ResearchState]:
        titles = self.corpus.found(words)
        lines = [f"{self.corpus.pages[title].kind} {title}" for title in titles]
        found = msgspec.structs.replace(state, found=state.found | set(titles))
        return Change(state=found, text="\n".join(lines) or "nothing found")

    def _read(self, state: ResearchState, tool: str, name: str) -> Change[ResearchState]:
        if tool == "open":
            text = self.corpus.pages[name].text if name in self.corpus.pages else ""
        else:
            text = self._files(state).get(name, "").strip()
        if not text:
            what = "page" if tool == "open" else "file of an opened page"
            raise InvalidAction(f"no {what} has the name {name}"[:80])
        return Change(state=msgspec.structs.replace(state, read=state.read | {name}), text=text)

    def _computed(self, state: ResearchState, result: str) -> Change[ResearchState]:
        computed = state.is_computed or is_gaia_match(result, self.question.answer)
        return Change(state=msgspec.structs.replace(state, is_computed=computed), text=result)

    def _files(self, state: ResearchState) -> dict[str, str]:
        """Return the files of the opened pages: name -> content."""
        names = [self.corpus.pages[title].file_name for title in sorted(state.read) if title in self.corpus.pages]
        return {name: self.corpus.files[name] for name in names if name}


def make_research_env(*, profile: str = "small", level: int = 1, pages: int = 24) -> Env:
    """Return a `research` environment. Raises ValueError for invalid options, and if no sandbox is available.

    `profile`: see `rules_in`. `level`: the number of links that a question follows, 1 to 3; from 2 on it is about a
    file, and at 3 it takes a program. `pages`: about their number.
    """
    check_range("level", level, 1, 3)
    check_range("pages", pages, 12, 48)
    require_sandbox()
    return WorldEnv(
        f"research {profile} level={level} pages={pages}",
        make_world=partial(make_research, level=level, num_pages=pages),
        rules=rules_in(profile, RULES),
    )


def make_research(task: Task, *, level: int, num_pages: int) -> ResearchWorld:
    rng = task_rng(task, world=f"research/{level}/{num_pages}")
    while True:
        corpus = draw_corpus(rng, num_pages=num_pages)
        for _ in range(DRAWS_PER_CORPUS):
            question = draw_question(rng, corpus, level=level)
            if question is None or split_of(question.text) != task.split:
                continue
            if not set(words(question.answer)) & set(words(question.text)):
                return ResearchWorld(opening=question.text, corpus=corpus, question=question)
