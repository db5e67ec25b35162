"""`research`: questions like GAIA's, over a corpus of one's own: search, pages, attached files, a calculator, Python.

Answers are judged by GAIA's quasi-exact match (`envhub/gaia_score.py`).
"""

import re
from dataclasses import dataclass
from functools import partial

import msgspec

from common.message import Message
from common.trajectory import Task
from envhub.bm25 import words
from envhub.env import Env
from envhub.isolation.file_tree import Tree, file
from envhub.gaia_score import is_gaia_match
from envhub.options import check_choice, check_range
from envhub.isolation.program import program_in
from envhub.research.calculator import calculate
from envhub.research.corpus import Corpus, draw_corpus
from envhub.research.question import MAX_RESULTS, Question, draw_question
from envhub.isolation.sandbox import Limits, require_sandbox, run_in_sandbox
from envhub.task_seed import split_of, task_rng
from envhub.world import Change, WorldEnv

MAX_SHOWN_CHARS = 2000
DRAWS_A_CORPUS = 50  # a small one may have no question for the task's split
RULES = (
    "Answer the question from a collection of pages. search(words): titles of the pages that fit best. open(title): a "
    "page. read(name): a file that a page names. calculate(expression): + - * / and brackets. python, and a program "
    "behind it, perhaps in a block, ```python ... ```: what it prints; it finds the files of the pages you opened. "
    "End with answer(...): a number, a few words, or a list with commas, and nothing else."
)

_CALL = re.compile(r"\s*(search|open|read|calculate|answer)\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)
_PYTHON = re.compile(r"\s*python\b[:\s]*(.*)", re.IGNORECASE | re.DOTALL)


class ResearchState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known, in no order: a collection that is only read has no other state."""

    found: frozenset[str] = frozenset()  # titles that a search has shown
    read: frozenset[str] = frozenset()  # titles of pages, and names of files
    is_computed: bool = False  # whether the calculator or Python has said the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class ResearchWorld:
    """One corpus and one question about it."""

    profile: str
    corpus: Corpus
    question: Question
    limits: Limits  # of a program

    @property
    def opening(self) -> tuple[Message, ...]:
        system = (Message("system", RULES),) if self.profile == "full" else ()
        return (*system, Message("user", self.question.text))

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self.question.answer,)

    @property
    def first(self) -> ResearchState:
        return ResearchState()

    async def act(self, state: ResearchState, action: str) -> Change[ResearchState]:
        if found := _PYTHON.fullmatch(action):
            program = program_in(found[1])
            if not program:
                return Change(state=state, text="a program is needed", valid=False)
            return self._computed(state, await self._printed(state, program))
        call = _CALL.fullmatch(action)
        if call is None or not call[2].strip():
            return Change(state=state, text="no such call", valid=False)
        tool, argument = call[1].lower(), call[2].strip()
        if tool == "answer":
            return Change(
                state=state, text="answered", over=True, score=float(is_gaia_match(argument, self.question.answer))
            )
        if tool == "search":
            return self._searched(state, argument)
        if tool == "calculate":
            try:
                return self._computed(state, calculate(argument))
            except ValueError as error:
                return Change(state=state, text=str(error), valid=False)
        return self._read(state, tool, "".join(argument.lower().split()))

    def admissible(self, state: ResearchState) -> None:
        return None

    def expert(self, state: ResearchState) -> str:
        """The search, the pages and the file that are still missing, in this order; the sum; the answer."""
        missing = [name for name in self.question.way if name not in state.read]
        if missing == list(self.question.way) and missing[0] not in state.found:
            return f"search({self.question.search})"
        if missing:
            return f"{'open' if missing[0] in self.corpus.pages else 'read'}({missing[0]})"
        if self.question.sum_action and not state.is_computed:
            return self.question.sum_action
        return f"answer({self.question.answer})"

    def _searched(self, state: ResearchState, words: str) -> Change[ResearchState]:
        titles = self.corpus.found(words, most=MAX_RESULTS)
        lines = [f"{self.corpus.pages[title].kind} {title}" for title in titles]
        found = msgspec.structs.replace(state, found=state.found | set(titles))
        return Change(state=found, text="\n".join(lines) or "nothing found")

    def _read(self, state: ResearchState, tool: str, name: str) -> Change[ResearchState]:
        if tool == "open":
            text = self.corpus.pages[name].text if name in self.corpus.pages else ""
        else:
            text = self._files(state).get(name, "").strip()
        if not text:
            what = "page" if tool == "open" else "file on the pages that you opened is"
            return Change(state=state, text=f"no {what} {name}"[:80], valid=False)
        return Change(state=msgspec.structs.replace(state, read=state.read | {name}), text=text)

    def _computed(self, state: ResearchState, said: str) -> Change[ResearchState]:
        computed = state.is_computed or is_gaia_match(said, self.question.answer)
        return Change(state=msgspec.structs.replace(state, is_computed=computed), text=said)

    def _files(self, state: ResearchState) -> dict[str, str]:
        """The files of the pages that have been opened."""
        names = [self.corpus.pages[title].file_name for title in sorted(state.read) if title in self.corpus.pages]
        return {name: self.corpus.files[name] for name in names if name}

    async def _printed(self, state: ResearchState, program: str) -> str:
        """What `program` prints, and how it fails."""
        tree: Tree = {name: file(content) for name, content in self._files(state).items()}
        tree["program.py"] = file(program)
        finished = await run_in_sandbox("/usr/bin/python3 -I program.py", tree, limits=self.limits)
        return finished.output.strip()[-MAX_SHOWN_CHARS:] or "(nothing)"


def make_research_env(
    *, profile: str = "small", level: int = 1, pages: int = 24, python_timeout_s: float = 10.0
) -> Env:
    """An environment of questions to look up. Raises ValueError for options that do not fit, and where no sandbox is.

    `profile` is "small" (no system message) or "full" (the tools are told), `level` how many links a question follows
    (1 to 3; from 2 on it is about an attached file, on 3 one for a program), `pages` about how many there are,
    `python_timeout_s` what a program may take.
    """
    check_choice("profile", profile, ("small", "full"))
    check_range("level", level, 1, 3)
    check_range("pages", pages, 12, 48)
    require_sandbox()
    return WorldEnv(
        f"research {profile} level={level} pages={pages}",
        state=ResearchState,
        make_world=partial(
            make_research, profile=profile, level=level, num_pages=pages, limits=Limits(wall_s=float(python_timeout_s))
        ),
    )


def make_research(task: Task, *, profile: str, level: int, num_pages: int, limits: Limits) -> ResearchWorld:
    """The corpus and question of `task`. Raises ValueError for a split that does not exist."""
    rng = task_rng(task, world=f"research/{level}/{num_pages}")
    while True:
        corpus = draw_corpus(rng, num_pages=num_pages)
        for _ in range(DRAWS_A_CORPUS):
            question = draw_question(rng, corpus, level=level)
            if question is None or split_of(question.text) != task.split:
                continue
            if not set(words(question.answer)) & set(words(question.text)):
                return ResearchWorld(profile=profile, corpus=corpus, question=question, limits=limits)
