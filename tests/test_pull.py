"""What a puller makes of its sources: good ones, dying ones, full ones, liars; and what a server gives to whom."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import xxhash
import zmq

from actors.pull import Puller, PullFailed
from actors.sources import NoSource, Sources
from common.chunk_server import MAX_WAITING, ChunkServer, ServerLimits
from common.chunks import Blob, ChunkReply, ChunkRequest, ChunkStatus, Farewell, Request
from common.config_error import ConfigError
from common.curve import KEY_VARIABLE, CurveKey, key_from_environment, load_key, new_secret
from common.patience import RedisAway
from common.weights import WeightsError
from replay.bulletin import RelayNotice

CHUNK_BYTES = 64 << 10
NUM_CHUNKS = 40
NOWHERE = "tcp://127.0.0.1:1"
DATA = bytes(range(256)) * (NUM_CHUNKS * CHUNK_BYTES // 256)
BLOB = Blob(root=xxhash.xxh3_128_hexdigest(DATA), num_bytes=len(DATA))


def check(data: memoryview) -> None:
    if xxhash.xxh3_128_hexdigest(data) != BLOB.root:
        raise WeightsError("not the bytes of that name")


def relay_at(endpoint: str, *, name: str = "", host: str = "elsewhere", roots: tuple[str, ...] = (BLOB.root,),
             num_children: int = 0, moved_bytes: int = 0) -> RelayNotice:  # fmt: skip
    return RelayNotice(
        name=name or endpoint, host=host, endpoint=endpoint, roots=list(roots), policy_version=1,
        num_children=num_children, fan_out=8, fetched_bytes=moved_bytes, served_bytes=0, num_corrupt=0,
    )  # fmt: skip


class Pulling:
    """A puller, the relays that it knows, and those that it blamed."""

    def __init__(self, *relays: str, key: CurveKey | None = None, patience_s: float = 0.0) -> None:
        self.relays = [relay_at(endpoint) for endpoint in relays]
        self.blamed: list[str] = []
        sources = Sources(lambda: self.relays, name="me", host="here", patience_s=patience_s)
        self.puller = Puller(sources, blame=self.blamed.append, chunk_bytes=CHUNK_BYTES, key=key)

    def pull(self, publisher: str = NOWHERE, *, timeout_s: float = 60.0) -> bytes:
        return bytes(self.puller.pull(BLOB, publisher=publisher, check=check, timeout_s=timeout_s))


@contextmanager
def serving(
    data: bytes = DATA, *, fan_out: int = 8, bytes_per_s: int = 0, key: CurveKey | None = None
) -> Iterator[ChunkServer]:
    def read(request: ChunkRequest) -> bytes | None:
        return data[request.offset : request.offset + request.num_bytes] if request.root == BLOB.root else None

    limits = ServerLimits(fan_out=fan_out, bytes_per_s=bytes_per_s, chunk_bytes=CHUNK_BYTES)
    server = ChunkServer("127.0.0.1", read, limits=limits, key=key)
    try:
        yield server
    finally:
        server.close()


Reply = Callable[[ChunkRequest, int], "tuple[ChunkReply, bytes] | None"]


@contextmanager
def faulty(reply: Reply) -> Iterator[str]:
    """A server of the test's own, at the address that it yields; `reply` gets the request and its number."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        closing = threading.Event()

        def serve() -> None:
            num_requests = 0
            while not closing.is_set():
                if not router.poll(20):
                    continue
                peer, frame = router.recv_multipart()
                request = msgspec.msgpack.decode(frame, type=Request)
                if isinstance(request, Farewell):
                    continue
                made = reply(request, num_requests)
                num_requests += 1
                if made is not None:
                    router.send_multipart([peer, msgspec.msgpack.encode(made[0]), made[1]])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            closing.set()
            thread.join()


def reply_with(request: ChunkRequest, data: bytes) -> tuple[ChunkReply, bytes]:
    reply = ChunkReply(
        root=request.root, offset=request.offset, answer=ChunkStatus.HERE, xxh3=xxhash.xxh3_64_intdigest(data)
    )
    return reply, data


def true_reply(request: ChunkRequest, _number: int) -> tuple[ChunkReply, bytes]:
    return reply_with(request, DATA[request.offset : request.offset + request.num_bytes])


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for: {what}"
        time.sleep(0.01)


