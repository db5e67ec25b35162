"""The bulk path is as near to the bare socket as it was, and the benchmark of replay measures what it says."""

import pickle  # a rival's wire
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from replay.server import Server, start_server
from tools import bench_replay, bench_replay_fleet, benchmark
from tools.replay_load import FRAME, GROUP_SIZE, TRAJECTORY, Groups, a_buffer
from tools.replay_rivals import PickledStream, RawSocket, TrainingText

NUM_ITEMS = 64
NUM_REPEATS = 15
MAX_INSERT_RATIO = 13  # twice as slow as measured, less what machines differ by
MAX_CLAIM_RATIO = 12


def cpu_s(work: Callable[[], object]) -> float:
    """What this process worked: unlike the time that passes, it hardly depends on what else the machine does."""
    started = time.process_time()
    work()
    return time.process_time() - started


def test_insert_and_claim_take_little_more_cpu_than_the_bare_socket(
    redis_server: Server, redis_client: redis.Redis
) -> None:
    """A gate against becoming slower, on whatever machine this is: the least of some short repeats on both sides.

    Everything is in it: checks, MessagePack, scripts. Measured on a busy machine: 7.4 to 7.8 and 6.3 to 7.3 times.
    """
    buffer = a_buffer(redis_client, "gate")
    buffer.acquire_epoch()
    groups = Groups(buffer=buffer)
    raw = RawSocket(redis_server, FRAME)
    raw_sets, inserts, claims, raw_gets = [], [], [], []
    for _ in range(NUM_REPEATS):
        work = groups.lease(NUM_ITEMS // GROUP_SIZE)
        raw_sets.append(cpu_s(lambda: raw.set(NUM_ITEMS)))
        inserts.append(cpu_s(lambda: buffer.insert_all(work)))  # noqa: B023 - called at once
        claims.append(cpu_s(lambda: bench_replay.claim_all(buffer, NUM_ITEMS)))
        raw_gets.append(cpu_s(lambda: raw.get(NUM_ITEMS)))
        buffer.settle(NUM_ITEMS)
    raw.close()
    redis_client.delete(*redis_client.keys("payload:*"))
    assert min(inserts) < MAX_INSERT_RATIO * min(raw_sets)
    assert min(claims) < MAX_CLAIM_RATIO * min(raw_gets)


def test_the_table_of_replay_in_docs_is_that_of_the_recorded_run() -> None:
    page = (benchmark.DOCS / "benchmarks.md").read_text()
    recorded = benchmark.read("replay")
    assert benchmark.with_table(page, recorded) == page
    assert {row.goal for row in recorded.rows if row.goal} == {
        "ratio >= 0.7", "ratio >= 0.75", "ratio >= 2.5", "ratio >= 7", "ratio >= 4", "ratio >= 10",
        "value <= 9", "value <= 6",
    }  # fmt: skip


def test_a_stream_of_pickles_holds_what_pipelinerl_puts_into_it_and_gives_it_back(redis_client: redis.Redis) -> None:
    stream, text = PickledStream(redis_client), TrainingText.of(TRAJECTORY)
    assert stream.insert([text, text], 3) > 0
    assert stream.sample(3) > 0
    last: Any = redis_client.xrevrange(stream.STREAM, count=1)
    ((_, entry),) = last
    assert entry[b"index"] == b"2" and redis_client.xlen(stream.STREAM) == 3
    group = pickle.loads(entry[b"data"])
    assert group == [text.model_dump()] * 2
    sampled = TRAJECTORY.loss_mask_array()
    assert group[0]["input_ids"] == TRAJECTORY.token_array().tolist()
    assert [label for label in group[0]["labels"] if label != -100] == TRAJECTORY.token_array()[sampled].tolist()
    assert len(group[0]["logprobs"]) == group[0]["output_tokens"] == sampled.sum()
    redis_client.delete(stream.STREAM)


def test_many_actors_are_measured_each_with_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_replay_fleet, "MEASURED_S", 1.0)
    with start_server(tmp_path) as server:
        measured = bench_replay_fleet.measure(server, 20, stream="few")
    assert measured.inserts_per_s > 0.5 * bench_replay_fleet.INSERTS_PER_S
    assert 0 < measured.p50_ms <= measured.p99_ms and measured.server_cpu > 0
