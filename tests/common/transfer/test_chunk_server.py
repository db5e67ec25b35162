"""What a server of chunks gives to whom, and to whom it gives nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from slipstream.common.transfer.chunk_server import MAX_WAITING, ChunkServer
from slipstream.common.transfer.chunks import ChunkReply, ChunkRequest, ChunkStatus, Farewell
from tests.actors.chunks import BLOB, CHUNK_BYTES, DATA, NUM_CHUNKS, Pulling, ask, serving
from tests.waiting import beside, wait_until


@contextmanager
def client(server: ChunkServer, *, max_unread: int = 1000) -> "Iterator[zmq.Socket[bytes]]":
    """A receiver that does as the test says."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, max_unread)
        socket.setsockopt(zmq.RCVBUF, 1 << 16)
        socket.connect(server.endpoint)
        yield socket


def answer_to(socket: "zmq.Socket[bytes]", chunk: int) -> ChunkStatus:
    ask(socket, chunk)
    assert socket.poll(60_000), "no answer"
    return msgspec.msgpack.decode(socket.recv_multipart()[0], type=ChunkReply).answer


def test_a_server_turns_away_whom_it_has_no_room_for_until_another_has_all_it_wants() -> None:
    with serving(fan_out=1) as server, client(server) as first, client(server) as second:
        assert answer_to(first, 0) is ChunkStatus.HERE
        assert answer_to(second, 0) is ChunkStatus.FULL
        assert answer_to(first, 1) is ChunkStatus.HERE
        first.send(msgspec.msgpack.encode(Farewell()))
        wait_until(lambda: server.load.num_children == 0, "the farewell")
        assert answer_to(second, 0) is ChunkStatus.HERE
        assert server.load.num_turned_away == 1


def test_a_receiver_that_vanishes_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.common.transfer.chunk_server.IDLE_S", 0.3)
    with serving(fan_out=1) as server, client(server) as patient:
        with client(server) as vanishing:
            assert answer_to(vanishing, 0) is ChunkStatus.HERE
        wait_until(lambda: server.load.num_children == 0, "the place to be free")
        assert answer_to(patient, 0) is ChunkStatus.HERE


def test_a_pull_waits_for_room_at_the_publisher() -> None:
    with serving(fan_out=1) as publisher, client(publisher) as first, Pulling() as pulling:
        assert answer_to(first, 0) is ChunkStatus.HERE
        timer = threading.Timer(0.5, lambda: first.send(msgspec.msgpack.encode(Farewell())))
        timer.start()
        assert pulling.pull(publisher.endpoint) == DATA
        assert publisher.load.num_turned_away > 0
        timer.join()


def test_one_that_asks_for_everything_gets_no_more_than_its_share_and_keeps_nobody_waiting() -> None:
    with serving(bytes_per_s=64 * CHUNK_BYTES) as server, client(server) as greedy, Pulling() as pulling:
        for number in range(1000):
            ask(greedy, number % NUM_CHUNKS)
        before = server.load.served_bytes
        assert pulling.pull(server.endpoint) == DATA
        to_greedy = server.load.served_bytes - before - len(DATA)
        assert to_greedy <= len(DATA) + MAX_WAITING * CHUNK_BYTES, "more than one chunk for each of the other's"


def test_one_that_takes_nothing_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.common.transfer.chunk_server.IDLE_S", 0.5)
    with serving() as server, client(server, max_unread=1) as deaf, Pulling() as pulling:
        for number in range(1000):
            ask(deaf, number % NUM_CHUNKS)
            if number % MAX_WAITING == 0:
                time.sleep(0.005)  # so that they are not dropped as too many at once
        assert pulling.pull(server.endpoint) == DATA
        assert server.load.served_bytes - len(DATA) < 500 * CHUNK_BYTES, "what it does not take piles up"
        wait_until(lambda: server.load.num_children == 0, "its place to be free")


# By what a request is for: its root, offset and size, by its number.
REQUESTS: dict[str, Callable[[int], tuple[str, int, int]]] = {
    "a chunk": lambda number: (BLOB.root, number % NUM_CHUNKS * CHUNK_BYTES, CHUNK_BYTES),
    "what is not there": lambda number: (f"nothing{number}", 0, CHUNK_BYTES),
    "a byte": lambda number: (BLOB.root, number, 1),
}


@pytest.mark.parametrize("wanted", REQUESTS)
def test_receivers_without_progress_lose_their_places_for_good(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.common.transfer.chunk_server.IDLE_S", 0.5)
    with serving(fan_out=2) as server, client(server, max_unread=1) as first, client(server, max_unread=1) as second:

        def hold(over: threading.Event) -> None:
            number = 0
            while not over.wait(0.02):
                root, offset, num_bytes = REQUESTS[wanted](number)
                request = ChunkRequest(root=root, offset=offset, num_bytes=num_bytes)
                for socket in (first, second):
                    socket.send(msgspec.msgpack.encode(request))
                    while wanted != "a chunk" and socket.poll(0):  # who asks for chunks never reads
                        socket.recv_multipart()
                number += 1

        with beside(hold), Pulling() as pulling:
            wait_until(lambda: server.load.num_children == 2, "both places to be taken")
            assert pulling.pull(server.endpoint) == DATA
            before = server.load.num_turned_away
            wait_until(lambda: server.load.num_turned_away > before + 20, "them to be turned away")


def test_rubbish_and_requests_out_of_range_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, client(server) as hostile:
        hostile.send(b"\xdd\xff\xff\xff\xff")
        hostile.send_multipart([b"", b"", b"x" * 4000])
        for offset, num_bytes in ((-1, 1), (2**63, 1), (0, CHUNK_BYTES + 1), (0, 0)):  # no file can seek to 2**63
            hostile.send(msgspec.msgpack.encode(ChunkRequest(root=BLOB.root, offset=offset, num_bytes=num_bytes)))
        assert answer_to(hostile, 0) is ChunkStatus.HERE
        assert server.load.served_bytes == CHUNK_BYTES
        assert server.load.num_malformed == 6
    assert caplog.text.count("1 malformed requests so far; the last one, from 127.0.0.1 (") == 1
