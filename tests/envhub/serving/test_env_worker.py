"""A worker process: what it keeps of episodes, tested through its socket."""

import asyncio
import socket

import msgspec

from slipstream.envhub.remote import env_protocol as protocol
from slipstream.envhub.serving.env_worker import Worker
from tests.envhub.env_cases import task_of

GRID = protocol.Open(env="grid", options=msgspec.Raw(msgspec.msgpack.encode({})))


async def test_a_request_after_the_end_of_an_episode_leaves_nothing_in_the_worker() -> None:
    ours, its = socket.socketpair()
    requests, responses = await asyncio.open_connection(sock=its)
    reader, writer = await asyncio.open_connection(sock=ours)
    worker = Worker(requests, responses, step_timeout_s=20)
    serving = asyncio.create_task(worker.serve())
    start = protocol.Reset(task=task_of("grid"))
    close, step = protocol.Close(), protocol.StepEnv(action="up")
    messages: list[protocol.EnvRequest] = [GRID, start, close, step, close]
    received = []
    for call, message in enumerate(messages):
        protocol.write_numbered(writer, protocol.WorkerRequest(call=call, episode=1, request=message))
        response = await protocol.read_numbered(reader, msgspec.msgpack.Decoder(protocol.WorkerResponse))
        assert response is not None
        received.append(protocol.decode_response(bytes(response.response)))
    kept = len(worker._episodes)
    writer.close()
    await serving
    responses.close()
    opened, _, closed, *late = received
    assert (opened, closed, kept) == (protocol.Opened(replay_only=False), protocol.Closed(), 0)
    assert late == [protocol.EnvFailed(why="no environment is open; send Open first")] * 2


def test_messages_keep_their_tags_and_fields_on_the_wire() -> None:
    def on_the_wire(message: object) -> object:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(message))

    step = {"type": "Step", "action": "up"}
    assert on_the_wire(protocol.StepEnv(action="up")) == step
    assert on_the_wire(protocol.InvalidRequest(why="x")) == {"type": "NoSense", "why": "x"}
    assert on_the_wire(protocol.NotSupported(why="x")) == {"type": "NotThere", "why": "x"}
    request = protocol.WorkerRequest(call=1, episode=2, request=protocol.StepEnv(action="up"))
    assert on_the_wire(request) == {"call": 1, "episode": 2, "ask": step}
    assert on_the_wire(protocol.WorkerResponse(call=1, response=msgspec.Raw(b"\x01"))) == {"call": 1, "answer": 1}
