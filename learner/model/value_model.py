"""The models of critics: a value for each loss token, from a separate trunk or from the policy's."""

import dataclasses
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.learner.batch.pack import Packed
from slipstream.learner.model.logprobs import TokenLogprobs, predictions
from slipstream.learner.model.packed_model import ModelSettings, PackedModel


class ValueHead(nn.Module):
    """One number from a hidden state, in float32; 0 for every state at first."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden: Float[Tensor, "loss_tokens hidden"]) -> Float[Tensor, " loss_tokens"]:
        """The value of each state: (1, 2) under weights (3, 0.5) is 4."""
        return hidden.float() @ self.weight.float()


class ValueModel(PackedModel):
    """A critic with a separate trunk: the policy's architecture, with a value head instead of the output embedding.

    The value of a loss token is computed where the policy predicts it: at the token before it. So it is the value of
    the state in which that token was sampled.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, folder: Path, settings: ModelSettings) -> None:
        super().__init__(causal_lm, folder=folder, settings=settings)
        causal_lm.get_output_embeddings().weight = None  # a tied weight stays as the input embedding
        self.value_head = ValueHead(causal_lm.config.get_text_config().hidden_size)

    def forward(self, packed: Packed) -> Float[Tensor, " loss_tokens"]:  # type: ignore[override]
        """The value of each loss token, in the critic's unit: see `slipstream.learner.objective.return_scale`."""
        found = predictions(self.hidden_states(packed), packed)
        return found.of.of_all_ranks(self.value_head(found.states))


class SharedTrunk(PackedModel):
    """A policy with a value head on the same hidden states: policy and critic share the trunk."""

    def __init__(self, causal_lm: PreTrainedModel, *, folder: Path, settings: ModelSettings) -> None:
        super().__init__(causal_lm, folder=folder, settings=settings)
        self.value_head = ValueHead(causal_lm.config.get_text_config().hidden_size)

    def forward(self, packed: Packed, *, entropy_gradient: bool = False) -> TokenLogprobs:
        """The log-probabilities of the loss tokens, and their `values`."""
        found = predictions(self.hidden_states(packed), packed)
        logprobs = self.logprobs(found, packed, entropy_gradient=entropy_gradient)
        return dataclasses.replace(logprobs, values=found.of.of_all_ranks(self.value_head(found.states)))
