"""`slipstream scale`: have a host keep up more or fewer actors, as many as are advised or as told."""

import argparse
import socket

from common.config import Config
from common.config_error import ConfigError
from common.connection import connect_or_explain
from common.metrics import read_metrics
from common.run_dir import RunDir
from replay.fleet import Fleet, Member, MemberState


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the verb."""
    parser.add_argument("--to", type=int, metavar="N", help="actors of this host; left out: as many as are advised")
    parser.add_argument("--host", default=socket.gethostname(), help="whose `slipstream actors` is told; this one's")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and stop")


def scale(config: Config, *, to: int | None, host: str, dry_run: bool) -> int:
    """Tell the supervisor on `host` how many actors to keep up; it follows within a second or two."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; `slipstream up` prints the URL of the server that it started")
    if to is not None and to < 1:
        raise ConfigError(f"--to must be >= 1, got {to}; to have no actors here, end `slipstream actors`")
    with connect_or_explain(config.redis.url) as client:
        fleet = Fleet(client, config.run.name)
        fleet.run_facts()  # raises UnknownRun
        staying = [member for member in fleet.members() if stays(member)]
        here = sum(member.host == host for member in staying)
        if not here:
            others = ", ".join(sorted({member.host for member in staying})) or "none"
            raise ConfigError(f"no actor of {config.run.name} is on {host}; hosts with actors: {others}")
        if to is None:
            wanted = advice(config)
            print(f"{wanted} actors are advised for {config.run.name}, {len(staying)} are there")
            to = max(here + wanted - len(staying), 1)
        print(f"{host}: {here} actors now, {to} wanted" + (" (not told: --dry-run)" if dry_run else ""))
        if not dry_run:
            fleet.want_actors(host, to)
    return 0


def stays(member: Member) -> bool:
    """Whether it is an actor that was not told to leave."""
    return member.role == "actor" and member.state is not MemberState.DRAINING


def advice(config: Config) -> int:
    """What the learner's newest record advises. Raises ConfigError where there is none."""
    metrics = RunDir(config.run.root, config.run.name).metrics
    advised = [record["fleet/advised_actors"] for record in read_metrics(metrics) if "fleet/advised_actors" in record]
    if not advised:
        raise ConfigError(f"{metrics} holds no advice yet; wait for a step, or say how many: --to N")
    return round(advised[-1])
