"""What a start checks of an objective, in one call."""

from slipstream.common.config.config import Config
from slipstream.learner.objective.coherence import check_coherence
from slipstream.learner.probation.bounds import check_bounds


def check_objective(config: Config) -> None:
    """Raise ConfigError unless `config.objective` can be trained with. Takes one or two seconds."""
    check_coherence(config)
    check_bounds(config.objective, max_lag=config.replay.max_lag, max_uses=config.replay.max_uses)