# --- One source after another.


@pytest.mark.parametrize("endpoint", ["tcp://*:5555", "tcp://host:99999", "nonsense"])
def test_a_source_at_no_address_is_left_for_another(endpoint: str) -> None:
    with serving() as publisher:
        pulling = Pulling(endpoint)
        assert pulling.pull(publisher.endpoint) == DATA
        pulling.puller.close()


def test_a_source_that_falls_silent_in_mid_blob_is_left_and_the_rest_comes_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.fetch.SILENCE_S", 0.5)

    def reply(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes] | None:
        return true_reply(request, number) if number < 15 else None

    with faulty(reply) as dying, serving() as publisher:
        pulling = Pulling(dying)
        assert pulling.pull(publisher.endpoint) == DATA
        assert publisher.load.served_bytes == (NUM_CHUNKS - 15) * CHUNK_BYTES, "what had come was asked for again"
        assert pulling.puller.counts.fetched_bytes == len(DATA)
        pulling.puller.close()


def test_a_pull_that_was_given_up_goes_on_from_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.fetch.SILENCE_S", 0.3)

    def reply(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes] | None:
        return true_reply(request, number) if number < 15 else None

    pulling = Pulling()
    with faulty(reply) as dying, pytest.raises(PullFailed, match="25 of 40 chunks missing at the deadline"):
        pulling.pull(dying, timeout_s=1.0)
    with serving() as publisher:
        assert pulling.pull(publisher.endpoint) == DATA
        assert publisher.load.served_bytes == 25 * CHUNK_BYTES
    pulling.puller.close()


def test_only_the_chunks_that_were_lost_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.fetch.SILENCE_S", 0.3)
    asked: list[int] = []

    def reply(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes] | None:
        asked.append(request.offset)
        return None if number in (1, 2) else true_reply(request, number)

    with faulty(reply) as publisher:
        pulling = Pulling()
        assert pulling.pull(publisher) == DATA
        pulling.puller.close()
    assert sorted(asked) == sorted([*range(0, len(DATA), CHUNK_BYTES), CHUNK_BYTES, 2 * CHUNK_BYTES])


def test_a_publisher_that_stops_answering_is_given_up_long_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.fetch.SILENCE_S", 0.3)
    monkeypatch.setattr("actors.pull.GIVE_UP_S", 0.5)
    pulling = Pulling()
    with (
        faulty(lambda *_: None) as publisher,
        pytest.raises(PullFailed, match="40 of 40 chunks missing: no source made progress"),
    ):
        pulling.pull(publisher, timeout_s=3600)
    pulling.puller.close()


def test_a_blob_that_the_publisher_no_longer_has_is_given_up_at_once() -> None:
    pulling = Pulling()
    with serving() as publisher, pytest.raises(PullFailed, match="does not serve this blob any more"):
        pulling.puller.pull(Blob(root="older", num_bytes=1), publisher=publisher.endpoint, check=check, timeout_s=3600)
    pulling.puller.close()


# --- Bytes that are not what they should be.


def test_what_the_way_did_to_a_chunk_is_seen_and_only_that_chunk_comes_from_another() -> None:
    def reply(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes]:
        header, data = true_reply(request, number)
        return header, (bytes([data[0] ^ 1]) + data[1:] if number == 3 else data)

    with faulty(reply) as bad, serving() as publisher:
        pulling = Pulling(bad)
        assert pulling.pull(publisher.endpoint) == DATA
        assert pulling.puller.counts.num_corrupt == 1
        assert pulling.blamed == [bad]
        assert publisher.load.served_bytes == (NUM_CHUNKS - 3) * CHUNK_BYTES, "good chunks were asked for again"
        pulling.puller.close()


