"""The command that starts a host of actors for a run: for `slipstream access join`, and for cluster engines."""

from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.config.config import Config

# What belongs to one host: its GPUs. All other settings of `actors` are taken over.
_OF_A_HOST = ("actors.devices",)


def host_settings(config: Config, *, transport: str, redis_url: str) -> list[str]:
    """The settings of `slipstream actors` on a host that has neither a configuration file nor the run's folder."""
    settings = [f"redis.url={redis_url}", f"run.name={config.run.name}", f"actors.transport={transport}"]
    settings += [
        setting
        for setting in _changed("actors", config.actors, ActorsConfig())
        if not setting.startswith(("actors.transport=", *(f"{key}=" for key in _OF_A_HOST)))
    ]
    return settings


def _changed(section: str, values: object, defaults: object) -> list[str]:
    """The settings of a section that differ from the defaults, as `section.key=value`."""
    names = [name for name in defaults.__slots__ if getattr(values, name) != getattr(defaults, name)]  # type: ignore[attr-defined]
    return [f"{section}.{name}={_text(getattr(values, name))}" for name in names]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
