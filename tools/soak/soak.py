"""`make soak`: random kills for minutes, real processes, and books that must balance to the last trajectory.

Actors and a learner (stand-ins, so that one is back in half a second) work on a server of their own. At random times
one of them, or the server, is killed or stopped; a supervisor starts what ended. In the end everything that an actor
was told about its inserts, and everything that is in the model, is compared with the ledger.

    SOAK_MINUTES=60 make soak
"""

import argparse
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import redis

from common.connection import connect
from replay.server import start_server
from tools.bench.benchmark import Row, Run
from tools.child import Child
from tools.soak.accounts import Accounts
from tools.soak.cast import Cast

SAMPLE_EVERY_S = 1.0
SAY_EVERY_S = 20.0
POLL_S = 0.05
STOPPED_S = 2.0  # the server stands still for so long
LEASE_TTL_S = 3.0
ZOMBIE_S = 1.5 * LEASE_TTL_S  # an actor stands still for so long: it comes back to leases that it lost
WARM_UP = 0.2  # the first fifth of the samples is not judged: everything is growing to its size
SETTLED_S = 60.0  # how long it may take, when the faults are over, until everyone works again

# What must not grow: what it is, and its scale and unit where people read it.
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
    """What is in use at one moment."""

    at_s: float  # since the start
    keys: int
    memory_bytes: int
    clients: int
    server_descriptors: int
    descriptors: int  # of actors and learner together
    resident_bytes: int  # of actors and learner together


@dataclass(kw_only=True, slots=True)
class Report:
    """What a soak has seen."""

    wall_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)  # ends that no fault had brought about
    resumed_s: list[float] = field(default_factory=list)  # from the server's PONG to the next answered insert
    accounts: Accounts = field(init=False)

    def halves(self, name: str) -> tuple[float, float]:
        """The mean of a quantity over the earlier half of the samples and over the later, the warm-up left out.

        What leaks is larger in the later half.
        """
        values = [float(getattr(sample, name)) for sample in self.samples[int(WARM_UP * len(self.samples)) :]]
        middle = len(values) // 2
        return statistics.mean(values[:middle]), statistics.mean(values[middle:])


