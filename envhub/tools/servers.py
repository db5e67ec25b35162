"""Four small servers with state, as MCP servers would offer them: a bank, a calendar, a mail box and a folder of notes.

A tool is a function of the servers' state: it checks its arguments against its schema, and gives a text and a new
state, or says why it cannot.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from envhub.tools.schema import check_value

MAX_ENTRIES = 100  # of anything that calls can add
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday")
_HOURS = {"type": "integer", "minimum": 8, "maximum": 17}
_NAME = {"type": "string", "maxLength": 40}
_TEXT = {"type": "string", "maxLength": 200}
_DAY = {"type": "string", "enum": list(DAYS)}


class Servers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the four servers hold."""

    accounts: dict[str, int]  # name -> balance
    events: dict[str, tuple[str, int]]  # title -> day, hour
    addresses: dict[str, str]  # person -> where mail reaches them
    sent: tuple[tuple[str, str], ...]  # to, text; sorted, as errands may be done in any order
    notes: dict[str, str]  # title -> text


class ToolError(ValueError):
    """The call fits its schema and cannot be done; the text says why, and nothing has changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    description: str
    properties: Mapping[str, Mapping[str, Any]]  # all of them required
    run: Callable[..., tuple[str, Servers]]

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", "properties": self.properties, "required": list(self.properties)}


def call_tool(servers: Servers, name: str, arguments: object) -> tuple[str, Servers]:
    """What `name` says to `arguments`, and the state after it. Raises ToolError or SchemaError, both ValueErrors."""
    if name not in TOOLS:
        raise ToolError(f"no tool {name[:40]}")
    tool = TOOLS[name]
    check_value(arguments, tool.schema)
    assert isinstance(arguments, dict)
    return tool.run(servers, **arguments)


def _list_accounts(servers: Servers) -> tuple[str, Servers]:
    return ", ".join(sorted(servers.accounts)), servers


def _balance(servers: Servers, account: str) -> tuple[str, Servers]:
    _check_known(account, servers.accounts, "account")
    return str(servers.accounts[account]), servers


def _transfer(servers: Servers, source: str, target: str, amount: int) -> tuple[str, Servers]:
    for account in (source, target):
        _check_known(account, servers.accounts, "account")
    if source == target:
        raise ToolError("source and target are the same account")
    if servers.accounts[source] < amount:
        raise ToolError(f"{source} holds less than {amount}")
    moved = {source: servers.accounts[source] - amount, target: servers.accounts[target] + amount}
    return "transferred", replace(servers, accounts={**servers.accounts, **moved})


def _list_events(servers: Servers, day: str) -> tuple[str, Servers]:
    at = sorted((hour, title) for title, (when, hour) in servers.events.items() if when == day)
    return "; ".join(f"{hour}:00 {title}" for hour, title in at) or "free", servers


def _put_event(servers: Servers, title: str, day: str, hour: int) -> dict[str, tuple[str, int]]:
    taken = [other for other, when in servers.events.items() if when == (day, hour) and other != title]
    if taken:
        raise ToolError(f"{day} {hour}:00 is taken by {taken[0]}")
    return {**servers.events, title: (day, hour)}


def _add_event(servers: Servers, title: str, day: str, hour: int) -> tuple[str, Servers]:
    _check_new(title, servers.events, "event")
    return "added", replace(servers, events=_put_event(servers, title, day, hour))


def _move_event(servers: Servers, title: str, day: str, hour: int) -> tuple[str, Servers]:
    _check_known(title, servers.events, "event")
    return "moved", replace(servers, events=_put_event(servers, title, day, hour))


def _cancel_event(servers: Servers, title: str) -> tuple[str, Servers]:
    _check_known(title, servers.events, "event")
    return "cancelled", replace(servers, events=_without(servers.events, title))


def _find_address(servers: Servers, person: str) -> tuple[str, Servers]:
    _check_known(person, servers.addresses, "person")
    return servers.addresses[person], servers


def _send(servers: Servers, address: str, text: str) -> tuple[str, Servers]:
    if address not in servers.addresses.values():
        raise ToolError(f"no mail box at {address}")
    if len(servers.sent) == MAX_ENTRIES:
        raise ToolError("the out box is full")
    return "sent", replace(servers, sent=tuple(sorted((*servers.sent, (address, text)))))


def _list_notes(servers: Servers) -> tuple[str, Servers]:
    return ", ".join(sorted(servers.notes)) or "none", servers


def _read_note(servers: Servers, title: str) -> tuple[str, Servers]:
    _check_known(title, servers.notes, "note")
    return servers.notes[title], servers


def _write_note(servers: Servers, title: str, text: str) -> tuple[str, Servers]:
    if title not in servers.notes:
        _check_new(title, servers.notes, "note")
    return "written", replace(servers, notes={**servers.notes, title: text})


def _delete_note(servers: Servers, title: str) -> tuple[str, Servers]:
    _check_known(title, servers.notes, "note")
    return "deleted", replace(servers, notes=_without(servers.notes, title))


def _check_known(name: str, entries: Mapping[str, object], what: str) -> None:
    if name not in entries:
        raise ToolError(f"no {what} {name}")


def _check_new(name: str, entries: Mapping[str, object], what: str) -> None:
    if name in entries:
        raise ToolError(f"{what} {name} is there already")
    if len(entries) == MAX_ENTRIES:
        raise ToolError(f"there are {MAX_ENTRIES} of them already")


def _without(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: entry for other, entry in entries.items() if other != name}


_EVENT: Mapping[str, Mapping[str, Any]] = {"title": _NAME, "day": _DAY, "hour": _HOURS}
TOOLS: dict[str, Tool] = {
    "bank.list": Tool(description="the accounts", properties={}, run=_list_accounts),
    "bank.balance": Tool(description="what an account holds", properties={"account": _NAME}, run=_balance),
    "bank.transfer": Tool(
        description="move money",
        properties={"source": _NAME, "target": _NAME, "amount": {"type": "integer", "minimum": 1, "maximum": 10**6}},
        run=_transfer,
    ),
    "calendar.list": Tool(description="the events of a day", properties={"day": _DAY}, run=_list_events),
    "calendar.add": Tool(description="a new event", properties=_EVENT, run=_add_event),
    "calendar.move": Tool(description="an event to another time", properties=_EVENT, run=_move_event),
    "calendar.cancel": Tool(description="take an event out", properties={"title": _NAME}, run=_cancel_event),
    "mail.find": Tool(description="the address of a person", properties={"person": _NAME}, run=_find_address),
    "mail.send": Tool(description="a mail", properties={"address": _NAME, "text": _TEXT}, run=_send),
    "notes.list": Tool(description="the titles", properties={}, run=_list_notes),
    "notes.read": Tool(description="a note's text", properties={"title": _NAME}, run=_read_note),
    "notes.write": Tool(
        description="a note, new or again", properties={"title": _NAME, "text": _TEXT}, run=_write_note
    ),
    "notes.delete": Tool(description="take a note away", properties={"title": _NAME}, run=_delete_note),
}
