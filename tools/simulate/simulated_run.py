"""What is simulated of a run."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is simulated."""

    num_actors: int
    max_episodes: int  # of one actor at a time
    group_size: int
    groups_per_step: int
    step_scale: float  # of the recorded steps' times: a step takes as long as its batch
    num_shards: int  # Redis servers that the groups are spread over
    target_lag: int
    max_lag: int
    steps: int  # that are measured
    price_per_hour: float  # dollars, of one actor
    preemptions_per_hour: float  # of one actor; its episodes continue elsewhere
    restart_s: float  # until a lost actor is replaced
    seed: int
