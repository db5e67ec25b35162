"""The names of a run's keys in Redis. One hash tag a run, so that a cluster keeps them in one slot."""


class FencedOut(RuntimeError):
    """A newer learner, or newer weights, have taken this one's place in the run; it must stop."""


def key(run_id: str, *parts: str | int) -> str:
    """`slipstream:{run}:part:part`."""
    return ":".join([f"slipstream:{{{run_id}}}", *map(str, parts)])


def epoch_key(run_id: str) -> str:
    """The newest learner's epoch: a learner that holds an older one is fenced out of claim and publish."""
    return key(run_id, "epoch")
