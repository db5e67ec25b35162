"""What a puller makes of its sources: good ones, dying ones, full ones, liars."""

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import msgspec
import pytest
import xxhash
from msgspec.structs import replace

from slipstream.actors.weights.pull import SMALL_CHUNK_BYTES, PullFailed
from slipstream.actors.weights.sources import NOTICES_PER_S, NoSource, Sources
from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.transfer.chunks import Blob, ChunkReply, ChunkRequest, ChunkStatus, Farewell, Request
from slipstream.replay.fleet.bulletin import RelayNotice
from tests.actors.chunks import BLOB, CHUNK_BYTES, DATA, NUM_CHUNKS, Pulling, check, relay_at, routed, serving
from tests.waiting import wait_until

Reply = Callable[[ChunkRequest, int], "tuple[ChunkReply, bytes] | None"]


def faulty(reply: Reply) -> AbstractContextManager[str]:
    """A server of the test's own, at the address that it yields; `reply` gets the request and its number."""
    numbers = itertools.count()

    def answer(frame: bytes) -> list[bytes] | None:
        request = msgspec.msgpack.decode(frame, type=Request)
        made = None if isinstance(request, Farewell) else reply(request, next(numbers))
        return None if made is None else [msgspec.msgpack.encode(made[0]), made[1]]

    return routed(answer)


def reply_with(request: ChunkRequest, data: bytes) -> tuple[ChunkReply, bytes]:
    named = {"root": request.root, "offset": request.offset, "answer": ChunkStatus.HERE}
    return ChunkReply(**named, xxh3=xxhash.xxh3_64_intdigest(data)), data


def true_reply(request: ChunkRequest, _number: int) -> tuple[ChunkReply, bytes]:
    return reply_with(request, DATA[request.offset : request.offset + request.num_bytes])


def silent_after_15(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes] | None:
    return true_reply(request, number) if number < 15 else None


@pytest.mark.parametrize("endpoint", ["tcp://*:5555", "tcp://host:99999", "nonsense"])
def test_a_source_at_no_address_is_left_for_another(endpoint: str) -> None:
    with serving() as publisher, Pulling(endpoint) as pulling:
        assert pulling.pull(publisher.endpoint) == DATA


def test_a_source_that_falls_silent_is_left_and_the_rest_comes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.actors.weights.fetch.SILENCE_S", 0.5)
    with faulty(silent_after_15) as dying, serving() as publisher, Pulling(dying) as pulling:
        assert pulling.pull(publisher.endpoint) == DATA
        assert publisher.load.served_bytes == (NUM_CHUNKS - 15) * CHUNK_BYTES, "what had come was asked for again"
        assert pulling.puller.counts.fetched_bytes == len(DATA)


def test_a_pull_that_was_given_up_goes_on_from_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.actors.weights.fetch.SILENCE_S", 0.3)
    with Pulling() as pulling:
        missing = "25 of 40 chunks missing at the deadline"
        with faulty(silent_after_15) as dying, pytest.raises(PullFailed, match=missing):
            pulling.pull(dying, timeout_s=1.0)
        with serving() as publisher:
            assert pulling.pull(publisher.endpoint) == DATA
            assert publisher.load.served_bytes == 25 * CHUNK_BYTES


def test_only_the_chunks_that_were_lost_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.actors.weights.fetch.SILENCE_S", 0.3)
    asked: list[int] = []

    def reply(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes] | None:
        asked.append(request.offset)
        return None if number in (1, 2) else true_reply(request, number)

    with faulty(reply) as publisher, Pulling() as pulling:
        assert pulling.pull(publisher) == DATA
    assert sorted(asked) == sorted([*range(0, len(DATA), CHUNK_BYTES), CHUNK_BYTES, 2 * CHUNK_BYTES])


def test_a_publisher_that_stops_answering_is_given_up_long_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.actors.weights.fetch.SILENCE_S", 0.3)
    monkeypatch.setattr("slipstream.actors.weights.pull.GIVE_UP_S", 0.5)
    why = "40 of 40 chunks missing: no source made progress"
    with Pulling() as pulling, faulty(lambda *_: None) as publisher, pytest.raises(PullFailed, match=why):
        pulling.pull(publisher, timeout_s=3600)


def test_a_blob_that_the_publisher_no_longer_has_is_given_up_at_once() -> None:
    older = Blob(root="older", num_bytes=1)
    with Pulling() as pulling, serving() as publisher, pytest.raises(PullFailed, match="does not serve this blob any"):
        pulling.puller.pull(older, publisher=publisher.endpoint, check=check, timeout_s=3600)


def test_what_the_way_did_to_a_chunk_is_seen_and_only_that_chunk_comes_from_another() -> None:
    def reply(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes]:
        header, data = true_reply(request, number)
        return header, (bytes([data[0] ^ 1]) + data[1:] if number == 3 else data)

    with faulty(reply) as bad, serving() as publisher, Pulling(bad) as pulling:
        assert pulling.pull(publisher.endpoint) == DATA
        assert pulling.puller.counts.num_corrupt == 1
        assert pulling.blamed == [bad]
        assert publisher.load.served_bytes == (NUM_CHUNKS - 3) * CHUNK_BYTES, "good chunks were asked for again"


