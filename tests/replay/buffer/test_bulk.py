"""The bulk path: what is stored and read comes whole and in order, whatever the connection and the server do."""

import socket
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.common.process.connection import connect
from slipstream.common.process.wire import WireError
from slipstream.common.records.trajectory import InvalidTrajectory, Trajectory
from slipstream.replay.buffer import bulk
from slipstream.replay.buffer.bulk import CHUNK_BYTES, MAX_LINE_BYTES, REQUEST_NAMES, WINDOW, Bulk, Payload, packed
from slipstream.replay.records.keys import key
from slipstream.replay.records.ticket import InsertResult, Lease
from tests.replay.records.attempts import Views, leased, make_buffer, ticket

MAX_BYTES = 3 * CHUNK_BYTES
SIZES = st.none() | st.integers(0, 200) | st.integers(CHUNK_BYTES - 50, CHUNK_BYTES + 50) | st.just(MAX_BYTES)


@pytest.fixture
def bulk_path(redis_client: redis.Redis) -> Bulk:
    return Bulk(redis_client, max_bytes=MAX_BYTES)


def kept(payload: Payload) -> bytes | WireError | None:
    """A copy: a payload is overwritten by the next."""
    return bytes(payload) if isinstance(payload, memoryview) else payload


def read(bulk_path: Bulk, names: list[str]) -> list[bytes | WireError | None]:
    return bulk_path.read(names, lambda _, payload: kept(payload))


def store_all(client: redis.Redis, run_id: str, sizes: list[int | None]) -> tuple[list[str], list[bytes | None]]:
    """Store a payload of each size, none for None; return the names and the payloads."""
    names = [key(run_id, "blob", number) for number in range(len(sizes))]
    payloads = [None if size is None else bytes([number]) * size for number, size in enumerate(sizes)]
    for name, payload in zip(names, payloads, strict=True):
        if payload is not None:
            client.set(name, payload)
    return names, payloads


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(SIZES, min_size=1, max_size=6))
def test_payloads_come_whole_and_in_order(
    bulk_path: Bulk, redis_client: redis.Redis, run_id: str, sizes: list[int | None]
) -> None:
    names, payloads = store_all(redis_client, run_id, sizes)
    assert read(bulk_path, names) == payloads
    assert read(bulk_path, names[::-1]) == payloads[::-1]
    redis_client.delete(*names)


@pytest.mark.parametrize("cut_at", [2, REQUEST_NAMES - 1, 2 * REQUEST_NAMES])
def test_reading_goes_on_after_a_cut(redis_url: str, redis_client: redis.Redis, run_id: str, cut_at: int) -> None:
    """Within a request, at its end, at the first of another."""
    sizes = [10, CHUNK_BYTES, 0, 70, None, 70, MAX_BYTES, CHUNK_BYTES - 40, CHUNK_BYTES - 40, *range(4 * REQUEST_NAMES)]
    names, payloads = store_all(redis_client, run_id, sizes)
    with connect(redis_url) as cut_client:
        only_connection = cut_client.client_id()
        num_cut = 0

        def use(number: int, payload: Payload) -> tuple[int, bytes | WireError | None]:
            nonlocal num_cut
            if number == cut_at:
                num_cut += redis_client.client_kill_filter(_id=only_connection)
            return number, kept(payload)

        used = Bulk(cut_client, max_bytes=MAX_BYTES).read(names, use)
    assert num_cut == 1
    assert used == list(enumerate(payloads))
    redis_client.delete(*names)


def test_replies_under_way_are_no_health_check(redis_url: str, redis_client: redis.Redis, run_id: str) -> None:
    """What comes slowly takes longer than the interval of redis-py's checks, which ask with the next request."""
    names = [key(run_id, "blob", number) for number in range(4 * REQUEST_NAMES)]
    redis_client.mset(dict.fromkeys(names, b"payload"))
    with connect(redis_url) as client:
        client.connection_pool.connection_kwargs["health_check_interval"] = 1e-9
        bulk_path = Bulk(client, max_bytes=MAX_BYTES)
        assert read(bulk_path, names) == [b"payload"] * len(names)
        replies = bulk_path.exchange((packed(("GET", name)) for name in names), num_replies=1)
        assert replies == [[b"payload"]] * len(names)
    redis_client.delete(*names)


def test_what_is_too_large_passes_by_unread(bulk_path: Bulk, redis_client: redis.Redis, run_id: str) -> None:
    names = [key(run_id, "blob", number) for number in range(3)]
    redis_client.set(names[0], b"before")
    redis_client.setrange(names[1], (64 << 20) - 1, b"x")
    redis_client.set(names[2], b"after")
    read(bulk_path, names[:1])
    tracemalloc.start()
    before, refused, after = read(bulk_path, names)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (before, after) == (b"before", b"after")
    assert isinstance(refused, WireError) and str(refused) == f"{64 << 20} bytes, the limit is {MAX_BYTES}"
    assert peak_bytes < 4 * CHUNK_BYTES
    redis_client.delete(*names)


def test_more_requests_than_the_window_are_answered_in_order_and_an_error_is_one(bulk_path: Bulk, run_id: str) -> None:
    def requests() -> Iterator[bytes]:
        for number in range(3 * WINDOW):
            value = b"no number" if number == WINDOW else number
            name = key(run_id, number)
            yield packed(("SET", name, value, "EX", 60), ("INCR", name))

    replies = bulk_path.exchange(requests(), num_replies=2)
    assert [sent for sent, _ in replies] == [b"OK"] * 3 * WINDOW
    numbers = [added for _, added in replies]
    assert isinstance(numbers.pop(WINDOW), redis.ResponseError)
    assert numbers == [number + 1 for number in range(3 * WINDOW) if number != WINDOW]


