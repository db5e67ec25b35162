"""The data of a shop: its products, and the goal of the customer."""

from dataclasses import dataclass

from slipstream.envhub.bm25 import Bm25


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of product. Its name consists of nouns."""

    name: str
    category: tuple[str, ...]  # from the department down to the kind

    @property
    def nouns(self) -> frozenset[str]:
        return frozenset(self.name.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One item of the catalogue. The values of its options are distinct across options."""

    product_id: str
    kind: Kind
    title: str
    attributes: frozenset[str]
    price: float  # dollars
    options: dict[str, tuple[str, ...]]  # option -> its values
    sections: dict[str, str]  # name to click -> text of that page

    def option_of(self, value: str) -> str | None:
        """Return the option that has `value`; None if there is no such option."""
        return next((option for option, values in self.options.items() if value in values), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """The product that the instruction describes."""

    kind: Kind
    attributes: frozenset[str]
    options: dict[str, str]
    max_price: float  # dollars
    product_id: str  # of a product that meets the whole goal; only the expert uses it


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """Everything about one task that does not change."""

    products: tuple[Product, ...]
    index: Bm25
    goal: Goal
    instruction: str
    searches: tuple[str, ...]  # sensible queries, the best first

    @property
    def goal_position(self) -> int:
        return self.position_of(self.goal.product_id)

    def position_of(self, product_id: str) -> int:
        """Return the position of `product_id` in the catalogue. Raises ValueError if it is not there."""
        return [product.product_id for product in self.products].index(product_id)
