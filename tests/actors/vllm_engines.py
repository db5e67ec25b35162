"""A vLLM engine with a tiny model, and offers of weights for it."""

import asyncio
import copy
import threading
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from transformers import Qwen3ForCausalLM

from slipstream.actors.engine.orders import EngineSettings
from slipstream.actors.engine.vllm_engine import EngineProcess, VllmEngine
from slipstream.actors.weights.receive import ReceiverInfo
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.records.trajectory import Sampling
from slipstream.common.transfer.chunk_server import ChunkServer, ServerLimits
from slipstream.common.transfer.chunks import ChunkRequest
from slipstream.common.transfer.delta import encode_delta
from slipstream.common.transfer.weights import Offer, buffer_bytes, layout, sealed
from slipstream.learner.publisher.lineage import continued
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.actors.forward_pass import probe_by
from tests.tools.run.tiny_model import without_absent

T = TypeVar("T")
MAX_TOKENS = 320
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
        self._server = ChunkServer("127.0.0.1", self._read, limits=ServerLimits(chunk_bytes=1 << 16), key=None)

    def offer(self, model: Qwen3ForCausalLM, *, policy_version: int, probed: Qwen3ForCausalLM | None = None) -> Offer:
        """Serve the weights of `model` as `policy_version`, with their probe, or with that of `probed`: a wrong one."""
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}  # tied ones once
        return self.offer_of(weights, policy_version=policy_version, probe=probe_by(probed or model))

    def offer_of(self, weights: dict[str, torch.Tensor], *, policy_version: int, **named: Any) -> Offer:
        """Serve these tensors, all float32: whole weights, or adapters; `named` is for their manifest."""
        entries = layout((name, "float32", tuple(value.shape)) for name, value in weights.items())
        buffer = bytearray(buffer_bytes(entries))
        for entry in entries:
            buffer[entry.offset : entry.offset + entry.num_bytes] = weights[entry.name].numpy().tobytes()
        manifest = sealed(entries, memoryview(buffer), policy_version=policy_version, learner_epoch=1, **named)
        self._buffers[manifest.root] = buffer
        return Offer(manifest=manifest, pull_endpoint=self._server.endpoint)

    def delta_offer(self, model: Qwen3ForCausalLM, last: Offer) -> Offer:
        """Serve the weights of `model` as the version after `last`, by nothing but a delta on it."""
        whole = self.offer(model, policy_version=last.manifest.policy_version + 1)
        old, new = (self._buffers.pop(offer.manifest.root) for offer in (last, whole))
        delta = encode_delta(memoryview(old), memoryview(new), whole.manifest.tensors)
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


def started(
    folder: Path,
    *,
    process: EngineProcess | None = None,
    receiver: ReceiverInfo = RECEIVER,
    model: dict[str, Any] | None = None,
    **actors: Any,
) -> VllmEngine:
    """An engine; `model` and `actors` are settings of these sections."""
    of_model = ModelConfig(**({"max_tokens": MAX_TOKENS, "dtype": "float32"} | (model or {})))
    of_actors = ActorsConfig(**({"kv_cache_bytes": 64 << 20, "max_episodes": 32} | actors))
    start = {"model_path": str(folder), "policy_version": 0, "seed": 11, "receiver": receiver}
    return VllmEngine(process or EngineProcess(), EngineSettings(model=of_model, actors=of_actors, **start))


def changed(model: Qwen3ForCausalLM, *, seed: int) -> Qwen3ForCausalLM:
    """A copy with other weights, far enough away that no log-probability of one passes for the other's."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return other


def run(awaitable: Awaitable[T]) -> T:
    async def main() -> T:
        async with asyncio.timeout(120):
            return await awaitable

    return asyncio.run(main())
