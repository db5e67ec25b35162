"""Generations by a vLLM engine, into which commits and deaths fall, compared with forward passes."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch
from transformers import Qwen3ForCausalLM

from slipstream.actors.engine.engine import Completion, EngineDied
from slipstream.actors.engine.vllm_engine import VllmEngine
from slipstream.common.records.trajectory import VersionSpan
from slipstream.common.transfer.weights import Offer
from tests.actors.forward_pass import TOLERANCE, forward_logprobs, kept_kv_logprobs, worst
from tests.actors.vllm_engines import LONG, ONES, PROMPT, run


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One generation that a commit fell into."""

    prompt: list[int]
    completion: Completion
    boundary: int  # tokens before the commit


def committed(engine: VllmEngine, offer: Offer) -> None:
    run(engine.stage(offer))
    run(engine.commit(offer.manifest.policy_version))


async def crossings_of(engine: VllmEngine, offer: Offer) -> tuple[list[Crossing], float]:
    """A stage while one generation runs, and a commit while eight do: those that it fell into, and the pause.

    All must end as if nothing had happened. By chance some end before the commit, more of them on a busy machine.
    """
    prompts = [[*PROMPT, member] for member in range(8)]
    beside = asyncio.create_task(engine.generate(PROMPT, LONG))
    await engine.stage(offer)
    await beside
    running = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in prompts]
    while engine.load().kv_use == 0:  # noqa: ASYNC110 - the commit must not come before them
        await asyncio.sleep(0.005)
    pause_s = await engine.commit(offer.manifest.policy_version)
    completions = await asyncio.gather(*running)
    crossings = [
        Crossing(prompt=prompt, completion=completion, boundary=completion.version_spans[0].stop)
        for prompt, completion in zip(prompts, completions, strict=True)
        if len(completion.version_spans) > 1
    ]
    assert crossings
    return crossings, pause_s


def check_spans(crossing: Crossing) -> None:
    """Version 0 up to the commit, version 1 from there to the end."""
    assert crossing.completion.version_spans == [
        VersionSpan(start=0, stop=crossing.boundary, policy_version=0),
        VersionSpan(start=crossing.boundary, stop=len(crossing.completion.tokens), policy_version=1),
    ]


def check_crossing(crossing: Crossing, old: Qwen3ForCausalLM, new: Qwen3ForCausalLM, *, keeps_kv: bool = False) -> None:
    """Each token has the log-probability by the weights of its version, of the new ones on the KV that they have."""
    check_spans(crossing)
    prompt, tokens, boundary = crossing.prompt, crossing.completion.tokens, crossing.boundary
    if keeps_kv:
        by_new = kept_kv_logprobs(old, new, prompt, tokens, boundary=boundary)
    else:
        by_new = forward_logprobs(new, prompt, tokens)[boundary:]
    by_old = forward_logprobs(old, prompt, tokens)[:boundary]
    assert worst(crossing.completion, torch.cat([by_old, by_new])) < TOLERANCE


def check_completion(completion: Completion, model: Qwen3ForCausalLM, *, version: int, prompt: list[int]) -> None:
    """All of it was sampled by the weights of `model`, and is recorded as of `version`."""
    assert completion.version_spans == [VersionSpan(start=0, stop=len(completion.tokens), policy_version=version)]
    assert worst(completion, forward_logprobs(model, prompt, completion.tokens)) < TOLERANCE


def check_serves(engine: VllmEngine, model: Qwen3ForCausalLM, *, version: int) -> Completion:
    """The engine samples by the weights of `model`; return a completion of PROMPT."""
    completion = run(engine.generate(PROMPT, ONES))
    check_completion(completion, model, version=version, prompt=PROMPT)
    return completion


async def deaths_of(engine: VllmEngine, end: Callable[[], Awaitable[object]]) -> set[str]:
    """What eight generations hear when `end` comes right behind the orders for them; few may draw their end before."""
    running = [asyncio.create_task(engine.generate([*PROMPT, member], LONG)) for member in range(8)]
    await asyncio.sleep(0)  # each has placed its order
    await end()
    results = await asyncio.gather(*running, return_exceptions=True)
    deaths = [result for result in results if not isinstance(result, Completion)]
    assert len(deaths) > 4 and all(isinstance(death, EngineDied) for death in deaths), results
    return {str(death) for death in deaths}
