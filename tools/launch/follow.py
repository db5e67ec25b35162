"""`slipstream scale --prices`: keep the hosts of actors in the best markets that the budget allows, and say why."""

import contextlib
import json
import math
import shlex
import subprocess
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect_or_explain
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.fleet.fleet import Fleet, Member, RunState, UnknownRun
from slipstream.tools.launch.hosts import dollars_per_host, experience, hosts_by_place, stays
from slipstream.tools.launch.market import Decision, Market, Place, decide
from slipstream.tools.launch.market_options import MarketOptions
from slipstream.tools.launch.prices import BadPrices, read_prices

COMMAND_TIMEOUT_S = 300.0


class NoDecision(Exception):
    """Nothing can be decided now; what runs stays as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    have: Mapping[Place, int]
    ordered: Mapping[Place, int]  # of each place with a price, what was ordered there last: those hosts may start still
    decision: Decision

    @property
    def changes(self) -> dict[Place, int]:
        """The wanted hosts of each place where another number runs, or was ordered."""
        wanted = {place: self.decision.wanted.get(place, 0) for place in self.decision.wanted.keys() | self.ordered}
        return {
            place: want
            for place, want in sorted(wanted.items())
            if want != self.have.get(place, 0) or want != self.ordered.get(place, want)
        }


def follow(config: Config, *, options: MarketOptions, dry_run: bool) -> int:
    """Decide once, or every `options.every` seconds until the run has finished; return the exit code.

    Where something cannot be read, one decision ends with an error, and a loop changes nothing until it can.
    """
    if not options.command and not dry_run:
        raise ConfigError("--command is empty; give the command that sets the hosts of a market, or --dry-run")
    printed = ""
    with connect_or_explain(config.redis.url) as client:
        fleet = Fleet(client, config.run.name)
        fleet.run_facts()  # raises UnknownRun
        while True:
            try:
                decided = _decide_now(config, fleet, options)
                line, code = decided.decision.why, 0
            except (NoDecision, BadPrices, ConfigError, UnknownRun, redis.RedisError) as error:
                if not options.every:
                    raise ConfigError(f"{error}; nothing was changed") from None
                decided, line, code = None, f"nothing is changed: {error}", 1
            if line != printed:
                print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
                printed = line
            if decided and decided.changes:
                code = _apply(config, decided, options, dry_run=dry_run)
            if not options.every:
                return code
            if _has_finished(fleet):
                print("the run has finished: its hosts end by themselves", flush=True)
                return 0
            time.sleep(options.every)


def _has_finished(fleet: Fleet) -> bool:
    with contextlib.suppress(UnknownRun, redis.RedisError):
        return fleet.run_state() is RunState.FINISHED
    return False


def _decide_now(config: Config, fleet: Fleet, options: MarketOptions) -> Decided:
    """Decide from what prices, Redis and the run's records say now. Raises NoDecision, BadPrices, RedisError."""
    state = fleet.run_state()
    if state is not RunState.TRAINING:
        raise NoDecision(f"the run's state is {state.value!r}, and advice needs one that trains")
    markets = read_prices(path=options.prices, command=options.prices_command)
    if options.command:
        _check_distinct(markets, options.command)
    advised, alive, log = advice(config), fleet.members(), read_log(_log_path(config))
    staying = [member for member in alive if stays(member)]
    have, priced = hosts_by_place(staying), {market.place for market in markets}
    seen = experience(fleet.everyone(), alive=alive, step_times=_step_times(config), ended=ended_hosts(log))
    decision = decide(
        _with_unpriced(markets, staying),
        have,
        advised=math.ceil(advised / max(config.actors.count, 1)),
        limits=options.limits,
        seen=seen,
        assumed=options.assumed,
    )
    ordered = {row["place"]: row["want"] for row in log if row["place"] in priced}
    return Decided(have=have, ordered=ordered, decision=decision)


