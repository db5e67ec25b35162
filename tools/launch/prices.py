"""Reads the prices of markets, from a file or a command of the user's. A line: `spot eu-west-1a 0.41 [MOST_HOSTS]`."""

import math
import re
import shlex
import subprocess
from pathlib import Path

from slipstream.tools.launch.market import Market, Place

KINDS = ("reserved", "spot")
ZONE = r"[\w./:+-]{1,100}"
MAX_PRICE = 1e5  # dollars an hour of one host
MAX_BYTES = 1 << 20
COMMAND_TIMEOUT_S = 60.0


class BadPrices(ValueError):
    """The prices cannot be read now; what runs must stay as it is."""


def read_prices(*, path: str, command: str) -> list[Market]:
    """The markets in the file `path`, or in the output of `command`. Raises BadPrices."""
    source = path or command
    return parse_prices(_of_file(path) if path else _of_command(command), source=source)


def parse_prices(text: str, *, source: str) -> list[Market]:
    """The markets in `text`: kind, zone, dollars an hour of one host, and perhaps the most hosts. Raises BadPrices.

    '#' begins a comment. The last line must be whole, as the file may be being written.
    """
    if text and not text.endswith("\n"):
        raise BadPrices(f"prices of {source}: the last line does not end; write the whole file, then rename it")
    markets = dict[Place, Market]()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        market = _market(words, where=f"prices of {source}, line {number}")
        if market.place in markets:
            raise BadPrices(f"prices of {source}, line {number}: {market.place} has a price already; leave one of them")
        markets[market.place] = market
    if not markets:
        raise BadPrices(f"prices of {source}: there are none; a line is `spot ZONE DOLLARS_PER_HOUR [MOST_HOSTS]`")
    return list(markets.values())


def _market(words: list[str], *, where: str) -> Market:
    if not 3 <= len(words) <= 4 or words[0] not in KINDS or not re.fullmatch(ZONE, words[1]):
        raise BadPrices(
            f"{where}: got {' '.join(words)[:80]!r}, expected `reserved|spot ZONE DOLLARS_PER_HOUR [MOST_HOSTS]`"
        )
    price = _number(words[2])
    if not 0 < price <= MAX_PRICE:
        raise BadPrices(f"{where}: the price must be in (0, {MAX_PRICE:g}] dollars an hour, got {words[2][:40]!r}")
    if len(words) == 4 and not re.fullmatch(r"[0-9]{1,6}", words[3]):
        raise BadPrices(f"{where}: the most hosts must be a number >= 0, got {words[3][:40]!r}")
    most = int(words[3]) if len(words) == 4 else None
    return Market(place=Place(words[0], words[1]), dollars_per_hour=price, most=most)


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _of_file(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return _text(file.read(MAX_BYTES + 1), source=path)
    except OSError as error:
        raise BadPrices(f"prices of {path} cannot be read: {error.strerror}; write the file again") from None


def _of_command(command: str) -> str:
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise BadPrices(f"prices: the command {command!r} failed: {error}; correct it") from None
    if done.returncode:
        errors = done.stderr.decode(errors="replace").strip()[-200:]
        raise BadPrices(f"prices: the command {command!r} ended with code {done.returncode}: {errors}")
    return _text(done.stdout, source=command)


def _text(content: bytes, *, source: str) -> str:
    if len(content) > MAX_BYTES:
        raise BadPrices(f"prices of {source}: more than {MAX_BYTES} bytes; a line for each market is enough")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise BadPrices(f"prices of {source}: not UTF-8 text") from None
