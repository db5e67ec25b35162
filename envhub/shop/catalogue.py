"""What a shop sells, and what a customer wants from it."""

from dataclasses import dataclass

from envhub.bm25 import Bm25


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a product is: its name is made of nouns, the last of them the head."""

    name: str
    category: tuple[str, ...]  # from the department down

    @property
    def nouns(self) -> frozenset[str]:
        return frozenset(self.name.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One item of the catalogue. No value belongs to two of its options."""

    product_id: str
    kind: Kind
    title: str
    attributes: frozenset[str]
    price: float  # dollars
    options: dict[str, tuple[str, ...]]  # the values on offer, by option
    sections: dict[str, str]  # further pages, by the name that is clicked

    def option_of(self, value: str) -> str | None:
        """The option that offers `value`; None where none does."""
        return next((option for option, values in self.options.items() if value in values), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What the instruction asks for."""

    kind: Kind
    attributes: frozenset[str]
    options: dict[str, str]
    max_price: float  # dollars
    product_id: str  # of a product that has it all: for the expert's eyes only


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """One task's world, never changed by an episode."""

    products: tuple[Product, ...]
    index: Bm25
    goal: Goal
    instruction: str
    searches: tuple[str, ...]  # queries that make sense, good and bad ones, the best first

    @property
    def goal_position(self) -> int:
        return [product.product_id for product in self.products].index(self.goal.product_id)
