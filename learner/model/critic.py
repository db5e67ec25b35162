"""The critic of a run: the model that predicts returns, with its optimizer, schedule and unit."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.config.model_config import LoraConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.batch.pack import Packed
from slipstream.learner.model.logprobs import TokenLogprobs
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import PackedModel, load_kind
from slipstream.learner.model.value_model import SharedTrunk, ValueHead, ValueModel
from slipstream.learner.model.weight_shards import merged_shards, named_shards, reshard
from slipstream.learner.objective.return_scale import ReturnScale
from slipstream.learner.objective.value_loss import ValueLoss, value_loss
from slipstream.learner.ranks.ranks import Ranks


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
        case unknown:
            raise ValueError(f"unknown critic {unknown!r}")
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
