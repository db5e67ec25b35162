"""The proximal policy: an exponential average of the policy's trainable weights.

    average <- average + (weights - average) / total,    total <- 1 + decay * total

PPO-EWMA, https://arxiv.org/abs/2110.00641: the clip limits how fast the policy changes. It is around a recent policy,
which need not be the one that sampled. The average is decay / (1 - decay) steps old: 3 steps with a decay of 0.75. If
the proximal policy were equal to the current one, the clip would have no effect. It is never published.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.learner.batch.pack import Packed
from slipstream.learner.model.packed_model import PackedModel
from slipstream.learner.model.weight_shards import named_shards


class Proximal:
    """The average of the trainable weights, in float32 and sharded like them."""

    def __init__(self, model: PackedModel, *, decay: float) -> None:
        """Begin at the current weights of `model`."""
        # This rank's shards, by the parameter's name.
        self.averages = {name: shard.detach().clone() for name, shard in _trained(model)}
        self.total = torch.ones((), dtype=torch.float64)  # sum of the weights of all steps in the average
        self._decay = decay

    @torch.no_grad()
    def begin_at(self, model: PackedModel) -> None:
        """Restart the average at the current weights of `model`."""
        self.total.fill_(1.0)
        for name, shard in _trained(model):
            self.averages[name].copy_(shard)

    @torch.no_grad()
    def after_step(self, model: PackedModel) -> None:
        """Add the weights after an optimizer step to the average.

        With a decay of 0.5, weights 1, then 4, then 4 give averages 1, 3 and 3.571: (4 + 4 / 2 + 1 / 4) / 1.75.
        """
        self.total.mul_(self._decay).add_(1.0)
        share = float(1 / self.total)
        for name, shard in _trained(model):
            self.averages[name].lerp_(shard.detach(), share)

    @torch.no_grad()
    def logprobs(self, model: PackedModel, micro_batches: Sequence[Packed]) -> list[Tensor]:
        """The proximal log-probability of each loss token of each pack, without gradient. Every rank calls it.

        The forward pass runs on `model` with its weights replaced by the average; they are restored exactly.
        """
        device = next(model.parameters()).device
        self._swap(model)
        try:
            return [model(packed.to(device)).logprobs for packed in micro_batches]
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: PackedModel) -> None:
        """Exchange weights and averages, one tensor at a time, so that there is never a third copy of the model."""
        for name, shard in _trained(model):
            weights = shard.detach().clone()
            shard.copy_(self.averages[name])
            self.averages[name].copy_(weights)


def _trained(model: PackedModel) -> list[tuple[str, Tensor]]:
    """This rank's shards of the trainable parameters."""
    return [(name, shard) for name, shard in named_shards(model) if shard.requires_grad]
