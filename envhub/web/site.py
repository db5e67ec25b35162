"""A small market as a web site: its state, and its response to a request. There are no sockets.

One customer has an account. A request that changes the site returns a new state. The last state judges the episode.
"""

import hashlib
import html
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

ITEMS_PER_PAGE = 4
MAX_COUNT = 4
MAX_TEXT_CHARS = 100
FIRST_ORDER = 101


class ItemOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    item: str
    count: int


class SiteState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    orders: dict[str, ItemOrder]  # by number
    account: dict[str, str]  # city and phone
    messages: tuple[tuple[str, str], ...] = ()  # (recipient, text)
    sessions: frozenset[str] = frozenset()  # the cookies of the sessions that are logged in


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The part of a site that never changes."""

    items: dict[str, int]  # title -> price; an item's number is its position, from 1
    people: tuple[str, ...]  # the possible recipients of a message
    name: str
    password: str

    @property
    def cookie(self) -> str:
        """The session cookie of the customer. It is always the same, so that states can be compared."""
        return hashlib.blake2b(f"{self.name} {self.password}".encode(), digest_size=16).hexdigest()

    def matching(self, query: str) -> list[str]:
        """Return the items whose titles contain all words of `query`."""
        return [title for title in self.items if set(query.lower().split()) <= set(title.split())]

    def item_path(self, title: str) -> str:
        return f"/item/{list(self.items).index(title) + 1}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    cookie: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A page or a redirect, and the state of the site after the request."""

    state: SiteState
    body: str = ""  # HTML
    location: str = ""  # of a redirect
    cookie: str | None = None  # the cookie to set; "" deletes it, None leaves it unchanged


def next_number(state: SiteState) -> str:
    return str(max(map(int, state.orders), default=FIRST_ORDER - 1) + 1)


def in_order(state: SiteState) -> list[str]:
    return sorted(state.orders, key=int)


def page_number(query: Mapping[str, str]) -> int:
    """Return the requested page of a list, from 1; the first page if the number is malformed."""
    page = query.get("page", "")
    return max(1, int(page)) if re.fullmatch(r"[0-9]{1,4}", page) else 1


def respond(site: Site, state: SiteState, request: Request) -> Response:
    name, _, rest = request.path.removeprefix("/").partition("/")
    handle = _HANDLERS.get((request.method, name))
    is_in = request.cookie in state.sessions
    if not is_in and (name in _MEMBERS_ONLY or (request.method, name) == ("POST", "item")):
        back = request.path if request.method == "GET" else request.path.rpartition("/")[0] or request.path
        return _to(state, f"/login?{urllib.parse.urlencode({'next': back})}")
    response = handle(site, state, request, rest) if handle else _nothing(state)
    return replace(response, body=_framed(response.body, is_in)) if response.body else response


