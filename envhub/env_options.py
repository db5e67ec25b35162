"""Checks the values that a user configured under `env.options`."""

import difflib
import math
import os
import urllib.parse
from collections.abc import Collection, Mapping
from typing import TypeGuard


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"`env.options.{name}` must be {' or '.join(choices)}, got {value!r}; leave it out for the default"
        )


def check_known(name: str, value: str, known: Collection[str], *, of: str, usual: str) -> None:
    """Raise ValueError unless `value` is one of `known`, which are too many to list; `of` says what they are."""
    if value not in known:
        near = ", ".join(difflib.get_close_matches(value, known, n=3, cutoff=0.3)) or usual
        raise ValueError(f"`env.options.{name}` must be one of {of}, got {value!r}; did you mean {near}?")


def check_range(name: str, value: object, low: int, high: int) -> None:
    """Raise ValueError unless `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"`env.options.{name}` must be a whole number from {low} to {high}, got {value!r}; change it")


def is_server_url(url: object) -> bool:
    """Whether `url` is of HTTP, with a host, and with a port that can be one."""
    try:
        parts = urllib.parse.urlsplit(url if isinstance(url, str) else "")
        _ = parts.port  # raises ValueError for letters
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def check_url(url: str, server: str) -> None:
    """Raise ValueError unless `url` is a server's; `server` says of which."""
    if not is_server_url(url):
        raise ValueError(f"`env.options.url` must be http://HOST:PORT of {server}, got {url!r}; correct it")


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number: not true, and no whole number that is beyond any float."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def read_secrets(secrets: Mapping[str, str] | None) -> dict[str, str]:
    """Return the values of the actor's variables that `secrets` names. Raises ValueError if one is not set."""
    named = dict(secrets or {})
    if missing := [variable for variable in named.values() if variable not in os.environ]:
        raise ValueError(
            f"`env.options.secrets`: {missing[0]} is not set in the actor's environment; export it before the start"
        )
    return {name: os.environ[variable] for name, variable in named.items()}
