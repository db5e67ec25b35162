"""The critic of a run: what predicts returns, what moves it, and the unit that it predicts in."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from common.config import Config
from learner.model.logprobs import TokenLogprobs
from learner.model.packed_model import PackedModel, load_kind, merged_shards, named_shards
from learner.model.optimizer import make_optimizer, make_schedule
from learner.pack import Packed
from learner.ranks import Ranks
from learner.objective.return_scale import ReturnScale
from learner.objective.value_loss import ValueLoss, value_loss
from learner.model.value_model import SharedTrunk, ValueHead, ValueModel


@dataclass(kw_only=True, slots=True)
class Critic:
    """What its optimizer moves is `module`: a model of its own, or the head alone where the policy's trunk is shared.

    Its schedule counts its own updates: in the warm-up it moves, and the policy's does not.
    """

    module: ValueModel | ValueHead
    optimizer: torch.optim.AdamW
    schedule: LambdaLR
    scale: ReturnScale

    @property
    def is_shared(self) -> bool:
        return isinstance(self.module, ValueHead)


def critic_loss(critic: Critic, packed: Packed, current: TokenLogprobs, *, value_clip: float) -> ValueLoss:
    """The critic's loss on a pack that carries values and returns; `current` is the policy's forward pass on it."""
    assert packed.old_values is not None and packed.returns is not None
    values = current.values if critic.is_shared else critic.module(packed)
    assert values is not None
    return value_loss(
        values,
        critic.scale.normalised(packed.old_values[packed.loss_mask]),
        critic.scale.normalised(packed.returns[packed.loss_mask]),
        value_clip=value_clip,
    )


def load_critic(config: Config, model: PackedModel, *, ranks: Ranks) -> Critic | None:
    """The critic that `objective.critic` asks for, beside `model`, whose folder its own trunk is read from."""
    module: ValueModel | ValueHead
    match config.objective.critic:
        case "none":
            return None
        case "shared":
            assert isinstance(model, SharedTrunk)
            module = model.value_head
        case "own":
            module = load_kind(
                ValueModel,
                model.folder,
                ranks=ranks,
                dtype=config.model.dtype,
                activation_checkpointing=config.learner.activation_checkpointing,
                compile=config.learner.compile,
                cpu_offload=config.learner.cpu_offload,
            )
        case unknown:
            raise ValueError(f"no critic {unknown!r}")
    optim = dataclasses.replace(config.optim, lr=config.optim.critic_lr)
    optimizer = make_optimizer(module, config=optim)
    return Critic(
        module=module,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config=optim, num_steps=config.learner.steps),
        scale=ReturnScale(),
    )


def policy_kind(config: Config) -> type[PackedModel]:
    """What the policy's model has to be for `objective.critic`."""
    return SharedTrunk if config.objective.critic == "shared" else PackedModel


@torch.no_grad()
def begin_at(critic: Critic, model: PackedModel) -> None:
    """Give a critic with a trunk of its own the policy's weights: what imitation has learnt is worth as much to it."""
    if isinstance(critic.module, ValueModel):
        shards = dict(merged_shards(model))
        for name, parameter in named_shards(critic.module):
            parameter.copy_(shards[name])


def critic_shards(critic: Critic) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of the critic as this rank holds it. A shared trunk must have been asked for its own before."""
    if isinstance(critic.module, ValueModel):
        for _ in named_shards(critic.module):  # which puts back what a forward pass gathered
            break
    yield from critic.module.named_parameters()
