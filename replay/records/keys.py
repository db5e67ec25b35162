"""The names of a run's keys in Redis."""


class FencedOut(RuntimeError):
    """A newer learner, or newer weights, replaced this learner in the run; it must stop."""


class RunForgotten(RuntimeError):
    """The server came back without the run's keys; the learner must be started again from its checkpoint."""


class BooksDamaged(RuntimeError):
    """The keys of a stream are so damaged that a repair failed; the message says which keys to remove."""


def key(run_id: str, *parts: str | int) -> str:
    """`slipstream:{run}:part:part`."""
    return ":".join([f"slipstream:{{{run_id}}}", *map(str, parts)])


def epoch_key(run_id: str) -> str:
    """The key of the newest learner's epoch: a learner with an older epoch cannot claim or publish."""
    return key(run_id, "epoch")
