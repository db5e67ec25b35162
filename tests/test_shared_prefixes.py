"""A step whose shared prefixes are computed once is the step of separate sequences: losses, gradients, measurements."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.config import load_config
from learner.clock import Clock
from learner.learner import Learner, train_on
from learner.ranks import Ranks
from learner.step_metrics import StepMetrics
from tests.even_game import load_player, play
from tests.tiny_model import save_tiny_model

GAE = ["objective.advantage=gae", "optim.critic_lr=1e-2"]
# Everything that a pack goes through beside the policy's forward and backward pass.
OBJECTIVES = {
    "siblings": [],
    "own critic": [*GAE, "objective.critic=own"],
    "shared critic": [*GAE, "objective.critic=shared"],
    "reference in the loss": ["objective.kl_coefficient=0.1"],
    "reference in the reward": ["objective.kl_coefficient=0.1", "objective.kl_place=reward"],
    "v-trace": [*GAE, "objective.advantage=vtrace", "objective.critic=own", "objective.correction=none"],
    "proximal": ["objective.correction=decoupled", "objective.dual_clip=3", "objective.max_negative_kl=0"],
    "sequence ratios": ["objective.surrogate=gspo", "objective.normalisation=sequences", "objective.dual_clip=3"],
    "entropy": ["objective.entropy_bonus=0.01"],
    "adapters": ["model.lora.rank=4"],
    "checkpointed": ["learner.activation_checkpointing=true"],
    "small packs": ["learner.micro_batch_tokens=40"],
}
NUM_STEPS = 3  # by the last, critic, proximal policy, reference and adapters differ from what they began as


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_with_shared_prefixes_has_the_loss_and_the_gradient_of_separate_sequences(
    name: str, folder: Path, tmp_path: Path, ranks: Ranks
) -> None:
    settings = [f"model.path={folder}", "model.max_tokens=32", "sampling.max_turn_tokens=8", "optim.lr=1e-3"]
    config = load_config(None, [*settings, "learner.micro_batch_tokens=512", *OBJECTIVES[name]])
    learners: list[Learner] = []
    for way in ("apart", "shared"):
        torch.manual_seed(0)  # for the adapters
        learner, player = load_player(config, tmp_path / way, ranks)
        assert learner.model.shares_prefixes
        learners.append(learner)
    for step in range(NUM_STEPS):
        batch, last = play(learners[0], player), step == NUM_STEPS - 1
        found = []
        for learner, shares in zip(learners, (False, last), strict=True):
            learner.model.shares_prefixes = shares
            found.append(step_on(learner, batch))
    (apart, expected), (shared, gradients) = found
    assert shared.num_computed_tokens < 0.8 * apart.num_computed_tokens
    assert not shared.skipped and shared.grad_norm > 0
    for field in ("loss", "entropy", "reference_kl", "ratio_mean", "ratio_max", "grad_norm", "effective_sample_size"):
        assert getattr(shared, field) == pytest.approx(getattr(apart, field), rel=1e-5, abs=1e-6), field
    assert gradients.keys() == expected.keys()
    for weight, gradient in expected.items():
        assert float((gradients[weight] - gradient).norm()) <= 1e-5 * float(gradient.norm()), weight


def step_on(learner: Learner, batch: object) -> tuple[StepMetrics, dict[str, Tensor]]:
    """The metrics of a step, and the gradients of policy and critic."""
    gradients: dict[str, Tensor] = {}
    critic = learner.critic
    optimizers = {"policy": learner.optimizer} | ({} if critic is None else {"critic": critic.optimizer})

    def hooked(whose: str) -> object:
        def write_down(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                gradients[f"{whose} {number}"] = parameter.grad.full_tensor().clone()

        return optimizers[whose].register_step_pre_hook(write_down)

    hooks = [hooked(whose) for whose in optimizers]
    metrics = train_on(learner, batch, Clock(learner.ranks.device))
    for hook in hooks:
        hook.remove()
    return metrics, gradients
