"""The vLLM engine against a Hugging Face forward pass: log-probabilities, versions, and refreshes in mid-generation."""

import asyncio
import copy
import dataclasses
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import psutil
import pytest
import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from actors import vllm_start
from actors.engine import Completion, EngineDied, WeightsRefused
from actors.orders import EngineSettings
from actors.receive import ReceiverInfo
from actors.vllm_engine import EngineProcess, VllmEngine
from common.chunk_server import ChunkServer, ServerLimits
from common.chunks import ChunkRequest
from common.config import LoraConfig, TinyModelConfig
from common.delta import encode_delta
from common.trajectory import Sampling, VersionSpan
from common.weights import Adapted, Offer, buffer_bytes, layout, sealed
from learner.model.lora import adapters_of
from learner.model.packed_model import load_model
from learner.pack import TokenSequence, pack
from learner.publisher.lineage import continued
from learner.publisher.published import adapted_folder, published_tensors
from learner.ranks import Ranks
from tests.tiny_model import FLOAT32
from tools.tiny_model import make_tiny_model

T = TypeVar("T")
MAX_TOKENS = 320
TOLERANCE = 1e-3
PROMPT = [7, 300, 12, 45, 501, 8, 99, 230]
ONES = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=24)
LONG = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=200)


class Offers:
    """Serves versions as a publisher does; `gate` holds every reply back while it is clear."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._buffers: dict[str, bytearray] = {}
        limits = ServerLimits(fan_out=8, bytes_per_s=0, chunk_bytes=1 << 16)
        self._server = ChunkServer("127.0.0.1", self._read, limits=limits, key=None)

    def offer(self, model: torch.nn.Module, *, policy_version: int) -> Offer:
        """Serve the weights of `model` as `policy_version`."""
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}  # tied ones once
        return self.offer_of(weights, policy_version=policy_version)

    def offer_of(
        self, weights: dict[str, torch.Tensor], *, policy_version: int, adapted: Adapted | None = None
    ) -> Offer:
        """Serve these tensors, all float32: whole weights, or adapters."""
        entries = layout((name, "float32", tuple(value.shape)) for name, value in weights.items())
        buffer = bytearray(buffer_bytes(entries))
        for entry in entries:
            buffer[entry.offset : entry.offset + entry.num_bytes] = weights[entry.name].numpy().tobytes()
        manifest = sealed(entries, memoryview(buffer), policy_version=policy_version, learner_epoch=1, adapted=adapted)
        self._buffers[manifest.root] = buffer
        return Offer(manifest=manifest, pull_endpoint=self._server.endpoint)

    def delta_offer(self, model: torch.nn.Module, last: Offer) -> Offer:
        """Serve the weights of `model` as the version after `last`, by nothing but a delta on it."""
        whole = self.offer(model, policy_version=last.manifest.policy_version + 1)
        old, new = (self._buffers.pop(offer.manifest.root) for offer in (last, whole))
        delta = encode_delta(memoryview(old), memoryview(new), whole.manifest.tensors)
        assert delta is not None
        manifest = continued(whole.manifest, last.manifest, delta, anchor_every=10)
        self._buffers[manifest.deltas[-1].blob.root] = bytearray(delta)
        return msgspec.structs.replace(whole, manifest=manifest)

    def corrupt(self, offer: Offer) -> None:
        """Flip one bit of what is served for `offer`."""
        self._buffers[offer.manifest.root][1000] ^= 1

    def close(self) -> None:
        self.gate.set()
        self._server.close()

    def _read(self, request: ChunkRequest) -> bytes:
        self.gate.wait(60)
        return bytes(self._buffers[request.root][request.offset : request.offset + request.num_bytes])


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The same architecture with three sets of weights, as Hugging Face runs it; version 0 is the folder's."""

    folder: Path
    models: dict[int, Qwen3ForCausalLM]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    words = [a + b for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"]
    make_tiny_model(folder, texts=words, config=TinyModelConfig(), max_tokens=MAX_TOKENS, seed=3)
    first = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Policies(folder=folder, models={0: first, 1: changed(first, seed=1), 2: changed(first, seed=2)})


@pytest.fixture(scope="module")
def server() -> Iterator[Offers]:
    server = Offers()
    yield server
    server.close()


@pytest.fixture(scope="module")
def keeping(policies: Policies) -> Iterator[VllmEngine]:
    """One engine for the file, which runs in order: it serves version 0 up to the first refresh."""
    engine = started(policies, kv_policy="keep")
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def recomputing(policies: Policies) -> Iterator[VllmEngine]:
    engine = started(policies, kv_policy="recompute")
    yield engine
    asyncio.run(engine.close())


def started(policies: Policies, *, kv_policy: str) -> VllmEngine:
    settings = EngineSettings(
        model_path=str(policies.folder),
        policy_version=0,
        seed=11,
        max_tokens=MAX_TOKENS,
        dtype="float32",
        kv_cache_bytes=64 << 20,
        max_episodes=32,
        tensor_parallel=1,
        kv_policy=kv_policy,
        receiver=ReceiverInfo(
            redis_url="redis://127.0.0.1:1", run_id="test", actor="a0", transport="pull", chunk_bytes=1 << 16,
            timeout_s=60.0, disk="",
        ),
    )  # fmt: skip
    return VllmEngine(EngineProcess(), settings)


def changed(model: Qwen3ForCausalLM, *, seed: int) -> Qwen3ForCausalLM:
    """A copy with other weights, far enough away that no log-probability of one passes for the other's."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return other


@torch.no_grad()
def forward_logprobs(
    model: Qwen3ForCausalLM, prompt: list[int], tokens: list[int], *, temperature: float = 1.0
) -> torch.Tensor:
    """The log-probability of each of `tokens` after `prompt`, by one forward pass."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return picked(logits / temperature, tokens)


@torch.no_grad()
def kept_kv_logprobs(
    old: Qwen3ForCausalLM, new: Qwen3ForCausalLM, prompt: list[int], tokens: list[int], *, boundary: int
) -> torch.Tensor:
    """The log-probabilities of tokens[boundary:] by `new`, on top of the KV that `old` made of what came before.

    The last token before the boundary was sampled by `old` but not yet fed back: `new` reads it.
    """
    sequence = prompt + tokens
    fed = len(prompt) + boundary - 1
    cache = DynamicCache(config=old.config)
    old(torch.tensor([sequence[:fed]]), past_key_values=cache, use_cache=True)
    logits = new(torch.tensor([sequence[fed:]]), past_key_values=cache, use_cache=True).logits[0, :-1]
    return picked(logits, tokens[boundary:])


def picked(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def worst(completion: Completion, expected: torch.Tensor, *, start: int = 0) -> float:
    """The largest difference, in nats, from token `start` on."""
    return float((torch.tensor(completion.logprobs[start:]) - expected).abs().max())


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One generation that a commit fell into."""

    prompt: list[int]
    completion: Completion
    boundary: int  # tokens before the commit


async def refreshed_in_mid_generation(engine: VllmEngine, offer: Offer) -> tuple[list[Crossing], float]:
    """A stage while one generation runs, and a commit while eight do: those that it fell into, and the pause.

    All must end as if nothing had happened. By chance a few end before the commit, but never most of them.
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
    assert len(crossings) >= 4
    return crossings, pause_s


def check_spans(crossing: Crossing) -> None:
    """Version 0 up to the commit, version 1 from there to the end."""
    assert crossing.completion.version_spans == [
        VersionSpan(start=0, stop=crossing.boundary, policy_version=0),
        VersionSpan(start=crossing.boundary, stop=len(crossing.completion.tokens), policy_version=1),
    ]


async def deaths_of(engine: VllmEngine, end: Callable[[], Awaitable[object]]) -> set[str]:
    """What eight generations hear when `end` comes right behind the orders for them; few may draw their end before."""
    running = [asyncio.create_task(engine.generate([*PROMPT, member], LONG)) for member in range(8)]
    await asyncio.sleep(0)  # each has placed its order
    await end()
    results = await asyncio.gather(*running, return_exceptions=True)
    deaths = [result for result in results if not isinstance(result, Completion)]
    assert len(deaths) > 4 and all(isinstance(death, EngineDied) for death in deaths), results
    return {str(death) for death in deaths}


async def until(holds: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 — another thread makes it true
            await asyncio.sleep(0.005)


def run(awaitable: Awaitable[T]) -> T:
    async def main() -> T:
        async with asyncio.timeout(120):
            return await awaitable

    return asyncio.run(main())


def test_logprobs_are_those_of_a_forward_pass(keeping: VllmEngine, policies: Policies) -> None:
    completion = run(keeping.generate(PROMPT, ONES))
    assert len(completion.tokens) == len(completion.logprobs) > 0
    assert worst(completion, forward_logprobs(policies.models[0], PROMPT, completion.tokens)) < TOLERANCE


def test_logprobs_are_of_the_distribution_at_the_true_temperature(keeping: VllmEngine, policies: Policies) -> None:
    cooler = Sampling(temperature=0.7, top_p=1.0, top_k=0, max_turn_tokens=24)
    completion = run(keeping.generate(PROMPT, cooler))
    at_temperature = forward_logprobs(policies.models[0], PROMPT, completion.tokens, temperature=0.7)
    assert worst(completion, at_temperature) < TOLERANCE
    assert worst(completion, forward_logprobs(policies.models[0], PROMPT, completion.tokens)) > 10 * TOLERANCE


def test_greedy_takes_the_likeliest_tokens(keeping: VllmEngine, policies: Policies) -> None:
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_turn_tokens=12)
    completion = run(keeping.generate(PROMPT, greedy))
    sequence = list(PROMPT)
    with torch.no_grad():
        for _ in completion.tokens:
            sequence.append(int(policies.models[0](torch.tensor([sequence])).logits[0, -1].argmax()))
    assert completion.tokens == sequence[len(PROMPT) :]


def test_a_seed_fixes_the_tokens_whatever_runs_beside(keeping: VllmEngine) -> None:
    async def alone_and_in_company() -> list[Completion]:
        alone = await keeping.generate(PROMPT, ONES, seed=5)
        beside = [keeping.generate([*PROMPT, 1], ONES, seed=6), keeping.generate([*PROMPT, 2], ONES)]
        in_company, other, _ = await asyncio.gather(keeping.generate(PROMPT, ONES, seed=5), *beside)
        return [alone, in_company, other]

    alone, in_company, other = run(alone_and_in_company())
    assert alone.tokens == in_company.tokens != other.tokens


def test_a_turn_ends_with_its_end_token_or_at_its_limit(keeping: VllmEngine, policies: Policies) -> None:
    end = policies.models[0].generation_config.eos_token_id

    async def many() -> list[Completion]:
        return await asyncio.gather(*(keeping.generate([*PROMPT, member], LONG, seed=member) for member in range(24)))

    completions = run(many())
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    cut = [completion for completion in completions if completion.finish_reason == "length"]
    assert stopped and cut
    assert all(completion.tokens.index(end) == len(completion.tokens) - 1 for completion in stopped)
    assert all(end not in completion.tokens and len(completion.tokens) == 200 for completion in cut)


def test_a_generation_ends_where_the_context_does(keeping: VllmEngine) -> None:
    prompt = [5] * (MAX_TOKENS - 3)
    assert len(run(keeping.generate(prompt, ONES, seed=1)).tokens) <= 3
    with pytest.raises(ValueError, match=rf"a prompt of {MAX_TOKENS} tokens; .*`model.max_tokens` = {MAX_TOKENS}"):
        run(keeping.generate([5] * MAX_TOKENS, ONES))


def test_tokens_of_another_vocabulary_are_refused_and_hurt_nobody(keeping: VllmEngine) -> None:
    with pytest.raises(ValueError, match=r"token ids in \[5, 90000\]"):
        run(keeping.generate([5, 90_000], ONES))
    assert run(keeping.generate(PROMPT, ONES)).tokens


def test_a_cancelled_generate_frees_its_request(keeping: VllmEngine) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(keeping.generate(PROMPT, LONG))
        while keeping.load().kv_use == 0:
            if task.done():  # before anyone looked
                task = asyncio.create_task(keeping.generate(PROMPT, LONG))
            await asyncio.sleep(0.005)
        task.cancel()
        await until(lambda: keeping.load().num_running == 0 and keeping.load().kv_use == 0)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())


def test_generation_goes_on_during_a_slow_stage(keeping: VllmEngine, policies: Policies, server: Offers) -> None:
    async def generated_meanwhile() -> int:
        await keeping.generate(PROMPT, ONES, seed=0)  # the first is slow, and a publisher that is silent is given up
        server.gate.clear()
        staging = asyncio.create_task(keeping.stage(server.offer(policies.models[1], policy_version=1)))
        before = keeping.load().generated_tokens
        await keeping.generate(PROMPT, ONES, seed=1)
        await keeping.generate(PROMPT, ONES, seed=2)
        assert not staging.done()
        server.gate.set()
        await staging
        return keeping.load().generated_tokens - before

    assert run(generated_meanwhile()) > 20
    assert keeping.policy_version == 0


def test_corrupt_weights_are_refused_and_the_old_ones_serve_on(
    keeping: VllmEngine, policies: Policies, server: Offers
) -> None:
    offer = server.offer(policies.models[2], policy_version=1)
    server.corrupt(offer)
    with pytest.raises(WeightsRefused, match="does not match its hash"):
        run(keeping.stage(offer))
    with pytest.raises(ValueError, match="commit of version 1, but staged is None"):
        run(keeping.commit(1))
    completion = run(keeping.generate(PROMPT, ONES))
    assert completion.version_spans == [VersionSpan(start=0, stop=len(completion.tokens), policy_version=0)]
    assert worst(completion, forward_logprobs(policies.models[0], PROMPT, completion.tokens)) < TOLERANCE


def test_weights_of_another_model_are_refused_before_they_travel(
    keeping: VllmEngine, policies: Policies, server: Offers
) -> None:
    offer = server.offer(policies.models[1].model.layers, policy_version=1)
    server.gate.clear()
    with pytest.raises(WeightsRefused, match="does not fit the model"):
        run(keeping.stage(offer))
    server.gate.set()


def test_a_refresh_in_mid_generation_keeps_requests_and_their_kv(
    keeping: VllmEngine, policies: Policies, server: Offers
) -> None:
    old, new = policies.models[0], policies.models[1]
    offer = server.offer(new, policy_version=1)
    crossings, pause_s = run(refreshed_in_mid_generation(keeping, offer))
    assert 0 < pause_s < 10
    for crossing in crossings:
        check_spans(crossing)
        tokens, boundary = crossing.completion.tokens, crossing.boundary
        by_old = forward_logprobs(old, crossing.prompt, tokens)
        by_kept_kv = kept_kv_logprobs(old, new, crossing.prompt, tokens, boundary=boundary)
        assert worst(crossing.completion, torch.cat([by_old[:boundary], by_kept_kv])) < TOLERANCE
        assert worst(crossing.completion, by_old[boundary:], start=boundary) > 10 * TOLERANCE


def test_after_a_refresh_new_requests_are_of_the_new_weights_alone(
    keeping: VllmEngine, policies: Policies, server: Offers
) -> None:
    """The prompt was served before: neither its cached prefix nor a packed output layer may survive a commit."""
    run(keeping.generate(PROMPT * 16, ONES))
    offer = server.offer(policies.models[2], policy_version=2)
    run(keeping.stage(offer))
    run(keeping.commit(2))
    completion = run(keeping.generate(PROMPT * 16, ONES))
    assert keeping.policy_version == 2
    assert completion.version_spans == [VersionSpan(start=0, stop=len(completion.tokens), policy_version=2)]
    assert worst(completion, forward_logprobs(policies.models[2], PROMPT * 16, completion.tokens)) < TOLERANCE


def test_a_request_that_a_commit_overtakes_begins_with_the_new_weights(
    keeping: VllmEngine, policies: Policies, server: Offers
) -> None:
    """Ordered before the commit, and with a prompt whose KV the old weights left in the prefix cache."""

    async def overtaken() -> Completion:
        await keeping.generate(PROMPT * 16, ONES)
        await keeping.stage(server.offer(policies.models[1], policy_version=3))
        os.kill(keeping.pid, signal.SIGSTOP)
        generating = asyncio.create_task(keeping.generate(PROMPT * 16, ONES))
        committing = asyncio.create_task(keeping.commit(3))
        await asyncio.sleep(0)  # each has placed its order, in this sequence
        os.kill(keeping.pid, signal.SIGCONT)
        await committing
        return await generating

    completion = run(overtaken())
    assert completion.version_spans == [VersionSpan(start=0, stop=len(completion.tokens), policy_version=3)]
    assert worst(completion, forward_logprobs(policies.models[1], PROMPT * 16, completion.tokens)) < TOLERANCE


def test_an_engine_that_idles_is_heard_of_every_second(keeping: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_max_silence_s", 3.0)
    run(asyncio.sleep(5.0))
    assert run(keeping.generate(PROMPT, ONES)).tokens


def test_when_its_process_is_killed_all_who_wait_hear_of_it(keeping: VllmEngine) -> None:
    """The last test of this engine."""

    async def kill() -> None:
        os.kill(keeping.pid, signal.SIGKILL)

    async def killed() -> None:
        assert await deaths_of(keeping, kill) == {"the engine process ended with exit code -9"}
        with pytest.raises(EngineDied, match="exit code -9"):
            await keeping.generate(PROMPT, ONES)

    run(killed())


def test_a_refresh_can_recompute_the_kv_of_running_requests(
    recomputing: VllmEngine, policies: Policies, server: Offers
) -> None:
    old, new = policies.models[0], policies.models[1]
    crossings, _ = run(refreshed_in_mid_generation(recomputing, server.offer(new, policy_version=1)))
    for crossing in crossings:
        check_spans(crossing)
        tokens, boundary = crossing.completion.tokens, crossing.boundary
        by_old = forward_logprobs(old, crossing.prompt, tokens)
        by_new = forward_logprobs(new, crossing.prompt, tokens)
        assert worst(crossing.completion, torch.cat([by_old[:boundary], by_new[boundary:]])) < TOLERANCE


def test_a_delta_is_staged_beside_the_weights_that_serve_and_commits_to_what_was_published(
    recomputing: VllmEngine, policies: Policies, server: ChunkServer
) -> None:
    last, nudged = server.offer(policies.models[2], policy_version=2), copy.deepcopy(policies.models[2])
    with torch.no_grad():
        for parameter in nudged.parameters():
            parameter.view(-1)[::10] += 0.3
    run(recomputing.stage(last))
    run(recomputing.commit(2))
    run(recomputing.stage(server.delta_offer(nudged, last)))
    for version, model, other in ((2, policies.models[2], nudged), (3, nudged, policies.models[2])):
        completion = run(recomputing.generate(PROMPT, ONES))
        assert completion.version_spans == [VersionSpan(start=0, stop=len(completion.tokens), policy_version=version)]
        assert worst(completion, forward_logprobs(model, PROMPT, completion.tokens)) < TOLERANCE
        assert worst(completion, forward_logprobs(other, PROMPT, completion.tokens)) > 10 * TOLERANCE
        if version == 2:
            run(recomputing.commit(3))


def test_published_adapters_are_merged_by_the_engine_to_the_learners_log_probabilities(
    recomputing: VllmEngine, policies: Policies, server: ChunkServer, ranks: Ranks
) -> None:
    lora = LoraConfig(rank=4, alpha=12, target_modules=["q_proj", "down_proj"])
    model = load_model(policies.folder, ranks=ranks, settings=dataclasses.replace(FLOAT32, lora=lora))
    with torch.no_grad():
        for adapter in adapters_of(model.causal_lm).values():
            adapter.up.to_local().normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    tensors = dict(published_tensors(model, dtype="float32"))
    offer = server.offer_of(tensors, policy_version=4, adapted=adapted_folder(model))
    run(recomputing.stage(offer))
    run(recomputing.commit(4))
    completion = run(recomputing.generate(PROMPT, ONES))
    sequence = TokenSequence(
        tokens=np.array(PROMPT + completion.tokens, dtype=np.int32),
        loss_mask=np.arange(len(PROMPT) + len(completion.tokens)) >= len(PROMPT),
        behaviour_logprobs=np.zeros(len(PROMPT) + len(completion.tokens), dtype=np.float32),
        advantages=np.zeros(len(PROMPT) + len(completion.tokens), dtype=np.float32),
        kept=None,
    )
    with torch.no_grad():
        learners = model(pack([sequence])).logprobs
    assert worst(completion, learners[-len(completion.tokens) :]) < TOLERANCE
    assert worst(completion, forward_logprobs(policies.models[0], PROMPT, completion.tokens)) > 10 * TOLERANCE


def test_what_fails_inside_the_process_is_told_to_all_who_wait(recomputing: VllmEngine) -> None:
    """A commit that nothing was staged for breaks vLLM's update session. The last test of this engine."""

    async def fail() -> None:
        recomputing._staged_version = 9  # the check on this side would refuse it
        with pytest.raises(EngineDied, match="the engine process failed: AssertionError: commit before the stage"):
            await recomputing.commit(9)

    async def failed() -> None:
        (death,) = await deaths_of(recomputing, fail)
        assert "AssertionError" in death

    run(failed())


def test_after_its_close_every_call_says_so(policies: Policies) -> None:
    async def closed_while_generating() -> None:
        assert await deaths_of(engine, engine.close) == {"the engine ended: close() was called"}
        with pytest.raises(EngineDied, match="close"):
            await engine.generate(PROMPT, ONES)
        await engine.close()

    engine = started(policies, kv_policy="keep")
    run(closed_while_generating())
    assert not psutil.pid_exists(engine.pid)


def test_a_process_that_hangs_is_killed() -> None:
    process = EngineProcess()
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineDied, match="the engine process hangs: it has sent nothing for 2 s"):
        process.receive(timeout_s=2.0)
    assert not psutil.pid_exists(process.pid)


def test_sizes_that_vllm_refuses_are_a_value_error_and_leave_no_process(policies: Policies) -> None:
    process = EngineProcess()
    receiver = ReceiverInfo(
        redis_url="", run_id="test", actor="a0", transport="pull", chunk_bytes=1 << 16, timeout_s=1.0,
        disk="",
    )  # fmt: skip
    settings = EngineSettings(
        model_path=str(policies.folder), policy_version=0, seed=11, max_tokens=1 << 20, dtype="float32",
        kv_cache_bytes=64 << 20, max_episodes=32, tensor_parallel=1, kv_policy="keep", receiver=receiver,
    )  # fmt: skip
    with pytest.raises(ValueError, match="max_model_len"):
        VllmEngine(process, settings)
    assert not psutil.pid_exists(process.pid)


def test_with_a_size_of_its_kv_cache_an_engine_asks_for_no_share_of_its_gpu() -> None:
    """As of vLLM 0.32: with that size it respects no share, but does not start where the share is not free."""
    assert vllm_start._gpu_options(0) == {"gpu_memory_utilization": 0.9}
    assert vllm_start._gpu_options(16 << 30) == {"kv_cache_memory_bytes": 16 << 30, "gpu_memory_utilization": 0.01}
    assert vllm_start._cpu_options(0)["kv_cache_memory_bytes"] == 64 << 20
