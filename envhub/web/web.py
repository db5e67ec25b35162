"""`web`: do errands on a web site through a text browser. The site's last state is judged."""

import re
import urllib.parse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_choice, check_range
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.web.browser import Browser, Element, Page, element_text, filled, page_text, read_page
from slipstream.envhub.web.site import (
    ITEMS_PER_PAGE,
    MAX_TEXT_CHARS,
    ItemOrder,
    Request,
    Site,
    SiteState,
    in_order,
    page_number,
    respond,
)
from slipstream.envhub.web.web_task import ERRANDS, NUM_ITEMS, Errand, draw_errand, draw_site, draw_state
from slipstream.envhub.world import Change, InvalidAction, WorldEnv, rules_in

RULES = (
    "Do the errands on a web site. A page is shown as text: [1] home is a link, [2] name = _ an empty field, [3] count "
    "= 1 of 1 2 a field with choices, [4] (send) a button. goto PATH opens a page; begin with goto / . click NUMBER "
    "follows a link. type NUMBER TEXT fills in a field. submit NUMBER presses a button. back opens the previous page. "
    "When all errands are done, and nothing else has been changed, write done."
)

MAX_PATH_CHARS = 1000
_ACTION = re.compile(
    r"(?:(?P<verb>back|done)|goto\s*(?P<path>/[a-z0-9/?=&+\s]*)|(?P<on>click|submit)\s+(?P<number>\d{1,3})|"
    r"type\s+(?P<field>\d{1,3})\s+(?P<text>\S.*))",
    re.IGNORECASE | re.DOTALL | re.ASCII,
)


class WebState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    site: SiteState
    browser: Browser


@dataclass(frozen=True, kw_only=True, slots=True)
class WebWorld:
    opening: str
    first: WebState
    site: Site
    errands: list[Errand]

    @property
    def goal(self) -> SiteState:
        return self.errands[-1].goal

    async def act(self, state: WebState, action: str) -> Change[WebState]:
        found = _ACTION.fullmatch(action.strip())
        if found is None:
            raise InvalidAction("write goto PATH, click NUMBER, type NUMBER TEXT, submit NUMBER, back or done")
        if (found["verb"] or "").lower() == "done":
            return Change(state=state, text="bye", over=True, score=float(_is_alike(state.site, self.goal)))
        if found["field"]:
            return _typed(state, int(found["field"]), " ".join(found["text"].split()))
        path, form = _request(state.browser, found)
        after = _opened(self.site, state, path, form)
        return Change(state=after, text=page_text(after.browser))

    def admissible(self, state: WebState) -> list[str]:
        """Return what the page offers. For fields, only the texts of the errands are listed."""
        page, actions = state.browser.page, ["goto /", "done"]
        actions += ["back"] if state.browser.previous else []
        texts = dict.fromkeys([self.site.name, self.site.password, *(t for e in self.errands for t in e.types)])
        for number, element in enumerate(page.elements, 1):
            if element.kind == "link":
                actions.append(f"click {number}")
            elif element.kind == "button":
                actions.append(f"submit {number}")
            else:
                actions += [f"type {number} {text}" for text in element.options or texts]
        return actions

    def expert(self, state: WebState) -> str:
        """Return an action that brings the site closer to the goal; `done` at the goal or if it is out of reach."""
        page = state.browser.page
        if _is_alike(state.site, self.goal) or Counter(state.site.messages) - Counter(self.goal.messages):
            return "done"
        if not state.site.sessions:
            account = {"name": self.site.name, "password": self.site.password}
            return _fill(state.browser, account, "enter") or _click(page, "log in") or "goto /"
        if state.site.account != self.goal.account:
            return _fill(state.browser, self.goal.account, "save") or _click(page, "account") or "goto /"
        unsent = Counter(self.goal.messages) - Counter(state.site.messages)
        if unsent:
            person, text = next(iter(unsent))
            return _fill(state.browser, {"to": person, "text": text}, "send") or _click(page, "write") or "goto /"
        extra = Counter(state.site.orders.values()) - Counter(self.goal.orders.values())
        if extra:
            return _cancel(page, state.site, next(iter(extra)))
        missing = Counter(self.goal.orders.values()) - Counter(state.site.orders.values())
        return self._order(state.browser, page, next(iter(missing)))

    def _order(self, browser: Browser, page: Page, order: ItemOrder) -> str:
        """Return the next action to place `order`: search, turn pages, open the item, choose how many."""
        path = self.site.item_path(order.item)
        if page.path == path:
            return _fill(browser, {"count": str(order.count)}, "order") or "goto /"
        texts = (text for errand in self.errands for text in errand.types)
        query = next((text for text in texts if order.item in self.site.matching(text)), order.item)
        shown = _click(page, path)
        if shown is None and _query(page).get("search") == query:
            shown = _turn(page, self.site.matching(query).index(order.item))
        return shown or _fill(browser, {"search": query}, "find") or "goto /"


def make_web_env(*, profile: str = "small", task: str = "any", errands: int = 1) -> Env:
    """Return a `web` environment. Raises ValueError for invalid options.

    `profile`: see `rules_in`. `task`: "order", "cancel", "change", "write" or "any". `errands`: their number.
    """
    check_choice("task", task, (*ERRANDS, "any"))
    check_range("errands", errands, 1, 3)
    return WorldEnv(
        f"web {profile} task={task} errands={errands}",
        make_world=partial(make_web, kind=task, num_errands=errands),
        rules=rules_in(profile, RULES),
    )