def _home(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    return Response(state=state, body=f"<p>market, {len(site.items)} items</p>")


def _search(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    query = request.query.get("search", "")
    found = site.matching(query)
    body = f"<p>{len(found)} found</p>"
    lines = [_link(f"{title} , {site.items[title]}", site.item_path(title)) for title in found]
    return Response(state=state, body=body + _paged(lines, "/search", {"search": query}, request))


def _item(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    title = _item_title(site, rest)
    if title is None:
        return _nothing(state)
    counts = "".join(f"<option>{count}</option>" for count in range(1, MAX_COUNT + 1))
    form = f'<select name="count">{counts}</select><button>order</button>'
    body = f"<p>{html.escape(title)} , {site.items[title]}</p>{_form(f'{request.path}/order', form)}"
    return Response(state=state, body=body)


def _order_item(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    number, _, verb = rest.partition("/")
    title, count = _item_title(site, number), request.form.get("count", "")
    if title is None or verb != "order" or count not in map(str, range(1, MAX_COUNT + 1)):
        return _nothing(state)
    order_number = next_number(state)
    orders = {**state.orders, order_number: ItemOrder(item=title, count=int(count))}
    return _to(msgspec.structs.replace(state, orders=orders), f"/orders/{order_number}")


def _login(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    where = html.escape(request.query.get("next", "/"))
    fields = _text_field("name") + _text_field("password") + f'<input type="hidden" name="next" value="{where}">'
    error = "<p>wrong name or password</p>" if "wrong" in request.query else ""
    return Response(state=state, body=error + _form("/login", f"{fields}<button>enter</button>"))


def _enter(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    where = request.form.get("next", "/")
    if (request.form.get("name"), request.form.get("password")) != (site.name, site.password):
        return _to(state, f"/login?{urllib.parse.urlencode({'next': where, 'wrong': '1'})}")
    entered = msgspec.structs.replace(state, sessions=state.sessions | {site.cookie})
    # `//host` would be a redirect to another host
    path = urllib.parse.quote(where, safe="/?=&") if where[:1] == "/" != where[1:2] else "/"
    return replace(_to(entered, path), cookie=site.cookie)


def _leave(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    left = msgspec.structs.replace(state, sessions=state.sessions - {request.cookie})
    return replace(_to(left, "/"), cookie="")


def _orders(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    if not rest:
        lines = [_link(f"order {n} : {_order_text(state.orders[n])}", f"/orders/{n}") for n in in_order(state)]
        return Response(state=state, body=f"<p>{len(lines)} orders</p>" + _paged(lines, "/orders", {}, request))
    if rest not in state.orders:
        return _nothing(state)
    form = _form(f"/orders/{rest}/cancel", "<button>cancel</button>")
    return Response(state=state, body=f"<p>order {rest} : {html.escape(_order_text(state.orders[rest]))}</p>{form}")


def _cancel(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    number, _, verb = rest.partition("/")
    if verb != "cancel" or number not in state.orders:
        return _nothing(state)
    orders = {other: order for other, order in state.orders.items() if other != number}
    return _to(msgspec.structs.replace(state, orders=orders), "/orders")


def _account(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    fields = "".join(_text_field(name, value) for name, value in state.account.items())
    form = _form("/account", f"{fields}<button>save</button>")
    return Response(state=state, body=f"<p>account of {site.name}</p>{form}")


def _save(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    account = {name: request.form.get(name, value)[:MAX_TEXT_CHARS] for name, value in state.account.items()}
    return _to(msgspec.structs.replace(state, account=account), "/account")


def _write(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    people = "".join(f"<option>{person}</option>" for person in site.people)
    form = f'<select name="to">{people}</select>{_text_field("text")}<button>send</button>'
    return Response(state=state, body=f"<p>{len(state.messages)} sent</p>{_form('/write', form)}")


def _send(site: Site, state: SiteState, request: Request, rest: str) -> Response:
    person, text = request.form.get("to", ""), request.form.get("text", "")[:MAX_TEXT_CHARS]
    if person not in site.people:
        return _nothing(state)
    messages = (*state.messages, (person, text)) if text else state.messages
    return _to(msgspec.structs.replace(state, messages=messages), "/write")


def _framed(body: str, is_in: bool) -> str:
    """Return the whole page: `body` with the links and the search form that every page has."""
    links = [("home", "/")]
    links += [("orders", "/orders"), ("account", "/account"), ("write", "/write")] if is_in else [("log in", "/login")]
    nav = "<p>" + " ".join(_link(label, path) for label, path in links) + "</p>"
    search = f'<form method="get" action="/search">{_text_field("search")}<button>find</button></form>'
    leave = _form("/logout", "<button>log out</button>") if is_in else ""
    return f"<!DOCTYPE html><html><head><title>market</title></head><body>{nav}{search}{body}{leave}</body></html>"


def _paged(lines: list[str], path: str, query: dict[str, str], request: Request) -> str:
    """Return the requested page of `lines`, with links to the previous and the next page."""
    last = max(1, -(-len(lines) // ITEMS_PER_PAGE))
    page = min(page_number(request.query), last)
    shown = [f"<p>{line}</p>" for line in lines[(page - 1) * ITEMS_PER_PAGE : page * ITEMS_PER_PAGE]]
    turns = [("previous", page - 1)] * (page > 1) + [("next", page + 1)] * (page < last)
    links = [_link(label, f"{path}?{urllib.parse.urlencode({**query, 'page': number})}") for label, number in turns]
    return "".join(shown) + (f"<p>{' '.join(links)}</p>" if links else "")


def _nothing(state: SiteState) -> Response:
    return Response(state=state, body="<p>no such page</p>")


def _to(state: SiteState, path: str) -> Response:
    return Response(state=state, location=path)


def _item_title(site: Site, number: str) -> str | None:
    return dict(zip(map(str, range(1, len(site.items) + 1)), site.items, strict=True)).get(number)


def _order_text(order: ItemOrder) -> str:
    return f"{order.count} {order.item}"


def _link(label: str, path: str) -> str:
    return f'<a href="{html.escape(path)}">{html.escape(label)}</a>'


def _form(action: str, fields: str) -> str:
    return f'<form method="post" action="{action}">{fields}</form>'


def _text_field(name: str, value: str = "") -> str:
    return f'<input name="{name}" value="{html.escape(value)}">'


_HANDLERS: dict[tuple[str, str], Callable[[Site, SiteState, Request, str], Response]] = {
    ("GET", ""): _home,
    ("GET", "search"): _search,
    ("GET", "item"): _item,
    ("POST", "item"): _order_item,
    ("GET", "login"): _login,
    ("POST", "login"): _enter,
    ("POST", "logout"): _leave,
    ("GET", "orders"): _orders,
    ("POST", "orders"): _cancel,
    ("GET", "account"): _account,
    ("POST", "account"): _save,
    ("GET", "write"): _write,
    ("POST", "write"): _send,
}
_MEMBERS_ONLY = ("orders", "account", "write")  # and to order an item
