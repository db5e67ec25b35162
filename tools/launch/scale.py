"""`slipstream scale`: change the number of actors on a host, or on a Ray cluster."""

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.metrics import newest_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.fleet.fleet import Fleet, MemberState
from slipstream.tools.see.run_client import client_of

RAY = "ray"  # the host name under which `slipstream.tools.launch.ray_run` asks Redis for its number of actors


def scale(config: Config, *, to: int | None, host: str) -> int:
    """Write the wanted number to Redis: of actors on `host`, or on Ray. Its supervisor follows at once."""
    if to is not None and to < 1:
        raise ConfigError(f"--to must be >= 1, got {to}; to run no actors on a host, stop its `slipstream actors`")
    fleet = Fleet(client_of(config), config.run.name)
    hosts = [actor.host for actor in fleet.members() if actor.state is not MemberState.DRAINING]
    if host != RAY and host not in hosts:
        others = ", ".join(sorted(set(hosts))) or "none"
        raise ConfigError(
            f"run {config.run.name!r} has no actor on host {host}; give --host; hosts with actors: {others}"
        )
    if to is None:
        advised = _advised(config)
        print(f"{advised} actors are advised for {config.run.name}, {len(hosts)} are running")
        to = advised if host == RAY else max(hosts.count(host) + advised - len(hosts), 1)
    fleet.want_actors(host, to)
    print(f"{host}: {to} wanted")
    return 0


def _advised(config: Config) -> int:
    """The number of actors that the learner's newest record advises. Raises ConfigError if no record has one."""
    metrics = RunDir(config.run.root, config.run.name).metrics
    advised = [record["fleet/advised_actors"] for record in newest_metrics(metrics) if "fleet/advised_actors" in record]
    if not advised:
        raise ConfigError(f"{metrics} has no advised number of actors yet; wait for the first step, or give --to N")
    return round(advised[-1])