def test_a_relay_that_lies_about_a_chunk_is_found_out_by_the_whole_and_another_is_asked() -> None:
    def reply(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes]:
        _, data = true_reply(request, number)
        return reply_with(request, bytes(len(data)) if number == 3 else data)

    with faulty(reply) as liar, serving() as good, serving() as publisher, Pulling(liar) as pulling:
        pulling.relays.append(relay_at(good.endpoint, num_children=1))  # so that the liar is asked first
        assert pulling.pull(publisher.endpoint) == DATA
        assert pulling.blamed == [liar]
        assert good.load.served_bytes == len(DATA)
        assert publisher.load.served_bytes == 0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda request, data: reply_with(request, data[:-1]), "bytes, expected"),
        (lambda request, data: reply_with(request, bytes(len(data))), "not the bytes of that name"),
        (lambda request, data: (reply_with(request, data)[0], data[::-1]), "does not match its hash"),
        (lambda request, data: reply_with(replace(request, offset=7), data), "a chunk at 7 that was not requested"),
    ],
)
def test_a_publisher_that_sends_rubbish_is_refused_with_the_reason(
    spoil: Callable[[ChunkRequest, bytes], tuple[ChunkReply, bytes]], why: str
) -> None:
    def reply(request: ChunkRequest, number: int) -> tuple[ChunkReply, bytes]:
        return spoil(request, true_reply(request, number)[1])

    with faulty(reply) as publisher, Pulling() as pulling:
        with pytest.raises(PullFailed, match=why):
            pulling.pull(publisher)
        assert pulling.puller.counts.num_corrupt == 1


def choosing(
    find: Callable[[], list[RelayNotice]], *, patience_s: float = 0.0
) -> tuple[Sources, Callable[[], str | NoSource]]:
    """The sources of `me`, and a function that chooses among them."""
    sources, begun = Sources(find, name="me", host="here", patience_s=patience_s), time.monotonic()
    return sources, lambda: sources.choose(BLOB.root, "tcp://publisher", begun=begun)


def test_the_relay_of_ones_own_host_is_asked_first_then_the_one_with_most_room_then_the_publisher() -> None:
    far, near = relay_at("tcp://far", num_children=1), relay_at("tcp://near", host="here", num_children=3)
    idle, behind = relay_at("tcp://idle", num_children=0), relay_at("tcp://behind", roots=[])
    relays = [far, near, idle, behind, relay_at("tcp://me", name="me")]
    sources, chosen = choosing(lambda: relays)
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
    relays = [relay_at("tcp://relay", roots=[])]
    sources, chosen = choosing(lambda: relays, patience_s=0.3)
    assert chosen() is NoSource.RELAY_IS_FETCHING
    wait_until(lambda: chosen() == "tcp://publisher", "its time to be over")
    relays[0] = relay_at("tcp://relay", roots=[], fetched_bytes=1)
    assert chosen() is NoSource.RELAY_IS_FETCHING
    sources.note_full("tcp://relay")
    assert chosen() is NoSource.RELAY_IS_FETCHING, "who is full will have room"
    sources.avoid("tcp://relay", 60)
    assert chosen() == "tcp://publisher"


def test_those_who_wait_for_a_version_read_the_notices_of_many_relays_a_bounded_number_of_times() -> None:
    """Each of a thousand actors that waited for a hundred relays would read 2,000 notices a second from Redis."""
    relays, read = [relay_at(f"tcp://{number}", name=str(number), roots=[]) for number in range(40)], list[int]()

    def find() -> list[RelayNotice]:
        read.append(len(relays))
        return list(relays)

    begun, (_, chosen) = time.monotonic(), choosing(find, patience_s=60.0)
    for _ in range(20):
        assert chosen() is NoSource.RELAY_IS_FETCHING
    assert sum(read) <= 40 + NOTICES_PER_S * (time.monotonic() - begun)
    relays[7] = relay_at("tcp://holder", name="7")
    wait_until(lambda: chosen() == "tcp://holder", "the next look")


def test_without_redis_the_relays_that_were_known_last_are_asked() -> None:
    def find() -> list[RelayNotice]:
        num_asked.append(1)
        if len(num_asked) > 1:
            raise RedisAway("gone")
        return [relay_at("tcp://relay")]

    num_asked: list[int] = []
    _, chosen = choosing(find)
    for _ in range(5):
        assert chosen() == "tcp://relay"
    assert len(num_asked) == 2, "a server that is away is not asked for every chunk"


def test_a_slow_link_gets_smaller_chunks_until_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.actors.weights.fetch.SILENCE_S", 0.5)
    data, sizes, slow = bytes(range(256)) * 8192, list[int](), True

    def reply(request: ChunkRequest, _: int) -> tuple[ChunkReply, bytes] | None:
        sizes.append(request.num_bytes)
        if slow and request.num_bytes > SMALL_CHUNK_BYTES:
            return None
        return reply_with(request, data[request.offset : request.offset + request.num_bytes])

    blob = Blob(root="slow", num_bytes=len(data) - 100)
    with faulty(reply) as endpoint, Pulling(chunk_bytes=1 << 20) as pulling:
        pull = partial(pulling.puller.pull, blob, publisher=endpoint, check=lambda _: None, timeout_s=60.0)
        assert bytes(pull()) == data[:-100]
        assert sizes == [1 << 20, (1 << 20) - 100, *[1 << 18] * 7, (1 << 18) - 100]
        slow = False
        assert bytes(pull()) == data[:-100] and bytes(pull()) == data[:-100]
        assert sizes[-2:] == [1 << 20, (1 << 20) - 100]
