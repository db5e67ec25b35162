"""A mixture of experts with stored buffers, whole or with adapters, in one vLLM engine; and what its probe catches."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from slipstream.actors.engine.engine import Completion
from slipstream.actors.engine.vllm_engine import EngineProcess, VllmEngine
from slipstream.actors.weights.refused import WeightsUnfit
from slipstream.common.records.trajectory import Sampling, VersionSpan
from slipstream.common.transfer.probe import Probe
from slipstream.common.transfer.weights import Offer
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.probe_score import probe_of
from slipstream.learner.publisher.published import Published
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.lab.families.__main__ import BEGIN, END, write_table
from slipstream.tools.lab.families.measure import (
    COLUMNS,
    Versions,
    engine_settings,
    model_settings,
    move,
    score,
    served,
)
from slipstream.tools.lab.families.tiny import FAMILIES, save_tiny, sequence
from tests.actors.vllm_engines import LONG, run
from tests.waiting import until

EXACT = 1e-4
CPU = torch.device("cpu")
PROMPT = sequence(12, seed=5).tokens.tolist()
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(FAMILIES["glm4_moe"], tmp_path_factory.mktemp("glm4_moe"))


@pytest.fixture(scope="module")
def models(folder: Path, ranks: Ranks) -> list[PackedModel]:
    """The folder's model, and the same with other weights."""
    loaded = [load_model(folder, ranks=ranks, settings=model_settings("float32")) for _ in range(3)]
    for seed, model in enumerate(loaded):
        if seed:
            move(model, seed=seed)
    return loaded


@pytest.fixture(scope="module")
def versions() -> Iterator[Versions]:
    server = Versions()
    yield server
    server.close()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    """One engine for the file, which runs in order: it serves version 1 once two versions were published."""
    engine = VllmEngine(EngineProcess(), engine_settings(folder, "float32"))
    yield engine
    asyncio.run(engine.close())


def test_experts_and_buffers_are_the_learners_after_every_publish(
    engine: VllmEngine, versions: Versions, models: list[PackedModel]
) -> None:
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in dict(Published(models[0], dtype="float32").tensors())
    for version in (0, 1):
        assert served(engine, versions, models[version], version, "float32") < EXACT
    assert engine.policy_version == 1


async def test_ids_that_the_tokenizer_lacks_are_never_sampled(engine: VllmEngine, models: list[PackedModel]) -> None:
    assert models[1].absent is not None and len(models[1].absent) > 8
    hot = Sampling(temperature=2.0, top_p=1.0, top_k=0, max_turn_tokens=64)
    completions = await asyncio.gather(*(engine.generate(PROMPT, hot, seed=seed) for seed in range(8)))
    sampled = [token for completion in completions for token in completion.tokens]
    assert len(sampled) > 50 and not set(sampled) & set(models[1].absent.tolist())
    with models[1].at_temperature(2.0):
        for each in completions:
            scored = sequence(0, seed=0, tokens=[*PROMPT, *each.tokens], prompt=len(PROMPT))
            assert float((score(models[1], [scored]) - torch.tensor(each.logprobs)).abs().max()) < EXACT


def with_layers_exchanged(weights: Weights, _: Weights) -> Weights:
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    return weights | dict(zip(names, [weights[name] for name in reversed(names)], strict=True))


def with_stale_experts(weights: Weights, before: Weights) -> Weights:
    return {name: before[name] if ".experts." in name else each for name, each in weights.items()}


def of_the_version_before(_: Weights, before: Weights) -> Weights:
    return before


