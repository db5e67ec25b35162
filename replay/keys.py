"""The names of a run's keys in Redis. One hash tag a shard, so that a cluster keeps each in one slot."""


class FencedOut(RuntimeError):
    """A newer learner, or newer weights, have taken this one's place in the run; it must stop."""


class RunForgotten(RuntimeError):
    """The server came back without the run; its learner must begin anew from its checkpoint."""


def key(run_id: str, *parts: str | int) -> str:
    """`slipstream:{run}:part:part`."""
    return ":".join([f"slipstream:{{{run_id}}}", *map(str, parts)])


def shard_name(run_id: str, shard: int) -> str:
    """What stands in a shard's keys for the run's name: the first one's is that. No name of a run holds '#'."""
    return run_id if shard == 0 else f"{run_id}#{shard}"


def epoch_key(run_id: str) -> str:
    """The newest learner's epoch: a learner that holds an older one is fenced out of claim and publish."""
    return key(run_id, "epoch")
