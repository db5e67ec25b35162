"""The floating-point operations of a step, and the model FLOPs utilisation (MFU)."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from slipstream.learner.model.kernel import head_dim_of
from slipstream.learner.model.packed_model import PackedModel
from slipstream.learner.model.skeleton import unused_parameters
from slipstream.learner.model.states import num_attending

# Dense bfloat16, in 1e12 operations per second, by a whole word of the device's name; the first match counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10": 125.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Floating-point operations of one optimizer step: the matrix products forward, and twice that backward.

        flops = 6 * parameters * tokens + 12 * layers * heads * head_dim * token pairs

    `parameters` are those that a token is multiplied with: see `flops_of`. `layers` are those with attention; what a
    linear one does with its state is not counted.

    PaLM, appendix B, https://arxiv.org/abs/2204.02311. A token attends to itself and those before it in its sequence,
    so n tokens are n (n + 1) / 2 pairs. A shared prefix counts once, because it is computed once. Recomputation
    (activation checkpointing) and the reference's forward pass are not counted. With 1e6 parameters and 2 layers of 4
    heads of 8, a sequence of 10 tokens costs 6e7 + 12 * 2 * 4 * 8 * 55 = 60,042,240.
    """

    per_token: float
    per_pair: float
    peak: float | None  # operations per second of all ranks together; None if unknown

    def utilisation(self, num_tokens: int, *, num_pairs: int, elapsed_s: float) -> float | None:
        """The fraction of the peak that was used in `elapsed_s` (MFU); None if the peak is unknown."""
        operations = self.per_token * num_tokens + self.per_pair * num_pairs
        return operations / (self.peak * elapsed_s) if self.peak else None


def flops_of(model: PackedModel, *, device: torch.device, num_ranks: int) -> Flops:
    """The cost of training `model`, and the peak of all ranks, if the device's name is in PEAK_TFLOPS.

    Of experts, which transformers keeps in one tensor for all of a layer, only those count that a token is sent to.
    """
    config = model.causal_lm.config.get_text_config()
    heads, head_dim = config.num_attention_heads, head_dim_of(model.causal_lm)
    unused = {f"causal_lm.{name}" for name in unused_parameters(model.causal_lm)}
    parameters = sum(
        _used(name, parameter, config) for name, parameter in model.named_parameters() if name not in unused
    )
    # Of some vision-language models only the whole configuration says so, and not that of its text.
    if not (config if hasattr(config, "tie_word_embeddings") else model.causal_lm.config).tie_word_embeddings:
        # looked up, not multiplied
        parameters -= model.causal_lm.get_input_embeddings().weight.numel()
    peak = _known_peak(device)
    return Flops(
        per_token=6.0 * parameters,
        per_pair=12.0 * num_attending(model.causal_lm) * heads * head_dim,
        peak=1e12 * peak * num_ranks if peak else None,
    )


def _used(name: str, parameter: Tensor, config: PretrainedConfig) -> float:
    """How many elements of a parameter one token is multiplied with; all if the number of active experts is unknown."""
    _, _, of_experts = name.partition(".experts.")
    active = getattr(config, "num_experts_per_tok", None)  # nearly every architecture has the key
    if not of_experts or of_experts[0].isdigit() or not active:
        return parameter.numel()
    return parameter.numel() * int(active) / parameter.shape[0]


def _known_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_TFLOPS.items() if re.search(rf"\b{word}\b", name)), None)
