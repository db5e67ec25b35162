"""Every HTTP server of ours against hostile requests: what they cost before they are refused, and how a server ends."""

import asyncio
import contextlib
import functools
import json
import socket
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from slipstream.common.process.http_guard import END_S, NUM_LARGEST, Border
from slipstream.common.records.reward_protocol import MAX_REQUEST_BYTES, PROCESS, RewardModelCard
from slipstream.common.text.codec import end_tokens
from slipstream.envhub.adapters import generate_server
from slipstream.envhub.agent import endpoint
from slipstream.envhub.driving import Reply, Request, Terms
from slipstream.envhub.serving import env_server
from slipstream.envhub.serving.env_pool import EnvPool
from slipstream.tools.play.state_values import Batches
from slipstream.tools.serve.reward_server import RewardServer
from slipstream.tools.viewer import page_server
from tests.envhub.adapters.test_generate_server import ASKED, SAMPLING
from tests.envhub.agent.test_agent_endpoint import TOKENIZER

MAX_HOLD_S = 0.25  # of the event loop, in CPU time of this process: it depends on no other process
HEAVY_BYTES = 644 << 10
MAX_TOKENS = 20_000
KEY = "the-key"
BUFFER_BYTES = 512 << 10  # of one connection whose body waits for room


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A server, and the request whose body it reads."""

    port: int
    path: str
    max_bytes: int
    heavy: bytes  # ends in a refusal
    key: str = KEY


@contextlib.asynccontextmanager
async def agents() -> AsyncIterator[Served]:
    async def generate(_: Request) -> Reply:
        raise AssertionError("a refused request was sampled")

    limits = {"max_tokens": MAX_TOKENS, "max_turns": 4, "sampling": SAMPLING, "started_at_s": 0.0}
    served = endpoint.Endpoint(Terms(tokenizer=TOKENIZER, end_tokens=end_tokens(TOKENIZER), **limits), generate)
    message = {"role": "user", "content": "hello"}
    heavy = json.dumps({"messages": [message] * (HEAVY_BYTES // (len(json.dumps(message)) + 2))}).encode()
    async with served.listening() as url:
        max_bytes = endpoint.MAX_BODY_BYTES + endpoint.MAX_TOKEN_BYTES * MAX_TOKENS
        yield Served(port=port_of(url), path="/v1/chat/completions", max_bytes=max_bytes, heavy=heavy, key=served.key)


@contextlib.asynccontextmanager
async def generations() -> AsyncIterator[Served]:
    served = generate_server.GenerateServer({}, max_tokens=MAX_TOKENS, end_tokens=frozenset({2}), secret=KEY)
    async with served.listening() as url:
        max_bytes = generate_server.MAX_BODY_BYTES + generate_server.MAX_TOKEN_BYTES * (MAX_TOKENS - 1)
        heavy = json.dumps(ASKED | {"token_ids": [7] * (HEAVY_BYTES // 3)}).encode()
        yield Served(port=port_of(url), path="/inference/v1/generate", max_bytes=max_bytes, heavy=heavy)


@contextlib.asynccontextmanager
async def environments() -> AsyncIterator[Served]:
    pool = EnvPool(num_processes=1, max_episodes=1, step_timeout_s=1.0)
    async with env_server.EnvServer(pool, names=["grid"], lease_s=60.0, secret=KEY).listening("127.0.0.1", 0) as url:
        yield Served(port=port_of(url), path="/v1/episode", max_bytes=env_server.MAX_BODY_BYTES, heavy=b"x" * 1000)


@contextlib.asynccontextmanager
async def rewards() -> AsyncIterator[Served]:
    card = RewardModelCard(kind=PROCESS, model="a", reads="a", max_tokens=64)
    batches = Batches(lambda episodes: [np.zeros(1)] * len(episodes))
    async with RewardServer(batches, card, vocab_size=9, secret=KEY).listening("127.0.0.1", 0) as url:
        heavy = msgspec.msgpack.encode({"reads": "a", "episode": [[]] * HEAVY_BYTES})
        yield Served(port=port_of(url), path="/v1/values", max_bytes=MAX_REQUEST_BYTES, heavy=heavy)


@contextlib.asynccontextmanager
async def pages() -> AsyncIterator[Served]:
    app = page_server.make_app(None, str)  # type: ignore[arg-type]
    border = Border(max_body_bytes=page_server.MAX_BODY_BYTES, is_for_pages=True)
    async with border.served(app, ("127.0.0.1", 0)) as url:
        yield Served(port=port_of(url), path="/api/x", max_bytes=page_server.MAX_BODY_BYTES, heavy=b"x" * 1000)


SERVERS = {each.__name__: each for each in (agents, generations, environments, rewards, pages)}


def port_of(url: str) -> int:
    return int(url.removeprefix("http://").partition("/")[0].rpartition(":")[2])


def head_of(served: Served, length: int, *, key: str | None = None, more: str = "") -> bytes:
    shown = served.key if key is None else key
    return (
        f"POST {served.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {shown}\r\n{more}"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def status_of(served: Served, sent: bytes) -> tuple[int, str]:
    """Send one request, and return its status and the text of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(sent)
    try:
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            return int(head.split()[1]), (await reader.readexactly(length)).decode()
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def watched_loop() -> AsyncIterator[None]:
    """Fail if something holds the event loop. A garbage collection or a first call holds it for less."""
    longest, before = 0.0, time.process_time()

    async def watch() -> None:
        nonlocal longest, before
        while True:
            before = time.process_time()
            await asyncio.sleep(0.002)
            longest = max(longest, time.process_time() - before)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    yield
    await asyncio.sleep(0.01)
    watching.cancel()
    assert longest < MAX_HOLD_S, f"the event loop was held for {longest:.2f} s of CPU time"


