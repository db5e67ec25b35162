"""Draws the state of the servers and the errands: each with its text and the calls that do it."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.envhub.name_list import name_list
from slipstream.envhub.tools.servers import DAYS, Servers

PEOPLE = name_list(
    """
    Ada, Ben, Cleo, Dora, Emil, Fay, Gus, Hana, Igor, June, Kai, Lena, Milo, Nora, Otto, Pia, Rosa, Sven, Tara,
    Ugo, Vera, Walt, Yara, Zeno
    """
)
ACCOUNTS = ("rent", "savings", "travel", "groceries", "garden", "gifts", "repairs", "school")
TITLES = ("review", "dentist", "lunch", "planning", "training", "interview", "tour", "rehearsal", "budget", "demo")
NOTES = ("shopping", "ideas", "recipes", "passage", "packing", "errands", "books", "quotes")
WORDS = name_list(
    """
    amber, birch, cobalt, dune, ember, fjord, grove, harbour, indigo, juniper, kelp, lichen, maple, nectar,
    onyx, pebble, quill, raven, saffron, thistle
    """
)

TIMES = [(day, hour) for day in DAYS for hour in range(8, 18)]

Calls = tuple[tuple[str, dict[str, str | int]], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    text: str
    calls: Calls  # the calls that do it; among them the look-ups that a policy needs
    found: tuple[str, ...] = ()  # values that are not in the text and must be looked up


def draw_servers(rng: random.Random) -> Servers:
    times = rng.sample(TIMES, 6)
    people = rng.sample(PEOPLE, 6)
    return Servers(
        accounts={name: rng.randrange(500, 2000) for name in rng.sample(ACCOUNTS, 4)},
        events=dict(zip(rng.sample(TITLES, 6), times, strict=True)),
        addresses={person: f"{person.lower()}.{rng.choice(WORDS)}@{rng.choice(WORDS)}.example" for person in people},
        notes={title: " ".join(rng.sample(WORDS, 3)) for title in rng.sample(NOTES, 4)},
    )


def draw_errands(rng: random.Random, servers: Servers, *, count: int) -> list[Errand]:
    """Return `count` errands of different kinds."""
    return [draw(rng, servers) for draw in rng.sample(ERRANDS, count)]


def _pay(rng: random.Random, servers: Servers) -> Errand:
    source, target = rng.sample(sorted(servers.accounts), 2)
    amount = rng.randrange(10, 100)
    return Errand(
        text=f"Transfer {amount} from the account {source} to the account {target}.",
        calls=(("bank.transfer", {"source": source, "target": target, "amount": amount}),),
    )


def _note_balance(rng: random.Random, servers: Servers) -> Errand:
    account, title = rng.choice(sorted(servers.accounts)), f"balance {rng.choice(WORDS)}"
    held = servers.accounts[account]
    return Errand(
        text=f"Write down in a note titled {title} what the account {account} held at first, the number alone.",
        calls=(("bank.balance", {"account": account}), ("notes.write", {"title": title, "text": str(held)})),
        found=(str(held),),
    )


def _move(rng: random.Random, servers: Servers) -> Errand:
    title = rng.choice(sorted(servers.events))
    day, hour = rng.choice([time for time in TIMES if time not in servers.events.values()])
    return Errand(
        text=f"Move the {title} to {day} at {hour}:00.",
        calls=(("calendar.move", {"title": title, "day": day, "hour": hour}),),
    )


def _cancel_the_one_at(rng: random.Random, servers: Servers) -> Errand:
    title = rng.choice(sorted(servers.events))
    day, hour = servers.events[title]
    return Errand(
        text=f"Cancel what is in the calendar on {day} at {hour}:00.",
        calls=(("calendar.list", {"day": day}), ("calendar.cancel", {"title": title})),
        found=(title,),
    )


def _mail(rng: random.Random, servers: Servers) -> Errand:
    person, text = rng.choice(sorted(servers.addresses)), " ".join(rng.sample(WORDS, 2))
    address = servers.addresses[person]
    return Errand(
        text=f"Mail {person} exactly this text: {text}",
        calls=(("mail.find", {"person": person}), ("mail.send", {"address": address, "text": text})),
        found=(address,),
    )


def _forward_note(rng: random.Random, servers: Servers) -> Errand:
    person, title = rng.choice(sorted(servers.addresses)), rng.choice(sorted(servers.notes))
    address, text = servers.addresses[person], servers.notes[title]
    return Errand(
        text=f"Mail {person} the text of the note {title}, and nothing else.",
        calls=(
            ("notes.read", {"title": title}),
            ("mail.find", {"person": person}),
            ("mail.send", {"address": address, "text": text}),
        ),
        found=(address, text),
    )


_Draw = Callable[[random.Random, Servers], Errand]
ERRANDS: tuple[_Draw, ...] = (_pay, _note_balance, _move, _cancel_the_one_at, _mail, _forward_note)
