"""Generates a knowledge graph: people, towns, firms and goods, the relations between them, and a number for each."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.envhub.name_list import name_list

NAMES = {
    "person": name_list(
        """
        ada, ben, cleo, dora, emil, fay, gus, hana, igor, june, kai, lena, milo, nora, otto, pia, quinn, rosa,
        sven, tara, ugo, vera, walt, xena, yara, zeno, alma, boris, carla, dino, elsa, felix, greta, hugo, iris,
        jonas, klara, leon, mona, nils
        """
    ),
    "town": name_list(
        """
        arden, belmont, corby, dover, elgin, forest, garston, hilton, irvine, jarrow, kelso, linton, malton,
        norwood, oakham, preston, quorn, ripley, selby, thirsk
        """
    ),
    "firm": name_list(
        """
        acme, borealis, comet, delta, ember, fulcrum, granite, horizon, indigo, juniper, kestrel, lumen,
        meridian, nimbus, orbit, pinnacle
        """
    ),
    "good": name_list(
        """
        boots, cheese, chairs, clocks, drums, flour, honey, jam, kettles, lamps, nails, paint, pens, rope, soap,
        tea
        """
    ),
}
COUNTS = {"person": 10, "town": 5, "firm": 5, "good": 6}  # entities of each kind in a graph
# relation -> (kind it leads from, kind it leads to, at most how many); the inverse relations follow from these
RELATIONS = {
    "friend": ("person", "person", 3),
    "home": ("person", "town", 1),
    "employer": ("person", "firm", 1),
    "seat": ("firm", "town", 1),
    "product": ("firm", "good", 3),
    "rival": ("firm", "firm", 2),
}
INVERSES = {"home": "resident", "employer": "worker", "product": "maker"}
ATTRIBUTES = {"person": "age", "town": "size", "firm": "staff", "good": "price"}

Entities = tuple[str, ...]  # a sorted set


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    kinds: dict[str, str]  # entity -> person, town, firm or good
    edges: dict[str, dict[str, Entities]]  # entity -> relation -> the entities that it leads to
    numbers: dict[str, int]  # entity -> the value of the only attribute of its kind; all values differ

    def relations(self, entities: Iterable[str]) -> list[str]:
        return sorted({relation for entity in entities for relation in self.edges[entity]})

    def neighbours(self, entities: Iterable[str], relation: str) -> Entities:
        return tuple(sorted({end for entity in entities for end in self.edges[entity].get(relation, ())}))


def draw_graph(rng: random.Random) -> Graph:
    members = {kind: rng.sample(names, COUNTS[kind]) for kind, names in NAMES.items()}
    kinds = {entity: kind for kind, entities in members.items() for entity in entities}
    found: dict[str, dict[str, set[str]]] = {entity: {} for entity in kinds}
    for relation, (start_kind, end_kind, most) in RELATIONS.items():
        for start in members[start_kind]:
            others = [end for end in members[end_kind] if end != start]
            for end in rng.sample(others, rng.randint(1, most)):
                found[start].setdefault(relation, set()).add(end)
                if relation in INVERSES:
                    found[end].setdefault(INVERSES[relation], set()).add(start)
    edges = {
        entity: {relation: tuple(sorted(ends)) for relation, ends in by_relation.items()}
        for entity, by_relation in found.items()
    }
    values = rng.sample(range(10, 100), len(kinds))
    return Graph(kinds=kinds, edges=edges, numbers=dict(zip(kinds, values, strict=True)))