class Soak:
    """One soak, in `directory`. Call it from the main thread: the server ends with the thread that started it."""

    def __init__(self, directory: Path, *, mean_s: float, num_actors: int, seed: int) -> None:
        """`mean_s` is the mean time between two faults."""
        self._redis = directory / "redis"
        self._mean_s = mean_s
        self._random = random.Random(seed)
        self._server = start_server(self._redis)
        self._client: redis.Redis = connect(self._server.secret_url)
        self._cast = Cast(
            directory / "cast",
            url=self._server.url,
            password=self._server.password,
            run_id="soak",
            num_actors=num_actors,
            lease_ttl_s=LEASE_TTL_S,
            episode_s=0.02,
            seed=seed,
        )
        self._report = Report()
        self._to_continue: list[tuple[float, Callable[[signal.Signals], None]]] = []  # what was stopped, until when
        self._killed: set[str] = set()
        self._faults = {
            "actor killed": self._kill_an_actor,
            "actor stopped": self._stop_an_actor,
            "learner killed": self._kill_the_learner,
            "server killed": self._kill_the_server,
            "server stopped": self._stop_the_server,
        }

    def run(self, seconds: float) -> Report:
        """Faults for so many seconds; then let everyone work, end them in order, and compare the books."""
        report = self._report
        try:
            self._cast.start()
            self._suffer(seconds)
            self._wait_for_answers()
            report.unasked += self._cast.end()
            report.accounts = self._cast.accounts(self._client)
            return report
        finally:
            self._cast.kill()
            self._server.process.send_signal(signal.SIGCONT)
            self._client.close()
            self._server.stop()

    def _suffer(self, seconds: float) -> None:
        started = time.monotonic()
        next_fault = started + self._random.expovariate(1 / self._mean_s)
        next_sample, next_word = started, started
        deck: list[str] = []
        while (now := time.monotonic()) < started + seconds:
            self._continue(now)
            self._keep_up()
            if now >= next_fault:
                deck = deck or self._random.sample(list(self._faults), len(self._faults))  # none twice before all once
                name = deck.pop()
                self._faults[name]()
                self._report.faults[name] += 1
                next_fault = now + self._random.expovariate(1 / self._mean_s)
            if now >= next_sample and not self._to_continue:  # a server that stands still would not answer
                self._report.samples.append(self._sample(now - started))
                next_sample = now + SAMPLE_EVERY_S
            if now >= next_word:
                self._say(now - started)
                next_word = now + SAY_EVERY_S
            time.sleep(POLL_S)
        self._report.wall_s = time.monotonic() - started
        self._continue(float("inf"))

    # --- Faults.

    def _kill_an_actor(self) -> None:
        self._kill(self._random.choice(self._cast.actors))

    def _kill_the_learner(self) -> None:
        self._kill(self._cast.learner)

    def _kill(self, child: Child) -> None:
        self._killed.add(child.name)
        child.send(signal.SIGKILL)

    def _stop_an_actor(self) -> None:
        actor = self._random.choice(self._cast.actors)
        actor.send(signal.SIGSTOP)
        self._to_continue.append((time.monotonic() + ZOMBIE_S, actor.send))

    def _stop_the_server(self) -> None:
        self._server.process.send_signal(signal.SIGSTOP)
        self._to_continue.append((time.monotonic() + STOPPED_S, self._server.process.send_signal))

    def _kill_the_server(self) -> None:
        self._server.process.kill()
        self._server.process.wait()
        self._server = start_server(self._redis)  # returns at its first PONG
        self._report.resumed_s.append(self._wait_for_answers())

    # --- Supervision.

    def _continue(self, now: float) -> None:
        for until, send in [entry for entry in self._to_continue if entry[0] <= now]:
            send(signal.SIGCONT)
            self._to_continue.remove((until, send))

    def _keep_up(self) -> None:
        """Start again whoever ended, and note whom no fault had ended."""
        for child in self._cast.everyone:
            if child.exit_code is not None:
                if child.name not in self._killed:
                    self._report.unasked.append(f"{child.name} ended with {child.exit_code}: {child.last_words()}")
                self._killed.discard(child.name)
                child.start()

    def _wait_for_answers(self) -> float:
        """Seconds until some actor has an answer that it did not have before."""
        started, size = time.monotonic(), self._journal_bytes()
        while self._journal_bytes() == size:
            self._continue(time.monotonic())
            self._keep_up()
            if time.monotonic() - started > SETTLED_S:
                words = "\n".join(f"{child.name}: {child.last_words()}" for child in self._cast.everyone)
                raise TimeoutError(f"no insert was answered for {SETTLED_S:.0f} s:\n{words}")
            time.sleep(POLL_S / 5)
        return time.monotonic() - started

    def _journal_bytes(self) -> int:
        return sum(journal.stat().st_size for journal in self._cast.journals)

    def _sample(self, at_s: float) -> Sample:
        memory, clients = self._client.info("memory"), self._client.info("clients")
        processes = [psutil.Process(child.pid) for child in self._cast.everyone]
        return Sample(
            at_s=at_s,
            keys=self._client.dbsize(),
            memory_bytes=memory["used_memory"],
            clients=clients["connected_clients"],
            server_descriptors=psutil.Process(self._server.process.pid).num_fds(),
            descriptors=sum(process.num_fds() for process in processes),
            resident_bytes=sum(process.memory_info().rss for process in processes),
        )

    def _say(self, at_s: float) -> None:
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self._report.faults.items()))
        answers_mib = self._journal_bytes() / 2**20
        print(f"{at_s:6.0f} s: {answers_mib:.1f} MiB of answers; {faults or 'no fault yet'}", flush=True)


def rows_of(report: Report, *, max_growth: float) -> list[Row]:
    """The report as rows of a benchmark; `max_growth` is the goal for whatever must stay flat."""
    accounts, num_faults = report.accounts, report.faults.total()
    rows = [
        _count("acknowledged inserts lost, of all", len(accounts.lost), of=accounts.num_acknowledged),
        _count("groups trained twice, of all trained", len(accounts.twice), of=accounts.num_trained),
        _count("contradictions in books and audit, of groups opened", len(accounts.wrong), of=accounts.ledger.opened),
        _count("processes that ended unasked, beside faults", len(report.unasked), of=num_faults),
    ]
    if report.resumed_s:
        rows.append(
            Row.of("longest wait from PONG to an answered insert, of 5 s", [max(report.resumed_s)],
                   unit="s", against=[5.0], goal="ratio <= 1")
        )  # fmt: skip
    for name, (what, scale, unit) in FLAT.items():
        earlier, later = report.halves(name)
        rows.append(
            Row.of(f"flat: {what}, later half beside earlier", [later / scale],
                   unit=unit, against=[earlier / scale], goal=f"ratio <= {max_growth}")
        )  # fmt: skip
    return rows + [Row.of(f"faults: {name}, of all", [n], unit="", against=[num_faults])
                   for name, n in sorted(report.faults.items())]  # fmt: skip


def _count(name: str, value: int, *, of: int) -> Row:
    return Row.of(name, [float(value)], unit="", against=[float(of)], goal="value <= 0")


def main(arguments: list[str]) -> int:
    """Soak as the command line says; return 0 if everything held."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
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
