"""Measures one family: does vLLM compute what the learner does, at the start, after each publish, with adapters?

A cell is the largest difference of a token's log-probability in nats, or the text of the refusal. The engine generates,
and the learner scores what it generated: so the cells do not rely on the probe, which only decides about refusals.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from slipstream.actors.engine.engine import EngineDied
from slipstream.actors.engine.orders import EngineSettings
from slipstream.actors.engine.vllm_engine import EngineProcess, VllmEngine
from slipstream.actors.weights.receive import ReceiverInfo
from slipstream.actors.weights.refused import WeightsRefused
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.config.model_config import LoraConfig, ModelConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Sampling
from slipstream.common.transfer.chunk_server import ChunkServer, ServerLimits
from slipstream.common.transfer.chunks import ChunkRequest
from slipstream.common.transfer.probe import Probe
from slipstream.common.transfer.weights import Adapted, Offer, buffer_bytes, layout, sealed
from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.model.export import save_hf
from slipstream.learner.model.lora import adapters_of
from slipstream.learner.model.packed_model import ModelSettings, PackedModel, load_model, name_of
from slipstream.learner.model.probe_score import probe_of
from slipstream.learner.model.skeleton import auto_class
from slipstream.learner.model.weight_shards import named_shards
from slipstream.learner.publisher.published import Published, adapted_folder
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.lab.families.tiny import MAX_TOKENS, Family, save_tiny, sequence

COLUMNS = ("load", "pack", "version 0", "publish 1", "publish 2", "LoRA", "export")
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=64)
LENGTHS = (70, 41, 9)
MOVED = 0.05  # standard deviation of what a publish adds to every weight
MAX_SHOWN_CHARS = 240
NOT_REACHED = "-"


def measure(family: Family, root: Path, *, ranks: Ranks) -> dict[str, str]:
    """One cell for each of COLUMNS."""
    dtype, cells = family.dtype, dict.fromkeys(COLUMNS, NOT_REACHED)
    try:
        folder = save_tiny(family, root / "model")
        model = load_model(folder, ranks=ranks, settings=model_settings(dtype))
    except Exception as error:  # the code of any family
        return cells | {"load": _short(error)}
    cells |= {"load": "yes", "pack": _cell(partial(_difference_of_packing, model, folder, dtype))}
    server, engine = Versions(), None
    try:
        engine = VllmEngine(EngineProcess(), engine_settings(folder, dtype))
        for version, column in enumerate(("version 0", "publish 1", "publish 2")):
            if version:
                move(model, seed=version)
            cells[column] = _cell(partial(served, engine, server, model, version, dtype))
        adapted = load_model(folder, ranks=ranks, settings=model_settings(dtype, lora_rank=4))
        move(adapted, seed=3)
        cells["LoRA"] = _cell(partial(served, engine, server, adapted, 3, dtype))
    except ValueError as error:  # from vLLM's start, or from peft
        column = "version 0" if engine is None else "LoRA"
        cells[column] = _short(error)
    except EngineDied as error:
        cells["version 0"] = _short(error)
    finally:
        if engine is not None:
            asyncio.run(engine.close())
        server.close()
    move(model, seed=4)  # the export is of the weights now, not of those in the folder
    return cells | {"export": _cell(partial(_difference_of_export, model, root / "export", dtype, ranks))}


class Versions:
    """Serves published versions from memory, as the publisher process does."""

    def __init__(self) -> None:
        self._buffers: dict[str, memoryview] = {}
        limits = ServerLimits()
        self._server = ChunkServer("127.0.0.1", self._read, limits=limits, key=None)

    def offer(self, model: PackedModel, *, policy_version: int, dtype: str) -> Offer:
        """Publish the weights of `model`, or its adapters, with their probe."""
        published, probe = Published(model, dtype=dtype), probe_of(model, torch.device("cpu"))
        tensors = dict(published.tensors())
        assert [entry.name for entry in published.layout] == list(tensors)
        return self.offer_of(tensors, policy_version=policy_version, probe=probe, adapted=adapted_folder(model))

    def offer_of(
        self, tensors: dict[str, torch.Tensor], *, policy_version: int, probe: Probe, adapted: Adapted | None = None
    ) -> Offer:
        """Publish these tensors."""
        entries = layout((name, name_of(each.dtype), tuple(each.shape)) for name, each in tensors.items())
        buffer = torch.zeros(buffer_bytes(entries), dtype=torch.uint8)
        for entry in entries:
            data = tensors[entry.name].contiguous().flatten().view(torch.uint8)
            buffer[entry.offset : entry.offset + entry.num_bytes] = data
        held = buffer.numpy().data
        manifest = sealed(entries, held, policy_version=policy_version, learner_epoch=1, adapted=adapted, probe=probe)
        self._buffers[manifest.root] = held
        return Offer(manifest=manifest, pull_endpoint=self._server.endpoint)

    def close(self) -> None:
        self._server.close()

    def _read(self, request: ChunkRequest) -> bytes:
        return bytes(self._buffers[request.root][request.offset : request.offset + request.num_bytes])


def model_settings(dtype: str, *, lora_rank: int = 0) -> ModelSettings:
    lora = LoraConfig(rank=lora_rank, alpha=8) if lora_rank else LoraConfig()
    return ModelSettings(dtype=dtype, temperature=1.0, chunk_tokens=64, max_tokens=MAX_TOKENS, lora=lora)


def engine_settings(
    folder: Path, dtype: Any, *, max_tokens: int = MAX_TOKENS, policy_version: int = -1, **actors: Any
) -> EngineSettings:
    """Of the model in `folder`; `actors` are settings of that section."""
    usual: dict[str, Any] = {"kv_cache_bytes": 32 << 20, "max_episodes": 8}
    return EngineSettings(
        model=ModelConfig(dtype=dtype, max_tokens=max_tokens),
        actors=ActorsConfig(**(usual | actors)),
        model_path=str(folder),
        policy_version=policy_version,
        seed=1,
        receiver=ReceiverInfo(
            redis_url="redis://127.0.0.1:1", run_id="families", actor="a0", transport="pull", timeout_s=60.0
        ),
    )


def served(engine: VllmEngine, server: Versions, model: PackedModel, version: int, dtype: str) -> float:
    """Publish `model`, have `engine` take it, and compare what both say of sequences that the engine generates."""

    async def generate() -> list[tuple[list[int], list[float]]]:
        await engine.stage(server.offer(model, policy_version=version, dtype=dtype))
        await engine.commit(version)
        prompts = [sequence(length, seed=length).tokens.tolist() for length in LENGTHS]
        completions = await asyncio.gather(*(engine.generate(prompt, SAMPLING) for prompt in prompts))
        return [
            (prompt + completion.tokens, completion.logprobs)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    worst = 0.0
    for tokens, logprobs in asyncio.run(generate()):
        scored = score(model, [sequence(0, seed=0, tokens=tokens, prompt=len(tokens) - len(logprobs))])
        worst = max(worst, float((scored - torch.tensor(logprobs)).abs().max()))
    return worst


@torch.no_grad()
def score(model: PackedModel, sequences: list[TokenSequence]) -> torch.Tensor:
    """The learner's log-probabilities of their loss tokens."""
    logprobs: torch.Tensor = model(pack(sequences)).logprobs
    return logprobs


