"""The scripted engine keeps its schedule, its versions and its word."""

import asyncio
import time

import pytest

from slipstream.actors.engine.engine import EngineError
from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.trajectory import Sampling, VersionSpan
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from tests.learner.publisher.offers import empty_offer

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=20)


def countdown(tokens: list[int], seed: int | None) -> list[int]:
    """As many tokens as the last one of the prompt says, moved by the seed."""
    return [left + (seed or 0) for left in range(tokens[-1], 0, -1)]


def engine_of(*, token_time_s: float = 0.0, prefill_s: float = 0.0) -> ScriptedEngine:
    schedule = Schedule(token_time_s=token_time_s, prefill_s=prefill_s)
    return ScriptedEngine(countdown, policy_version=4, schedule=schedule, max_tokens=64)


async def test_it_returns_what_the_script_writes_up_to_the_limits_of_a_turn_and_of_the_context() -> None:
    engine = engine_of()
    whole = await engine.generate([9, 3], SAMPLING, seed=10)
    assert (whole.tokens, whole.logprobs, whole.finish_reason) == ([13, 12, 11], [0.0] * 3, "stop")
    assert whole.version_spans == [VersionSpan(start=0, stop=3, policy_version=4)]
    for prompt, num_tokens in (([50], 20), ([50] * 60, 4)):
        completion = await engine.generate(prompt, SAMPLING)
        assert (len(completion.tokens), completion.finish_reason) == (num_tokens, "length")
    with pytest.raises(ValueError, match=r"with `model\.max_tokens` = 64"):
        await engine.generate([50] * 64, SAMPLING)


@pytest.mark.parametrize(("temperature", "top_k", "kept"), [(1.0, 5, [[3], [2], [1]]), (1.0, 0, None), (0.0, 5, None)])
def test_where_sampling_cuts_off_each_token_is_the_only_one_kept(
    temperature: float, top_k: int, kept: list[list[int]] | None
) -> None:
    sampling = Sampling(temperature=temperature, top_p=1.0, top_k=top_k, max_turn_tokens=20)
    assert asyncio.run(engine_of().generate([9, 3], sampling)).kept == (kept and kept_sets(kept))


async def test_requests_are_ready_when_due_and_do_not_wait_for_each_other() -> None:
    engine = engine_of(token_time_s=0.02, prefill_s=0.1)

    async def one(length: int) -> float:
        started_s = time.perf_counter()
        await engine.generate([length], SAMPLING)
        return time.perf_counter() - started_s

    short_s, middle_s, *long_s = await asyncio.gather(one(2), one(5), *(one(10) for _ in range(50)))
    assert short_s >= 0.14 and middle_s >= 0.2 and min(long_s) >= 0.3
    assert max(long_s) < 51 * 0.3 / 10  # 51 requests one after another would take 15 s


async def test_a_commit_shows_in_the_spans_of_what_is_running() -> None:
    """Ten tokens, due every 0.1 s; version 5 comes after 0.35 s, or when the machine gets round to it."""
    engine = engine_of(token_time_s=0.1)
    loop = asyncio.get_running_loop()
    before_start_s = loop.time()
    running = asyncio.create_task(engine.generate([10], SAMPLING))
    await asyncio.sleep(0)
    after_start_s = loop.time()
    await asyncio.sleep(0.35)
    await engine.stage(empty_offer(5))
    assert engine.policy_version == 4
    before_commit_s = loop.time()
    await engine.commit(5)
    after_commit_s = loop.time()
    assert engine.policy_version == 5
    earliest, latest = (before_commit_s - after_start_s) / 0.1, (after_commit_s - before_start_s) / 0.1
    (before, after), boundaries = (await running).version_spans, range(int(earliest), int(latest) + 1)
    assert before.stop in boundaries
    assert before == VersionSpan(start=0, stop=before.stop, policy_version=4)
    assert after == VersionSpan(start=before.stop, stop=10, policy_version=5)


def test_only_what_was_staged_can_be_committed() -> None:
    engine = engine_of()
    with pytest.raises(ValueError, match="commit of version 5, but staged is None"):
        asyncio.run(engine.commit(5))


async def test_what_is_running_is_ended_by_a_cancellation_and_by_close() -> None:
    engine = engine_of(token_time_s=10.0)
    cancelled, running = (asyncio.create_task(engine.generate([5], SAMPLING)) for _ in range(2))
    await asyncio.sleep(0)
    assert engine.load().num_running == 2
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert engine.load().num_running == 1
    await engine.close()
    for ended in (running, engine.generate([5], SAMPLING)):
        with pytest.raises(EngineError, match="closed"):
            await ended
