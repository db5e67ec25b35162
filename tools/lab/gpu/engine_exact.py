"""Whether every token is of the version on its label, while an engine commits again and again.

    python -m slipstream.tools.lab.gpu.engine_exact MODEL [--dtype bfloat16] [--commits 8] [--kv-policy keep]

An engine generates without pause while versions are staged and committed: small random changes of MODEL's weights, each
with its probe. Afterwards each token's log-probability is computed by transformers in float32 under the version of its
label, with the keys and values of earlier tokens as the versions before made them, and once as if the label were of the
version before, and of the version after. Prints one JSON line.
"""

import argparse
import asyncio
import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from slipstream.actors.engine.engine import Completion
from slipstream.actors.engine.vllm_engine import EngineProcess, VllmEngine
from slipstream.common.records.trajectory import Sampling
from slipstream.common.transfer.probe import TOLERANCES, Probe
from slipstream.common.transfer.weights import Offer
from slipstream.tools.lab.families.measure import Versions, engine_settings
from slipstream.tools.lab.gpu.turn import add_turn, await_turn

NUM_VERSIONS = 3  # sets of weights, committed in turn under rising numbers
CHANGE = 0.05  # of a weight's deviation: far enough that no version's log-probabilities pass for another's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--commits", type=int, default=8)
    parser.add_argument("--kv-policy", default="keep", choices=("keep", "recompute"))
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--kv-bytes", type=int, default=4 << 30)
    add_turn(parser)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = _models(options.model, getattr(torch, options.dtype), device)
    server = Versions()
    offers = [
        _offer(server, models[version % NUM_VERSIONS], version, options.dtype)
        for version in range(1, options.commits + 1)
    ]
    done, pauses, seconds = asyncio.run(_run(options, offers))
    server.close()
    report = _compared(done, models, keep=options.kv_policy == "keep")
    report |= {
        "dtype": options.dtype,
        "kv_policy": options.kv_policy,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "commits": options.commits,
        "pause_ms": [round(1000 * pause, 2) for pause in pauses],
        "ms_a_token": round(1000 * seconds * options.at_once / sum(len(each.tokens) for _, each in done), 2),
    }
    print(json.dumps(report), flush=True)


def _offer(server: Versions, model: Any, version: int, dtype: str) -> Offer:
    """Publish the weights of `model`, with their probe."""
    tokens = [1000 + 37 * place for place in range(64)]
    logprobs = _logprobs([(model, len(tokens))], tokens, start=1).tolist()
    return server.offer_of(
        {name: weight.detach().to(getattr(torch, dtype)).cpu() for name, weight in model.named_parameters()},
        policy_version=version,
        probe=Probe(tokens=tokens, logprobs=logprobs, tolerance=TOLERANCES[dtype]),
    )


def _models(folder: str, dtype: torch.dtype, device: str) -> list[Any]:
    """The folder's model and changed ones: rounded to `dtype`, as they travel, and in float32, as they are compared."""
    first = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval().to(device)
    models = [first]
    for seed in range(1, NUM_VERSIONS):
        generator = torch.Generator(device).manual_seed(seed)
        other = copy.deepcopy(first)
        with torch.no_grad():
            for weight in other.parameters():
                if weight.ndim > 1:
                    noise = torch.randn(weight.shape, generator=generator, device=device)
                    weight += CHANGE * weight.std() * noise
                weight.copy_(weight.to(dtype).float())
        models.append(other)
    return models


