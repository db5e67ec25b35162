"""Draws questions about a graph: their text, and the calls that answer them."""

import random
from dataclasses import dataclass

from slipstream.envhub.kg.graph import ATTRIBUTES, Entities, Graph

KINDS = ("chain", "both", "most", "least", "number")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of the solution, and the entities that it returns."""

    tool: str
    arguments: tuple[str | int, ...]  # a str is text, an int is the position of an earlier call
    gives: Entities


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    text: str
    starts: tuple[str, ...]  # the entities that its text names
    program: tuple[Call, ...]  # the solution; its last call returns the answer

    @property
    def answer(self) -> Entities:
        return self.program[-1].gives


def draw_question(rng: random.Random, graph: Graph, *, hops: int) -> Question | None:
    """Return a question whose answer is not empty and not in its text; None if this draw gave no such question."""
    kind = rng.choice(KINDS)
    start, other = rng.sample(sorted(graph.kinds), 2)
    program, second = _walk(rng, graph, start, hops), _walk(rng, graph, other, hops)
    if not program or not second:
        return None
    found, last, text = program[-1].gives, len(program) - 1, _chain_text(program)
    if kind == "both":
        common = tuple(sorted(set(found) & set(second[-1].gives)))
        if common in (found, second[-1].gives):
            return None
        program += [_shifted(call, len(program)) for call in second]
        program.append(Call(tool="intersection", arguments=(last, len(program) - 1), gives=common))
        text = f"both {text} and {_chain_text(second)}"
    elif kind in ("most", "least"):
        if len(found) < 2:
            return None
        attribute = ATTRIBUTES[graph.kinds[found[0]]]
        tool, best = ("argmax", max) if kind == "most" else ("argmin", min)
        chosen = best(found, key=graph.numbers.__getitem__)
        program.append(Call(tool=tool, arguments=(last, attribute), gives=(chosen,)))
        text = f"{text} with {kind} {attribute}"
    elif kind == "number":
        program.append(Call(tool="count", arguments=(last,), gives=(str(len(found)),)))
        text = f"number of {text}"
    starts = (start, other) if kind == "both" else (start,)
    answer = program[-1].gives
    if not answer or set(answer) & set(starts):
        return None
    return Question(text=text, starts=starts, program=tuple(program))


def _walk(rng: random.Random, graph: Graph, start: str, hops: int) -> list[Call]:
    """Return calls that follow `hops` relations in a row; [] if the walk ends earlier."""
    calls: list[Call] = []
    here: Entities = (start,)
    for hop in range(hops):
        relations = graph.relations(here)
        if not relations:
            return []
        relation = rng.choice(relations)
        here = graph.neighbours(here, relation)
        calls.append(Call(tool="get_neighbors", arguments=(hop - 1 if hop else start, relation), gives=here))
    return calls


def _chain_text(calls: list[Call]) -> str:
    relations = [str(call.arguments[1]) for call in reversed(calls)]
    return f"{' of '.join(relations)} of {calls[0].arguments[0]}"


def _shifted(call: Call, by: int) -> Call:
    """Return `call` with its positions increased by `by`, for a program that starts after `by` other calls."""
    arguments = tuple(argument + by if isinstance(argument, int) else argument for argument in call.arguments)
    return Call(tool=call.tool, arguments=arguments, gives=call.gives)
