"""A worker process: what it keeps of episodes, spoken with through its socket."""

import asyncio
import socket

import msgspec

from common.trajectory import Task
from envhub.remote.env_protocol import (
    Answer,
    Ask,
    Close,
    Closed,
    Done,
    EnvFailed,
    Open,
    Opened,
    Order,
    Reset,
    Step,
    decode_answer,
    read_numbered,
    write_numbered,
)
from envhub.serving.env_worker import Worker

GRID = Open(env="grid", options=msgspec.Raw(msgspec.msgpack.encode({})))


def test_nothing_is_kept_of_an_episode_that_is_asked_something_after_its_end() -> None:
    async def play() -> tuple[list[Answer], int]:
        ours, its = socket.socketpair()
        orders, answers = await asyncio.open_connection(sock=its)
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = Worker(orders, answers, step_timeout_s=20)
        serving = asyncio.create_task(worker.serve())
        asks: list[Ask] = [
            GRID,
            Reset(task=Task(env="grid", split="train", index=0)),
            Close(),
            Step(action="up"),
            Close(),
        ]
        told = []
        for call, ask in enumerate(asks):
            write_numbered(writer, Order(call=call, episode=1, ask=ask))
            done = await read_numbered(reader, msgspec.msgpack.Decoder(Done))
            assert done is not None
            told.append(decode_answer(bytes(done.answer)))
        kept = len(worker._episodes)
        writer.close()
        await serving
        answers.close()
        return told, kept

    (opened, _, closed, *late), kept = asyncio.run(play())
    assert (opened, closed, kept) == (Opened(replay_only=False), Closed(), 0)
    assert late == [EnvFailed(why="no environment was opened here")] * 2