def test_a_relay_that_lies_about_a_chunk_is_found_out_by_the_whole_and_another_is_asked() -> None:
    def reply(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes]:
        _, data = true_reply(request, number)
        return reply_with(request, bytes(len(data)) if number == 3 else data)

    with faulty(reply) as liar, serving() as good, serving() as publisher:
        pulling = Pulling(liar)
        pulling.relays.append(relay_at(good.endpoint, num_children=1))  # so that the liar is asked first
        assert pulling.pull(publisher.endpoint) == DATA
        assert pulling.blamed == [liar]
        assert good.load.served_bytes == len(DATA)
        assert publisher.load.served_bytes == 0
        pulling.puller.close()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda request, data: reply_with(request, data[:-1]), "bytes, expected"),
        (lambda request, data: reply_with(request, bytes(len(data))), "not the bytes of that name"),
        (lambda request, data: (reply_with(request, data)[0], data[::-1]), "does not match its hash"),
        (
            lambda request, data: reply_with(msgspec.structs.replace(request, offset=7), data),
            "a chunk at 7 that was not requested",
        ),
    ],
)
def test_a_publisher_that_sends_rubbish_is_refused_with_the_reason(
    spoil: Callable[[ChunkRequest, bytes], tuple[ChunkReply, bytes]], why: str
) -> None:
    def reply(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes]:
        return spoil(request, true_reply(request, number)[1])

    with faulty(reply) as publisher:
        pulling = Pulling()
        with pytest.raises(PullFailed, match=why):
            pulling.pull(publisher)
        assert pulling.puller.counts.num_corrupt == 1
        pulling.puller.close()


# --- Who is asked.


def test_the_relay_of_ones_own_host_is_asked_first_then_the_one_with_most_room_then_the_publisher() -> None:
    far, near = relay_at("tcp://far", num_children=1), relay_at("tcp://near", host="here", num_children=3)
    idle, behind = relay_at("tcp://idle", num_children=0), relay_at("tcp://behind", roots=())
    relays = [far, near, idle, behind, relay_at("tcp://me", name="me")]
    sources = Sources(lambda: relays, name="me", host="here", patience_s=0.0)

    def chosen() -> object:
        return sources.choose(BLOB.root, "tcp://publisher", begun=time.monotonic())

    assert chosen() == "tcp://near"
    sources.avoid("tcp://near", 60)
    assert chosen() == "tcp://idle"
    sources.note_full("tcp://idle")
    assert chosen() == "tcp://far"
    sources.avoid("tcp://far", 60)
    assert chosen() == "tcp://publisher"
    sources.avoid("tcp://publisher", 60)
    assert chosen() is NoSource.ALL_UNAVAILABLE


def test_a_relay_that_gets_nearer_is_waited_for_and_one_that_stands_still_is_not() -> None:
    relays = [relay_at("tcp://relay", roots=())]
    sources = Sources(lambda: relays, name="me", host="here", patience_s=0.3)
    begun = time.monotonic()

    def chosen() -> object:
        return sources.choose(BLOB.root, "tcp://publisher", begun=begun)

    assert chosen() is NoSource.RELAY_IS_FETCHING
    wait_until(lambda: chosen() == "tcp://publisher", "its time to be over")
    relays[0] = relay_at("tcp://relay", roots=(), moved_bytes=1)
    assert chosen() is NoSource.RELAY_IS_FETCHING
    sources.note_full("tcp://relay")
    assert chosen() is NoSource.RELAY_IS_FETCHING, "who is full will have room"
    sources.avoid("tcp://relay", 60)
    assert chosen() == "tcp://publisher"


def test_without_redis_the_relays_that_were_known_last_are_asked() -> None:
    def find() -> list[RelayNotice]:
        num_asked.append(1)
        if len(num_asked) > 1:
            raise RedisAway("gone")
        return [relay_at("tcp://relay")]

    num_asked: list[int] = []
    sources = Sources(find, name="me", host="here", patience_s=0.0)
    for _ in range(5):
        assert sources.choose(BLOB.root, "tcp://publisher", begun=time.monotonic()) == "tcp://relay"
    assert len(num_asked) == 2, "a server that is away is not asked for every chunk"


# --- What a server gives to whom.


