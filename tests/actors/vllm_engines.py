"""A vLLM engine with a tiny model, offers of weights for it, and log-probabilities by a Hugging Face forward pass."""

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from slipstream.actors.engine.engine import Completion, EngineDied
from slipstream.actors.engine.orders import EngineSettings
from slipstream.actors.engine.vllm_engine import EngineProcess, VllmEngine
from slipstream.actors.weights.receive import ReceiverInfo
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.records.trajectory import Sampling, VersionSpan
from slipstream.common.transfer.chunk_server import ChunkServer, ServerLimits
from slipstream.common.transfer.chunks import ChunkRequest
from slipstream.common.transfer.delta import encode_delta
from slipstream.common.transfer.probe import TOLERANCES, Probe
from slipstream.common.transfer.weights import Adapted, Offer, buffer_bytes, layout, sealed
from slipstream.learner.publisher.lineage import continued
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.tools.run.tiny_model import without_absent

T = TypeVar("T")
MAX_TOKENS = 320
TOLERANCE = 1e-3
PROMPT = [7, 300, 12, 45, 501, 8, 99, 230]
ONES = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=24)
LONG = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=200)
RECEIVER = ReceiverInfo(
    redis_url="redis://127.0.0.1:1", run_id="test", actor="a0", transport="pull", chunk_bytes=1 << 16, timeout_s=60.0
)


class Offers:
    """Serves versions as a publisher does; `gate` holds every reply back while it is clear."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._buffers: dict[str, bytearray] = {}
        limits = ServerLimits(chunk_bytes=1 << 16)
        self._server = ChunkServer("127.0.0.1", self._read, limits=limits, key=None)

    def offer(self, model: Qwen3ForCausalLM, *, policy_version: int, probed: Qwen3ForCausalLM | None = None) -> Offer:
        """Serve the weights of `model` as `policy_version`, with their probe, or with that of `probed`: a wrong one."""
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}  # tied ones once
        return self.offer_of(weights, policy_version=policy_version, probe=probe_by(probed or model))

    def offer_of(
        self,
        weights: dict[str, torch.Tensor],
        *,
        policy_version: int,
        adapted: Adapted | None = None,
        probe: Probe | None = None,
    ) -> Offer:
        """Serve these tensors, all float32: whole weights, or adapters."""
        entries = layout((name, "float32", tuple(value.shape)) for name, value in weights.items())
        buffer = bytearray(buffer_bytes(entries))
        for entry in entries:
            buffer[entry.offset : entry.offset + entry.num_bytes] = weights[entry.name].numpy().tobytes()
        manifest = sealed(
            entries, memoryview(buffer), policy_version=policy_version, learner_epoch=1, adapted=adapted, probe=probe
        )
        self._buffers[manifest.root] = buffer
        return Offer(manifest=manifest, pull_endpoint=self._server.endpoint)

    def delta_offer(self, model: Qwen3ForCausalLM, last: Offer) -> Offer:
        """Serve the weights of `model` as the version after `last`, by nothing but a delta on it."""
        whole = self.offer(model, policy_version=last.manifest.policy_version + 1)
        old, new = (self._buffers.pop(offer.manifest.root) for offer in (last, whole))
        delta = encode_delta(memoryview(old), memoryview(new), whole.manifest.tensors)
        assert delta is not None
        manifest = continued(whole.manifest, last.manifest, delta, anchor_every=10)
        self._buffers[manifest.deltas[-1].blob.root] = bytearray(delta)
        return msgspec.structs.replace(whole, manifest=manifest)

    def corrupt(self, offer: Offer) -> None:
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


def make_policies(folder: Path, shape: TinyShape) -> Policies:
    words = [a + b for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"]
    make_tiny_model(folder, texts=words, shape=shape, max_tokens=MAX_TOKENS, seed=3)
    first = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    without_absent(first, folder)
    return Policies(folder=folder, models={0: first, 1: changed(first, seed=1), 2: changed(first, seed=2)})


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return make_policies(tmp_path_factory.mktemp("model") / "tiny", TinyShape())


@pytest.fixture(scope="module")
def server() -> Iterator[Offers]:
    server = Offers()
    yield server
    server.close()


def started(
    folder: Path,
    *,
    process: EngineProcess | None = None,
    receiver: ReceiverInfo = RECEIVER,
    model: dict[str, Any] | None = None,
    **actors: Any,
) -> VllmEngine:
    """An engine; `model` and `actors` are settings of these sections."""
    of_model: dict[str, Any] = {"max_tokens": MAX_TOKENS, "dtype": "float32"}
    of_actors: dict[str, Any] = {"kv_cache_bytes": 64 << 20, "max_episodes": 32}
    order = EngineSettings(
        model=ModelConfig(**(of_model | (model or {}))),
        actors=ActorsConfig(**(of_actors | actors)),
        model_path=str(folder),
        policy_version=0,
        seed=11,
        receiver=receiver,
    )
    return VllmEngine(process or EngineProcess(), order)


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


def probe_by(model: Qwen3ForCausalLM) -> Probe:
    """The probe of `model`, by Hugging Face's forward pass."""
    tokens = [7 + 5 * place % 600 for place in range(64)]
    logprobs = forward_logprobs(model, tokens[:1], tokens[1:])
    return Probe(tokens=tokens, logprobs=logprobs.tolist(), tolerance=TOLERANCES["float32"])


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
    whole = VersionSpan(start=0, stop=len(completion.tokens), policy_version=version)
    assert completion.version_spans == [whole]
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


def run(awaitable: Awaitable[T]) -> T:
    async def main() -> T:
        async with asyncio.timeout(120):
            return await awaitable

    return asyncio.run(main())
