"""`shop`: a WebShop-format store. Search, look, choose options, buy; WebShop's reward for what was bought.

Products, pages and instructions are generated from the task, so nothing is downloaded and no two tasks share a world.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec

from common.message import Message
from common.trajectory import Task
from common.wire import decode, encode
from envhub.env import EnvError, Observation
from envhub.shop.catalogue import Store
from envhub.shop.full import make_full_store
from envhub.shop.pages import (
    BACK,
    BUY,
    NEXT,
    PREVIOUS,
    Page,
    clickables,
    next_page,
    terse_text,
    webshop_text,
)
from envhub.shop.reward import purchase_reward
from envhub.shop.small import make_small_store

MAX_SNAPSHOT_BYTES = 1 << 16

FULL_RULES = (
    "You are shopping online. Find a product that is what the instruction asks for, choose its options, and buy it. "
    "On the search page: search[keywords]. On every other page: click[...] with a product's code, an option's value, "
    "or a link that the page shows, such as click[Back to Search], click[< Prev], click[Next >], click[Description] "
    "and click[Buy Now]. Buying ends the episode."
)


class _Renderer(Protocol):
    def __call__(self, store: Store, page: Page, *, page_size: int) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Profile:
    make_store: Callable[[Task], Store]
    text: _Renderer
    page_size: int  # results on one page
    ranked: bool  # best first; six products in order of rank would give the answer away without reading
    rules: str  # the system message; empty for none
    greeting: str  # before the instruction, in the first user message
    refusal: str  # the answer to an action that makes no sense


PROFILES = {
    "small": _Profile(make_store=make_small_store, text=terse_text, page_size=4, ranked=False, rules="", greeting="",
                      refusal="invalid"),
    "full": _Profile(make_store=make_full_store, text=webshop_text, page_size=10, ranked=True, rules=FULL_RULES,
                     greeting="WebShop [SEP] Instruction: [SEP] ", refusal="Invalid action: the page has nothing that "
                     "it refers to."),
}  # fmt: skip


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    profile: str
    task: Task
    page: Page
    observation: Observation


@dataclass(kw_only=True, slots=True)
class _Episode:
    task: Task
    store: Store
    page: Page
    observation: Observation


class ShopEnv:
    """`search[words]` and `click[thing]`, until `click[buy now]`.

    Options: `profile`, "small" (six products and terse texts, for a tiny model) or "full" (hundreds of products,
    paging, descriptions, features and reviews). The one reward component is `purchase`: 0 on every turn but the last.
    """

    replay_only: ClassVar[bool] = False

    def __init__(self, *, profile: str = "small") -> None:
        """Raises ValueError for a profile that does not exist."""
        if profile not in PROFILES:
            raise ValueError(
                f"`env.options.profile` must be {' or '.join(PROFILES)}, got {profile!r}; small is default"
            )
        self._profile_name = profile
        self._profile = PROFILES[profile]
        self._episode: _Episode | None = None

    async def reset(self, task: Task) -> Observation:
        """Start `task`. Raises ValueError for a split that does not exist."""
        store = self._profile.make_store(task)
        instruction = Message("user", self._profile.greeting + store.instruction)
        system = (Message("system", self._profile.rules),) if self._profile.rules else ()
        observation = Observation(messages=(*system, instruction), rewards={})
        self._episode = _Episode(task=task, store=store, page=Page(), observation=observation)
        return observation

    async def step(self, action: str) -> Observation:
        """Do `action`. Raises EnvError before a reset and after the end."""
        episode = self._running()
        profile, store = self._profile, episode.store
        page = next_page(store, episode.page, action, page_size=profile.page_size, ranked=profile.ranked)
        if page is None:
            text, reward = profile.refusal, 0.0
        else:
            episode.page = page
            text, reward = profile.text(store, page, page_size=profile.page_size), _reward(store, page)
        episode.observation = Observation(
            messages=(Message("user", text),),
            rewards={"purchase": reward},
            terminated=episode.page.bought,
            valid_action=page is not None,
            score=reward,
            success=reward == 1.0,
        )
        return episode.observation

    async def close(self) -> None:
        self._episode = None

    def snapshot(self) -> bytes:
        """The episode, as one wire frame. Raises EnvError before a reset."""
        episode = self._started()
        return encode(
            _Snapshot(profile=self._profile_name, task=episode.task, page=episode.page, observation=episode.observation)
        )

    def restore(self, state: bytes) -> Observation:
        """Go back to a snapshot of any shop of this profile. Raises ValueError for bytes that are none."""
        snapshot = decode(_Snapshot, state, max_bytes=MAX_SNAPSHOT_BYTES)
        if snapshot.profile != self._profile_name:
            raise ValueError(f"a snapshot of a {snapshot.profile!r} shop cannot go on in a {self._profile_name!r} one")
        store = self._profile.make_store(snapshot.task)
        _check_page(store, snapshot.page, page_size=self._profile.page_size)
        _check_observation(store, snapshot.page, snapshot.observation)
        self._episode = _Episode(task=snapshot.task, store=store, page=snapshot.page, observation=snapshot.observation)
        return snapshot.observation

    def admissible(self) -> list[str]:
        """Every click there is; on the search page some good and some bad searches, in no telling order."""
        episode = self._started()
        if episode.page.results is None:
            return sorted(f"search[{query}]" for query in episode.store.searches)
        targets = clickables(episode.store, episode.page, page_size=self._profile.page_size)
        return [f"click[{target}]" for target in targets]

    def state_key(self) -> str:
        """Equal for the same page of the same task with the same options chosen."""
        episode = self._started()
        return f"{episode.task.task_id} {episode.page}"

    def expert(self) -> str:
        """The next action of the shortest sure way to the goal from here. Raises EnvError after the end."""
        episode = self._running()
        return _expert(episode.store, episode.page, self._profile)

    def _started(self) -> _Episode:
        if self._episode is None:
            raise EnvError("the shop has no episode; call reset first")
        return self._episode

    def _running(self) -> _Episode:
        episode = self._started()
        if episode.observation.done:
            raise EnvError(f"the episode of {episode.task.task_id} is over; call reset first")
        return episode


def _reward(store: Store, page: Page) -> float:
    if not page.bought:
        return 0.0
    assert page.product is not None
    return purchase_reward(store.products[page.product], store.goal, page.options)


def _expert(store: Store, page: Page, profile: _Profile) -> str:
    goal_position = store.goal_position
    if page.results is None:
        return f"search[{_best_search(store, profile)}]"
    if page.product is None:
        if goal_position not in page.results:
            return f"click[{BACK}]"
        rank = page.results.index(goal_position)
        if rank < page.first:
            return f"click[{PREVIOUS}]"
        return f"click[{NEXT if rank >= page.first + profile.page_size else store.goal.product_id}]"
    if page.product != goal_position:
        return f"click[{PREVIOUS if page.section or goal_position in page.results else BACK}]"
    if page.section:
        return f"click[{PREVIOUS}]"
    missing = [value for option, value in store.goal.options.items() if page.options.get(option) != value]
    return f"click[{missing[0] if missing else BUY}]"


def _best_search(store: Store, profile: _Profile) -> str:
    """The first of the queries that finds the goal, or the one that finds it earliest."""
    goal_position = store.goal_position
    ranks = {}
    for query in store.searches:
        ranking = store.index.rank(query)
        ranks[query] = ranking.index(goal_position) if goal_position in ranking else len(store.products)
    good = [query for query, rank in ranks.items() if rank < profile.page_size]
    return good[0] if good else min(ranks, key=ranks.__getitem__)


def _check_page(store: Store, page: Page, *, page_size: int) -> None:
    """Raise ValueError unless the customer can be on `page` of `store`."""
    num_products, results = len(store.products), page.results
    if results is None:
        if page != Page():
            raise ValueError("shop snapshot: a search page with a product on it")
        return
    if len(set(results)) != len(results) or not all(0 <= position < num_products for position in results):
        raise ValueError(f"shop snapshot: results {results} are not distinct products of {num_products}")
    if page.first % page_size or not 0 <= page.first < max(len(results), 1):
        raise ValueError(f"shop snapshot: no page of {len(results)} results begins with number {page.first}")
    if page.product is None:
        if page.section or page.options or page.bought:
            raise ValueError("shop snapshot: a page of results with something chosen or bought")
        return
    if page.product not in results[page.first : page.first + page_size]:
        raise ValueError(f"shop snapshot: product {page.product} is not on its page of results")
    product = store.products[page.product]
    if page.section and (page.section not in product.sections or page.bought):
        raise ValueError(f"shop snapshot: product {page.product} shows no section {page.section!r}")
    for option, value in page.options.items():
        if value not in product.options.get(option, ()):
            raise ValueError(f"shop snapshot: product {page.product} has no {option} {value!r}")


def _check_observation(store: Store, page: Page, observation: Observation) -> None:
    """Raise ValueError unless `observation` may have been made on `page`."""
    reward = _reward(store, page)
    said = (observation.terminated, observation.truncated, observation.score, observation.success)
    if said != (page.bought, False, reward, reward == 1.0):
        raise ValueError(f"shop snapshot: the observation says score {observation.score}, the page {reward}")
    if observation.rewards not in ({}, {"purchase": reward}):
        raise ValueError(f"shop snapshot: rewards {observation.rewards}, expected purchase {reward}")
