"""Gives ids that a tokenizer lacks the probability 0 in vLLM, in samples and in scores of prompts."""

import math
from collections.abc import Sequence
from typing import Any

import torch


def mask_absent(model: Any, absent: Sequence[int], device: torch.device) -> None:
    """Make the logits of `absent` -inf in all that `model`, on `device`, computes, whatever its weights are."""
    compute_logits, ids = model.compute_logits, torch.tensor(absent, dtype=torch.long, device=device)

    def masked(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits: torch.Tensor | None = compute_logits(*args, **kwargs)
        return None if logits is None else logits.index_fill_(-1, ids, -math.inf)  # None: another worker has them

    if absent:
        model.compute_logits = masked
