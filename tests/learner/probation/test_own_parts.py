"""The user's own parts are tried before a run; tests/whole/test_extend.py has the mistakes of each kind."""

import pytest

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.probation.bounds import check_bounds


def only_ascending(returns: list[float]) -> list[float]:
    if returns[0] > returns[-1]:
        raise RuntimeError("the best comes first")
    return [each - 0.5 for each in returns]


def test_an_advantage_that_fails_for_another_order_of_siblings_is_refused_by_its_key() -> None:
    objective = ObjectiveConfig(advantage=f"{__name__}:only_ascending")
    with pytest.raises(ConfigError, match=r"`objective.advantage` .*failed: RuntimeError: the best comes first"):
        check_bounds(objective, max_lag=0, max_uses=1)
