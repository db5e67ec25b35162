"""`make soak`: kill real processes at random for minutes; the ledger must balance to the last trajectory.

Stand-ins for actors and a learner, which restart in half a second, work on a Redis server of their own. At random times
one of them, or the server, is killed or stopped; a supervisor restarts it. In the end, every answer to an actor's
insert, and every group in the model, is compared with the ledger.

    SOAK_MINUTES=60 make soak
"""

import argparse
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import redis

from slipstream.tools.lab.bench.benchmark import Row, Run
from slipstream.tools.lab.soak.accounts import Accounts
from slipstream.tools.lab.soak.stage import LEASE_TTL_S, POLL_S, SoakStage

SAMPLE_EVERY_S = 1.0
REPORT_EVERY_S = 20.0
STOPPED_S = 2.0  # how long the server is suspended
ZOMBIE_S = 1.5 * LEASE_TTL_S  # how long an actor is suspended; its leases expire meanwhile
WARM_UP = 0.2  # the first fifth of the samples is ignored, as everything still grows to its size

# Quantities that must not grow: the title, scale and unit of each.
FLAT = {
    "keys": ("keys in Redis", 1, ""),
    "memory_bytes": ("memory of Redis", 1 << 20, "MiB"),
    "clients": ("connected clients", 1, ""),
    "server_descriptors": ("descriptors of the server", 1, ""),
    "descriptors": ("descriptors of actors and learner", 1, ""),
    "resident_bytes": ("memory of actors and learner", 1 << 20, "MiB"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The resources in use at one time."""

    at_s: float  # since the start
    keys: int
    memory_bytes: int
    clients: int
    server_descriptors: int
    descriptors: int  # of actors and learner together
    resident_bytes: int  # of actors and learner together


@dataclass(kw_only=True, slots=True)
class Report:
    """The results of a soak."""

    wall_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)  # ends of processes that no fault had caused
    resumed_s: list[float] = field(default_factory=list)  # from the server's PONG to the next answered insert
    accounts: Accounts = field(init=False)

    def halves(self, name: str) -> tuple[float, float]:
        """The mean of a quantity over the earlier and over the later half of the samples, without the warm-up.

        A leak makes the later mean larger.
        """
        values = [float(getattr(sample, name)) for sample in self.samples[int(WARM_UP * len(self.samples)) :]]
        middle = len(values) // 2
        return statistics.mean(values[:middle]), statistics.mean(values[middle:])


class Soak:
    """One soak, with its files in `directory`. Use it in the main thread: the server ends with its starting thread."""

    def __init__(self, directory: Path, *, mean_s: float, num_actors: int, seed: int) -> None:
        """`mean_s` is the mean time between two faults."""
        self._mean_s = mean_s
        self._stage = SoakStage(directory, num_actors=num_actors, seed=seed)
        self._report = Report()
        self._faults = {
            "actor killed": self._kill_an_actor,
            "actor stopped": self._stop_an_actor,
            "learner killed": self._kill_the_learner,
            "server killed": self._kill_the_server,
            "server stopped": self._stop_the_server,
        }

    def run(self, seconds: float) -> Report:
        """Inject faults for `seconds`; then let all processes recover, end them in order, and compare the ledger."""
        report, stage = self._report, self._stage
        try:
            stage.start()
            self._inject_faults(seconds)
            stage.until_answered()
            report.accounts = stage.end()
            report.unasked = stage.unasked
            return report
        finally:
            stage.close()

    def _inject_faults(self, seconds: float) -> None:
        stage = self._stage
        started = time.monotonic()
        next_fault = started + stage.random.expovariate(1 / self._mean_s)
        next_sample, next_report = started, started
        deck: list[str] = []
        while (now := time.monotonic()) < started + seconds:
            stage.tick()
            if now >= next_fault:
                deck = deck or stage.random.sample(
                    list(self._faults), len(self._faults)
                )  # each fault once before any again
                name = deck.pop()
                self._faults[name]()
                self._report.faults[name] += 1
                next_fault = now + stage.random.expovariate(1 / self._mean_s)
            if now >= next_sample and not stage.is_disturbed:  # a suspended server would not answer
                self._report.samples.append(self._sample(now - started))
                next_sample = now + SAMPLE_EVERY_S
            if now >= next_report:
                self._print_progress(now - started)
                next_report = now + REPORT_EVERY_S
            time.sleep(POLL_S)
        self._report.wall_s = time.monotonic() - started
        stage.undo_all()

    def _kill_an_actor(self) -> None:
        self._stage.kill(self._stage.random.choice(self._stage.cast.actors))

    def _kill_the_learner(self) -> None:
        self._stage.kill(self._stage.cast.learner)

    def _stop_an_actor(self) -> None:
        actor = self._stage.random.choice(self._stage.cast.actors)
        actor.send(signal.SIGSTOP)
        self._stage.later(ZOMBIE_S, lambda: actor.send(signal.SIGCONT))

    def _stop_the_server(self) -> None:
        process = self._stage.server.process
        process.send_signal(signal.SIGSTOP)
        self._stage.later(STOPPED_S, lambda: process.send_signal(signal.SIGCONT))

    def _kill_the_server(self) -> None:
        self._report.resumed_s.append(self._stage.restart_server())

    def _sample(self, at_s: float) -> Sample:
        client, everyone = self._stage.client, self._stage.cast.everyone
        memory, clients = client.info("memory"), client.info("clients")
        processes = [psutil.Process(child.pid) for child in everyone]
        return Sample(
            at_s=at_s,
            keys=client.dbsize(),
            memory_bytes=memory["used_memory"],
            clients=clients["connected_clients"],
            server_descriptors=psutil.Process(self._stage.server.process.pid).num_fds(),
            descriptors=sum(process.num_fds() for process in processes),
            resident_bytes=sum(process.memory_info().rss for process in processes),
        )

    def _print_progress(self, at_s: float) -> None:
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self._report.faults.items()))
        answers_mib = self._stage.journal_bytes() / 2**20
        print(f"{at_s:6.0f} s: {answers_mib:.1f} MiB of answers; {faults or 'no fault yet'}", flush=True)


def rows_of(report: Report, *, max_growth: float) -> list[Row]:
    """The report as rows of a benchmark; `max_growth` is the goal for the quantities that must not grow."""
    accounts, num_faults = report.accounts, report.faults.total()
    rows = [
        _count("acknowledged inserts lost, of all", len(accounts.lost), of=accounts.num_acknowledged),
        _count("groups trained twice, of all trained", len(accounts.twice), of=accounts.num_trained),
        _count("contradictions in books and audit, of groups opened", len(accounts.wrong), of=accounts.ledger.opened),
        _count("processes that ended unasked, beside faults", len(report.unasked), of=num_faults),
    ]
    if report.resumed_s:
        rows.append(
            Row.of(
                "longest wait from PONG to an answered insert, of 5 s",
                [max(report.resumed_s)],
                unit="s",
                against=[5.0],
                goal="ratio <= 1",
            )
        )
    for name, (what, scale, unit) in FLAT.items():
        earlier, later = report.halves(name)
        rows.append(
            Row.of(
                f"flat: {what}, later half beside earlier",
                [later / scale],
                unit=unit,
                against=[earlier / scale],
                goal=f"ratio <= {max_growth}",
            )
        )
    return rows + [
        Row.of(f"faults: {name}, of all", [n], unit="", against=[num_faults])
        for name, n in sorted(report.faults.items())
    ]


def _count(name: str, value: int, *, of: int) -> Row:
    return Row.of(name, [float(value)], unit="", against=[float(of)], goal="value <= 0")


def main(arguments: list[str]) -> int:
    """Run a soak with the options of the command line; return 0 if every goal holds, else 1."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.tools.lab.soak.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--mean-s", type=float, default=20.0, help="mean time between two faults")
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args(arguments)
    run = Run("soak", command=f"SOAK_MINUTES={chosen.minutes:g} make soak")
    print(f"soaking for {chosen.minutes:g} minutes, seed {chosen.seed}", flush=True)
    with TemporaryDirectory(prefix="slipstream-soak-") as directory:
        soak = Soak(Path(directory), mean_s=chosen.mean_s, num_actors=chosen.actors, seed=chosen.seed)
        report = soak.run(60 * chosen.minutes)
    for line in report.unasked + report.accounts.lost + report.accounts.twice + report.accounts.wrong:
        print(line)
    print(report.accounts.ledger)
    return run.end(rows_of(report, max_growth=1.1), versions={"redis-py": redis.__version__})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
