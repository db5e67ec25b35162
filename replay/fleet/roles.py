"""Access control rules for a shared Redis server: what each kind of process may do there.

A script has only the rights of its caller. So an actor may use every command that its verbs use, on every key that they
change, but not the learner's keys and commands. An actor can damage its own run, for example by deleting groups. It
cannot claim, settle, publish, take the epoch, or access another run, the list of runs or the server's settings.
"""

import enum
import hashlib

from slipstream.replay.fleet.fleet import RUNS_KEY
from slipstream.replay.records.keys import key

STREAMS = ("train", "eval")

_EVERYONES_COMMANDS = ("ping", "select", "time", "evalsha")
_ACTORS_COMMANDS = (
    *("multi", "exec", "type"),
    *("get", "mget", "set", "persist", "expire", "unlink", "del"),
    *("hget", "hset", "hdel", "hmget", "hexists", "hincrby", "hincrbyfloat"),
    *("zadd", "zrem", "zscore", "zcard", "zrange", "zrangebyscore", "zremrangebyscore"),
    *("lpush", "ltrim", "srandmember", "smembers", "xread"),
)
_ACTORS_STREAM_KEYS = (
    *("", ":counters"),
    *(":queued", ":leased", ":judging", ":ready", ":ready_by_version"),
    *(":group:*", ":blob:*", ":partial:*", ":lease_request:*", ":failures"),
)
_ACTORS_RUN_KEYS = (
    *("judge:spent", "facts", "state"),
    *("fleet", "fleet:deadlines", "fleet:wanted:*"),
    *("weights:latest", "weights:latest:versions"),
    *("weights:members", "weights:acknowledged:*", "weights:group:*", "weights:rendezvous:*"),
    *("weights:relays", "weights:relay:*", "weights:corrupt"),
)


class Role(enum.Enum):
    """A kind of client."""

    LEARNER = "learner"
    """`LearnerBuffer` and `PeopleBuffer`, and the publisher: everything on the run's own keys."""
    ACTOR = "actor"
    """`ActorBuffer` and `JudgeBuffer`, through scripts that the learner has loaded."""
    VIEWER = "viewer"
    """Reads only."""


def user_of(run_id: str, role: Role, *, fleet: str = "") -> str:
    """The name of the Redis user of a role in a run; some hosts, a `fleet`, may have one of their own."""
    return f"slipstream-{run_id}-{role.value}" + (f"-{fleet}" if fleet else "")


def acl_rules(run_id: str, role: Role, *, password: str) -> list[str]:
    """The rules of the user for `ACL SETUSER` or an ACL file of Redis 6.2, with only the hash of the password."""
    rules = ["reset", "on", "#" + hashlib.sha256(password.encode()).hexdigest()]
    everyones = [f"+{name}" for name in _EVERYONES_COMMANDS]
    everything = ["~" + RUNS_KEY, "~" + key(run_id, "*")]
    match role:
        case Role.LEARNER:
            further = ["+script|load", "+script|exists", "+multi", "+exec"]
            return [*rules, *everything, "+@read", "+@write", "-@dangerous", *everyones, *further]
        case Role.ACTOR:
            keys = [key(run_id, stream) + part for stream in STREAMS for part in _ACTORS_STREAM_KEYS]
            keys += [key(run_id, part) for part in _ACTORS_RUN_KEYS]
            may = [*(f"~{name}" for name in keys), *(f"+{name}" for name in _ACTORS_COMMANDS)]
            return [*rules, *may, *everyones]
        case Role.VIEWER:
            return [*rules, *everything, "+@read", "-@dangerous", *everyones]
