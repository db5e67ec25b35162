"""The error for a configuration that cannot run, the check that raises it, and the reason of another's error."""


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, the value, what was expected, and what to do."""


def require(is_met: bool, path: str, contract: str, value: object, cure: str) -> None:
    """Raise ConfigError unless `is_met`: key `path` must be `contract`, and `cure` says what to do."""
    if not is_met:
        raise ConfigError(f"`{path}` must be {contract}, got {value!r}; {cure}")


def reason(error: BaseException) -> str:
    """One line that says why a file cannot be read."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
