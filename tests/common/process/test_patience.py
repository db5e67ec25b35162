"""A server that dies, stops, loads or refuses, and clients that wait for it."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import redis

from slipstream.common.process import redis_retry
from slipstream.common.process.connection import RedisUnreachable, connect, connect_or_explain
from slipstream.common.process.redis_retry import RedisAway
from slipstream.tools.lab.loopback_server import Server
from tests.proxy import Fault, Proxy
from tests.stand_ins import server
from tests.waiting import wait_until

__all__ = ["server"]  # the fixture
DEADLINE_S = 60.0


def test_calls_outlive_a_server_that_is_killed_and_say_so(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with connect(server.secret_url) as client:
        count = client.register_script("return redis.call('INCR', KEYS[1])")
        assert count(keys=["before"]) == 1
        server.process.kill()
        server.process.wait()
        waiting = [Call(lambda: count(keys=["scripted"])), Call(lambda: piped(client)), Call(lambda: client.get("x"))]
        wait_until(lambda: "has not answered since" in caplog.text)
        assert all(call.result is None for call in waiting)
        assert server.keep_up() == -signal.SIGKILL
        back = time.monotonic()
        assert [call.wait() for call in waiting] == [1, [True, b"1"], (None,)]
        assert time.monotonic() - back < 5
        assert "is back after" in caplog.text and server.password not in caplog.text
        assert client.get("before") == b"1"
    assert server.keep_up() is None


def test_calls_outlive_a_server_that_stands_still(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.common.process.connection.CALL_TIMEOUT_S", 0.5)
    with connect(server.secret_url) as client:
        client.set("x", "1")
        os.kill(server.process.pid, signal.SIGSTOP)
        call = Call(lambda: client.get("x"))
        retry = client.get_retry()
        assert isinstance(retry, redis_retry.Patience)
        wait_until(lambda: retry._since is not None)
        os.kill(server.process.pid, signal.SIGCONT)
        assert call.wait() == b"1"


def test_calls_wait_for_a_server_that_reads_its_file(server: Server) -> None:
    num_keys = 20_000  # it looks up from its file at every thousandth, and each request of a client waits for that
    with connect(server.secret_url) as client:
        client.mset({f"key-{number}": "x" for number in range(num_keys)})
        with client.pipeline(transaction=False) as pipeline:
            for number in range(num_keys):
                pipeline.incr(f"count-{number}")
            pipeline.execute()
        server.process.kill()
        server.process.wait()
        with (server.directory / "redis.conf").open("a") as settings:
            settings.write("key-load-delay 200\n")

        def sizes_once_it_loads() -> tuple[object, object]:
            wait_until(lambda: is_loading(server))
            with connect_or_explain(server.secret_url) as another:
                return client.dbsize(), another.dbsize()

        asking = Call(sizes_once_it_loads)
        assert server.keep_up() == -signal.SIGKILL  # here: a process is to be started from the main thread
        assert asking.wait() == (2 * num_keys, 2 * num_keys)


def is_loading(server: Server) -> bool:
    with connect(server.secret_url, patience_s=0) as client:
        try:
            client.dbsize()
        except RedisAway as error:
            return isinstance(error.__cause__, redis.BusyLoadingError)
        return pytest.fail("it was read before the test looked")


def test_calls_wait_while_the_server_refuses_writes(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """As a replica does, or a master that was demoted, until it is promoted again."""
    with connect(server.secret_url) as client, connect(server.admin_url) as another:
        write = client.register_script("return redis.call('SET', KEYS[1], ARGV[1])")
        write(keys=["loaded"], args=["x"])
        another.execute_command("REPLICAOF", "127.0.0.1", "1")
        calls = [Call(lambda: client.set("plain", "1")), Call(lambda: write(keys=["scripted"], args=["1"]))]
        wait_until(lambda: "has refused calls since" in caplog.text)
        assert client.get("loaded") == b"x"  # which does not hide that writes are refused
        assert "is back" not in caplog.text and all(call.result is None for call in calls)
        another.execute_command("REPLICAOF", "NO", "ONE")
        assert [bool(call.wait()) for call in calls] == [True, True]
        assert "is back" in caplog.text


def test_a_client_gives_up_once_for_all_its_calls_and_soon_where_its_process_is_told_to_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_retry, "ENDING_PATIENCE_S", 0.5)
    ending = threading.Event()
    with connect(server.secret_url, patience_s=1.5) as client, connect(server.secret_url, ending=ending) as leaving:
        client.ping()
        leaving.ping()
        server.process.kill()
        server.process.wait()
        call = Call(lambda: leaving.get("x"))
        begun = time.monotonic()
        with pytest.raises(RedisAway, match=r"Redis at redis://\*\*\*@127.0.0.1:\d+/0 has not answered for [12] s: "):
            client.get("x")
        assert 1.5 < time.monotonic() - begun < 5
        begun = time.monotonic()
        with pytest.raises(RedisAway):
            client.get("x")
        assert time.monotonic() - begun < 1
        assert call.thread.is_alive()
        ending.set()
        call.thread.join(DEADLINE_S / 10)
        assert not call.thread.is_alive() and isinstance(call.error, RedisAway)


def test_a_refusal_that_was_not_waited_for_to_its_end_costs_no_later_call_its_patience(server: Server) -> None:
    with (
        Proxy(server.port) as proxy,
        connect(proxy.url(server.password), patience_s=1.5) as client,
        connect(server.admin_url) as another,
    ):
        client.set("x", "1")
        another.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(RedisAway, match="has refused calls for"):
            client.set("x", "2")
        another.execute_command("REPLICAOF", "NO", "ONE")
        once = iter([Fault.RESET])
        proxy.judge = lambda _: next(once, Fault.NONE)
        assert client.set("x", "3")


def test_a_call_never_answered_gives_up_also_where_others_are(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a payload that takes longer than a reply may, while heartbeats are answered."""
    monkeypatch.setattr("slipstream.common.process.connection.CALL_TIMEOUT_S", 0.5)
    with Proxy(server.port) as proxy, connect(proxy.url(server.password), patience_s=2) as client:
        proxy.judge = lambda command: Fault.SWALLOW if command[0] == b"SET" else Fault.NONE
        call = Call(lambda: client.set("x", "1"))
        begun = time.monotonic()
        while call.thread.is_alive() and time.monotonic() - begun < DEADLINE_S / 3:
            client.get("x")
            time.sleep(0.05)
        assert isinstance(call.error, RedisAway)


def test_what_waiting_does_not_mend_is_raised_at_once(server: Server) -> None:
    begun = time.monotonic()
    with connect(server.url) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.get("x")
    with connect(server.secret_url) as client, pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        client.set("text", "x")
        client.lpush("text", "y")
    with pytest.raises(RedisUnreachable, match="does not answer"):
        connect_or_explain("redis://127.0.0.1:1")
    assert time.monotonic() - begun < 10


class Call:
    """A call that waits in a thread of its own."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.result: object = None
        self.error: Exception | None = None
        self._do = do
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            result = self._do()
            self.result = (None,) if result is None else result
        except Exception as error:
            self.error = error

    def wait(self) -> object:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), "the call still waits"
        assert self.error is None, repr(self.error)
        return self.result


def piped(client: redis.Redis) -> list[object]:
    with client.pipeline(transaction=False) as pipeline:
        pipeline.set("piped", "1")
        pipeline.get("piped")
        return list(pipeline.execute())
