"""The options of `slipstream scale` with prices."""

import math
import shlex
import string
from dataclasses import dataclass, fields

from slipstream.common.process.config_error import ConfigError, require
from slipstream.tools.launch.market import Assumed, Limits

PLACEHOLDERS = ("kind", "zone", "want")


@dataclass(frozen=True, kw_only=True, slots=True)
class MarketOptions:
    prices: str = ""  # file of prices, a market each line: `spot|reserved ZONE DOLLARS_PER_HOUR [MOST_HOSTS]`
    prices_command: str = ""  # command that prints such lines; instead of a file
    budget: float = 0.0  # dollars an hour, for all hosts of actors
    command: str = ""  # command that sets the hosts of a market, with {kind}, {zone} and {want} in it
    min_hosts: int = 1  # at least, if the budget allows it
    max_hosts: int = 64  # at most
    max_change: int = 2  # hosts that one decision adds at most, and that it ends at most
    every: float = 0.0  # seconds between two decisions, until the run has finished; 0 decides once
    start_minutes: float = 5.0  # assumed, from the order of a host to its first episode
    losses_per_hour: float = 0.05  # assumed of a spot host, until the run has seen enough hours of its own
    lost_minutes: float = 1.0  # assumed work that a lost host loses, until the run has lost one

    def __post_init__(self) -> None:
        if not self.has_prices:
            given = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
            if given:
                flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
                raise ConfigError(f"{flags} has no effect without --prices FILE or --prices-command COMMAND; give one")
            return
        if self.prices and self.prices_command:
            raise ConfigError("got both --prices and --prices-command; give one")
        require(0 < self.budget < math.inf, "--budget", "> 0", self.budget, "it is in dollars an hour, for all hosts")
        require(self.min_hosts >= 0, "--min-hosts", ">= 0", self.min_hosts, "1 is the default")
        require(self.max_hosts >= max(self.min_hosts, 1), "--max-hosts", ">= --min-hosts", self.max_hosts, "raise it")
        require(self.max_change >= 1, "--max-change", ">= 1", self.max_change, "2 is the default")
        for name in ("every", "start_minutes", "losses_per_hour", "lost_minutes"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"--{name.replace('_', '-')}", ">= 0", value, "leave it out for the default")
        self._check_command()

    @property
    def has_prices(self) -> bool:
        return bool(self.prices or self.prices_command)

    @property
    def limits(self) -> Limits:
        return Limits(budget=self.budget, fewest=self.min_hosts, most=self.max_hosts, max_change=self.max_change)

    @property
    def assumed(self) -> Assumed:
        return Assumed(
            start_hours=self.start_minutes / 60,
            losses_per_hour=self.losses_per_hour,
            lost_work_hours=self.lost_minutes / 60,
        )

    def _check_command(self) -> None:
        """Raise ConfigError unless the command, if there is one, can be filled in."""
        if not self.command:
            return
        cure = "use {kind}, {zone} and {want}; it must set the number of hosts to {want}, not add to it"
        try:
            found = {name for _, name, _, _ in string.Formatter().parse(self.command) if name is not None}
            shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"--command cannot be read: {error}, got {self.command!r}; {cure}") from None
        if not {"want"} <= found <= set(PLACEHOLDERS):
            raise ConfigError(f"--command must have {{want}} and no other placeholders, got {self.command!r}; {cure}")
