import pytest

from common.objective_config import ObjectiveConfig
from learner.objective.guard import judge

OBJECTIVE = ObjectiveConfig()


def test_a_healthy_step_is_made_whole() -> None:
    # The worst of 1,500 steps of quickstart runs: an effective sample size of 0.42, a mean ratio within 2 % of 1.
    for ess, ratio_mean in ((1.0, 1.0), (0.42, 1.02), (0.3, 0.98)):
        verdict = judge(effective_sample_size=ess, ratio_mean=ratio_mean, objective=OBJECTIVE)
        assert (verdict.scale, verdict.reason) == (1.0, "")


def test_a_small_effective_sample_size_shrinks_the_step() -> None:
    verdict = judge(effective_sample_size=0.15, ratio_mean=1.0, objective=OBJECTIVE)
    assert verdict.scale == pytest.approx(0.5)
    assert verdict.reason == "the effective sample size is 0.15 of the batch, below 0.3 (objective.guard_min_ess)"


@pytest.mark.parametrize("ratio_mean", [2.1, 0.49, float("nan")])
def test_a_mean_ratio_far_from_one_skips_the_step(ratio_mean: float) -> None:
    verdict = judge(effective_sample_size=1.0, ratio_mean=ratio_mean, objective=OBJECTIVE)
    assert verdict.scale == 0.0
    assert "outside [0.5, 2] (objective.guard_max_ratio)" in verdict.reason


def test_a_threshold_of_zero_is_off() -> None:
    off = ObjectiveConfig(guard_min_ess=0.0, guard_max_ratio=0.0)
    assert judge(effective_sample_size=0.01, ratio_mean=50.0, objective=off).scale == 1.0
