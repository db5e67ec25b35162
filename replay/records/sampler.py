"""Which ready groups a claim takes, and how often a group may be used."""

import enum
from dataclasses import dataclass


class ClaimOrder(enum.Enum):
    """The order in which a claim takes ready groups."""

    OLDEST = "oldest"
    """The groups that finished first."""
    FRESHEST = "freshest"
    """The groups that finished last."""
    UNIFORM = "uniform"
    """Random groups without replacement; the same seed, step and groups give the same choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reuse:
    """How often groups are used: each at most once per step, and at most `max_uses` times in total.

    The limiter also bounds the average (Reverb's SampleToInsertRatio, https://arxiv.org/abs/2102.04736). A claim of n
    groups waits while

        claimed + n > samples_per_insert * inserted + error_buffer

    where `claimed` and `inserted` count groups since the run began, and a group that is claimed twice counts as two.
    Example: 1.5 samples per insert, no buffer, 10 groups inserted, 8 claimed: a claim of 7 is granted (15 <= 15), and a
    claim of 8 waits.
    """

    max_uses: int
    samples_per_insert: float  # 0: only `max_uses` limits
    error_buffer: float  # groups


ONCE = Reuse(max_uses=1, samples_per_insert=0.0, error_buffer=0.0)
