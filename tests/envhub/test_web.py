"""The web: the site, the browser, and the score of the last state."""

import msgspec
import pytest

from slipstream.envhub.web.browser import Browser, Element, page_text, read_page
from slipstream.envhub.web.site import ItemOrder, Request, Site, SiteState, respond
from slipstream.envhub.web.web import WebState, WebWorld, make_web
from slipstream.envhub.web.web_task import Errand
from slipstream.envhub.world import Change
from tests.envhub.env_cases import act, task_of

ITEMS = {"red lamp cedar": 20, "red lamp maple": 30, "blue lamp cedar": 40, "red lamp rowan": 50}
ITEMS |= {"red hat maple": 60, "red lamp birch": 70, "red lamp alder": 80}
SITE = Site(items=ITEMS, people=("ben", "cleo"), name="ada", password="magnet")
STATE = SiteState(orders={"101": ItemOrder(item="red hat maple", count=2)}, account={"city": "dover", "phone": "1234"})
ENTERED = msgspec.structs.replace(STATE, sessions=frozenset({SITE.cookie}))


def play(here: WebWorld, state: WebState, *actions: str) -> Change[WebState]:
    for action in actions:
        change = act(here, action, state)
        state = change.state
    return change


def goal_of(**changes: object) -> WebWorld:
    errand = Errand(text="", goal=msgspec.structs.replace(STATE, **changes))
    first = WebState(site=STATE, browser=Browser())
    return WebWorld(opening="", first=first, site=SITE, errands=[errand])


ENTER = ("goto /login", "type 5 ada", "type 6 magnet", "submit 7")


def test_html_is_read_into_lines_with_numbered_elements() -> None:
    html = """<!DOCTYPE html><html><head><title>no text</title></head><body>
        <p>one <b>bold</b> &amp; <a href='/a?b=1&amp;c=2'>a link</a></p>
        <form method=post action=/send><input type=hidden name=token value=t>to <input name=name value='x y'>
        <select name=count><option>1</option><option>2</option></select><button>send it</button></form></body></html>"""
    page = read_page("/x", html)
    assert page_text(Browser(page=page)).splitlines() == [
        "/x",
        "one bold & [1] a link",
        "to [2] name = x y [3] count = 1 of 1 2 [4] (send it)",
    ]
    assert page.elements[0] == Element(kind="link", label="a link", target="/a?b=1&c=2")
    assert (page.forms[0].method, page.forms[0].action, page.forms[0].hidden) == ("post", "/send", {"token": "t"})


def test_pages_for_members_redirect_to_the_login_and_back() -> None:
    here = goal_of()
    asked = play(here, here.first, "goto /orders/101")
    assert asked.text.splitlines()[0] == "/login?next=%2Forders%2F101"
    refused = play(here, asked.state, "type 5 ada", "type 6 wrong", "submit 7")
    assert refused.text.splitlines()[3] == "wrong name or password"
    entered = play(here, asked.state, "type 5 ada", "type 6 wrong", "submit 7", *ENTER[1:])
    assert entered.text.splitlines()[0] == "/orders/101"
    assert entered.state.site.sessions == {SITE.cookie}
    assert entered.state.browser.cookie == SITE.cookie
    left = play(here, entered.state, "goto /", "submit 7")
    assert (left.state.site, left.state.browser.cookie) == (STATE, "")
    assert play(here, left.state, "goto /account").text.startswith("/login")


def test_a_cookie_that_the_site_did_not_set_is_refused() -> None:
    for cookie in ("", "x", SITE.cookie):
        request = Request(method="POST", path="/orders/101/cancel", cookie=cookie)
        response = respond(SITE, STATE, request)
        assert (response.location, response.state) == ("/login?next=%2Forders%2F101", STATE)
    request = Request(method="POST", path="/orders/101/cancel", cookie=SITE.cookie)
    assert respond(SITE, ENTERED, request).state.orders == {}


def test_login_redirects_only_within_the_site() -> None:
    for where in ("//evil.example/x", "http://evil.example", ""):
        form = {"name": "ada", "password": "magnet", "next": where}
        assert respond(SITE, STATE, Request(method="POST", path="/login", form=form)).location == "/"


def test_search_finds_items_with_all_words_in_pages() -> None:
    here = goal_of()
    first = play(here, here.first, "goto /", "type 3 lamp  red", "submit 4")
    lines = first.text.splitlines()
    assert lines[0] == "/search?search=lamp+red"
    assert lines[3:] == [
        "5 found",
        "[5] red lamp cedar , 20",
        "[6] red lamp maple , 30",
        "[7] red lamp rowan , 50",
        "[8] red lamp birch , 70",
        "[9] next",
    ]
    second = play(here, first.state, "click 9")
    assert second.text.splitlines()[3:] == ["5 found", "[5] red lamp alder , 80", "[6] previous"]
    assert play(here, second.state, "click 6").text.splitlines()[3:] == lines[3:]
    assert play(here, second.state, "back").text == first.text
    for page in ("0", "x", "99999", "-1"):
        assert play(here, first.state, f"goto /search?search=lamp+red&page={page}").state.browser.page.path


