"""What a simulated run brings: sums over its measured steps, and their means."""

import statistics
from dataclasses import dataclass, field

from slipstream.actors.host.poll_interval import PollInterval
from slipstream.common.config.config import Config

BEAT_S, MAX_BEAT_S = 1.0, 3.0  # between an actor's requests for the run's state, its heartbeats, its leases' renewals
LOOK_S = 0.5  # between its looks for newer weights, while there are none
ASK_S = 0.02  # between its requests for work, while a slot is free
REQUESTS_PER_BEAT, REQUESTS_PER_EPISODE = 3, 2  # an episode has its payload, and its commit


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
    requests_per_s: float  # to the busiest Redis server


@dataclass(kw_only=True, slots=True)
class Tally:
    """Sums over the measured steps; tokens are sampled ones."""

    wait_s: float = 0.0  # of the learner, for its batches
    num_episodes: int = 0
    num_sampled: int = 0
    num_trained: int = 0
    num_masked: int = 0
    num_wasted: int = 0
    lags: list[int] = field(default_factory=list)  # of each trained episode
    slots_used: list[float] = field(default_factory=list)
    free_actors: list[int] = field(default_factory=list)
    num_actors: list[int] = field(default_factory=list)

    def outcome(self, config: Config, *, num_steps: int, lasted_s: float) -> Outcome:
        """Return the means over `num_steps` measured steps, which lasted `lasted_s`."""
        num_actors = statistics.fmean(self.num_actors)
        return Outcome(
            steps_per_hour=3600 * num_steps / lasted_s,
            tokens_per_s=self.num_sampled / lasted_s,
            lag=statistics.fmean(self.lags),
            slow_lag=sorted(self.lags)[99 * len(self.lags) // 100],
            masked_share=self.num_masked / self.num_trained,
            learner_busy=1 - self.wait_s / lasted_s,
            slots_used=statistics.fmean(self.slots_used),
            wasted_share=self.num_wasted / max(self.num_sampled, 1),
            dollars_per_hour=num_actors * config.actors.price_per_hour,
            requests_per_s=requests_per_s(
                round(num_actors),
                num_free=statistics.fmean(self.free_actors),
                episodes_per_s=self.num_episodes / lasted_s,
            ),
        )


def requests_per_s(num_actors: int, *, num_free: float, episodes_per_s: float) -> float:
    """The requests to the server with the heartbeats and the weights on offer, by `actors.host.poll_interval`.

    `num_free` actors ask it for work, and it has so many `episodes_per_s`.
    """
    interval = PollInterval(num_members=num_actors)
    of_each = REQUESTS_PER_BEAT / interval.seconds(BEAT_S, most_s=MAX_BEAT_S) + 1 / interval.seconds(LOOK_S)
    return num_actors * of_each + num_free / interval.seconds(ASK_S) + REQUESTS_PER_EPISODE * episodes_per_s
