"""Virtual time, processes that are greenlets, a network and a server: the same seed gives the same run."""

import heapq
import itertools
import random
import types
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import redis
from greenlet import getcurrent, greenlet

from slipstream.common.process.redis_retry import Patience
from slipstream.tools.lab.sim.store import Patches, Store

BEGIN_US = 1_800_000_000_000_000  # unix time at which every simulation begins
LATENCY_S = 0.002
TIMEOUT_S = 0.2  # until a client notices that a reply does not come


class Killed(BaseException):
    """Ends a process at once: nothing that it does afterwards has an effect."""


class Process:
    """One process: all its greenlets end together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.greenlets: list[Any] = []
        self.is_dead = False
        self.paused_until_us = 0
        self.cut_until_us = 0
        self.error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return not self.is_dead and not self.greenlets[0].dead


class World:
    """A seeded simulation."""

    def __init__(self, seed: str, patches: Patches = ()) -> None:
        self.random = random.Random(seed)
        self.store = Store(patches)
        self.now_us = BEGIN_US
        self.skew_us = 0  # of the server's clock
        self.down_until_us = 0  # the server is not there
        self.chances = dict[str, float]()  # of what may happen to a request
        self.trace: list[tuple[int, tuple[Any, ...]]] = []  # when, and what
        self.num_verbs = 0
        self._hub = getcurrent()  # where time passes
        self._places = itertools.count()
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._ids = itertools.count(1)

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it in so many seconds."""
        heapq.heappush(self._queue, (self.now_us + int(seconds * 1e6), next(self._places), call))

    def note(self, *words: Any) -> None:
        self.trace.append((self.now_us, words))

    def spawn(self, process: Process, main: Callable[[], Any]) -> None:
        """Start another greenlet of the process."""

        def whole() -> None:
            try:
                main()
            except Killed:
                pass
            except Exception as error:
                process.error = error
                self.note(f"{process.name} ended: {type(error).__name__}: {error}")

        thread = greenlet(whole, parent=self._hub)
        thread.process = process
        process.greenlets.append(thread)
        self.at(0, lambda: self._resume(thread))

    def kill(self, process: Process) -> None:
        """As SIGKILL does."""
        self.note(f"{process.name} is killed")
        process.is_dead = True
        if getcurrent() is not self._hub:
            self.at(0, lambda: self._reap(process))
            raise Killed
        self._reap(process)

    def _reap(self, process: Process) -> None:
        for thread in process.greenlets:
            if thread:
                thread.throw(Killed)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; return whether `until` holds, which ends the wait."""
        end_us = self.now_us + int(seconds * 1e6)
        while self._queue and self._queue[0][0] <= end_us:
            if until():
                return True
            self.now_us, _, call = heapq.heappop(self._queue)
            call()
        self.now_us = max(self.now_us, end_us)
        return until()

    def sleep(self, seconds: float) -> None:
        """What `time.sleep` does in a process."""
        thread = getcurrent()
        if thread.process.is_dead:
            raise Killed
        self.at(max(0.0, seconds), lambda: self._resume(thread))
        self._hub.switch()

    def _resume(self, thread: Any) -> None:
        process = thread.process
        if process.is_dead or thread.dead:
            return
        if process.paused_until_us > self.now_us:
            self.at((process.paused_until_us - self.now_us) / 1e6, lambda: self._resume(thread))
        else:
            thread.switch()

    def request(self, process: Process, request: Sequence[Any]) -> Any:
        """Send one request, and return its reply. Raises what a client of Redis raises."""
        self.sleep(self.random.random() * LATENCY_S)
        fate = self._fate()
        if self.now_us < max(self.down_until_us, process.cut_until_us) or fate == "lost request":
            self.sleep(TIMEOUT_S)
            raise redis.ConnectionError("the connection was lost")
        if fate == "late request":
            self.at(self.random.random() * 4, lambda: self._execute(process, request))
            self.sleep(TIMEOUT_S)
            raise redis.ConnectionError("the connection was lost")
        reply = self._execute(process, request)
        if fate == "sent twice":
            self.at(self.random.random() * 4, lambda: self._execute(process, request))
        if fate == "lost reply":
            raise redis.ConnectionError("the connection was lost")
        if self.random.random() < 0.2:
            self.sleep(LATENCY_S)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _fate(self) -> str:
        chance = self.random.random()
        for fate, share in self.chances.items():
            chance -= share
            if chance < 0:
                return fate
        return ""

    def _execute(self, process: Process, request: Sequence[Any]) -> Any:
        if self.now_us < self.down_until_us:
            return redis.ConnectionError("the server is not there")
        self.num_verbs += request[0] == "EVALSHA"
        reply = self.store.execute(self.now_us + self.skew_us, *request)
        self.note(process.name, request, "->", reply)
        return reply

    # What the product's modules see as `time` and `uuid`.

    def time(self) -> float:
        return self.now_us / 1e6

    def monotonic(self) -> float:
        return self.now_us / 1e6

    perf_counter = monotonic

    def time_ns(self) -> int:
        return self.now_us * 1000

    def strftime(self, *_: Any) -> str:
        return ""

    def localtime(self, *_: Any) -> None:
        return None

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=next(self._ids))


class OfGreenlet:
    """Attributes of the greenlet that asks, as `threading.local` has those of a thread."""

    def __getattr__(self, name: str) -> Any:
        try:
            return getcurrent().__dict__[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        getcurrent().__dict__[name] = value


_ANY_CLIENT = redis.Redis()


class Client(redis.Redis):
    """A client of one process, whose requests go through the simulated network."""

    def __init__(self, world: World, process: Process) -> None:
        pool: Any = types.SimpleNamespace(
            connection_kwargs={},
            get_connection=lambda: Connection(world, process),
            release=lambda _: None,
            disconnect=lambda: None,
            reset=lambda: None,
        )
        self.__dict__ |= _ANY_CLIENT.__dict__  # its constructor would fill a table of 300 names each time
        self.connection_pool = pool
        self._world, self._process = world, process
        self._patience = Patience("the simulated server", limit_s=30.0, ending=None)
        self._patience._thread = OfGreenlet()  # type: ignore[assignment]

    def get_retry(self) -> Patience:
        return self._patience

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        reply = self._patience.persist(lambda: self._world.request(self._process, arguments))
        if arguments[0] == "HGETALL":
            return dict(zip(reply[::2], reply[1::2], strict=True))
        callback: Any = self.response_callbacks.get(arguments[0])  # type: ignore[no-untyped-call]
        return callback(reply, **options) if callback and reply is not None else reply

    def evalsha(self, sha: str, num_keys: int, *arguments: Any) -> Any:
        return self.execute_command("EVALSHA", sha, num_keys, *arguments)


class Connection:
    """What `bulk` uses of a connection: bytes go in, and replies or bytes come out."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._sent: list[list[bytes | str]] = []
        self._received = b""
        self._sock = self

    def send_packed_command(self, requests: Sequence[bytes], *, check_health: bool) -> None:
        for data in requests:
            at = 0
            while at < len(data):
                at, num = _number(data, at)
                command: list[bytes | str] = []
                for _ in range(num):
                    at, size = _number(data, at)
                    command.append(data[at : at + size])
                    at += size + 2
                self._sent.append([bytes(command[0]).decode(), *command[1:]])  # type: ignore[arg-type]

    def read_response(self) -> Any:
        request = self._sent.pop(0)
        if request[0] == "EVALSHA":
            request[1] = request[1].decode()  # type: ignore[union-attr]
        return self._world.request(self._process, request)

    def recv_into(self, view: memoryview) -> int:
        if not self._received:
            payloads = self.read_response()
            parts = [b"$-1\r\n" if each is None else b"$%d\r\n%b\r\n" % (len(each), each) for each in payloads]
            self._received = b"*%d\r\n" % len(payloads) + b"".join(parts)
        size = min(len(view), len(self._received))
        view[:size] = self._received[:size]
        self._received = self._received[size:]
        return size

    def disconnect(self) -> None:
        self._sent.clear()


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Where the line that begins at `at` ends, and the number in it after its first character."""
    end = data.index(b"\r\n", at)
    return end + 2, int(data[at + 1 : end])