def _difference_of_packing(model: PackedModel, folder: Path, dtype: str) -> float:
    """Packed sequences by the learner, against each alone by transformers."""
    sequences = [sequence(length, seed=length) for length in LENGTHS]
    return _apart(model, _by_transformers(folder, dtype), sequences)


def _difference_of_export(model: PackedModel, folder: Path, dtype: str, ranks: Ranks) -> float:
    save_hf(model, folder, ranks=ranks)
    return _apart(model, _by_transformers(folder, dtype), [sequence(length, seed=length) for length in LENGTHS])


def _by_transformers(folder: Path, dtype: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return auto_class(config).from_pretrained(folder, dtype=dtype, attn_implementation="eager", trust_remote_code=False)


@torch.no_grad()
def _apart(model: PackedModel, causal_lm: PreTrainedModel, sequences: list[TokenSequence]) -> float:
    found, expected = score(model, sequences), []
    for each in sequences:
        tokens = torch.from_numpy(each.tokens).long()
        logits = causal_lm(input_ids=tokens[None], use_cache=False).logits[0].float()
        if model.absent is not None:
            logits[:, model.absent] = -torch.inf
        table = logits.log_softmax(-1)
        expected.append(table[:-1].gather(1, tokens[1:, None]).squeeze(1))
    return float((found - torch.cat(expected)).abs().max())


@torch.no_grad()
def move(model: PackedModel, *, seed: int) -> None:
    """Add noise to every weight that is trained; adapters are no longer without effect."""
    generator = torch.Generator().manual_seed(seed)
    adapters = adapters_of(model.causal_lm)
    for _, shard in named_shards(model):
        if shard.requires_grad:
            detached = shard.detach()
            assert isinstance(detached, DTensor)
            local = detached.to_local()
            local.add_(torch.randn(local.shape, generator=generator), alpha=0.2 if adapters else MOVED)


def _cell(compute: Callable[[], float]) -> str:
    try:
        return f"{compute():.0e}"
    except (WeightsRefused, ConfigError) as error:
        return _short(error)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
