"""Log-probabilities by a Hugging Face forward pass."""

import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from slipstream.actors.engine.engine import Completion
from slipstream.common.transfer.probe import TOLERANCES, Probe

TOLERANCE = 1e-3


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