def test_requests_that_stop_midway_leave_nothing_behind_for_the_next(bulk_path: Bulk, run_id: str) -> None:
    def requests() -> Iterator[bytes]:
        yield packed(("SET", key(run_id, "name"), "mine", "EX", 60))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bulk_path.exchange(requests(), num_replies=1)
    assert bulk_path.exchange([packed(("GET", key(run_id, "name")))], num_replies=1) == [[b"mine"]]


def begun(buffer: Views, num_members: int) -> Lease:
    return leased(buffer.start(ticket(0, num_members=num_members)))


def test_a_cut_connection_costs_and_repeats_nothing(redis_url: str, redis_client: redis.Redis, run_id: str) -> None:
    num_members = 4 * WINDOW
    with connect(redis_url) as cut_client:
        buffer = make_buffer(cut_client, run_id)
        lease = begun(buffer, num_members)
        only_connection = cut_client.client_id()
        num_cut = 0

        def attempts() -> Iterator[tuple[Lease, Trajectory]]:
            nonlocal num_cut
            for member in range(num_members):
                if member == 2 * WINDOW:
                    num_cut += redis_client.client_kill_filter(_id=only_connection)
                yield lease, buffer.attempt(lease, member)

        results = buffer.actor.insert_all(attempts())
    assert num_cut == 1
    assert set(results) <= {InsertResult.STORED, InsertResult.DUPLICATE} and len(results) == num_members
    assert buffer.ledger.ready == 1 and buffer.ledger.inserted == num_members
    assert buffer.audit() == []


def test_a_group_with_an_oversized_payload_is_quarantined_and_its_sender_named(
    redis_client: redis.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.replay.buffer.payloads.MAX_TRAJECTORY_BYTES", 4000)
    buffer = make_buffer(redis_client, run_id)
    lease = begun(buffer, 2)
    buffer.actor.insert_all((lease, buffer.attempt(lease, member, actor="mallory")) for member in (0, 1))
    buffer.client.setrange(buffer.names("blob:0:1")[0], 1 << 20, b"x")
    assert buffer.claim() == []
    (why,) = buffer.quarantined()
    assert (why.member, why.actor, why.reason) == (1, "mallory", f"{(1 << 20) + 1} bytes, the limit is 4000")


def test_a_buffer_that_compresses_holds_less_gives_back_the_same_and_limits_what_a_payload_becomes(
    redis_client: redis.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = make_buffer(redis_client, run_id, compress=True)
    lease = begun(buffer, 2)
    sent = [buffer.attempt(lease, member, num_sampled=2000) for member in (0, 1)]
    buffer.actor.insert_all((lease, trajectory) for trajectory in sent)
    assert redis_client.strlen(key(run_id, "train", "blob", 0, 1, 0, lease.fence)) < 2000
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    assert group.trajectories == sent
    monkeypatch.setattr("slipstream.replay.buffer.payloads.MAX_TRAJECTORY_BYTES", 10_000)
    with pytest.raises(InvalidTrajectory, match="bytes, the limit is 10000"):
        buffer.actor.insert(lease, sent[0])


def test_threads_share_it(buffer: Views) -> None:
    lease = buffer.begin(ticket(0, num_members=16))
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda member: buffer.actor.insert(lease, buffer.attempt(lease, member)), range(16)))
    assert results == [InsertResult.STORED] * 16
    assert buffer.claim() == [0]


Wire = tuple[socket.socket, "bulk._Receiver"]


@pytest.fixture
def wire() -> Iterator[Wire]:
    """The server's end of a connection, and what reads the other."""
    theirs, ours = socket.socketpair()
    with theirs, ours:
        ours.settimeout(5)
        yield theirs, bulk._Receiver(ours, bytearray(CHUNK_BYTES))


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (b"+OK\r\n", "expected \\$ and a size, got b'\\+OK'"),
        (b"$1e9\r\n", "expected \\$ and a size, got b'\\$1e9'"),
        (b"*3\r\n", "expected \\$ and a size"),
        (b"\r\n", "expected \\$ and a size, got b''"),
        (b"$" + b"1" * (MAX_LINE_BYTES + 1), "a line of more than 65536 bytes"),
    ],
)
def test_what_is_no_reply_of_a_server_is_refused(wire: Wire, sent: bytes, complaint: str) -> None:
    theirs, receiver = wire
    theirs.sendall(sent)
    with pytest.raises(redis.InvalidResponse, match=complaint):
        receiver.payload(max_bytes=100)


@pytest.mark.parametrize("sent", [b"", b"$1", b"$10\r\nabc", b"$1000\r\nabc"])
def test_a_connection_closed_midway_is_an_error(wire: Wire, sent: bytes) -> None:
    theirs, receiver = wire
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(redis.ConnectionError, match="closed"):
        receiver.payload(max_bytes=100)


def test_a_server_that_trickles_is_not_waited_for(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, receiver = wire
    monkeypatch.setattr(bulk, "CALL_TIMEOUT_S", -1.0)  # over before it began
    theirs.sendall(b"$10\r\nabc")
    with pytest.raises(redis.TimeoutError, match="took longer than"):
        receiver.payload(max_bytes=100)
