"""WebShop's reward for real products' texts (https://arxiv.org/abs/2207.01206, section 3, and its code).

    r = r_type * (attributes matched + options matched + [price <= bound]) / (attributes + options wanted + 1)

Words match approximately: if the token-set ratio of the package thefuzz is above 85. It differs from WebShop in three
points. The nouns of a name are its words without `FILLERS` and numbers, while WebShop uses a tagger. Colours are not
mapped to simpler ones. And a size must be equal.
"""

import re
from collections.abc import Mapping

from slipstream.envhub.shop.products import Goal, Product

NEARLY = 85
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
    """Return r, in [0, 1], for buying `product` with the options `chosen`."""
    text = " ".join([product.title, *product.sections.values()]).lower()
    num_attributes = sum(_has(attribute, product.attributes, text) for attribute in goal.attributes)
    num_options = sum(
        any(_meets(option, value, wanted) for option, value in chosen.items()) for wanted in goal.options.values()
    )
    num_wanted = len(goal.attributes) + len(goal.options) + 1
    matched = num_attributes + num_options + (product.price <= goal.max_price)
    return type_reward(product, goal) * matched / num_wanted


def type_reward(product: Product, goal: Goal) -> float:
    """Return r_type: 0, 0.1, 0.5 or 1, from the nouns of both names, the query that found them and their categories."""
    wanted = nouns(goal.kind.name)
    share = len(nouns(product.kind.name) & wanted) / len(wanted) if wanted else 0.2
    if share == 0.0:
        return 0.0
    if share < 0.1:
        return 0.1
    # A category has the query first, then the levels from the department down.
    same_query = product.kind.category[0] == goal.kind.category[0]
    same_levels = len(set(product.kind.category[1:]) & set(goal.kind.category[1:])) >= 2
    return 1.0 if same_query or same_levels or share > 0.2 else 0.5


def nouns(name: str) -> frozenset[str]:
    """Return the words of a product's name that may be nouns."""
    return frozenset(_WORD.findall(name.lower())) - FILLERS


def token_set_ratio(one: str, other: str) -> float:
    """Return the similarity of two texts as sets of words, 0 to 100: 100 if one has all words of the other.

    Otherwise it is the best of three ratios between: the common words, these with the rest of the first text, and these
    with the rest of the second. "machine wash" and "machine washable" share a subsequence of 12 letters: 24 / (12 + 16)
    = 86%.
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
    """Return 200 times the length of the longest common subsequence, divided by the sum of both lengths."""
    lengths = [0] * (len(other) + 1)
    for letter in one:
        diagonal = 0
        for position, its in enumerate(other, 1):
            above = lengths[position]
            lengths[position] = diagonal + 1 if letter == its else max(above, lengths[position - 1])
            diagonal = above
    return 200 * lengths[-1] / (len(one) + len(other))


def _has(wanted: str, attributes: frozenset[str], text: str) -> bool:
    return wanted in text or any(round(token_set_ratio(given, wanted)) > NEARLY for given in sorted(attributes))


def _meets(option: str, value: str, wanted: str) -> bool:
    return value == wanted if option == "size" else round(token_set_ratio(wanted, value)) > NEARLY
