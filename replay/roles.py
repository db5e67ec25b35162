"""What each kind of process may do on a Redis server that others share: rules for its access control lists.

A script may do what its caller may, so an actor has every command that its verbs use, on every key that they change,
and neither the keys nor the commands of the learner's. It can spoil what its own run holds, as by deleting groups; it
cannot claim, settle, publish, take the epoch, or reach another run or the server's settings.
"""

import enum
import hashlib

from replay.fleet import RUNS_KEY
from replay.keys import key, shard_name

STREAMS = ("train", "eval")

_EVERYONES_COMMANDS = (
    "ping",
    "select",
    "time",
    "evalsha",
    "command",
    "cluster|slots",
    "asking",
)  # the last for clusters
_ACTORS_COMMANDS = (
    "multi", "exec", "get", "mget", "set", "persist", "expire", "unlink", "del",
    "hget", "hset", "hdel", "hmget", "hexists", "hincrby", "zadd", "zrem", "zscore", "zrange", "zrangebyscore",
    "zremrangebyscore", "lpush", "ltrim", "srandmember", "smembers",
)  # fmt: skip
_ACTORS_STREAM_KEYS = (
    "", ":counters", ":queued", ":leased", ":ready", ":ready_by_version", ":ready_by_score", ":group:*", ":blob:*",
    ":partial:*", ":lease_request:*", ":failures",
)  # fmt: skip
_ACTORS_RUN_KEYS = (
    "facts", "state", "fleet", "fleet:deadlines", "fleet:wanted:*",
    "weights:latest", "weights:stored", "weights:members", "weights:acknowledged:*", "weights:group:*",
    "weights:relays", "weights:relay:*", "weights:corrupt",
)  # fmt: skip


class Role(enum.Enum):
    """Who connects."""

    LEARNER = "learner"
    """The learner and its publisher, and people who quarantine and requeue: everything on the run's own keys."""
    ACTOR = "actor"
    """The verbs of actors; scripts only as the learner loaded them."""
    VIEWER = "viewer"
    """Reads."""


def user_of(run_id: str, role: Role) -> str:
    """The name of the user."""
    return f"slipstream-{run_id}-{role.value}"


def acl_rules(run_id: str, role: Role, *, password: str) -> list[str]:
    """The rules of the user, for `ACL SETUSER` or a line of an ACL file, in Redis 6.2's words.

    The password is in them as its hash alone.
    """
    rules = ["reset", "on", "#" + hashlib.sha256(password.encode()).hexdigest()]
    everyones = [f"+{name}" for name in _EVERYONES_COMMANDS]
    names = (run_id, shard_name(run_id, 1)[:-1] + "*")  # the first shard's and the others'
    everything = ["~" + RUNS_KEY, *("~" + key(name, "*") for name in names)]
    match role:
        case Role.LEARNER:
            loading = ["+script|load", "+script|exists"]
            return [*rules, *everything, "+@read", "+@write", "-@dangerous", *everyones, *loading]
        case Role.ACTOR:
            streams = [key(name, stream) for name in names for stream in STREAMS]
            keys = [stream + part for stream in streams for part in _ACTORS_STREAM_KEYS]
            keys += [key(run_id, part) for part in _ACTORS_RUN_KEYS]
            may = [*(f"~{name}" for name in [*keys, RUNS_KEY]), *(f"+{name}" for name in _ACTORS_COMMANDS)]
            return [*rules, *may, *everyones]
        case Role.VIEWER:
            return [*rules, *everything, "+@read", "-@dangerous", *everyones]
