"""`slipstream scale`: change the number of actors on a host, or the number of hosts of actors on a cluster."""

import argparse
import json
import math
import shlex
import socket
from pathlib import Path

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect_or_explain
from slipstream.replay.fleet.fleet import Fleet, Member
from slipstream.tools.launch.follow import advice, follow
from slipstream.tools.launch.hosts import host_name, stays
from slipstream.tools.launch.kubernetes import resource_name
from slipstream.tools.launch.market_options import MarketOptions
from slipstream.tools.launch.skypilot import actors_job, launch_job
from slipstream.tools.launch.slurm import job_name
from slipstream.tools.see.runs import check_running

RAY = "ray"  # the host name under which `slipstream.tools.launch.ray_run` asks Redis for its number of tasks


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb to `parser`."""
    parser.add_argument("--to", type=int, metavar="N", help="number of actors (default: the number that is advised)")
    parser.add_argument("--host", default=socket.gethostname(), help="the host to scale (default: this one)")
    parser.add_argument(
        "--on",
        choices=["kubernetes", "slurm", "skypilot", RAY],
        metavar="ENGINE",
        help="scale the "
        "whole fleet, in hosts of actors.count actors each: ray follows by itself; for kubernetes, "
        "slurm and skypilot the commands to run are printed",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and exit")


def scale(config: Config, *, to: int | None, host: str, on: str | None, dry_run: bool, options: MarketOptions) -> int:
    """Write the wanted number of actors to Redis. The host's supervisor follows within two seconds.

    With prices, the hosts of the whole fleet follow them instead: see `slipstream.tools.launch.follow`.
    """
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; `slipstream up` prints the URL of the server that it started")
    if options.has_prices:
        if to is not None or on:
            raise ConfigError("got --to or --on with prices, which decide the number and run --command; leave them out")
        check_running(config)
        return follow(config, options=options, dry_run=dry_run)
    if to is not None and to < 1:
        raise ConfigError(f"--to must be >= 1, got {to}; to run no actors on a host, stop its `slipstream actors`")
    check_running(config)
    with connect_or_explain(config.redis.url) as client:
        fleet = Fleet(client, config.run.name)
        fleet.run_facts()  # raises UnknownRun
        staying = [member for member in fleet.members() if stays(member)]
        if on:
            _scale_engine(config, fleet, staying, on=on, to=to or _advised(config, staying), dry_run=dry_run)
            return 0
        here = sum(member.host == host for member in staying)
        if not here:
            others = ", ".join(sorted({member.host for member in staying})) or "none"
            raise ConfigError(
                f"run {config.run.name!r} has no actor on host {host}; give --host; hosts with actors: {others}"
            )
        to = to or max(here + _advised(config, staying) - len(staying), 1)
        print(f"{host}: {here} actors now, {to} wanted" + (" (--dry-run: nothing changed)" if dry_run else ""))
        if not dry_run:
            fleet.want_actors(host, to)
    return 0


def engine_commands(config: Config, engine: str, *, have: int, want: int) -> list[str]:
    """Shell commands that change the hosts of actors from `have` to `want`, for the folder of `slipstream launch`."""
    folder = Path("launch") / config.run.name
    match engine:
        case "kubernetes":
            patch = shlex.quote(json.dumps({"spec": {"parallelism": want}}))
            return [f"kubectl patch job/{resource_name(config, 'actors')} --type=merge --patch={patch}"]
        case "slurm" if want > have:
            return [f"sbatch --array={have}-{want - 1} {folder / 'actors.sbatch'}"]
        case "slurm" if want < have:
            listed = f"squeue --me --noheader --array --name={job_name(config, 'actors')} --format=%i"
            ends = "scontrol update jobid=$job requeue=0; scancel $job"  # as an actor that leaves asks for a requeue
            return [f"for job in $({listed} | tail -n {have - want}); do {ends}; done"]
        case "skypilot" if want > have:
            names = [actors_job(config, number) for number in range(have, want)]
            return [shlex.join(launch_job(config, folder / "actors.yaml", name)) for name in names]
        case "skypilot":
            return [f"sky jobs cancel --yes --name {actors_job(config, number)}" for number in range(want, have)]
        case _:
            return []


def _advised(config: Config, staying: list[Member]) -> int:
    wanted = advice(config)
    print(f"{wanted} actors are advised for {config.run.name}, {len(staying)} are running")
    return wanted


def _scale_engine(config: Config, fleet: Fleet, staying: list[Member], *, on: str, to: int, dry_run: bool) -> None:
    have = len({host_name(member) for member in staying})
    want = math.ceil(to / max(config.actors.count, 1))
    print(f"{on}: {have} hosts of actors now, {want} wanted" + (" (--dry-run: nothing changed)" if dry_run else ""))
    for command in engine_commands(config, on, have=have, want=want):
        print(command)
    if on == RAY and not dry_run:
        fleet.want_actors(RAY, want)
