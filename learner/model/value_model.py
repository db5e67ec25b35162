"""Critics as models: a value for each loss token, from a trunk of their own or from the policy's."""

import dataclasses
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from learner.model.logprobs import TokenLogprobs, predictions
from learner.model.packed_model import PackedModel
from learner.pack import Packed


class ValueHead(nn.Module):
    """One number from a hidden state, in float32; it begins at 0 for every state."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden: Float[Tensor, "loss_tokens hidden"]) -> Float[Tensor, " loss_tokens"]:
        """The value of each state: (1, 2) under weights (3, 0.5) is 4."""
        return hidden.float() @ self.weight.float()


class ValueModel(PackedModel):
    """A critic with a trunk of its own: the policy's architecture, with a value head in place of the vocabulary's.

    The value of a loss token is read where the policy reads its prediction: at the token before it, so that it is the
    value of the state in which that token was chosen.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, folder: Path) -> None:
        super().__init__(causal_lm, folder=folder)
        causal_lm.get_output_embeddings().weight = None  # a tied one stays as the input embedding
        self.value_head = ValueHead(causal_lm.config.hidden_size)

    def forward(self, packed: Packed) -> Float[Tensor, " loss_tokens"]:  # type: ignore[override]
        """The value of each loss token, in the critic's own unit: see `learner.return_scale`."""
        hidden, _ = predictions(self.hidden_states(packed), packed.tokens, packed.loss_mask)
        values: Tensor = self.value_head(hidden)
        return values


class SharedTrunk(PackedModel):
    """A policy that is its own critic: a value head beside the vocabulary's, on the same hidden states."""

    def __init__(self, causal_lm: PreTrainedModel, *, folder: Path) -> None:
        super().__init__(causal_lm, folder=folder)
        self.value_head = ValueHead(causal_lm.config.hidden_size)

    def forward(
        self, packed: Packed, *, temperature: float, chunk_tokens: int, entropy_gradient: bool = False
    ) -> TokenLogprobs:
        """As the policy's, with `values`."""
        hidden, targets = predictions(self.hidden_states(packed), packed.tokens, packed.loss_mask)
        found = self.logprobs(
            hidden,
            targets,
            packed.kept,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )
        return dataclasses.replace(found, values=self.value_head(hidden))
