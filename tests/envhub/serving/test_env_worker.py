"""A worker process: what it keeps of episodes, tested through its socket."""

import asyncio
import socket

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.remote.env_protocol import (
    Close,
    Closed,
    EnvFailed,
    EnvRequest,
    InvalidRequest,
    NotSupported,
    Open,
    Opened,
    Reset,
    StepEnv,
    WorkerRequest,
    WorkerResponse,
    decode_response,
    read_numbered,
    write_numbered,
)
from slipstream.envhub.serving.env_worker import Worker

GRID = Open(env="grid", options=msgspec.Raw(msgspec.msgpack.encode({})))


async def test_a_request_after_the_end_of_an_episode_leaves_nothing_in_the_worker() -> None:
    ours, its = socket.socketpair()
    requests, responses = await asyncio.open_connection(sock=its)
    reader, writer = await asyncio.open_connection(sock=ours)
    worker = Worker(requests, responses, step_timeout_s=20)
    serving = asyncio.create_task(worker.serve())
    start = Reset(task=Task(env="grid", split="train", index=0))
    messages: list[EnvRequest] = [GRID, start, Close(), StepEnv(action="up"), Close()]
    received = []
    for call, message in enumerate(messages):
        write_numbered(writer, WorkerRequest(call=call, episode=1, request=message))
        response = await read_numbered(reader, msgspec.msgpack.Decoder(WorkerResponse))
        assert response is not None
        received.append(decode_response(bytes(response.response)))
    kept = len(worker._episodes)
    writer.close()
    await serving
    responses.close()
    opened, _, closed, *late = received
    assert (opened, closed, kept) == (Opened(replay_only=False), Closed(), 0)
    assert late == [EnvFailed(why="no environment is open; send Open first")] * 2


def test_messages_keep_their_tags_and_fields_on_the_wire() -> None:
    def on_the_wire(message: object) -> object:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(message))

    step = {"type": "Step", "action": "up"}
    assert on_the_wire(StepEnv(action="up")) == step
    assert on_the_wire(InvalidRequest(why="x")) == {"type": "NoSense", "why": "x"}
    assert on_the_wire(NotSupported(why="x")) == {"type": "NotThere", "why": "x"}
    request = WorkerRequest(call=1, episode=2, request=StepEnv(action="up"))
    assert on_the_wire(request) == {"call": 1, "episode": 2, "ask": step}
    assert on_the_wire(WorkerResponse(call=1, response=msgspec.Raw(b"\x01"))) == {"call": 1, "answer": 1}
