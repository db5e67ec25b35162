"""Garbage at every border that frames cross: a server continues to serve, a client refuses and names the sender.

The frames of Redis are those of `tests/whole/test_hostile_messages.py`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import msgspec
import pytest
import redis
import zmq
from aiohttp import web

from slipstream.actors.host.relay import Relay, RelayInfo
from slipstream.actors.weights.pull import PullFailed
from slipstream.actors.weights.receive import Receiver
from slipstream.actors.weights.refused import WeightsRefused
from slipstream.common.transfer.chunk_server import ServerLimits
from slipstream.common.transfer.chunks import ChunkReply, ChunkRequest, ChunkStatus, Farewell
from slipstream.common.transfer.weights import Offer, layout, sealed
from slipstream.envhub.driving import Reply
from slipstream.envhub.env import EnvError
from slipstream.envhub.remote.env_protocol import ErrorResponse, Opened, Reset, StepEnv, decode_response, encode_message
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.tools.lab.bench.weights_stage import publish_whole
from tests.actors.chunks import BLOB, CHUNK_BYTES, DATA, Pulling, relay_at, routed, serving
from tests.envhub.adapters.test_generate_server import ASKED, asking
from tests.envhub.env_hosts import TASK, env_host, far, play_and_close
from tests.garbage import NOT_UTF8, garbage, shout, shouts
from tests.learner.publisher.test_weights import flat_bytes, latest_version, publishing, receiver_info, weights
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
REQUEST = ChunkRequest(root=BLOB.root, offset=0, num_bytes=CHUNK_BYTES)
REQUESTS = [msgspec.msgpack.encode(REQUEST), msgspec.msgpack.encode(Farewell())]
MANIFEST = sealed(layout([("w", "float32", (4,))]), memoryview(bytes(64)), policy_version=1, learner_epoch=0)
REPLIES = [msgspec.msgpack.encode(ChunkReply(root=BLOB.root, offset=0, answer=ChunkStatus.HERE, xxh3=1 << 63))]


def pelt(endpoint: str, messages: Iterator[list[bytes]]) -> None:
    """Send each message to a server over ZeroMQ without a look at its answers; then bytes of other protocols."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 10_000)
        dealer.connect(endpoint)
        for message in messages:
            dealer.send_multipart(message)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    for data in shouts(1):
        shout(host, int(port), data)


