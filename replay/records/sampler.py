"""Which ready groups a claim takes."""

import enum


class ClaimOrder(enum.Enum):
    """The order in which a claim takes ready groups."""

    OLDEST = "oldest"
    """The groups that finished first."""
    FRESHEST = "freshest"
    """The groups that finished last."""
    UNIFORM = "uniform"
    """Random groups without replacement; the same seed, step and groups give the same choice."""