@contextmanager
def client(server: ChunkServer, *, max_unread: int = 1000) -> "Iterator[zmq.Socket[bytes]]":
    """A receiver that does as the test says."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, max_unread)
        socket.setsockopt(zmq.RCVBUF, 1 << 16)
        socket.connect(server.endpoint)
        yield socket


def ask(socket: "zmq.Socket[bytes]", chunk: int) -> None:
    request = ChunkRequest(root=BLOB.root, offset=chunk * CHUNK_BYTES, num_bytes=CHUNK_BYTES)
    socket.send(msgspec.msgpack.encode(request))


def answer_of(socket: "zmq.Socket[bytes]") -> ChunkStatus:
    assert socket.poll(60_000), "no answer"
    return msgspec.msgpack.decode(socket.recv_multipart()[0], type=ChunkReply).answer


def test_a_server_turns_away_whom_it_has_no_room_for_until_another_has_all_it_wants() -> None:
    with serving(fan_out=1) as server, client(server) as first, client(server) as second:
        ask(first, 0)
        assert answer_of(first) is ChunkStatus.HERE
        ask(second, 0)
        assert answer_of(second) is ChunkStatus.FULL
        ask(first, 1)
        assert answer_of(first) is ChunkStatus.HERE
        first.send(msgspec.msgpack.encode(Farewell()))
        wait_until(lambda: server.load.num_children == 0, "the farewell")
        ask(second, 0)
        assert answer_of(second) is ChunkStatus.HERE
        assert server.load.num_turned_away == 1


def test_a_receiver_that_vanishes_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.chunk_server.IDLE_S", 0.3)
    with serving(fan_out=1) as server, client(server) as patient:
        with client(server) as vanishing:
            ask(vanishing, 0)
            assert answer_of(vanishing) is ChunkStatus.HERE
        wait_until(lambda: server.load.num_children == 0, "the place to be free")
        ask(patient, 0)
        assert answer_of(patient) is ChunkStatus.HERE


def test_a_pull_waits_for_room_at_the_publisher() -> None:
    with serving(fan_out=1) as publisher, client(publisher) as first:
        ask(first, 0)
        assert answer_of(first) is ChunkStatus.HERE
        timer = threading.Timer(1.0, lambda: first.send(msgspec.msgpack.encode(Farewell())))
        timer.start()
        pulling = Pulling()
        assert pulling.pull(publisher.endpoint) == DATA
        assert publisher.load.num_turned_away > 0
        pulling.puller.close()
        timer.join()


def test_one_that_asks_for_everything_gets_no_more_than_its_share_and_keeps_nobody_waiting() -> None:
    per_s = 16 * CHUNK_BYTES
    with serving(bytes_per_s=per_s) as server, client(server) as greedy:
        begun = time.monotonic()
        for number in range(1000):
            ask(greedy, number % NUM_CHUNKS)
        pulling = Pulling()
        assert pulling.pull(server.endpoint) == DATA
        to_greedy = server.load.served_bytes - len(DATA)
        elapsed_s = time.monotonic() - begun
        assert to_greedy <= elapsed_s * per_s + 2 * CHUNK_BYTES
        assert to_greedy <= 20 * CHUNK_BYTES, "more than 16 of its requests were kept"
        pulling.puller.close()


def test_one_that_takes_nothing_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.chunk_server.IDLE_S", 0.5)
    with serving() as server, client(server, max_unread=1) as deaf:
        for number in range(1000):
            ask(deaf, number % NUM_CHUNKS)
            if number % MAX_WAITING == 0:
                time.sleep(0.005)  # so that they are not dropped as too many at once
        pulling = Pulling()
        assert pulling.pull(server.endpoint) == DATA
        to_deaf = server.load.served_bytes - len(DATA)
        assert to_deaf < 500 * CHUNK_BYTES, "what it does not take piles up"
        wait_until(lambda: server.load.num_children == 0, "its place to be free")
        pulling.puller.close()


def asks_and_never_reads(socket: "zmq.Socket[bytes]", number: int) -> None:
    ask(socket, number % NUM_CHUNKS)


def asks_for_what_is_not_there(socket: "zmq.Socket[bytes]", number: int) -> None:
    request = ChunkRequest(root=f"nothing{number}", offset=0, num_bytes=CHUNK_BYTES)
    socket.send(msgspec.msgpack.encode(request))
    while socket.poll(0):
        socket.recv_multipart()


def asks_for_a_byte_at_a_time(socket: "zmq.Socket[bytes]", number: int) -> None:
    socket.send(msgspec.msgpack.encode(ChunkRequest(root=BLOB.root, offset=number, num_bytes=1)))
    while socket.poll(0):
        socket.recv_multipart()


@pytest.mark.parametrize("do", [asks_and_never_reads, asks_for_what_is_not_there, asks_for_a_byte_at_a_time])
def test_receivers_without_progress_lose_their_places_for_good(
    do: Callable[["zmq.Socket[bytes]", int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.chunk_server.IDLE_S", 0.5)
    with serving(fan_out=2) as server, client(server, max_unread=1) as first, client(server, max_unread=1) as second:
        closing = threading.Event()

        def hold() -> None:
            number = 0
            while not closing.wait(0.02):
                do(first, number)
                do(second, number)
                number += 1

        thread = threading.Thread(target=hold)
        thread.start()
        try:
            wait_until(lambda: server.load.num_children == 2, "both places to be taken")
            pulling = Pulling()
            assert pulling.pull(server.endpoint) == DATA
            pulling.puller.close()
        finally:
            closing.set()
            thread.join()


def test_a_receiver_gets_no_more_bytes_a_second_than_it_may() -> None:
    per_s = 16 * CHUNK_BYTES
    with serving(bytes_per_s=per_s) as server:
        pulling = Pulling()
        begun = time.monotonic()
        assert pulling.pull(server.endpoint) == DATA
        assert time.monotonic() - begun >= 0.95 * (len(DATA) - CHUNK_BYTES) / per_s
        pulling.puller.close()


def test_rubbish_and_requests_out_of_range_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, client(server) as hostile:
        hostile.send(b"\xdd\xff\xff\xff\xff")
        hostile.send_multipart([b"", b"", b"x" * 4000])
        for request in (
            ChunkRequest(root=BLOB.root, offset=-1, num_bytes=1),
            ChunkRequest(root=BLOB.root, offset=0, num_bytes=CHUNK_BYTES + 1),
            ChunkRequest(root=BLOB.root, offset=0, num_bytes=0),
        ):
            hostile.send(msgspec.msgpack.encode(request))
        ask(hostile, 0)
        assert answer_of(hostile) is ChunkStatus.HERE
        assert server.load.served_bytes == CHUNK_BYTES
        assert server.load.num_malformed == 5
    assert caplog.text.count("1 malformed requests so far; the last one, from 127.0.0.1 (") == 1


# --- Under a key.


def new_key() -> CurveKey:
    public, secret = zmq.curve_keypair()
    return CurveKey(public=public, secret=secret)


def test_who_has_the_key_pulls_and_who_has_none_or_another_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.fetch.SILENCE_S", 1.0)
    monkeypatch.setattr("actors.pull.GIVE_UP_S", 0.5)
    key, other = new_key(), new_key()
    with serving(key=key) as server:
        with zmq.Context() as context, context.socket(zmq.DEALER) as knowing:  # what a server shows is no secret
            knowing.setsockopt(zmq.LINGER, 0)
            knowing.curve_serverkey, knowing.curve_publickey, knowing.curve_secretkey = (
                key.public, other.public, other.secret,
            )  # fmt: skip
            knowing.connect(server.endpoint)
            ask(knowing, 0)
            assert not knowing.poll(1000)
        for strange in (None, other):
            stranger = Pulling(key=strange)
            with pytest.raises(PullFailed, match="40 of 40 chunks missing"):
                stranger.pull(server.endpoint)
            stranger.puller.close()
        assert server.load.served_bytes == 0
        member = Pulling(key=key)
        assert member.pull(server.endpoint) == DATA
        member.puller.close()


def test_a_pull_under_a_key_takes_nothing_from_a_server_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.fetch.SILENCE_S", 0.5)
    monkeypatch.setattr("actors.pull.GIVE_UP_S", 0.5)
    with serving() as impostor:
        member = Pulling(key=new_key())
        with pytest.raises(PullFailed, match="40 of 40 chunks missing"):
            member.pull(impostor.endpoint)
        assert impostor.load.served_bytes == 0
        member.puller.close()


def test_a_key_comes_from_the_environment_or_a_file_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")  # what is set below is undone at the end
    assert key_from_environment() is None
    (tmp_path / "key").write_text(new_secret() + "\n")
    load_key(str(tmp_path / "key"))
    key = key_from_environment()
    assert key is not None and key.secret.decode() == (tmp_path / "key").read_text().strip()
    assert key.secret.decode() not in repr(key)
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(ConfigError, match=r"`weights.key_file` .*nokey cannot be read: No such file"):
        load_key(str(tmp_path / "nokey"))
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match="must contain the 40 characters that `slipstream key` makes; got 5"):
        key_from_environment()
