"""WebShop's reward for a purchase (Yao et al., 2022, https://arxiv.org/abs/2207.01206, section 3 and its code).

    r = r_type * (|goal attributes of the product| + |goal options chosen| + 1[price <= max price])
               / (|goal attributes| + |goal options| + 1)

    r_type = 0    if the product's name has no noun of the goal's name
             0.1  else if it has fewer than 10 % of these nouns
             1    else if the kind or two levels of the category are equal, or it has more than 20 % of these nouns
             0.5  otherwise

Example: the goal has two attributes, a colour and a size. The product is of the same kind, has one of the attributes
and the right colour, another size, and a low enough price: r = 1 * (1 + 1 + 1) / (2 + 2 + 1) = 0.6.

WebShop compares words approximately and finds nouns with a tagger, because its texts come from the web. Our texts are
generated. So a name consists of nouns, and words match only if they are equal.
"""

from collections.abc import Mapping

from slipstream.envhub.shop.products import Goal, Kind, Product


def type_reward(bought: Kind, wanted: Kind) -> float:
    """Return r_type, in [0, 1]."""
    noun_match = len(bought.nouns & wanted.nouns) / len(wanted.nouns)
    if noun_match == 0.0:
        return 0.0
    if noun_match < 0.1:
        return 0.1
    category_match = len(set(bought.category) & set(wanted.category)) >= 2
    return 1.0 if bought.name == wanted.name or category_match or noun_match > 0.2 else 0.5


def purchase_reward(product: Product, goal: Goal, chosen: Mapping[str, str]) -> float:
    """Return the reward r, in [0, 1], for buying `product` with the options `chosen`."""
    num_attributes = len(product.attributes & goal.attributes)
    num_options = sum(chosen.get(option) == value for option, value in goal.options.items())
    cheap_enough = product.price <= goal.max_price
    num_required = len(goal.attributes) + len(goal.options) + 1
    return type_reward(product.kind, goal.kind) * (num_attributes + num_options + cheap_enough) / num_required