FAULTS: dict[str, tuple[Callable[[Weights, Weights], Weights], str]] = {
    "a tensor mapped to another": (with_layers_exchanged, "tokens agree|tokens differ"),
    "stale experts": (with_stale_experts, "tokens differ"),
    "other weights": (of_the_version_before, "still those of the version before: the engine computes with old weights"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_version_of_which_the_engine_computes_something_else_is_refused(
    fault: str, engine: VllmEngine, versions: Versions, models: list[PackedModel]
) -> None:
    make, suspect = FAULTS[fault]
    weights, before = (dict(Published(model, dtype="float32").tensors()) for model in (models[2], models[1]))
    offer = versions.offer_of(make(weights, before), policy_version=2, probe=probe_of(models[2], CPU))
    run(engine.stage(offer))
    with pytest.raises(WeightsUnfit, match=f"version 2 is refused by its probe: .* nats a token.*({suspect})"):
        run(engine.commit(2))
    assert engine.policy_version == 1


def another_theta(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters["rope_theta"] *= 30
    config.save_pretrained(folder)


def another_buffer(folder: Path) -> None:
    """vLLM's reload leaves this one out: what the engine read at its start stays."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    biases = {name: torch.randn_like(tensor) for name, tensor in tensors.items() if "correction_bias" in name}
    save_file(tensors | biases, file)


@pytest.mark.parametrize(
    ("change", "suspect"),
    [(another_theta, r"the first \d+ of 95 tokens agree: suspect .* rotary positions"), (another_buffer, "tokens")],
)
def test_a_model_that_differs_in_more_than_its_parameters_is_refused(
    change: Callable[[Path], None],
    suspect: str,
    engine: VllmEngine,
    versions: Versions,
    folder: Path,
    tmp_path: Path,
    ranks: Ranks,
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path)
    other = load_model(tmp_path, ranks=ranks, settings=model_settings("float32"))
    run(engine.stage(versions.offer(other, policy_version=2, dtype="float32")))
    with pytest.raises(WeightsUnfit, match=suspect):
        run(engine.commit(2))


def test_a_probe_that_cannot_agree_is_refused_and_the_engine_lives(
    engine: VllmEngine, versions: Versions, models: list[PackedModel]
) -> None:
    offer = versions.offer(models[2], policy_version=2, dtype="float32")
    of_another = Probe(tokens=[1 << 30, 5], logprobs=[-1.0], tolerance=1.0)
    with pytest.raises(WeightsUnfit, match="version 2: its probe is for another model: token ids in"):
        run(engine.stage(with_probe(offer, of_another)))
    run(engine.stage(with_probe(offer, Probe(tokens=[5, 6], logprobs=[float("nan")], tolerance=1.0))))
    with pytest.raises(WeightsUnfit, match="not finite numbers"):
        run(engine.commit(2))


def with_probe(offer: Offer, probe: Probe) -> Offer:
    return msgspec.structs.replace(offer, manifest=msgspec.structs.replace(offer.manifest, probe=probe))


async def crossed(engine: VllmEngine, offer: Offer) -> list[Completion]:
    """What generations that run while `offer` is committed, and refused, end with."""
    prompts = [[*PROMPT, member] for member in range(8, 14)]
    await engine.stage(offer)
    running = [asyncio.create_task(engine.generate(prompt, LONG, seed=1)) for prompt in prompts]
    await until(lambda: engine.load().kv_use > 0)
    with pytest.raises(WeightsUnfit):
        await engine.commit(2)
    return await asyncio.gather(*running)


def test_no_token_of_refused_weights_leaves_the_engine(
    engine: VllmEngine, versions: Versions, models: list[PackedModel]
) -> None:
    wrong = with_layers_exchanged(dict(Published(models[2], dtype="float32").tensors()), {})
    offer = versions.offer_of(wrong, policy_version=2, probe=probe_of(models[2], CPU))
    for member, completion in enumerate(run(crossed(engine, offer)), start=8):
        spans = [VersionSpan(start=0, stop=len(completion.tokens), policy_version=1)]
        assert completion.version_spans == spans
        scored = sequence(0, seed=0, tokens=[*PROMPT, member, *completion.tokens], prompt=len(PROMPT) + 1)
        assert float((score(models[1], [scored]) - torch.tensor(completion.logprobs)).abs().max()) < EXACT


def test_after_refusals_the_right_version_is_served(
    engine: VllmEngine, versions: Versions, models: list[PackedModel]
) -> None:
    assert served(engine, versions, models[2], 2, "float32") < EXACT


def test_adapters_leave_the_experts_as_they_were(
    engine: VllmEngine, versions: Versions, folder: Path, ranks: Ranks
) -> None:
    adapted = load_model(folder, ranks=ranks, settings=model_settings("float32", lora_rank=4))
    move(adapted, seed=3)
    assert served(engine, versions, adapted, 3, "float32") < EXACT


def test_the_page_has_the_newest_row_of_each_family_and_keeps_the_others(tmp_path: Path) -> None:
    page, table, cells = tmp_path / "page.md", tmp_path / "families.json", dict.fromkeys(COLUMNS, "1e-06")
    cells["load"] = "yes"
    refusal = (
        "version 0 is refused by its probe: the engine's log-probabilities differ from the learner's by 6.2 nats a "
        "token, by 9 at most (allowed: 0.002 and 0.02); 95 of 95 tokens differ"
    )
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    former = {"qwen3": cells | {"pack": "0.5"}, "mistral": cells, "gemma2": cells | {"load": "refused"}}
    table.write_text(json.dumps({"dates": ["2025-12-31"], "families": former}))
    rows = [
        {"family": "qwen3", "date": "2026-01-01", **cells, "pack": "0.5"},
        {"family": "qwen3", "date": "2026-01-02", **cells},
        {"family": "unknown", "date": "2026-01-03", **cells},
        {"family": "llama", "date": "2026-01-01", **cells, "version 0": refusal, "LoRA": "a | b" + "c" * 200},
        {"family": "gemma", "date": "2026-01-01", **cells, "version 0": refusal, "LoRA": "peft"},
        {"family": "gpt2", "date": "2026-01-01", **cells, "publish 1": "2e-03"},
    ]
    write_table(page, table, rows)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "**Alike**, within 0.0001 nats: qwen3; mistral." in text
    (_, _, llama, gpt2) = [line for line in text.splitlines() if line.startswith("|")]
    assert llama == "| llama; gemma | refused: 6.2 nats a token | fails |"
    assert gpt2 == "| gpt2 | 2e-03 | 1e-06 |"
    assert "Measured on 2025-12-31 to 2026-01-02" in text
    written = json.loads(table.read_text())["families"]
    assert set(written) == {"qwen3", "mistral", "gemma2", "llama", "gemma", "gpt2"}
    assert written["llama"]["LoRA"].startswith("a / bccc") and len(written["llama"]["LoRA"]) < 120
