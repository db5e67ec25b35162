"""The last step of an update: no parameter is left out of it in silence."""

import os

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from slipstream.common.config.learner_config import OptimConfig
from slipstream.learner.model.gradient import apply_gradient
from slipstream.learner.model.logprobs import TokenLogprobs
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.publisher.weight_server import let_failed_broadcasts_end_alone


class HalfUsed(nn.Module):
    """A model whose second layer takes no part in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1, bias=False), nn.Linear(5, 1, bias=False)


@pytest.fixture
def model() -> HalfUsed:
    model = HalfUsed()
    model.used(torch.ones(3)).sum().backward()
    return model


def update(model: HalfUsed, *, scale: float = 1.0) -> bool:
    """Whether the update was made."""
    optimizer = make_optimizer(model, config=OptimConfig())
    schedule = make_schedule(optimizer, config=OptimConfig(), num_steps=1)
    return not apply_gradient(optimizer, schedule, max_grad_norm=1.0, scale=scale).skipped


def test_a_trainable_parameter_without_a_gradient_is_an_error(model: HalfUsed) -> None:
    before = model.used.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"1 of 2 trainable parameters have no gradient, of shapes \(1, 5\)"):
        update(model)
    assert torch.equal(model.used.weight, before), "nothing was changed"


def test_one_that_is_frozen_or_not_updated_needs_none(model: HalfUsed) -> None:
    assert not update(model, scale=0.0)
    model.used(torch.ones(3)).sum().backward()
    model.unused.requires_grad_(False)
    assert update(model)


def test_fsdp_finds_the_tensors_of_a_policys_output() -> None:
    """PyTorch's own function for it, which FSDP calls, opens registered types alone."""
    output = TokenLogprobs(logprobs=torch.zeros(2), entropies=torch.ones(2))
    tensors, _ = tree_flatten(output)
    assert [each.tolist() for each in tensors if each is not None] == [[0, 0], [1, 1]]


def test_a_failed_broadcast_does_not_end_a_publisher_that_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun exports it
    let_failed_broadcasts_end_alone()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
