"""What a simulated run brings: sums over its measured steps, and their means."""

import statistics
from dataclasses import dataclass, field

from slipstream.actors.host.poll_interval import PollInterval
from slipstream.tools.simulate.simulated_run import Plan

BEAT_S, MAX_BEAT_S = 1.0, 3.0  # between an actor's requests for the run's state, its heartbeats, its leases' renewals
LOOK_S = 0.1  # between its looks for newer weights, while it plays
ASK_S = 0.02  # between its requests for work, while a slot is free
REQUESTS_PER_BEAT, REQUESTS_PER_EPISODE = 3, 2  # an episode has its payload, and its commit


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Means over the measured steps."""

    steps_per_hour: float
    episodes_per_s: float
    lag: float  # optimizer steps, of the oldest token of an episode
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

    def outcome(self, plan: Plan, *, lasted_s: float) -> Outcome:
        """Return the means over the measured steps, which lasted `lasted_s`."""
        episodes_per_s = self.num_episodes / lasted_s
        free = statistics.fmean(self.free_actors) if self.free_actors else 0.0
        num_actors = statistics.fmean(self.num_actors) if self.num_actors else plan.num_actors
        return Outcome(
            steps_per_hour=3600 * plan.steps / lasted_s,
            episodes_per_s=episodes_per_s,
            lag=statistics.fmean(self.lags),
            masked_share=self.num_masked / self.num_trained,
            learner_busy=1 - self.wait_s / lasted_s,
            slots_used=statistics.fmean(self.slots_used) if self.slots_used else 0.0,
            wasted_share=self.num_wasted / max(self.num_sampled, 1),
            dollars_per_hour=num_actors * plan.price_per_hour,
            requests_per_s=requests_per_s(plan, num_free=free, episodes_per_s=episodes_per_s),
        )


def requests_per_s(plan: Plan, *, num_free: float, episodes_per_s: float) -> float:
    """The requests to the server with the heartbeats and the weights on offer, by `actors.host.poll_interval`.

    `num_free` actors ask it for work; the episodes are spread over the shards.
    """
    interval = PollInterval(num_members=plan.num_actors)
    of_each = REQUESTS_PER_BEAT / interval.seconds(BEAT_S, most_s=MAX_BEAT_S) + 1 / interval.seconds(LOOK_S)
    asked = num_free / interval.seconds(ASK_S)
    return plan.num_actors * of_each + asked + REQUESTS_PER_EPISODE * episodes_per_s / plan.num_shards
