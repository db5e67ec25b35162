"""The limits that the learner is measured against: the same model in transformers, on full rows or a padded batch.

Both only run forward and backward passes, without packing, weighting, clipping or an update. Like the learner, they
compute logits only for the loss tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.learner.batch.pack import TokenSequence
from slipstream.tools.lab.bench.load.learner_load import LOSS_EVERY


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A micro-batch of rows of one length."""

    tokens: Tensor  # [rows, length]
    mask: Tensor | None  # True on real tokens; None if there is no padding
    loss_mask: Tensor


def length_around_a_token(sequences: Sequence[TokenSequence]) -> int:
    """The mean over tokens of the length of their sequence: rows of this length need as much attention."""
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    return round(sum(sequence.num_tokens**2 for sequence in sequences) / num_tokens)


def full_rows(sequences: Sequence[TokenSequence], *, length: int, max_tokens: int, vocab_size: int) -> list[Rows]:
    """Random tokens, as many as `sequences` have, in rows of one length."""
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    num_rows = round(num_tokens / length)
    tokens = torch.randint(0, vocab_size, (num_rows, length), generator=torch.Generator().manual_seed(0))
    loss_mask = (torch.arange(length) % LOSS_EVERY == LOSS_EVERY - 1).expand(num_rows, length)
    return _split(tokens, None, loss_mask, max_tokens=max_tokens)


def padded_rows(sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[Rows]:
    """The sequences, padded on the right to the longest one; `max_tokens` includes padding."""
    longest = max(sequence.num_tokens for sequence in sequences)
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask, loss_mask = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : sequence.num_tokens] = torch.from_numpy(sequence.tokens).long()
        mask[row, : sequence.num_tokens] = True
        loss_mask[row, : sequence.num_tokens] = torch.from_numpy(sequence.loss_mask)
    return _split(tokens, mask, loss_mask, max_tokens=max_tokens)


def forward_and_backward(causal_lm: PreTrainedModel, micro_batches: Sequence[Rows]) -> None:
    """Compute the gradients of the summed cross-entropy, and discard them."""
    for rows in micro_batches:
        hidden = causal_lm.get_decoder()(
            input_ids=rows.tokens, attention_mask=rows.mask, use_cache=False
        ).last_hidden_state[:, :-1]
        logits = causal_lm.get_output_embeddings()(hidden[rows.loss_mask[:, 1:]]).float()
        torch.autograd.backward(F.cross_entropy(logits, rows.tokens[rows.loss_mask], reduction="sum"))
    causal_lm.zero_grad(set_to_none=True)


def to(rows: Sequence[Rows], device: torch.device) -> list[Rows]:
    return [
        Rows(
            tokens=part.tokens.to(device),
            mask=None if part.mask is None else part.mask.to(device),
            loss_mask=part.loss_mask.to(device),
        )
        for part in rows
    ]


def _split(tokens: Tensor, mask: Tensor | None, loss_mask: Tensor, *, max_tokens: int) -> list[Rows]:
    size = max(1, max_tokens // tokens.shape[1])
    starts = range(0, len(tokens), size)
    return [
        Rows(
            tokens=tokens[start : start + size],
            mask=None if mask is None else mask[start : start + size],
            loss_mask=loss_mask[start : start + size],
        )
        for start in starts
    ]
