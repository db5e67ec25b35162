"""The actors and the relays of a run as tables for a terminal of 80 columns."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from rich import box
from rich.table import Table

from slipstream.replay.fleet.bulletin import RelayNotice
from slipstream.replay.fleet.fleet import Member
from slipstream.tools.terminal.table import cell

MAX_LISTED = 16  # more actors than these are shown as one line for each kind


def actors_table(actors: Sequence[Member]) -> Table:
    """What each actor does, and where it runs; of a large fleet, one line for each kind and state.

    In such a line, versions are the lowest and the highest; episodes and tokens are sums, the KV's use a mean, the
    pause the longest. Where all run on the same, it is printed once, below: a column of it would be narrow beside long
    names.
    """
    listed, places = len(actors) <= MAX_LISTED, {runs_on(actor) for actor in actors}
    kinds = defaultdict[tuple[str, str, str], list[Member]](list)
    for actor in actors:
        kinds[actor.name if listed else "", runs_on(actor), actor.state.value].append(actor)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    for column in ("actor" if listed else "actors", "state", "version", "episodes", "tokens/s", "KV", "pause ms"):
        table.add_column(column, no_wrap=True)  # a terminal of 80 columns must show these in full
    if len(places) == 1:
        table.caption = cell(f"runs on: {places.pop()}")
    else:
        table.add_column("runs on")
    for (name, where, state), kind in sorted(kinds.items(), key=lambda item: -len(item[1])):
        versions = sorted({actor.policy_version for actor in kind})
        row = [
            name if listed else str(len(kind)),
            state,
            "-".join(map(str, dict.fromkeys((versions[0], versions[-1])))),
            f"{sum(actor.num_episodes for actor in kind)} of {sum(actor.max_episodes for actor in kind)}",
            f"{sum(actor.tokens_per_s for actor in kind):.0f}",
            f"{fmean(actor.kv_use for actor in kind):.0%}",
            f"{1e3 * max(actor.last_pause_s for actor in kind):.0f}",
            where,
        ]
        table.add_row(*map(cell, row[: len(table.columns)]))
    return table


def runs_on(member: Member) -> str:
    """The actor's kind of instance, price and engine. Its name already begins with that of its host."""
    price = f"{member.price_per_hour:g} $/h" if member.price_per_hour else ""
    return " ".join(filter(None, [member.instance_kind, price, member.engine]))


def relays_table(relays: Sequence[RelayNotice]) -> Table:
    """The version that each relay serves, and how many receivers it serves."""
    table = Table("relay", "address", "version", "serves", "fetched MB", "served MB", "corrupt", title_justify="left")
    for relay in relays:
        row = [
            relay.name,
            relay.endpoint,
            str(relay.policy_version),
            f"{relay.num_children} of {relay.fan_out}",
            f"{relay.fetched_bytes / 1e6:.1f}",
            f"{relay.served_bytes / 1e6:.1f}",
            str(relay.num_corrupt),
        ]
        table.add_row(*map(cell, row))
    return table
