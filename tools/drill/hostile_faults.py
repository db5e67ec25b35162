"""Environments that fail, and strangers that send garbage."""

import contextlib
import socket
import threading
import time
from random import Random

import zmq

from slipstream.common.transfer.weights import blobs
from slipstream.replay.fleet.bulletin import Bulletin, RelayNotice
from slipstream.tools.drill.failing_env import DEADLY, TAKEN
from slipstream.tools.drill.faults import (
    GARBAGE,
    Fault,
    seen,
)
from slipstream.tools.drill.stage import Stage

LIES_FOR_S = 4.0


def trouble(kind: str) -> Fault[Stage]:
    """Make one episode fail, which is played again. If the actor ends with it, it is started again."""

    def fault(stage: Stage, _: Random) -> str:
        order = stage.orders / kind
        actors = [stage.actor(host) for host in (stage.near, stage.far)]
        for one in (stage.near, stage.far):
            stage.end_of(one)
        order.touch()
        stage.until(lambda: order.with_name(kind + TAKEN).exists(), "an episode suffers it")
        order.with_name(kind + TAKEN).unlink()
        if kind in DEADLY:
            stage.until(lambda: any(not one.is_running() for one in actors), "the actor ends")
            return "the actor ended"
        return "an episode suffered it"

    return fault


# --- Hostile members.


def shout_at_publisher(stage: Stage, random: Random) -> str:
    """Send malformed requests to the publisher, within ZeroMQ's protocol and outside of it."""
    endpoint = _publisher_endpoint(stage)
    num_messages = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 2000)
        dealer.connect(endpoint)
        for body in [*GARBAGE, random.randbytes(5000), b"\x91" * 4000]:
            for message in ([body], [b"", body], [body] * 40):
                dealer.send_multipart(message)
                num_messages += 1
    for data in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03\x00NULL", random.randbytes(4096)):
        with _connected(endpoint) as connection:
            connection.sendall(data)
    return f"{num_messages} messages of garbage, and 3 of no protocol"


def _publisher_endpoint(stage: Stage) -> str:
    """The endpoint of the publisher that runs now. The one that offered the newest weights may have been killed."""
    bulletin, found = Bulletin(stage.client, stage.run_id), list[str]()

    def is_there() -> bool:
        offer = bulletin.latest()
        if offer:
            with contextlib.suppress(OSError):
                _connected(offer.pull_endpoint).close()
                found.append(offer.pull_endpoint)
        return bool(found)

    stage.until(is_there, "a publisher serves")
    return found[0]


def _connected(endpoint: str) -> socket.socket:
    name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((name, int(port)), timeout=10)


def lie_as_relay(stage: Stage, random: Random) -> str:
    """Announce a relay that sends garbage: pullers must report it and use another source."""
    bulletin, closing = Bulletin(stage.client, stage.run_id), threading.Event()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

    def lie() -> None:
        while not closing.is_set():
            if router.poll(20):
                router.send_multipart([router.recv_multipart()[0], random.choice(GARBAGE), b"data"])
        context.destroy(linger=0)

    def announce() -> bool:
        offer = bulletin.latest()
        roots = [blob.root for blob in blobs(offer.manifest)] if offer else []
        notice = RelayNotice(
            name="liar",
            host=socket.gethostname(),
            endpoint=endpoint,
            roots=roots,
            policy_version=1,
            num_children=0,
            fan_out=8,
            fetched_bytes=0,
            served_bytes=0,
            num_corrupt=0,
        )
        bulletin.announce_relay(notice, ttl_s=2 * LIES_FOR_S)
        return time.monotonic() > ended

    thread, ended = threading.Thread(target=lie, daemon=True), time.monotonic() + LIES_FOR_S
    thread.start()
    try:
        stage.until(announce, "the relay has lied for long enough")
        seen(lambda: any(relay.endpoint == endpoint for relay in bulletin.relays()), "the relay is known")
    finally:
        bulletin.withdraw_relay("liar")
        closing.set()
        thread.join()
    return f"it was known, and blamed {bulletin.blamed().get(endpoint, 0)} times"
