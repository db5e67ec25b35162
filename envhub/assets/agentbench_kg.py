"""`agentbench_kg`: the knowledge-graph questions of AgentBench (https://arxiv.org/abs/2308.03688), over Freebase.

The questions come from the user's file, and Freebase is the user's SPARQL endpoint. The score is F1 over the entities,
as in AgentBench.
"""

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slipstream.envhub.assets.freebase import ENTITY, RELATION, Freebase, Variable, program_size
from slipstream.envhub.env import Env
from slipstream.envhub.kg.kg import ARITY, MAX_VARIABLES, f1
from slipstream.envhub.user_files import asset_path, item_of, read_files, read_json
from slipstream.envhub.world import Change, InvalidAction, WorldEnv

MAX_PROGRAM_CALLS = 64  # in the query for one variable
MAX_SHOWN_CHARS = 4000
NUMBER = "type.int"
FETCH = "get data/knowledgegraph/std.json (or dev.json) of github.com/THUDM/AgentBench, and give its path"
FETCH_ONTOLOGY = (
    "get src/server/tasks/knowledgegraph/ontology of github.com/THUDM/AgentBench, and give the folder with its "
    "vocab.json and fb_roles"
)
RULES = (
    "Answer the question by calling tools over Freebase. A call that finds entities stores them as #k, counted from "
    "zero; x is an entity or a #k. get_relations(x): the relations that lead away from it. get_neighbors(x, relation): "
    "what it leads to. intersection(#k, #k), of one type. get_attributes(#k): numbers and dates known of them. "
    "argmax(#k, attribute), argmin(#k, attribute): the one with the most or least. count(#k). End with answer(#k)."
)

_CALL = re.compile(r"\s*([a-z_]+)\s*\(([^()]*)\)\s*", re.ASCII)


class _Answer(msgspec.Struct):
    answer_argument: str


class KgItem(msgspec.Struct):
    """The fields of a question that this environment uses."""

    question: str
    entities: dict[str, str]  # a name in the question -> the entity's number in Freebase
    answer: list[_Answer]
    actions: list[str] = []  # calls that lead to the answer

    @property
    def true(self) -> set[str]:
        return {each.answer_argument for each in self.answer}


class _Vocabulary(msgspec.Struct):
    relations: frozenset[str]
    attributes: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ontology:
    relations: frozenset[str]
    attributes: frozenset[str]
    kinds: dict[str, str]  # relation -> the type of its objects


