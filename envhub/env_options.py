"""Checks the values that a user configured under `env.options`."""

from collections.abc import Collection


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"`env.options.{name}` must be {' or '.join(choices)}, got {value!r}; leave it out for the default"
        )


def check_range(name: str, value: object, low: int, high: int) -> None:
    """Raise ValueError unless `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"`env.options.{name}` must be a whole number from {low} to {high}, got {value!r}; change it")
