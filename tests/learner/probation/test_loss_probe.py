"""What the loss says of itself: how much a token may weigh, which bounds never act, and whose own part fails.

`tests/whole/test_extend.py` has the mistakes in each kind of own parts.
"""

import math

import pytest

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.probation.bounds import check_bounds
from slipstream.learner.probation.loss_probe import acts, weight_bound


@pytest.mark.parametrize(
    ("objective", "positive", "negative"),
    [
        (ObjectiveConfig(), (1, 1.28), (2.8, 5)),  # the token mask stops negative advantages at 5
        (ObjectiveConfig(correction="none", dual_clip=3.0), (1, 1.28), (1.6, 3)),
        (ObjectiveConfig(correction="none"), (1, 1.28), (1e8, math.inf)),
        (ObjectiveConfig(surrogate="cispo", correction="none", ratio_high=7.0), (7, 7), (7, 7)),
        (ObjectiveConfig(surrogate="dppo_tv", correction="none", ratio_high=20.0), (20, 20), (20, 20)),
        # A token that is as likely as it was has the ratio of a sequence whose other token is 7e7 times likelier.
        (ObjectiveConfig(surrogate="gspo", clip_low=3e-4, clip_high=4e-4), (0.5, 1.1), (8e3, math.inf)),
        (
            ObjectiveConfig(advantage="vtrace", critic="own", surrogate="policy_gradient", correction="none"),
            (1, 1),
            (1, 1),
        ),
    ],
)
def test_the_largest_weight_of_a_token_is_found_by_sign(
    objective: ObjectiveConfig, positive: tuple[float, float], negative: tuple[float, float]
) -> None:
    """Bounds by hand: what is found lies at most a factor of 10^(1/4) below what the equations allow."""
    found = weight_bound(objective)
    assert positive[0] <= found.positive <= positive[1] + 1e-9
    assert negative[0] <= found.negative <= negative[1] + 1e-9


def test_no_cap_just_above_the_limit_goes_unseen() -> None:
    assert weight_bound(ObjectiveConfig(mask_high=20.03)).negative > 20
    assert weight_bound(ObjectiveConfig(mask_high=19.9)).negative < 20


def test_a_bound_acts_where_tokens_get_to_it() -> None:
    assert acts(ObjectiveConfig(clip_high=3.9), "clip_high")
    assert not acts(ObjectiveConfig(clip_high=4.5), "clip_high")  # the token mask ends at a ratio of 5
    assert acts(ObjectiveConfig(clip_high=4.5), "clip_high", without={"mask_high": 1e9})
    assert acts(ObjectiveConfig(surrogate="dppo_tv", correction="none"), "max_total_variation")


def only_ascending(returns: list[float]) -> list[float]:
    if returns[0] > returns[-1]:
        raise RuntimeError("the best comes first")
    return [each - 0.5 for each in returns]


def test_an_advantage_that_fails_for_another_order_of_siblings_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"`objective.advantage` .*failed: RuntimeError: the best comes first"):
        check_bounds(ObjectiveConfig(advantage=f"{__name__}:only_ascending"), max_lag=0, max_uses=1)
