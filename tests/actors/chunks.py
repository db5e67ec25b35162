"""One blob in chunks: servers of it, pullers of it, and requests for a chunk."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.queues import Queue
from typing import Any, Self

import msgspec
import xxhash
import zmq

from slipstream.actors.host.model_cache import cached_folder
from slipstream.actors.weights.pull import Puller
from slipstream.actors.weights.sources import Sources
from slipstream.common.transfer.chunk_server import ChunkServer, ServerLimits
from slipstream.common.transfer.chunks import Blob, ChunkRequest
from slipstream.common.transfer.encryption import CurveKey
from slipstream.common.transfer.model_folder import ModelFile
from slipstream.common.transfer.weights import WeightsError
from slipstream.replay.fleet.bulletin import RelayNotice
from tests.learner.publisher.offers import empty_offer
from tests.replay.buffer.every_verb import RELAY
from tests.waiting import beside

CHUNK_BYTES = 64 << 10
NUM_CHUNKS = 40
NOWHERE = "tcp://127.0.0.1:1"
DATA = bytes(range(256)) * (NUM_CHUNKS * CHUNK_BYTES // 256)
BLOB = Blob(root=xxhash.xxh3_128_hexdigest(DATA), num_bytes=len(DATA))


def check(data: memoryview) -> None:
    if xxhash.xxh3_128_hexdigest(data) != BLOB.root:
        raise WeightsError("not the bytes of that name")


def relay_at(endpoint: str, **facts: Any) -> RelayNotice:
    """An idle relay elsewhere that has the blob, but for these facts."""
    usual = {"name": endpoint, "host": "elsewhere", "endpoint": endpoint, "roots": [BLOB.root]}
    return msgspec.structs.replace(RELAY, **(usual | facts))


class Pulling:
    def __init__(self, *relays: str, key: CurveKey | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.relays = [relay_at(endpoint) for endpoint in relays]
        self.blamed: list[str] = []
        sources = Sources(lambda: self.relays, name="me", host="here", patience_s=0.0)
        self.puller = Puller(sources, blame=self.blamed.append, chunk_bytes=chunk_bytes, key=key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.puller.close()

    def pull(self, publisher: str = NOWHERE, *, timeout_s: float = 60.0) -> bytes:
        return bytes(self.puller.pull(BLOB, publisher=publisher, check=check, timeout_s=timeout_s))


@contextmanager
def serving(*, fan_out: int = 8, bytes_per_s: float = math.inf, key: CurveKey | None = None) -> Iterator[ChunkServer]:
    def read(request: ChunkRequest) -> bytes | None:
        time.sleep(request.num_bytes / bytes_per_s)
        return DATA[request.offset : request.offset + request.num_bytes] if request.root == BLOB.root else None

    limits = ServerLimits(fan_out=fan_out, chunk_bytes=CHUNK_BYTES)
    with closing(ChunkServer("127.0.0.1", read, limits=limits, key=key)) as server:
        yield server


@contextmanager
def routed(answer: Callable[[bytes], list[bytes] | None]) -> Iterator[str]:
    """A server of the test's own, at the address that it yields: what `answer` says to a request is the reply."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve(over: threading.Event) -> None:
            while not over.is_set():
                if router.poll(20):
                    peer, request, *_ = router.recv_multipart()
                    if (reply := answer(request)) is not None:
                        router.send_multipart([peer, *reply])

        with beside(serve):
            yield f"tcp://127.0.0.1:{port}"


def fetch_model(files: list[ModelFile], endpoint: str, chunk_bytes: int, fetched: "Queue[int]") -> None:
    puller, offer = Pulling(chunk_bytes=chunk_bytes).puller, empty_offer(1, pull_endpoint=endpoint)
    cached_folder(files, make_puller=lambda: puller, newest=lambda: offer, timeout_s=60.0)
    fetched.put(puller.counts.fetched_bytes)


def ask(socket: "zmq.Socket[bytes]", chunk: int) -> None:
    request = ChunkRequest(root=BLOB.root, offset=chunk * CHUNK_BYTES, num_bytes=CHUNK_BYTES)
    socket.send(msgspec.msgpack.encode(request))