def of_frames(bodies: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Each as a message by itself, and among other frames."""
    for body in bodies:
        yield from ([body], [b"", body], [body, b""], [REQUESTS[0], body], [b""] * 40)


def test_a_chunk_server_outlives_garbage(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.common.transfer.chunk_server.LOG_EVERY_S", 0.0)  # every sender is looked up
    with serving() as server, Pulling() as pulling:
        pelt(server.endpoint, of_frames(garbage(1, 200, sound=REQUESTS)))
        assert pulling.pull(server.endpoint) == DATA
        wait_until(lambda: server.load.num_malformed > 500, "all of the garbage to be counted")
        assert server.alive
    assert "malformed requests so far; the last one, from 127.0.0.1 (" in caplog.text


def replies() -> Iterator[list[bytes]]:
    for body in garbage(2, 60, sound=REPLIES):
        yield from ([body], [body, b"data"], [b"data", REPLIES[0]], [REPLIES[0], body], [REPLIES[0], b"", b""], [b""])


def test_a_puller_refuses_whatever_is_no_reply_and_names_and_blames_the_sender() -> None:
    wrong = next(iter(replies()))
    with routed(lambda _: wrong) as liar, serving() as good, Pulling() as pulling:
        for wrong in replies():  # noqa: B007 - it is what `routed` sends
            with pytest.raises(PullFailed, match=liar):
                pulling.pull(liar)
        assert set(pulling.blamed) == {liar}
        pulling.relays.append(relay_at(liar, name="liar", host="here"))
        assert pulling.pull(good.endpoint) == DATA, "a relay that lies does not stop the pull"


def test_an_actor_that_a_source_sends_text_that_is_none_keeps_its_weights(redis_url: str, run_id: str) -> None:
    receiver = Receiver(receiver_info(redis_url, run_id, "a", "pull"))
    why = "version 1: tcp://127.0.0.1:.*: a reply that is not a ChunkReply"
    with routed(lambda _: [NOT_UTF8, b"data"]) as liar, pytest.raises(WeightsRefused, match=why):
        receiver.receive(Offer(manifest=MANIFEST, pull_endpoint=liar))
    receiver.close()


def test_a_publisher_process_outlives_garbage_on_its_port(redis_url: str, run_id: str, tmp_path: Path) -> None:
    receiver = Receiver(receiver_info(redis_url, run_id, "a", "pull"))
    with publishing(redis_url, run_id, tmp_path) as publisher, redis.Redis.from_url(redis_url) as client:
        bulletin, pid = Bulletin(client, run_id), publisher._process.pid
        publish_whole(publisher, weights(1), policy_version=1)
        wait_until(lambda: latest_version(bulletin) == 1, "version 1")
        offer = bulletin.latest()
        pelt(offer.pull_endpoint, of_frames(garbage(3, 50, sound=REQUESTS)))
        assert bytes(receiver.receive(offer).numpy()) == flat_bytes(weights(1))
        publish_whole(publisher, weights(2), policy_version=2)
        wait_until(lambda: latest_version(bulletin) == 2, "version 2")
        assert publisher._process.pid == pid
    receiver.close()


def test_a_relay_outlives_garbage_from_its_receivers_and_from_its_source(
    redis_url: str, redis_client: redis.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.actors.host.relay.RETRY_S", 0.0)
    named = {"redis_url": redis_url, "run_id": run_id, "name": "relay", "host": "here", "address": "127.0.0.1"}
    info = RelayInfo(**named, limits=ServerLimits(fan_out=2, chunk_bytes=CHUNK_BYTES), timeout_s=5.0)
    bulletin = Bulletin(redis_client, run_id)
    wrong = replies()
    with closing(Relay(info, key=None)) as relay, routed(lambda _: next(wrong, [b""])) as liar:
        bulletin.announce(Offer(manifest=MANIFEST, pull_endpoint=liar))
        pelt(relay.endpoint, of_frames(garbage(4, 50, sound=REQUESTS)))
        wait_until(lambda: bulletin.blamed().get(liar, 0) > 20, "the source to be blamed")
        assert relay.alive


def test_an_environment_server_outlives_garbage(tmp_path: Path) -> None:
    sound = [encode_message(Reset(task=TASK)), encode_message(StepEnv(action="x"))]

    async def pelt_sockets(url: str) -> int:
        num_refused = 0
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/episode") as socket:
            for body in garbage(5, 100, sound=sound):
                await socket.send_bytes(body)
                num_refused += isinstance(decode_response(await socket.receive_bytes()), ErrorResponse)
        return num_refused

    with env_host(tmp_path, "--names=grid") as host:
        assert asyncio.run(pelt_sockets(host.url)) > 60
        for data in shouts(2):
            shout("127.0.0.1", host.port, data)
        env = far(host.url, "grid")
        play_and_close(env, lambda: env.reset(TASK))


async def test_a_client_of_an_environment_refuses_whatever_is_no_answer_and_names_the_server() -> None:
    wrong = b""

    async def answer(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_bytes(encode_message(Opened(replay_only=False)))
        await socket.receive()
        await socket.send_bytes(wrong)
        await socket.receive()
        return socket

    app = web.Application()
    app.router.add_get("/v1/episode", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    env = far(url, "grid")
    for wrong in garbage(6, 60, sound=[encode_message(Opened(replay_only=True))]):  # noqa: B007 - `answer` sends it
        with pytest.raises((EnvError, ValueError, NotImplementedError), match=url):
            await env.reset(TASK)
    await env.close()
    await runner.cleanup()


async def test_the_endpoint_that_gives_tokens_outlives_garbage() -> None:
    sound = [msgspec.json.encode(ASKED)]
    async with asking() as side:
        side.reply = lambda prompt: Reply(tokens=[8, 2], logprobs=[-0.5, 0.0], finish_reason="stop")
        statuses = {(await side.post(body))[0] for body in garbage(7, 60, sound=sound)}
        assert 400 in statuses and statuses <= {200, 400}
        answered, writer = await asyncio.open_connection("127.0.0.1", int(side.url.rpartition(":")[2]))
        writer.write(b"GET /v1/models HTTP/1.0\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert b" 401 " in await answered.readline()
        writer.close()
        assert (await side.models())[0] == 200


def test_every_decode_of_bytes_from_elsewhere_answers_to_all_that_msgspec_raises() -> None:
    """msgspec raises UnicodeDecodeError and RecursionError beside its own: `except MALFORMED` is all of them."""
    rooms = ("actors", "common", "envhub", "learner", "replay")
    naming = [path.name for room in rooms for path in (ROOT / room).rglob("*.py") if "MsgspecError" in path.read_text()]
    assert naming == ["wire.py"]
