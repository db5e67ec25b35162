"""Checks the values that a user configured under `env.options`."""

import difflib
import os
from collections.abc import Collection, Mapping


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


def read_secrets(secrets: Mapping[str, str] | None) -> dict[str, str]:
    """Return the values of the actor's variables that `secrets` names. Raises ValueError if one is not set."""
    named = dict(secrets or {})
    if missing := [variable for variable in named.values() if variable not in os.environ]:
        raise ValueError(
            f"`env.options.secrets`: {missing[0]} is not set in the actor's environment; export it before the start"
        )
    return {name: os.environ[variable] for name, variable in named.items()}
