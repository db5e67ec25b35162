"""Commits and refusals while a batch is in flight: the version of every token stays exact."""

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from slipstream.actors.engine import vllm_engine
from slipstream.actors.engine.engine import EngineDied
from slipstream.actors.engine.vllm_engine import VllmEngine
from slipstream.actors.weights.refused import WeightsUnfit
from tests.actors.generations import check_completion, check_crossing, crossings_of, deaths_of
from tests.actors.vllm_engines import LONG, ONES, PROMPT, Offers, Policies, run, started


@pytest.fixture(scope="module", params=[pytest.param("keep", marks=pytest.mark.long), "recompute"])
def engine(policies: Policies, request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    """One for each policy, which the tests of this file use in their order; the last one closes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "ENGINE_MODULE", "tests.actors.overlapped_engine")
        engine = started(policies.folder, kv_policy=request.param)
    yield engine
    asyncio.run(engine.close())


def test_tokens_of_refused_weights_are_sampled_again(engine: VllmEngine, policies: Policies, server: Offers) -> None:
    """The probe is of other weights than those that travel, so the engine must return to the old ones."""
    wrong = server.offer(policies.models[1], policy_version=1, probed=policies.models[2])

    async def refused() -> list[vllm_engine.Completion]:
        await engine.stage(wrong)
        running = [asyncio.create_task(engine.generate([*PROMPT, member], LONG)) for member in range(8)]
        while engine.load().kv_use == 0:  # noqa: ASYNC110 - the commit must not come before them
            await asyncio.sleep(0.005)
        with pytest.raises(WeightsUnfit, match="refused by its probe"):
            await engine.commit(1)
        return await asyncio.gather(*running)

    for member, completion in enumerate(run(refused())):
        check_completion(completion, policies.models[0], version=0, prompt=[*PROMPT, member])


def test_a_commit_collects_the_batch_in_flight_first(
    engine: VllmEngine, policies: Policies, server: Offers, request: pytest.FixtureRequest
) -> None:
    old, new = policies.models[0], policies.models[1]
    crossings, _ = run(crossings_of(engine, server.offer(new, policy_version=1)))
    for crossing in crossings:
        check_crossing(crossing, old, new, keeps_kv="keep" in request.node.name)


async def test_after_its_close_every_call_says_so(engine: VllmEngine) -> None:
    assert await deaths_of(engine, engine.close) == {"the engine ended: close() was called"}
    with pytest.raises(EngineDied, match="close"):
        await engine.generate(PROMPT, ONES)
    await engine.close()
    assert not psutil.pid_exists(engine._process._popen.pid)
