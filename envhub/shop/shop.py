"""`shop`: a store in WebShop's format. Search, view products, choose options, buy; the reward is WebShop's.

The products, pages and instructions are generated from the task, so nothing is downloaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slipstream.envhub.env_options import check_choice
from slipstream.envhub.shop import pages
from slipstream.envhub.shop.full import make_full_store
from slipstream.envhub.shop.products import Goal, Product, Store
from slipstream.envhub.shop.purchase_reward import purchase_reward
from slipstream.envhub.shop.small import make_small_store
from slipstream.envhub.world import Change, InvalidAction, WorldEnv

FULL_RULES = (
    "You are shopping online. Find a product that matches the instruction, choose its options, and buy it. "
    "On the search page: search[keywords]. On every other page: click[...] with a product's code, an option's value, "
    "or a link that the page shows, such as click[Back to Search], click[< Prev], click[Next >], click[Description] "
    "and click[Buy Now]. Buying ends the episode."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    text: Callable[[Store, pages.Page, int], str]  # of a page, with the number of results on one
    page_size: int
    ranked: bool  # results are sorted best first; with only six products, that would give the answer away
    rules: str  # the system message; empty for none
    greeting: str  # before the instruction, in the first user message
    refusal: str  # the answer to an invalid action


STORES = {"small": make_small_store, "full": make_full_store}
PROFILES = {
    "small": Profile(text=pages.terse_text, page_size=4, ranked=False, rules="", greeting="", refusal="invalid"),
    "full": Profile(
        text=pages.webshop_text,
        page_size=10,
        ranked=True,
        rules=FULL_RULES,
        greeting="WebShop [SEP] Instruction: [SEP] ",
        refusal="Invalid action: the page has nothing that it refers to.",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShopWorld:
    profile: Profile
    store: Store
    reward: Callable[[Product, Goal, Mapping[str, str]], float]  # for a product with the options chosen
    first: pages.Page = field(default_factory=pages.Page)

    @property
    def opening(self) -> str:
        return self.profile.greeting + self.store.instruction

    async def act(self, state: pages.Page, action: str) -> Change[pages.Page]:
        profile, store = self.profile, self.store
        page = pages.next_page(store, state, action, page_size=profile.page_size, ranked=profile.ranked)
        if page is None:
            raise InvalidAction(profile.refusal)
        text = profile.text(store, page, profile.page_size)
        if not page.bought:
            return Change(state=page, text=text)
        assert page.product is not None
        score = self.reward(store.products[page.product], store.goal, page.options)
        return Change(state=page, text=text, over=True, score=score)

    def admissible(self, state: pages.Page) -> list[str]:
        """Return all clicks, or on the search page good and bad searches, in alphabetical order."""
        if state.results is None:
            return sorted(f"search[{query}]" for query in self.store.searches)
        return [f"click[{target}]" for target in pages.clickables(self.store, state, page_size=self.profile.page_size)]

    def expert(self, state: pages.Page) -> str:
        """Return the next action of the shortest safe plan to buy the goal's product."""
        profile, store = self.profile, self.store
        goal_position = store.goal_position
        if state.results is None:
            return f"search[{_best_search(store, profile)}]"
        if state.product is None:
            if goal_position not in state.results:
                return f"click[{pages.BACK}]"
            rank = state.results.index(goal_position)
            if rank < state.first:
                return f"click[{pages.PREVIOUS}]"
            return f"click[{pages.NEXT if rank >= state.first + profile.page_size else store.goal.product_id}]"
        if state.section:
            return f"click[{pages.PREVIOUS}]"
        if state.product != goal_position:
            return f"click[{pages.PREVIOUS if goal_position in state.results else pages.BACK}]"
        goal, goal_values = store.products[goal_position], store.goal.options.values()
        for option, values in goal.options.items():
            # A real product may have one value in two options; a click chooses the first one's.
            wanted = [value for value in values if value in goal_values and goal.option_of(value) == option]
            if wanted and state.options.get(option) not in wanted:
                return f"click[{wanted[0]}]"
        return f"click[{pages.BUY}]"


class ShopEnv(WorldEnv[pages.Page]):
    """The environment of `search[words]` and `click[thing]`, which ends with `click[buy now]`.

    `profile`: "small" (six products and short texts, for a tiny model) or "full" (200 products, with pages of results,
    descriptions, features and reviews). The one reward component is `purchase`: 0 on each turn but the last.
    """

    def __init__(self, *, profile: str = "small") -> None:
        """Raises ValueError for an unknown profile."""
        check_choice("profile", profile, PROFILES)
        chosen = PROFILES[profile]
        super().__init__(
            f"shop {profile}",
            make_world=lambda task: ShopWorld(profile=chosen, store=STORES[profile](task), reward=purchase_reward),
            rules=chosen.rules,
            reward="purchase",
        )


def _best_search(store: Store, profile: Profile) -> str:
    """Return the first query that shows the goal on its first page, or else the query that ranks it highest."""
    goal_position = store.goal_position
    ranks = {}
    for query in store.searches:
        ranking = store.index.rank(query)
        ranks[query] = ranking.index(goal_position) if goal_position in ranking else len(store.products)
        if ranks[query] < profile.page_size:
            return query
    return min(ranks, key=ranks.__getitem__)
