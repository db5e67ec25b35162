"""Which of the ready groups a claim takes, and how often one may be taken."""

import enum
from dataclasses import dataclass


class Order(enum.Enum):
    """Which of the ready groups come first."""

    OLDEST = "oldest"
    """Those that finished first."""
    FRESHEST = "freshest"
    """Those that finished last."""
    UNIFORM = "uniform"
    """Any, drawn without replacement by seed and step: the same draw from the same groups."""
    PRIORITISED = "prioritised"
    """Those with the highest score, the first to finish among equals. Those without one come first, so that each is
    seen (Schaul et al. 2016, https://arxiv.org/abs/1511.05952)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reuse:
    """How often groups are used: each at most once a step, and at most `max_uses` times in all.

    The limiter holds them to an average (Reverb's SampleToInsertRatio, https://arxiv.org/abs/2102.04736). A claim of n
    waits while

        claimed + n > samples_per_insert * inserted + error_buffer

    where `claimed` and `inserted` count groups since the run began, one that is claimed twice as two. With 1.5 samples
    per insert, no buffer, 10 groups inserted and 8 claimed, a claim of 7 goes ahead (15 <= 15) and one of 8 waits.
    """

    max_uses: int
    samples_per_insert: float  # 0: `max_uses` alone decides
    error_buffer: float  # groups


ONCE = Reuse(max_uses=1, samples_per_insert=0.0, error_buffer=0.0)
