"""What is wrong with a configuration, said so that a person can mend it."""


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, the value, and what to do."""


def require(holds: bool, path: str, contract: str, value: object, cure: str) -> None:
    """Raise ConfigError unless `holds`: key `path` must be `contract`, and `cure` says what to do."""
    if not holds:
        raise ConfigError(f"`{path}` must be {contract}, got {value!r}; {cure}")
