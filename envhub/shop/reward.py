"""WebShop's reward for what was bought (Yao et al., 2022, https://arxiv.org/abs/2207.01206, section 3 and its code).

    r = r_type * (|attributes asked and had| + |options asked and chosen| + 1[price <= max price])
               / (|attributes asked| + |options asked| + 1)

    r_type = 0    if no noun of the goal's name is in the product's
             0.1  else if fewer than 10 % of them are
             1    else if the kind is the same, two category levels are shared, or more than 20 % of the nouns are
             0.5  otherwise

Asked: two attributes, a colour and a size. Bought: one of the attributes, the right colour, another size, cheap enough,
and the same kind: r = 1 * (1 + 1 + 1) / (2 + 2 + 1) = 0.6.

WebShop matches words fuzzily and finds nouns with a tagger, because its texts come from the web. Ours are generated:
names are nouns, and equal means equal.
"""

from collections.abc import Mapping

from envhub.shop.catalogue import Goal, Kind, Product


def type_reward(bought: Kind, asked: Kind) -> float:
    """r_type, in [0, 1]."""
    noun_match = len(bought.nouns & asked.nouns) / len(asked.nouns)
    if noun_match == 0.0:
        return 0.0
    if noun_match < 0.1:
        return 0.1
    category_match = len(set(bought.category) & set(asked.category)) >= 2
    return 1.0 if bought.name == asked.name or category_match or noun_match > 0.2 else 0.5


def purchase_reward(product: Product, goal: Goal, chosen: Mapping[str, str]) -> float:
    """r, in [0, 1], for buying `product` with the options `chosen`."""
    num_attributes = len(product.attributes & goal.attributes)
    num_options = sum(chosen.get(option) == value for option, value in goal.options.items())
    cheap_enough = product.price <= goal.max_price
    num_asked = len(goal.attributes) + len(goal.options) + 1
    return type_reward(product.kind, goal.kind) * (num_attributes + num_options + cheap_enough) / num_asked
