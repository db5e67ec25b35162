"""`slipstream scale`: have a host keep up more or fewer actors, or an engine run more or fewer hosts."""

import argparse
import json
import math
import shlex
import socket
from pathlib import Path

from common.config import Config
from common.config_error import ConfigError
from common.connection import connect_or_explain
from common.metrics import read_metrics
from common.run_dir import RunDir
from replay.fleet import Fleet, Member, MemberState
from tools.launch.kubernetes import resource_name
from tools.launch.skypilot import actors_job, launch_job
from tools.launch.slurm import job_name

RAY = "ray"  # the host that a run on Ray listens as: its actors are the tasks of `tools.ray_run`


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the verb."""
    parser.add_argument("--to", type=int, metavar="N", help="actors; left out: as many as are advised")
    parser.add_argument("--host", default=socket.gethostname(), help="whose `slipstream actors` is told; this one's")
    parser.add_argument("--on", choices=["kubernetes", "slurm", "skypilot", RAY], metavar="ENGINE", help="scale the "
                        "whole fleet in hosts of actors.count each: ray is told, of the others (kubernetes, slurm, "
                        "skypilot) the commands are printed")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and stop")


def scale(config: Config, *, to: int | None, host: str, on: str | None, dry_run: bool) -> int:
    """Tell who starts actors how many to keep up; a supervisor follows within a second or two."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; `slipstream up` prints the URL of the server that it started")
    if to is not None and to < 1:
        raise ConfigError(f"--to must be >= 1, got {to}; to have no actors here, end `slipstream actors`")
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
            raise ConfigError(f"no actor of {config.run.name} is on {host}; hosts with actors: {others}")
        to = to or max(here + _advised(config, staying) - len(staying), 1)
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


def engine_commands(config: Config, engine: str, *, have: int, want: int) -> list[str]:
    """For a shell, in the folder that the run was launched from: `want` hosts of actors where there are `have`."""
    folder = Path("launch") / config.run.name
    match engine:
        case "kubernetes":
            patch = shlex.quote(json.dumps({"spec": {"parallelism": want}}))
            return [f"kubectl patch job/{resource_name(config, 'actors')} --type=merge --patch={patch}"]
        case "slurm" if want > have:
            return [f"sbatch --array={have}-{want - 1} {folder / 'actors.sbatch'}"]
        case "slurm" if want < have:
            listed = f"squeue --me --noheader --array --name={job_name(config, 'actors')} --format=%i"
            return [f"scancel $({listed} | tail -n {have - want})"]
        case "skypilot" if want > have:
            names = [actors_job(config, number) for number in range(have, want)]
            return [shlex.join(launch_job(folder / "actors.yaml", name)) for name in names]
        case "skypilot":
            return [f"sky jobs cancel --yes --name {actors_job(config, number)}" for number in range(want, have)]
        case _:
            return []


def _advised(config: Config, staying: list[Member]) -> int:
    wanted = advice(config)
    print(f"{wanted} actors are advised for {config.run.name}, {len(staying)} are there")
    return wanted


def _scale_engine(config: Config, fleet: Fleet, staying: list[Member], *, on: str, to: int, dry_run: bool) -> None:
    have = len({member.name.rpartition("-")[0] for member in staying})  # a supervisor's actors begin with its name
    want = math.ceil(to / max(config.actors.count, 1))
    print(f"{on}: {have} hosts of actors now, {want} wanted" + (" (not told: --dry-run)" if dry_run else ""))
    for command in engine_commands(config, on, have=have, want=want):
        print(command)
    if on == RAY and not dry_run:
        fleet.want_actors(RAY, want)