@functools.cache
def bomb(length: int) -> bytes:
    """A gzip file of that many zeros."""
    packer, block = zlib.compressobj(9, wbits=31), bytes(1 << 20)
    return b"".join(packer.compress(block) for _ in range(length >> 20)) + packer.flush()


Serving = Callable[[], contextlib.AbstractAsyncContextManager[Served]]
over_all_servers = pytest.mark.parametrize("serving", SERVERS.values(), ids=SERVERS)


@over_all_servers
async def test_a_packed_body_is_refused_and_never_unpacked(serving: Serving) -> None:
    async with serving() as served:
        is_open, packed = served.key and serving is pages, bomb(256 << 20)[: served.max_bytes]
        for key, wanted in (("guessed", 415 if is_open else 401), (served.key, 415)):
            began = time.process_time()
            head = head_of(served, len(packed), key=key, more="Content-Encoding: gzip\r\n")
            status, text = await status_of(served, head + packed)
            assert status == wanted and (status == 401 or "Content-Encoding gzip is not accepted" in text)
            await asyncio.sleep(0.2)  # the server reads the rest of a body that it has refused
            assert time.process_time() - began < MAX_HOLD_S


@over_all_servers
async def test_a_body_that_is_too_large_or_has_no_length_is_refused_by_its_headers(serving: Serving) -> None:
    async with serving() as served:
        status, text = await status_of(served, head_of(served, served.max_bytes + 1))
        assert status == 413 and f"the limit is {served.max_bytes}" in text
        chunked = head_of(served, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        assert (await status_of(served, chunked))[0] == 411


@pytest.mark.parametrize(
    "serving",
    [pytest.param(each, marks=[] if each in (agents, rewards) else pytest.mark.long) for each in SERVERS.values()],
    ids=SERVERS,
)
async def test_of_many_large_bodies_at_once_few_are_held_and_each_has_its_turn(serving: Serving) -> None:
    async with serving() as served, asyncio.timeout(300), contextlib.AsyncExitStack() as stack:
        content = memoryview(head_of(served, served.max_bytes) + b"[" * served.max_bytes)
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(20)]
        places, most = dict.fromkeys(clients, 0), len(content) - 1
        tracemalloc.start()
        try:
            await send_all(places, content, up_to=most)
            assert tracemalloc.get_traced_memory()[0] < NUM_LARGEST * served.max_bytes + 20 * BUFFER_BYTES
        finally:
            tracemalloc.stop()
        answers = [asyncio.create_task(asyncio.get_running_loop().sock_recv(client, 1 << 16)) for client in clients]
        while not all(each.done() for each in answers):
            await send_all(places, content, up_to=len(content))
        assert {each.result().split()[1] for each in answers} <= {b"400", b"403", b"405", b"422"}


async def send_all(places: dict[socket.socket, int], content: memoryview, *, up_to: int) -> None:
    """Send as much to each connection as the server takes, until it takes no more."""
    idle = 0
    while idle < 20:
        idle += 1
        for client, place in places.items():
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                if place < up_to:
                    places[client] += client.send(content[place : min(place + (1 << 18), up_to)])
                    idle = 0
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("serving", [each for each in SERVERS.values() if each is not pages])
async def test_a_web_page_is_refused_even_with_the_key(serving: Serving) -> None:
    async with serving() as served:
        assert (await status_of(served, head_of(served, 0, more="Origin: https://a.page\r\n")))[0] == 403


@over_all_servers
async def test_no_body_that_is_refused_holds_the_loop(serving: Serving) -> None:
    async with serving() as served:
        deep = b"\x91" * 100_000 if serving is rewards else b'{"messages":' + b"[" * 100_000
        small = head_of(served, 2) + b"[]"
        first, _ = await status_of(served, small)
        for body in (deep[: served.max_bytes], served.heavy):
            async with watched_loop():
                hostile = [asyncio.create_task(status_of(served, head_of(served, len(body)) + body)) for _ in range(2)]
                await asyncio.sleep(0.02)
                assert (await status_of(served, small))[0] == first
                assert {status for status, _ in await asyncio.gather(*hostile)} <= {400, 403, 405, 422}


@over_all_servers
async def test_half_a_request_does_not_keep_a_server_from_ending(serving: Serving) -> None:
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving())
        head, halves = head_of(served, 1000), []
        for half in (head[:20], head, head + b"x" * 500):
            halves.append((await asyncio.open_connection("127.0.0.1", served.port))[1])
            halves[-1].write(half)
        await asyncio.sleep(0.2)
        began = time.monotonic()
        async with asyncio.timeout(4 * END_S):
            await stack.aclose()
        assert time.monotonic() - began < 3 * END_S
        for half in halves:
            half.transport.abort()
