"""The processes of a soak: a server, and stand-ins for a learner and actors that restart when they end."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import redis

from slipstream.common.process.connection import connect
from slipstream.replay.server.redis_server import Server, start_server
from slipstream.tools.lab.soak.accounts import Accounts
from slipstream.tools.lab.soak.actor import Work
from slipstream.tools.lab.soak.cast import Cast
from slipstream.tools.lab.soak.undo import Undoing
from slipstream.tools.run.child import Child

POLL_S = 0.05
LEASE_TTL_S = 3.0
SETTLED_S = 60.0  # how long it may take, when the faults are over, until everyone works again


class SoakStage:
    """One run in `directory`. Call it from the main thread: its processes end with the thread that started them."""

    def __init__(self, directory: Path, *, num_actors: int, seed: int) -> None:
        self._redis = directory / "redis"
        self.server: Server = start_server(self._redis)
        self.client: redis.Redis = connect(self.server.secret_url)
        work = Work(url=self.server.url, run_id="soak", lease_ttl_s=LEASE_TTL_S, episode_s=0.02, seed=seed)
        self.cast = Cast(directory / "cast", work, password=self.server.password, num_actors=num_actors)
        self.random = random.Random(seed)
        self.unasked: list[str] = []  # ends that no fault had brought about
        self._asked: set[str] = set()
        self._undoing = Undoing()
        self.later, self.undo_all = self._undoing.later, self._undoing.undo_all

    def start(self) -> None:
        self.cast.start()

    @property
    def is_disturbed(self) -> bool:
        """Whether a fault is in progress."""
        return self._undoing.is_disturbed

    def tick(self) -> None:
        """Restart every process that has ended."""
        for child in self.cast.everyone:
            if child.exit_code is not None:
                if child.name not in self._asked:
                    self.unasked.append(f"{child.name} ended with {child.exit_code}: {child.last_log_lines()}")
                self._asked.discard(child.name)
                child.start()

    def end_of(self, child: Child) -> None:
        """Expect the next end of `child`, which a fault causes."""
        self._asked.add(child.name)

    def kill(self, child: Child) -> None:
        self.end_of(child)
        child.send(signal.SIGKILL)

    def restart_server(self) -> float:
        """Kill the server and start it again with its data. Return the seconds from its PONG to the next answer."""
        self.server.process.kill()
        self.server.process.wait()
        self.server = start_server(self._redis)  # returns at its first PONG
        return self.until_answered()

    def until_answered(self) -> float:
        """Wait until an actor gets one more answer. Return the seconds."""
        size = self.journal_bytes()
        return self.until(lambda: self.journal_bytes() > size, "an insert is answered")

    def until(self, holds: Callable[[], bool], what: str) -> float:
        """Wait, and return the seconds. Raises TimeoutError with the last log lines of every process."""
        started = time.monotonic()
        while not holds():
            self.tick()
            if time.monotonic() - started > SETTLED_S:
                words = "\n".join(f"{child.name}: {child.last_log_lines()}" for child in self.cast.everyone)
                raise TimeoutError(f"{what}: not for {SETTLED_S:.0f} s:\n{words}")
            time.sleep(POLL_S / 5)
        return time.monotonic() - started

    def journal_bytes(self) -> int:
        return sum(journal.stat().st_size for journal in self.cast.journals)

    def end(self) -> Accounts:
        """End every process in order, and compare the books."""
        self.unasked += self.cast.end()
        return self.cast.accounts(self.client)

    def close(self) -> None:
        """Kill every process that still runs."""
        self.server.process.send_signal(signal.SIGCONT)
        self.undo_all()
        self.cast.kill()
        self.client.close()
        self.server.stop()