class FbState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    found: tuple[Variable, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FbWorld:
    item: KgItem
    ontology: Ontology
    freebase: Freebase
    first: FbState = field(default_factory=FbState)

    @property
    def opening(self) -> str:
        named = ", ".join(f"{name}: {number}" for name, number in self.item.entities.items())
        return f"{self.item.question}\nEntities: {named}"

    async def act(self, state: FbState, action: str) -> Change[FbState]:
        tool, arguments = _parsed(state, action)
        if tool == "answer":
            answer = await self.freebase.members(state.found, arguments[0])
            return Change(state=state, text="answered", over=True, score=f1(answer, self.item.true))
        if tool in ("get_relations", "get_attributes"):
            known = self.ontology.relations if tool == "get_relations" else self.ontology.attributes
            names = sorted(await self.freebase.relations(state.found, arguments[0]) & known)
            return Change(state=state, text=", ".join(names)[:MAX_SHOWN_CHARS] or "none")
        kind = self._kind(state, tool, arguments)
        return await self._stored(state, Variable(tool=tool, arguments=arguments, kind=kind))

    def expert(self, state: FbState) -> str:
        """Return the file's next call that makes a new variable, then the answer."""
        shows = ("get_relations", "get_attributes")  # these calls make no variable
        calls = [call for call in self.item.actions if not call.startswith(shows)]
        if len(state.found) < len(calls):
            return calls[len(state.found)]
        return f"answer(#{len(calls) - 1})"

    def _kind(self, state: FbState, tool: str, arguments: tuple[str, ...]) -> str:
        """Return the type of a call's result. Raises InvalidAction for invalid arguments."""
        kinds = [state.found[int(name[1:])].kind for name in arguments if name.startswith("#")]
        if tool == "get_neighbors":
            if arguments[1] not in self.ontology.relations:
                raise InvalidAction(f"no relation {arguments[1]}"[:80])
            return self.ontology.kinds[arguments[1]]
        if tool == "intersection" and kinds[0] != kinds[1]:
            raise InvalidAction(f"{kinds[0]} and {kinds[1]} have nothing in common")
        if tool in ("argmax", "argmin") and arguments[1] not in self.ontology.attributes:
            raise InvalidAction(f"no attribute {arguments[1]}"[:80])
        return NUMBER if tool == "count" else kinds[0]

    async def _stored(self, state: FbState, variable: Variable) -> Change[FbState]:
        if variable in state.found:
            return Change(state=state, text=f"#{state.found.index(variable)} {variable.kind}")
        if len(state.found) == MAX_VARIABLES or program_size(state.found, variable) > MAX_PROGRAM_CALLS:
            raise InvalidAction("too many variables, or too long a way to this one")
        found, name = (*state.found, variable), f"#{len(state.found)}"
        if variable.tool != "count" and await self.freebase.is_empty(found, name):
            return Change(state=state, text="nothing")
        return Change(state=FbState(found=found), text=f"{name} {variable.kind}")


def make_agentbench_kg_env(*, train: str = "", held_out: str = "", ontology: str = "", sparql_url: str = "") -> Env:
    """Make an environment of AgentBench's questions. Raises ValueError if a file or the endpoint's URL is missing.

    `train` and `held_out` are files of questions, used in turn; `ontology` is AgentBench's folder of that name;
    `sparql_url` is the URL of the endpoint with Freebase.
    """
    if not sparql_url:
        raise ValueError(
            "`env.options.sparql_url` must be the URL of a SPARQL endpoint with Freebase, such as "
            "http://127.0.0.1:3001/sparql, got ''; github.com/dki-lab/Freebase-Setup explains how to set one up"
        )
    items = read_files(read_json, train, held_out, list[KgItem], fetch=FETCH)
    allowed = read_ontology(asset_path("ontology", ontology, fetch=FETCH_ONTOLOGY))
    freebase = Freebase(url=sparql_url)
    return WorldEnv(
        f"agentbench_kg {train} {held_out}",
        make_world=lambda task: FbWorld(item=item_of(task, items), ontology=allowed, freebase=freebase),
        rules=RULES,
    )


@functools.lru_cache(maxsize=2)
def read_ontology(folder: Path) -> Ontology:
    """Read the relations that AgentBench allows. A line of fb_roles is: type, relation, object's type."""
    words = read_json(asset_path("ontology", str(folder / "vocab.json"), fetch=FETCH_ONTOLOGY), _Vocabulary)
    roles = asset_path("ontology", str(folder / "fb_roles"), fetch=FETCH_ONTOLOGY).read_text().splitlines()
    kinds = {parts[1]: parts[2] for parts in map(str.split, roles) if len(parts) == 3}
    return Ontology(relations=words.relations & kinds.keys(), attributes=words.attributes, kinds=kinds)


def _parsed(state: FbState, action: str) -> tuple[str, tuple[str, ...]]:
    """Return the tool and its arguments: entities, existing variables and names of relations. Raises InvalidAction."""
    found = _CALL.fullmatch(action)
    arguments = tuple(part.strip() for part in found[2].split(",")) if found else ()
    if found is None or found[1] not in ARITY or len(arguments) != ARITY[found[1]]:
        raise InvalidAction("no such call")
    tool = found[1]
    takes_entities = tool in ("get_relations", "get_neighbors")
    named = arguments if tool == "intersection" else arguments[:1]
    for name in named:
        is_variable = name in {f"#{number}" for number in range(len(state.found))}
        if not is_variable and not (takes_entities and ENTITY.fullmatch(name)):
            raise InvalidAction(f"no variable {name}"[:80])
        if is_variable and tool != "answer" and state.found[int(name[1:])].kind == NUMBER:
            raise InvalidAction("a number has no members")
    if len(named) < len(arguments) and RELATION.fullmatch(arguments[1]) is None:
        raise InvalidAction(f"no relation {arguments[1]}"[:80])
    return tool, arguments
