"""The bulk path is as near to the bare socket as it was, and the benchmark of replay measures what it says."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import redis

from slipstream.common.process.wire import encode
from slipstream.common.records.trajectory import check, decode_trajectory
from slipstream.replay.server.redis_server import Server
from slipstream.tools.lab.bench import replay as bench_replay
from slipstream.tools.lab.bench.load.raw_socket import RawSocket
from slipstream.tools.lab.bench.load.replay_load import (
    FRAME,
    GROUP_SIZE,
    NUM_TOKENS,
    TRAJECTORY,
    VOCAB_SIZE,
    a_trajectory,
    groups_of,
)

NUM_ITEMS = 64
NUM_REPEATS = 15
MAX_BULK_RATIO = 7  # twice as slow as measured


def cpu_s(work: Callable[[], object]) -> float:
    """What this process worked: unlike the time that passes, it depends less on what else the machine does."""
    started = time.process_time()
    work()
    return time.process_time() - started


def decode_all() -> None:
    for _ in range(NUM_ITEMS):
        decode_trajectory(FRAME, max_bytes=len(FRAME), vocab_size=VOCAB_SIZE)


def encode_all() -> None:
    for _ in range(NUM_ITEMS):
        check(TRAJECTORY, vocab_size=VOCAB_SIZE)
        encode(TRAJECTORY)


@pytest.mark.long
def test_insert_and_claim_take_little_more_cpu_than_the_bare_socket_and_the_codec(
    redis_server: Server, redis_client: redis.Redis
) -> None:
    """A gate against becoming slower, on whatever machine this is: the least of some short repeats on both sides.

    Measured where ten processes wanted each core, which costs Python's caches most: 2.7 to 3.6 and 2.2 to 3.9 times.
    """
    groups = groups_of(redis_client, "gate")
    raw = RawSocket(redis_server, FRAME)
    costs = defaultdict[str, list[float]](list)
    for _ in range(NUM_REPEATS):
        work = groups.lease(NUM_ITEMS // GROUP_SIZE)
        costs["raw set"].append(cpu_s(lambda: raw.set(NUM_ITEMS)))
        costs["encode"].append(cpu_s(encode_all))
        costs["insert"].append(cpu_s(lambda: groups.actor.insert_all(work)))  # noqa: B023 - called at once
        costs["claim"].append(cpu_s(lambda: bench_replay.claim_all(groups.learner, NUM_ITEMS)))
        costs["decode"].append(cpu_s(decode_all))
        costs["raw get"].append(cpu_s(lambda: raw.get(NUM_ITEMS)))
        groups.learner.settle(NUM_ITEMS)
    raw.close()
    redis_client.delete(*redis_client.keys("payload:*"))
    least = {name: min(of) for name, of in costs.items()}
    assert least["insert"] < MAX_BULK_RATIO * (least["raw set"] + least["encode"])
    assert least["claim"] < MAX_BULK_RATIO * (least["raw get"] + least["decode"])


def steps_of(work: Callable[[], object]) -> int:
    """How many bytecodes of Python `work` takes: the same number on every machine, whatever its load."""
    steps = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps


def test_to_decode_and_check_a_trajectory_takes_as_many_steps_for_ten_times_the_tokens() -> None:
    """The other gate: no step of Python for each token. Numpy looks at all of them at once."""

    def steps(num_tokens: int) -> int:
        frame = encode(a_trajectory(num_tokens=num_tokens))
        return steps_of(lambda: decode_trajectory(frame, max_bytes=len(frame), vocab_size=VOCAB_SIZE))

    steps(NUM_TOKENS)  # the first call imports what it needs
    assert 0 < steps(10 * NUM_TOKENS) <= steps(NUM_TOKENS) + 10