def make_web(task: Task, *, kind: str, num_errands: int) -> WebWorld:
    rng = task_rng(task, world=f"web/{kind}/{num_errands}/{NUM_ITEMS}")
    while True:
        site = draw_site(rng)
        start = draw_state(rng, site)
        kinds = rng.sample(ERRANDS, num_errands) if kind == "any" else [kind] * num_errands
        errands: list[Errand] = []
        for each in kinds:
            errands.append(draw_errand(rng, site, errands[-1].goal if errands else start, kind=each))
        changes_the_site = not _is_alike(start, errands[-1].goal)  # one errand may undo another
        text = "\n".join([f"you are {site.name} , password {site.password}", *(errand.text for errand in errands)])
        if changes_the_site and split_of(text) == task.split:
            return WebWorld(opening=text, first=WebState(site=start, browser=Browser()), site=site, errands=errands)


def _is_alike(site: SiteState, goal: SiteState) -> bool:
    """Return whether the states are equal, without regard to the numbers of orders and to sessions."""
    return (
        site.account == goal.account
        and Counter(site.messages) == Counter(goal.messages)
        and Counter(site.orders.values()) == Counter(goal.orders.values())
    )


def _opened(site: Site, state: WebState, path: str, form: Mapping[str, str] | None) -> WebState:
    """Return the state after the browser has opened `path`, with a POST of `form` if there is one."""
    browser, now, cookie = state.browser, state.site, state.browser.cookie
    while True:
        parts = urllib.parse.urlsplit("/" + path.lstrip("/"))
        request = Request(
            method="GET" if form is None else "POST",
            path=parts.path,
            query=dict(urllib.parse.parse_qsl(parts.query)),
            form=form or {},
            cookie=cookie,
        )
        response = respond(site, now, request)
        now, cookie = response.state, cookie if response.cookie is None else response.cookie
        if not response.location:
            break
        path, form = response.location, None
    page = read_page(path, response.body)
    return WebState(site=now, browser=Browser(page=page, cookie=cookie, previous=browser.page.path))


def _typed(state: WebState, number: int, text: str) -> Change[WebState]:
    """Replace the content of a field by `text`. Raises InvalidAction."""
    element = _element(state.browser, number, ("field", "choice"))
    if len(text) > MAX_TEXT_CHARS or not text.isprintable() or (element.options and text not in element.options):
        raise InvalidAction(f"{element.label} does not accept this text")
    typed = {other: value for other, value in state.browser.typed.items() if other != str(number)}
    if text != element.value:
        typed[str(number)] = text
    browser = msgspec.structs.replace(state.browser, typed=typed)
    return Change(state=WebState(site=state.site, browser=browser), text=element_text(browser, number))


def _request(browser: Browser, found: re.Match[str]) -> tuple[str, dict[str, str] | None]:
    """Return the path that an action opens, and the form to post there, or None for a GET. Raises InvalidAction."""
    if found["path"]:
        path = "".join(found["path"].lower().split())
        if len(path) > MAX_PATH_CHARS:
            raise InvalidAction(f"a path has at most {MAX_PATH_CHARS} characters")
        return path, None
    if found["verb"]:
        if not browser.previous:
            raise InvalidAction("there is no previous page")
        return browser.previous, None
    if found["on"].lower() == "click":
        return _element(browser, int(found["number"]), ("link",)).target, None
    button = _element(browser, int(found["number"]), ("button",))
    form, fields = browser.page.forms[button.form], filled(browser, button.form)
    if form.method == "post":
        return form.action, fields
    return f"{form.action}?{urllib.parse.urlencode(fields)}", None


def _element(browser: Browser, number: int, kinds: tuple[str, ...]) -> Element:
    """Return the element with this number. Raises InvalidAction unless the page has one of these kinds there."""
    elements = browser.page.elements
    if not 1 <= number <= len(elements) or elements[number - 1].kind not in kinds:
        raise InvalidAction(f"no {' or '.join(kinds)} has the number {number}")
    return elements[number - 1]


def _fill(browser: Browser, values: Mapping[str, str], button: str) -> str | None:
    """Return the next action to fill in and submit the form with this button; None if the page has no such form."""
    elements = list(enumerate(browser.page.elements, 1))
    for pressed, element in elements:
        if element.kind != "button" or element.label != button:
            continue
        current = filled(browser, element.form)
        for number, other in elements:
            value = current.get(other.label)
            if other.form == element.form and value != values.get(other.label, value):
                return f"type {number} {values[other.label]}"
        return f"submit {pressed}"
    return None


def _click(page: Page, link: str) -> str | None:
    """Return the click on the link with this label or target; None if the page has no such link."""
    links = [(number, element) for number, element in enumerate(page.elements, 1) if element.kind == "link"]
    return next((f"click {number}" for number, found in links if link in (found.label, found.target)), None)


def _turn(page: Page, position: int) -> str | None:
    """Return the click that turns towards the page of results with the result at `position`."""
    return _click(page, "next" if position // ITEMS_PER_PAGE + 1 > page_number(_query(page)) else "previous")


def _query(page: Page) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(page.path.partition("?")[2]))


def _cancel(page: Page, site: SiteState, order: ItemOrder) -> str:
    """Return the next action to cancel one order equal to `order`."""
    number = next(number for number in in_order(site) if site.orders[number] == order)
    if page.path == f"/orders/{number}":
        return _fill(Browser(page=page), {}, "cancel") or "goto /"
    turned = _turn(page, in_order(site).index(number)) if page.path.partition("?")[0] == "/orders" else None
    return _click(page, f"/orders/{number}") or turned or _click(page, "orders") or "goto /"
