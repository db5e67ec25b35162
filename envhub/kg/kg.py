"""`kg`: questions of several hops over a knowledge graph, which only AgentBench's seven tools can read.

The tools (https://arxiv.org/abs/2308.03688) store the entities that they find as #1, #2 and so on. They show the kind
of these entities, not their names.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_range
from slipstream.envhub.kg.graph import ATTRIBUTES, Entities, Graph, draw_graph
from slipstream.envhub.kg.graph_question import Question, draw_question
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.world import Change, InvalidAction, WorldEnv, rules_in

MAX_VARIABLES = 64
RULES = (
    "Answer the question by calling tools over a knowledge graph. A call that finds entities stores them as #k, "
    "counted from one; x is an entity or a #k. get_relations(x): the relations that start at x. "
    "get_neighbors(x, relation): the entities that it leads to. intersection(#k, #k). get_attributes(#k). "
    "argmax(#k, attribute), argmin(#k, attribute): the entity with the largest or smallest value. count(#k). "
    "End with answer(#k)."
)
ARITY = dict.fromkeys(("get_relations", "get_attributes", "count", "answer"), 1)
ARITY |= dict.fromkeys(("get_neighbors", "intersection", "argmax", "argmin"), 2)
NUMBER = "number"  # the kind of a count

_CALL = re.compile(r"\s*([a-z][a-z_\s]*)\(([^()]*)\)\s*", re.IGNORECASE | re.ASCII)


class KgState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    found: tuple[Entities, ...] = ()  # the values of #1, #2 and so on; all differ


@dataclass(frozen=True, kw_only=True, slots=True)
class KgWorld:
    opening: str
    graph: Graph
    question: Question
    first: KgState = field(default_factory=KgState)

    async def act(self, state: KgState, action: str) -> Change[KgState]:
        tool, arguments = _parsed(action)
        if tool == "answer":
            score = f1(self._variable(state, arguments[0]), self.question.answer)
            return Change(state=state, text="answered", over=True, score=score)
        if tool in ("get_relations", "get_attributes"):
            return Change(state=state, text=" ".join(self._listed(state, tool, arguments[0])) or "none")
        return self._stored(state, self._result(state, tool, arguments))

    def admissible(self, state: KgState) -> list[str]:
        sets: dict[str, Entities] = {start: (start,) for start in self.question.starts}
        sets |= {f"#{number}": entities for number, entities in enumerate(state.found, 1) if not _is_count(entities)}
        variables = [name for name in sets if name.startswith("#")]
        actions = [f"get_relations({name})" for name in sets]
        actions += [f"get_attributes({name})" for name in variables]
        actions += [f"answer(#{number})" for number in range(1, len(state.found) + 1)]
        if len(state.found) == MAX_VARIABLES:
            return actions
        for name, entities in sets.items():
            actions += [f"get_neighbors({name}, {relation})" for relation in self.graph.relations(entities)]
        for name in variables:
            attribute = ATTRIBUTES[self.graph.kinds[sets[name][0]]]
            actions += [f"argmax({name}, {attribute})", f"argmin({name}, {attribute})", f"count({name})"]
            actions += [f"intersection({name}, {other})" for other in variables if name < other]
        return actions

    def expert(self, state: KgState) -> str:
        """Return the first call of the solution whose result is not stored yet, else the best answer."""
        names = {entities: f"#{number}" for number, entities in enumerate(state.found, 1)}
        program = self.question.program
        for call in program if len(state.found) < MAX_VARIABLES else ():
            if call.gives not in names:
                given = [names[program[a].gives] if isinstance(a, int) else a for a in call.arguments]
                return f"{call.tool}({', '.join(given)})"
        best = max(state.found, key=lambda entities: f1(entities, self.question.answer))
        return f"answer({names[best]})"

    def _listed(self, state: KgState, tool: str, name: str) -> list[str]:
        entities = self._set(state, name) if tool == "get_relations" else self._variable(state, name)
        if _is_count(entities):
            raise InvalidAction("a number has neither relations nor attributes")
        if tool == "get_relations":
            return self.graph.relations(entities)
        return [ATTRIBUTES[self.graph.kinds[entities[0]]]]

    def _result(self, state: KgState, tool: str, arguments: list[str]) -> Entities:
        if tool == "get_neighbors":
            entities = self._set(state, arguments[0])
            if _is_count(entities) or arguments[1] not in self.graph.relations(entities):
                raise InvalidAction(f"no relation {arguments[1]} there")
            return self.graph.neighbours(entities, arguments[1])
        entities = self._variable(state, arguments[0])
        if tool == "intersection":
            return tuple(sorted(set(entities) & set(self._variable(state, arguments[1]))))
        if _is_count(entities):
            raise InvalidAction("a number has neither members nor attributes")
        if tool == "count":
            return (str(len(entities)),)
        if arguments[1] != ATTRIBUTES[self.graph.kinds[entities[0]]]:
            raise InvalidAction(f"no attribute {arguments[1]} there")
        return ((max if tool == "argmax" else min)(entities, key=self.graph.numbers.__getitem__),)

    def _stored(self, state: KgState, entities: Entities) -> Change[KgState]:
        if not entities:
            return Change(state=state, text="nothing")
        kind = NUMBER if _is_count(entities) else self.graph.kinds[entities[0]]
        if entities in state.found:
            return Change(state=state, text=f"#{state.found.index(entities) + 1} {kind}")
        if len(state.found) == MAX_VARIABLES:
            raise InvalidAction("too many variables")
        return Change(state=KgState(found=(*state.found, entities)), text=f"#{len(state.found) + 1} {kind}")

    def _set(self, state: KgState, name: str) -> Entities:
        if name.startswith("#"):
            return self._variable(state, name)
        if name not in self.graph.kinds:
            raise InvalidAction(f"no entity {name}"[:80])
        return (name,)

    def _variable(self, state: KgState, name: str) -> Entities:
        number = name.removeprefix("#")
        if not name.startswith("#") or number not in map(str, range(1, len(state.found) + 1)):
            raise InvalidAction(f"no variable {name}"[:80])
        return state.found[int(number) - 1]


def make_kg_env(*, profile: str = "small", hops: int = 2) -> Env:
    """Return a `kg` environment. Raises ValueError for invalid options.

    `profile`: see `rules_in`. `hops`: the number of relations that a question follows.
    """
    check_range("hops", hops, 1, 4)
    rules, make_world = rules_in(profile, RULES), partial(make_kg, hops=hops)
    return WorldEnv(f"kg {profile} hops={hops}", make_world=make_world, rules=rules)


def make_kg(task: Task, *, hops: int) -> KgWorld:
    rng = task_rng(task, world=f"kg/{hops}")
    graph = draw_graph(rng)
    while True:
        question = draw_question(rng, graph, hops=hops)
        if question is not None and split_of(question.text) == task.split:
            return KgWorld(opening=question.text, graph=graph, question=question)


def f1(answer: Collection[str], true: Collection[str]) -> float:
    """Return 2 |answer & true| / (|answer| + |true|); 0 for an empty answer.

    Two answers, one of them the only true one: 2 * 1 / 3 = 0.67.
    """
    return 2 * len(set(answer) & set(true)) / (len(answer) + len(true)) if answer else 0.0


def _parsed(action: str) -> tuple[str, list[str]]:
    found = _CALL.fullmatch(action)
    tool = "".join(found[1].lower().split()) if found else ""
    arguments = ["".join(argument.lower().split()) for argument in found[2].split(",")] if found else []
    if tool not in ARITY or len(arguments) != ARITY[tool]:
        raise InvalidAction("no such call")
    return tool, arguments


def _is_count(entities: Entities) -> bool:
    return entities[0].isdigit()
