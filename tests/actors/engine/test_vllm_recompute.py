"""The vLLM engine that recomputes the KV of running requests: refreshes, deltas, adapters, and a failure inside."""

import asyncio
import copy
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from slipstream.actors.engine.engine import EngineDied
from slipstream.actors.engine.vllm_engine import VllmEngine
from slipstream.common.config.model_config import LoraConfig
from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.model.lora import adapters_of
from slipstream.learner.model.packed_model import load_model
from slipstream.learner.publisher.published import Published, adapted_folder
from slipstream.learner.ranks.ranks import Ranks
from tests.actors.forward_pass import TOLERANCE, forward_logprobs, worst
from tests.actors.generations import check_crossing, check_serves, committed, crossings_of, deaths_of
from tests.actors.vllm_engines import ONES, PROMPT, Offers, Policies, run, started
from tests.tools.run.tiny_model import FLOAT32


@pytest.fixture(scope="module")
def recomputing(policies: Policies) -> Iterator[VllmEngine]:
    engine = started(policies.folder, kv_policy="recompute")
    yield engine
    asyncio.run(engine.close())


def test_a_refresh_can_recompute_the_running_kv(recomputing: VllmEngine, policies: Policies, server: Offers) -> None:
    old, new = policies.models[0], policies.models[1]
    crossings, _ = run(crossings_of(recomputing, server.offer(new, policy_version=1)))
    for crossing in crossings:
        check_crossing(crossing, old, new)


def test_a_delta_is_staged_beside_the_weights_that_serve_and_commits_to_what_was_published(
    recomputing: VllmEngine, policies: Policies, server: Offers
) -> None:
    last, nudged = server.offer(policies.models[2], policy_version=2), copy.deepcopy(policies.models[2])
    with torch.no_grad():
        for parameter in nudged.parameters():
            parameter.view(-1)[::10] += 0.3
    committed(recomputing, last)
    run(recomputing.stage(server.delta_offer(nudged, last)))
    for version, model, other in ((2, policies.models[2], nudged), (3, nudged, policies.models[2])):
        completion = check_serves(recomputing, model, version=version)
        assert worst(completion, forward_logprobs(other, PROMPT, completion.tokens)) > 10 * TOLERANCE
        if version == 2:
            run(recomputing.commit(3))


def test_published_adapters_are_merged_by_the_engine_to_the_learners_log_probabilities(
    recomputing: VllmEngine, policies: Policies, server: Offers, ranks: Ranks
) -> None:
    lora = LoraConfig(rank=4, alpha=12)
    model = load_model(policies.folder, ranks=ranks, settings=dataclasses.replace(FLOAT32, lora=lora))
    with torch.no_grad():
        for adapter in adapters_of(model.causal_lm).values():
            adapter.up.to_local().normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    tensors = dict(Published(model, dtype="float32").tensors())
    committed(recomputing, server.offer_of(tensors, policy_version=4, adapted=adapted_folder(model)))
    completion = run(recomputing.generate(PROMPT, ONES))
    tokens = np.array(PROMPT + completion.tokens, dtype=np.int32)
    with torch.no_grad():
        learners = model(pack([TokenSequence.bare(tokens, np.arange(len(tokens)) >= len(PROMPT))])).logprobs
    assert worst(completion, learners[-len(completion.tokens) :]) < TOLERANCE
    assert worst(completion, forward_logprobs(policies.models[0], PROMPT, completion.tokens)) > 10 * TOLERANCE


async def test_what_fails_inside_the_process_is_told_to_all_who_wait(recomputing: VllmEngine) -> None:
    """A commit that nothing was staged for breaks vLLM's update session. The last test of this engine."""

    async def fail() -> None:
        recomputing._staged_version = 9  # the check on this side would refuse it
        with pytest.raises(EngineDied, match="the engine process failed: AssertionError: commit before the stage"):
            await recomputing.commit(9)

    (death,) = await deaths_of(recomputing, fail)
    assert "AssertionError" in death
