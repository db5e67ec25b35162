"""WebShop's reward for texts as the web has them (https://arxiv.org/abs/2207.01206, section 3 and its code).

    r = r_type * (attributes matched + options matched + [price <= bound]) / (attributes + options asked + 1)

Words match nearly: by the token-set ratio of the package thefuzz, above 85. What differs from WebShop: the nouns of a
name are its words without `FILLERS` and numbers, where WebShop asks a tagger; colours are not mapped to plainer ones;
and r is 1 at most.
"""

import re
from collections.abc import Mapping, Sequence

from envhub.shop.catalogue import Goal, Product

NEARLY = 85
EXACT_OPTIONS = ("size",)
FILLERS = frozenset(
    """
    a an and or of the for with without in on by to from at as is it its your our you all new best pack packs
    set piece pieces pcs count inch inches oz ounce ounces lb lbs ml cm mm ft pair free easy high low soft long
    short small large medium extra super ultra mini big one two three men women mens womens kids unisex adult
    black white red blue green grey gray brown pink purple yellow orange gold silver
    """.split()  # noqa: SIM905  a list of so many would be a column
)

_WORD = re.compile(r"[a-z]+")
_NO_WORD = re.compile(r"\W+")


def web_reward(product: Product, goal: Goal, chosen: Mapping[str, str]) -> float:
    """r, in [0, 1], for buying `product` with the options `chosen`."""
    text = " ".join([product.title, *product.sections.values()]).lower()
    num_attributes = sum(_has(asked, product.attributes, text) for asked in goal.attributes)
    wanted = list(goal.options.values())
    num_options = sum(_meets(option, value, wanted) or value in text for option, value in chosen.items())
    num_asked = len(goal.attributes) + len(goal.options) + 1
    matched = num_attributes + num_options + (product.price <= goal.max_price)
    return min(1.0, type_reward(product, goal) * matched / num_asked)


def type_reward(product: Product, goal: Goal) -> float:
    """r_type: 0, 0.1, 0.5 or 1, by the nouns of both names, the query that found them and their categories."""
    asked = nouns(goal.kind.name)
    share = len(nouns(product.kind.name) & asked) / len(asked) if asked else 0.2
    if share == 0.0:
        return 0.0
    if share < 0.1:
        return 0.1
    # A category holds the query first, then the levels from the department down.
    same_query = product.kind.category[0] == goal.kind.category[0]
    same_levels = len(set(product.kind.category[1:]) & set(goal.kind.category[1:])) >= 2
    return 1.0 if same_query or same_levels or share > 0.2 else 0.5


def nouns(name: str) -> frozenset[str]:
    """The words of a product's name that may be nouns."""
    return frozenset(_WORD.findall(name.lower())) - FILLERS


def token_set_ratio(one: str, other: str) -> float:
    """How alike two texts are as sets of words, 0 to 100: 100 where one has all words of the other.

    Else the best of three: the words in common against these with the rest of either behind them, and both of those
    against each other. "machine wash" and "machine washable" have 12 letters in common, in order: 24 / (12 + 16) = 86%.
    """
    ones, others = set(_NO_WORD.sub(" ", one.lower()).split()), set(_NO_WORD.sub(" ", other.lower()).split())
    if not ones or not others:
        return 0.0
    common = " ".join(sorted(ones & others))
    first = f"{common} {' '.join(sorted(ones - others))}".strip()
    second = f"{common} {' '.join(sorted(others - ones))}".strip()
    if common and common in (first, second):
        return 100.0
    return max(_ratio(first, second), *((_ratio(common, text) for text in (first, second)) if common else (0.0,)))


def _ratio(one: str, other: str) -> float:
    """200 times the longest common subsequence, over both lengths."""
    lengths = [0] * (len(other) + 1)
    for letter in one:
        diagonal = 0
        for position, its in enumerate(other, 1):
            above = lengths[position]
            lengths[position] = diagonal + 1 if letter == its else max(above, lengths[position - 1])
            diagonal = above
    return 200 * lengths[-1] / (len(one) + len(other))


def _has(asked: str, attributes: frozenset[str], text: str) -> bool:
    return asked in text or any(round(token_set_ratio(attribute, asked)) > NEARLY for attribute in sorted(attributes))


def _meets(option: str, value: str, wanted: Sequence[str]) -> bool:
    if option in EXACT_OPTIONS:
        return value in wanted
    return any(round(token_set_ratio(asked, value)) > NEARLY for asked in wanted)
