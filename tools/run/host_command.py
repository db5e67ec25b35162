"""The command that starts a host of actors for a run: for `slipstream access join`, and for cluster engines."""

from slipstream.common.config.config import Config, key_paths, value_of

# The GPUs belong to one host, and the transport is given. All other settings of `actors` are taken over.
NOT_TAKEN_OVER = ("actors.devices", "actors.transport")


def host_settings(config: Config, *, transport: str, redis_url: str) -> list[str]:
    """The settings of `slipstream actors` on a host that has neither a configuration file nor the run's folder."""
    settings, usual = {"redis.url": redis_url, "run.name": config.run.name, "actors.transport": transport}, Config()
    for key in key_paths():
        value = value_of(config, key)
        if key.startswith("actors.") and key not in NOT_TAKEN_OVER and value != value_of(usual, key):
            settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return [f"{key}={value}" for key, value in settings.items()]
