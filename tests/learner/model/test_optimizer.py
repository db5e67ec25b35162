import doctest
from pathlib import Path

import pytest
import torch

from slipstream.common.config.learner_config import OptimConfig
from slipstream.learner.batch import pack
from slipstream.learner.credit import gae, gigpo, grpo, reinforce_pp, token_rewards, tree, vtrace
from slipstream.learner.model import attention
from slipstream.learner.model.gradient import apply_gradient
from slipstream.learner.model.optimizer import lr_fraction
from slipstream.learner.model.weight_shards import named_shards, whole
from slipstream.learner.ranks.ranks import Ranks
from tests.learner.checkpoint.test_checkpoint import Learner, begun
from tests.learner.model.test_model_families import EXACT, load, save


def fractions(schedule: str, *, warmup_steps: int, steps: list[int]) -> list[float]:
    return [lr_fraction(step, schedule=schedule, warmup_steps=warmup_steps, num_steps=100) for step in steps]


def test_schedules_go_from_the_top_to_zero() -> None:
    assert fractions("constant", warmup_steps=0, steps=[0, 75, 100]) == [1.0, 1.0, 1.0]
    assert fractions("linear", warmup_steps=0, steps=[0, 75, 100]) == pytest.approx([1.0, 0.25, 0.0])
    assert fractions("cosine", warmup_steps=0, steps=[0, 75, 100]) == pytest.approx([1.0, 0.146447, 0.0], abs=1e-6)


def test_the_warm_up_climbs_and_wastes_no_step_on_a_rate_of_zero() -> None:
    assert fractions("linear", warmup_steps=4, steps=[0, 1, 3, 4, 52]) == pytest.approx([0.2, 0.4, 0.8, 1.0, 0.5])


def test_weight_decay_spares_norms_and_biases_also_after_a_resume(tmp_path: Path, ranks: Ranks) -> None:
    """Without a gradient, only decay moves a weight: by its learning rate times 0.5 in each step."""
    config = OptimConfig(lr=0.1, weight_decay=0.5)
    folder = save(EXACT["gpt_oss"], tmp_path / "model")  # its experts' biases are stacked: [experts, out]

    def stepped(learner: Learner) -> dict[str, float]:
        before = {name: whole(shard).clone() for name, shard in named_shards(learner.model)}
        for _, shard in named_shards(learner.model):
            shard.grad = torch.zeros_like(shard)
        apply_gradient(learner.optimizer, learner.schedule, max_grad_norm=1.0)
        return {name: float((whole(shard) / before[name]).nanmean()) for name, shard in named_shards(learner.model)}

    steady, resumed = (begun(load(folder, ranks), ranks, config) for _ in range(2))
    first = stepped(steady)
    resumed.load(steady.save(tmp_path, 1))
    spared = {name for name in first if "norm" in name or name.endswith(("bias", "sinks"))}
    assert any(name.endswith("experts.down_proj_bias") for name in spared) and len(spared) < len(first)
    for found in (first, stepped(resumed)):
        assert found == pytest.approx({name: 1.0 if name in spared else 0.95 for name in found})


@pytest.mark.parametrize("module", [attention, gae, gigpo, grpo, pack, reinforce_pp, token_rewards, tree, vtrace])
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