def test_orders_cancellations_changes_and_messages_are_in_the_state_of_the_site() -> None:
    here = goal_of()
    entered = play(here, here.first, *ENTER).state
    ordered = play(here, entered, "goto /item/3", "type 7 3", "submit 8")
    assert ordered.text.splitlines()[0] == "/orders/102"
    assert ordered.state.site.orders == {**STATE.orders, "102": ItemOrder(item="blue lamp cedar", count=3)}
    assert play(here, entered, "goto /orders/101", "submit 7").state.site.orders == {}
    changed = play(here, entered, "goto /account", "type 8 5678", "submit 9").state.site.account
    assert changed == {"city": "dover", "phone": "5678"}
    written = play(here, entered, "goto /write", "type 7 cleo", "type 8 tea at noon", "submit 9").state.site.messages
    assert written == (("cleo", "tea at noon"),)


def test_special_characters_of_html_are_only_text() -> None:
    here, odd = goal_of(), """<b>"x' &amp; </form><a href="/">y</a>"""
    saved = play(here, here.first, *ENTER, "goto /account", f"type 7 {odd}", "submit 9")
    assert saved.state.site.account["city"] == odd
    assert f"[7] city = {odd} [8] phone = 1234 [9] (save)" in saved.text


@pytest.mark.parametrize(
    "action",
    [
        *("click", "click 0", "click 3", "click 4", "click 99", "submit 1", "submit 3", "back", "done now"),
        *("type 3", "type 1 x", "type 4 x", "type 3 " + "x" * 101, "type 3 \x00", "type 3 \ud800"),
        *("goto", "goto http://evil.example/", "goto item/1"),
    ],
)
def test_an_action_that_the_page_does_not_offer_is_refused_and_changes_nothing(action: str) -> None:
    here = goal_of()
    home = play(here, here.first, "goto /").state
    change = play(here, home, action)
    assert (change.valid, change.state) == (False, home)


def test_a_missing_page_says_so_and_has_links() -> None:
    here = goal_of()
    entered = play(here, here.first, *ENTER).state
    for path in ("/nothing", "/item/99", "/item/x", "/item/3/order", "/orders/x", "/orders/101/cancel"):
        change = play(here, entered, f"goto {path}")
        assert change.text.splitlines()[3] == "no such page", path
        assert change.state.site == entered.site
    vanished = play(here, entered, "goto /orders/101", "submit 7", "back")
    assert (vanished.valid, vanished.text.splitlines()[3]) == (True, "no such page")
    assert play(here, vanished.state, "click 1").text.startswith("/\n")


@pytest.mark.parametrize(
    "path",
    ["/?" + "&".join(["a=1"] * 21), "/search?search=red&" + "&".join(["a=1"] * 20), "/" + "a" * 70_000, "//", "/?/?"],
)
def test_no_path_is_an_error_of_the_environment(path: str) -> None:
    here = goal_of()
    opened = play(here, here.first, "goto " + path)
    assert opened.state == here.first if len(path) > 1000 else opened.valid
    assert play(here, opened.state, "goto /").text.startswith("/\n")


def test_a_login_redirects_to_a_path_with_any_characters() -> None:
    here = goal_of()
    entered = play(here, here.first, "goto /login?next=/search?search=red+hat", *ENTER[1:])
    assert "1 found" in entered.text
    assert "no such page" in play(here, here.first, "goto /login?next=/a+b", *ENTER[1:]).text


def test_a_choice_accepts_only_its_own_values() -> None:
    here = goal_of()
    item = play(here, here.first, "goto /item/1").state
    assert not play(here, item, "type 5 9").valid
    assert play(here, item, "type 5 4").text == "[5] count = 4 of 1 2 3 4"
    assert play(here, item, "type 5 4", "type 5 1").state == item  # as the page has it


def test_the_score_depends_on_the_whole_state_of_the_site() -> None:
    here = goal_of(orders={**STATE.orders, "102": ItemOrder(item="red lamp maple", count=2)})

    def score(site: SiteState) -> float:
        return play(here, WebState(site=site, browser=Browser()), "done").score

    assert score(here.goal) == 1.0
    assert score(msgspec.structs.replace(here.goal, sessions=frozenset({SITE.cookie}))) == 1.0
    renumbered = {"104": STATE.orders["101"], "105": here.goal.orders["102"]}
    assert score(msgspec.structs.replace(here.goal, orders=renumbered)) == 1.0
    assert score(STATE) == 0.0
    assert score(msgspec.structs.replace(here.goal, messages=(("ben", "hi"),))) == 0.0
    assert score(msgspec.structs.replace(here.goal, account={"city": "dover", "phone": "1"})) == 0.0
    twice = {**here.goal.orders, "103": here.goal.orders["102"]}
    assert score(msgspec.structs.replace(here.goal, orders=twice)) == 0.0


def test_no_errands_undo_each_other() -> None:
    """Nothing would be left to do, and `done` as the first action would solve the task."""
    for index in range(200):
        here = make_web(task_of("web", index), kind="change", num_errands=2)
        assert here.first.site.account != here.goal.account