def advice(config: Config) -> int:
    """The number of actors that the learner's newest record advises. Raises ConfigError if no record has one."""
    metrics = RunDir(config.run.root, config.run.name).metrics
    advised = [record["fleet/advised_actors"] for record in read_metrics(metrics) if "fleet/advised_actors" in record]
    if not advised:
        raise ConfigError(
            f"{metrics} has no advised number of actors yet; wait for the first step, or give --to N without prices"
        )
    return round(advised[-1])


def _step_times(config: Config) -> list[float]:
    records = read_metrics(RunDir(config.run.root, config.run.name).metrics)
    return [record["time"] for record in records if isinstance(record.get("time"), int | float)]


def _with_unpriced(markets: Sequence[Market], staying: Sequence[Member]) -> list[Market]:
    """The markets, and those places where hosts run and which have no price now: none is added there."""
    priced = {market.place for market in markets}
    have = hosts_by_place(staying)
    return [
        *markets,
        *(
            Market(place=place, dollars_per_hour=dollars, most=have[place], is_priced=False)
            for place, dollars in dollars_per_host(staying).items()
            if place not in priced
        ),
    ]


def filled_in(command: str, place: Place, want: int) -> list[str]:
    """The words of the user's command for one market; no shell sees them."""
    return [word.format(kind=place.kind, zone=place.zone, want=want) for word in shlex.split(command)]


def _check_distinct(markets: Sequence[Market], command: str) -> None:
    if len({tuple(filled_in(command, market.place, 0)) for market in markets}) < len(markets):
        raise ConfigError(
            f"--command is the same for several of the {len(markets)} markets, got {command!r}; put {{zone}} or "
            "{kind} into it"
        )


def _apply(config: Config, decided: Decided, options: MarketOptions, *, dry_run: bool) -> int:
    """Run the command of each change until one fails, and log what was done; return the exit code."""
    left = dict(decided.changes)
    for place, want in decided.changes.items():
        command = filled_in(options.command, place, want) if options.command else []
        print(f"{'would run' if dry_run else '$'} {shlex.join(command)}" if command else f"{place}: {want}", flush=True)
        if not dry_run and not _succeeds(command, place):
            break
        del left[place]
    if not dry_run and len(left) < len(decided.changes):
        _write_log(_log_path(config), decided, left)
    return 1 if left else 0


def _succeeds(command: list[str], place: Place) -> bool:
    """Run a command, and print why if it fails."""
    try:
        code = subprocess.run(command, timeout=COMMAND_TIMEOUT_S).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"the command for {place} failed: {error}", flush=True)
        return False
    if code:
        print(f"the command for {place} ended with code {code}", flush=True)
    return code == 0


def _log_path(config: Config) -> Path:
    return RunDir(config.run.root, config.run.name).path / "scale.jsonl"


def _write_log(path: Path, decided: Decided, left: Collection[Place]) -> None:
    """Log the wanted hosts of each place, without those whose change is `left` to the next decision."""
    rows = [
        {"kind": place.kind, "zone": place.zone, "have": decided.have.get(place, 0), "want": want}
        for place, want in sorted((decided.decision.wanted | decided.changes).items())
        if place not in left
    ]
    with path.open("a") as file:
        file.write(json.dumps({"time": time.time(), "why": decided.decision.why, "hosts": rows}) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The hosts of each place, in the order of the decisions in a run's `scale.jsonl`; damaged lines are skipped."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            rows += [
                {"place": Place(str(row["kind"]), str(row["zone"])), "have": int(row["have"]), "want": int(row["want"])}
                for row in json.loads(line)["hosts"]
            ]
    return rows


def ended_hosts(rows: Sequence[Mapping[str, Any]]) -> dict[Place, int]:
    """How many hosts of each place were ended by decisions.

    A host still counts as running while it drains. So it counts as ended once: from 3 to 2 ends one, and 2 again, while
    3 still run, ends none.
    """
    before, ended = dict[Place, int](), defaultdict[Place, int](int)
    for row in rows:
        ended[row["place"]] += max(0, min(row["have"], before.get(row["place"], row["have"])) - row["want"])
        before[row["place"]] = row["want"]
    return dict(ended)
