"""Four small servers with state and the tools that they offer, as in MCP: a bank, a calendar, mail and notes.

A tool is a function of the servers' state. It returns a text and the new state, or raises an error with the reason.
Before a call, the arguments are checked against the tool's schema.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

MAX_ENTRIES = 100  # of each kind of entry that calls can add
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday")
_HOURS = {"type": "integer", "minimum": 8, "maximum": 17}
_NAME = {"type": "string", "maxLength": 40}
_TEXT = {"type": "string", "maxLength": 200}
_DAY = {"type": "string", "enum": list(DAYS)}
_TYPES: dict[str, type] = {"string": str, "integer": int}


class Servers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    accounts: dict[str, int]  # name -> balance
    events: dict[str, tuple[str, int]]  # title -> day, hour
    addresses: dict[str, str]  # person -> mail address
    sent: tuple[tuple[str, str], ...] = ()  # (address, text), sorted, because errands may be done in any order
    notes: dict[str, str]  # title -> text


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    description: str
    properties: Mapping[str, Mapping[str, Any]]  # argument -> its schema; all are required
    run: Callable[..., tuple[str, Servers]]

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", "properties": self.properties, "required": list(self.properties)}


def call_tool(servers: Servers, name: str, arguments: Mapping[str, Any]) -> tuple[str, Servers]:
    """Call the tool `name`. Return its text and the new state. Raises ValueError, and then nothing has changed."""
    if name not in TOOLS:
        raise ValueError(f"no tool {name[:40]}")
    _check_arguments(arguments, TOOLS[name].properties)
    return TOOLS[name].run(servers, **arguments)


def _check_arguments(arguments: Mapping[str, object], properties: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError, with the reason, unless each property has a value of its schema, and nothing else has one.

    A schema may have type, enum, minimum, maximum and maxLength.
    """
    if missing := [name for name in properties if name not in arguments]:
        raise ValueError(f"arguments lacks {', '.join(missing)}")
    if unknown := [name for name in arguments if name not in properties]:
        raise ValueError(f"arguments has an unknown key {unknown[0][:40]!r}")
    for name, value in arguments.items():
        _check_value(value, properties[name], f"arguments.{name}")


def _check_value(value: object, schema: Mapping[str, Any], where: str) -> None:
    if not isinstance(value, _TYPES[schema["type"]]) or isinstance(value, bool):
        raise ValueError(f"{where} must be of type {schema['type']}")
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{where} must be one of {', '.join(schema['enum'])}")
    if isinstance(value, int) and not schema["minimum"] <= value <= schema["maximum"]:
        raise ValueError(f"{where} is out of range")
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        raise ValueError(f"{where} is longer than {schema['maxLength']}")


def _list_accounts(servers: Servers) -> tuple[str, Servers]:
    return ", ".join(sorted(servers.accounts)), servers


def _balance(servers: Servers, account: str) -> tuple[str, Servers]:
    _check_known(account, servers.accounts, "account")
    return str(servers.accounts[account]), servers


def _transfer(servers: Servers, source: str, target: str, amount: int) -> tuple[str, Servers]:
    for account in (source, target):
        _check_known(account, servers.accounts, "account")
    if source == target:
        raise ValueError("source and target are the same account")
    if servers.accounts[source] < amount:
        raise ValueError(f"{source} holds less than {amount}")
    moved = {source: servers.accounts[source] - amount, target: servers.accounts[target] + amount}
    return "transferred", replace(servers, accounts={**servers.accounts, **moved})


def _list_events(servers: Servers, day: str) -> tuple[str, Servers]:
    at = sorted((hour, title) for title, (when, hour) in servers.events.items() if when == day)
    return "; ".join(f"{hour}:00 {title}" for hour, title in at) or "free", servers


def _put_event(servers: Servers, title: str, day: str, hour: int) -> dict[str, tuple[str, int]]:
    taken = [other for other, when in servers.events.items() if when == (day, hour) and other != title]
    if taken:
        raise ValueError(f"{day} {hour}:00 is taken by {taken[0]}")
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
        raise ValueError(f"no mail box at {address}")
    if len(servers.sent) == MAX_ENTRIES:
        raise ValueError(f"{MAX_ENTRIES} mails have been sent; no more can be sent")
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
        raise ValueError(f"no {what} {name}")


def _check_new(name: str, entries: Mapping[str, object], what: str) -> None:
    if name in entries:
        raise ValueError(f"{what} {name} already exists")
    if len(entries) == MAX_ENTRIES:
        raise ValueError(f"there are already {MAX_ENTRIES} entries of this kind")


def _without(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: entry for other, entry in entries.items() if other != name}


_EVENT: Mapping[str, Mapping[str, Any]] = {"title": _NAME, "day": _DAY, "hour": _HOURS}
TOOLS: dict[str, Tool] = {
    "bank.list": Tool(description="list the accounts", properties={}, run=_list_accounts),
    "bank.balance": Tool(description="show the balance of an account", properties={"account": _NAME}, run=_balance),
    "bank.transfer": Tool(
        description="move money",
        properties={"source": _NAME, "target": _NAME, "amount": {"type": "integer", "minimum": 1, "maximum": 10**6}},
        run=_transfer,
    ),
    "calendar.list": Tool(description="list the events of a day", properties={"day": _DAY}, run=_list_events),
    "calendar.add": Tool(description="add an event", properties=_EVENT, run=_add_event),
    "calendar.move": Tool(description="move an event to another time", properties=_EVENT, run=_move_event),
    "calendar.cancel": Tool(description="delete an event", properties={"title": _NAME}, run=_cancel_event),
    "mail.find": Tool(description="find a person's address", properties={"person": _NAME}, run=_find_address),
    "mail.send": Tool(description="send a mail", properties={"address": _NAME, "text": _TEXT}, run=_send),
    "notes.list": Tool(description="list the titles of all notes", properties={}, run=_list_notes),
    "notes.read": Tool(description="read a note", properties={"title": _NAME}, run=_read_note),
    "notes.write": Tool(
        description="write a note; overwrites a note of the same title",
        properties={"title": _NAME, "text": _TEXT},
        run=_write_note,
    ),
    "notes.delete": Tool(description="delete a note", properties={"title": _NAME}, run=_delete_note),
}
