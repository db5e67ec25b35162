"""What a simulated run brings: sums over its measured steps, and their means."""

import statistics
from dataclasses import dataclass, field

from slipstream.common.config.config import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Means over the measured steps."""

    steps_per_hour: float
    tokens_per_s: float  # sampled
    lag: float  # optimizer steps, of the oldest token of an episode
    slow_lag: int  # likewise, of the hundredth that lags most
    masked_share: float  # of the trained tokens: older than max_lag
    learner_busy: float  # share of time
    slots_used: float  # share of the actors' episode slots
    wasted_share: float  # of the sampled tokens: of dropped groups, or lost with their actor
    dollars_per_hour: float  # of the actors that serve; a lost one costs nothing until its replacement serves


@dataclass(kw_only=True, slots=True)
class Tally:
    """Sums over the measured steps; tokens are sampled ones."""

    wait_s: float = 0.0  # of the learner, for its batches
    num_sampled: int = 0
    num_trained: int = 0
    num_masked: int = 0
    num_wasted: int = 0
    lags: list[int] = field(default_factory=list)  # of each trained episode
    slots_used: list[float] = field(default_factory=list)
    num_actors: list[int] = field(default_factory=list)

    def outcome(self, config: Config, *, num_steps: int, lasted_s: float) -> Outcome:
        """Return the means over `num_steps` measured steps, which lasted `lasted_s`."""
        return Outcome(
            steps_per_hour=3600 * num_steps / lasted_s,
            tokens_per_s=self.num_sampled / lasted_s,
            lag=statistics.fmean(self.lags),
            slow_lag=sorted(self.lags)[99 * len(self.lags) // 100],
            masked_share=self.num_masked / self.num_trained,
            learner_busy=1 - self.wait_s / lasted_s,
            slots_used=statistics.fmean(self.slots_used),
            wasted_share=self.num_wasted / max(self.num_sampled, 1),
            dollars_per_hour=statistics.fmean(self.num_actors) * config.actors.price_per_hour,
        )