async def _run(
    options: argparse.Namespace, offers: list[Offer]
) -> tuple[list[tuple[list[int], Completion]], list[float], float]:
    """What the engine generated while all versions were committed, the pauses, and the seconds."""
    settings = engine_settings(
        Path(options.model),
        options.dtype,
        policy_version=0,
        max_tokens=1024,
        kv_cache_bytes=options.kv_bytes,
        max_episodes=options.at_once,
        kv_policy=options.kv_policy,
    )
    engine = VllmEngine(EngineProcess(), settings)
    done: list[tuple[list[int], Completion]] = []
    draw, stop = random.Random(0), False
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=options.tokens)

    async def play() -> None:
        while not stop:
            prompt = [draw.randrange(1000, 40000) for _ in range(16)]
            done.append((prompt, await engine.generate(prompt, sampling)))

    await_turn(options.turn)
    begun = time.monotonic()
    players = [asyncio.create_task(play()) for _ in range(options.at_once)]
    pauses = []
    for offer in offers:
        await engine.stage(offer)
        await asyncio.sleep(0.2)
        pauses.append(await engine.commit(offer.manifest.policy_version))
    stop = True
    await asyncio.gather(*players)
    seconds = time.monotonic() - begun
    await engine.close()
    return done, pauses, seconds


@torch.no_grad()
def _logprobs(segments: list[tuple[Any, int]], tokens: list[int], *, start: int) -> Tensor:
    """The log-probability of each of tokens[start:]. Each model of `segments` reads the tokens up to its position."""
    device = segments[0][0].device
    cache, logits, begin = DynamicCache(config=segments[0][0].config), [], 0
    for model, end in segments:
        if end > begin:
            part = torch.tensor([tokens[begin:end]], device=device)
            logits.append(model(part, past_key_values=cache, use_cache=True).logits[0].float())
            begin = end
    of_each = torch.log_softmax(torch.cat(logits), dim=-1)[start - 1 : len(tokens) - 1]
    return of_each.gather(1, torch.tensor(tokens[start:], device=device)[:, None])[:, 0].cpu()


def _compared(done: list[tuple[list[int], Completion]], models: list[Any], *, keep: bool) -> dict[str, Any]:
    """The differences in nats of all generations that a commit fell into, by their labels and by shifted ones."""
    crossed = [(prompt, each) for prompt, each in done if len(each.version_spans) > 1]
    by_shift: dict[int, list[Tensor]] = {0: [], -1: [], 1: []}
    at_boundaries: dict[int, list[float]] = {0: [], -1: [], 1: []}
    for prompt, each in crossed[:200]:
        tokens, start = prompt + each.tokens, len(prompt)
        starts = [span.start for span in each.version_spans[1:]]
        for shift, differences in by_shift.items():
            # The version that sampled token t read all tokens before t that no version had read.
            ends = [
                start + span.stop - 1 + (shift if span.stop < len(each.tokens) else 0) for span in each.version_spans
            ]
            by = [models[span.policy_version % NUM_VERSIONS] for span in each.version_spans]
            if keep:
                expected = _logprobs(list(zip(by, ends, strict=True)), tokens, start=start)
            else:
                expected = torch.zeros(len(each.tokens))
                begin = 0
                for model, end in zip(by, ends, strict=True):
                    stop = end - start + 1
                    expected[begin:stop] = _logprobs([(model, len(tokens))], tokens, start=start)[begin:stop]
                    begin = stop
            difference = (torch.tensor(each.logprobs) - expected).abs()
            differences.append(difference)
            # Of the tokens that a label shifted by one gives to the other version.
            for place in starts:
                wrong = {0: place, -1: place - 1, 1: place}[shift]
                at_boundaries[shift].append(float(difference[wrong]))
    own = torch.cat(by_shift[0]) if crossed else torch.zeros(1)
    return {
        "generations": len(done),
        "crossed": len(crossed),
        "tokens": own.numel(),
        "boundaries": len(at_boundaries[0]),
        "nats_mean": round(float(own.mean()), 5),
        "nats_worst": round(float(own.max()), 4),
        "first_token_of_a_version": _mean(at_boundaries[0]),
        "labels_one_earlier": _mean(at_boundaries[-1]),
        "labels_one_later": _mean(at_boundaries[1]),
    }


def _mean(values: list[float]) -> float:
    return round(sum(values) / max(1, len(values)), 4)


if __name__ == "__main__":
    main()
