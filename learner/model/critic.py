"""The critic of a run: a value for each loss token, from a trunk of its own or the policy's, and how it is trained."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.config.model_config import LoraConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.batch.pack import Packed
from slipstream.learner.model.logprobs import TokenLogprobs, predictions
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import ModelSettings, PackedModel, load_kind
from slipstream.learner.model.weight_shards import merged_shards, named_shards, reshard
from slipstream.learner.objective.return_scale import ReturnScale
from slipstream.learner.objective.value_loss import ValueLoss, value_loss
from slipstream.learner.ranks.ranks import Ranks


class ValueHead(nn.Module):
    """One number from a hidden state, in float32; 0 for every state at first."""

    def __init__(self, *shape: int) -> None:
        """`shape` is that of the weights: the hidden size, after a 1 in a folder of transformers."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape))

    def forward(self, hidden: Float[Tensor, "loss_tokens hidden"]) -> Float[Tensor, " loss_tokens"]:
        """The value of each state: (1, 2) under weights (3, 0.5) is 4."""
        return hidden.float() @ self.weight.flatten().float()


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


@dataclass(kw_only=True, slots=True)
class Critic:
    """A critic and its optimizer. `module` is a separate model, or only a head if the critic shares the policy's trunk.

    The critic has its own schedule: during the critic's warm-up it advances, but the policy's does not.
    """

    module: ValueModel | ValueHead
    optimizer: torch.optim.AdamW
    schedule: LambdaLR
    scale: ReturnScale

    @property
    def is_shared(self) -> bool:
        return isinstance(self.module, ValueHead)


def critic_loss(critic: Critic, packed: Packed, current: TokenLogprobs) -> ValueLoss:
    """The critic's loss on a pack with values and returns; `current` is the policy's result on the same pack."""
    assert packed.old_values is not None and packed.returns is not None
    values = current.values if critic.is_shared else critic.module(packed)
    assert values is not None
    return value_loss(
        values,
        old_values=critic.scale.normalised(packed.old_values[packed.loss_positions]),
        returns=critic.scale.normalised(packed.returns[packed.loss_positions]),
    )


def load_critic(
    objective: ObjectiveConfig, model: PackedModel, *, optim: OptimConfig, num_steps: int, ranks: Ranks
) -> Critic | None:
    """Load the critic of `objective`, which makes `num_steps` steps; None if it has none.

    A separate trunk comes from the folder of `model`.
    """
    module: ValueModel | ValueHead
    match objective.critic:
        case "none":
            return None
        case "shared":
            assert isinstance(model, SharedTrunk)
            module = model.value_head
        case "own":
            settings = dataclasses.replace(model.settings, lora=LoraConfig())
            module = load_kind(ValueModel, model.folder, ranks=ranks, settings=settings)
    return critic_of(module, optim=optim, num_steps=num_steps)


def critic_of(module: ValueModel | ValueHead, *, optim: OptimConfig, num_steps: int) -> Critic:
    """The critic whose model is `module`, before its first step."""
    optim = dataclasses.replace(optim, lr=optim.critic_lr)
    optimizer = make_optimizer(module, config=optim)
    return Critic(
        module=module,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config=optim, num_steps=num_steps),
        scale=ReturnScale(),
    )


def policy_kind(objective: ObjectiveConfig) -> type[PackedModel]:
    """The class of the policy's model that the objective's critic needs."""
    return SharedTrunk if objective.critic == "shared" else PackedModel


@torch.no_grad()
def begin_at(critic: Critic, model: PackedModel) -> None:
    """Copy the policy's weights into a critic with a separate trunk: it too needs what imitation has learned."""
    if isinstance(critic.module, ValueModel):
        shards = dict(merged_shards(model))
        for name, parameter in named_shards(critic.module):
            parameter.copy_(shards[name])


def critic_shards(critic: Critic) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's shards of the critic's parameters. With a shared trunk, call `named_shards(model)` before."""
    if isinstance(critic.module, ValueModel):
        reshard(critic.module)
    yield from critic.module.named_parameters()
