"""Who is alive, and what a newcomer must know to join the run.

A member that stops beating is gone after MEMBER_TTL_S of the server's time. The run's facts and state outlive everyone.
"""

import enum
from typing import Any

import msgspec
import redis

from common.wire import decode, encode
from replay import scripts
from replay.keys import key
from replay.notice import Notices

MEMBER_TTL_S = 15.0
RUNS_KEY = "slipstream:runs"  # the names of the runs that this server knows


class UnknownRun(ValueError):
    """No run of that name has been described on this server."""


class RunState(enum.Enum):
    """How far a run has come."""

    STARTING = "starting"
    """Its learner makes the model and warms it up; no weights are published yet."""
    TRAINING = "training"
    """Tickets are being opened and weights published."""
    FINISHED = "finished"
    """The last step is done: actors leave."""
    FAILED = "failed"
    """The learner ended with an error. It may come back; until then there is nothing to do."""


class MemberState(enum.Enum):
    """What a process of the run is doing."""

    SERVING = "serving"
    """It works."""
    DRAINING = "draining"
    """It was told to leave, and takes nothing new."""


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One live process, as it last said of itself."""

    name: str
    host: str
    role: str  # "actor" or "learner"
    zone: str  # where the host is; "" when not given
    instance_kind: str  # "reserved" or "spot"
    price_per_hour: float  # dollars; 0 when not given
    engine: str  # what generates, its version and its kind of device; "" for a learner
    transport: str  # how weights reach it: "broadcast" or "pull"; "" for a learner
    policy_version: int
    num_episodes: int  # running now
    max_episodes: int  # that it would run at a time
    generated_tokens: int  # since its start
    kept_tokens: int  # of these, in trajectories that are stored and in parts that were handed in
    tokens_per_s: float  # generated, over the last beat
    kv_use: float  # fraction of KV blocks held, in [0, 1]
    state: MemberState
    started_at_s: float  # unix time, of its own clock
    served_s: float  # from its first beat to this one
    last_pause_s: float  # generation stood still for this long at the last refresh
    num_refreshes: int


class RunFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an actor needs beyond the Redis URL and the run's name."""

    config_yaml: str
    model_path: str  # the Hugging Face folder, as every host of the run sees it
    vocab_size: int


class Fleet:
    """The processes of one run."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._member_keys = [key(run_id, "fleet"), key(run_id, "fleet", "deadlines")]
        self._beat = scripts.load(client, "beat")
        self._members = scripts.load(client, "members")
        self._enlist = scripts.load(client, "enlist")
        self._notices = Notices(client)

    def beat(self, member: Member) -> None:
        """Say that `member` is alive; good for MEMBER_TTL_S."""
        self._beat(keys=self._member_keys, args=[member.name, encode(member), round(1000 * MEMBER_TTL_S)])

    def members(self) -> list[Member]:
        """Those alive now, by name."""
        members = [decode(Member, frame) for frame in self._members(keys=self._member_keys)]
        return sorted(members, key=lambda member: member.name)

    def everyone(self) -> list[Member]:
        """Everyone who ever took part, by name, as they last said of themselves: what the whole run cost and made."""
        frames: list[Any] = self._client.hvals(self._member_keys[0])
        return sorted((decode(Member, frame) for frame in frames), key=lambda member: member.name)

    def leave(self, name: str) -> None:
        """Say goodbye, rather than be missed."""
        self._client.zrem(self._member_keys[1], name)

    def describe_run(self, facts: RunFacts) -> None:
        """Make the run known, so that actors can join it."""
        self._notices.put(key(self._run_id, "facts"), encode(facts))
        self._enlist(keys=[RUNS_KEY], args=[self._run_id])

    def run_facts(self) -> RunFacts:
        """What the learner described. Raises UnknownRun."""
        frame = self._notices.read(key(self._run_id, "facts"))
        if frame is None:
            raise self._unknown_run()
        return decode(RunFacts, frame)

    def set_run_state(self, state: RunState) -> None:
        """Tell everyone how far the run has come."""
        self._notices.put(key(self._run_id, "state"), state.value)

    def run_state(self) -> RunState:
        """How far the run has come. Raises UnknownRun."""
        state = self._notices.read(key(self._run_id, "state"))
        if state is None:
            raise self._unknown_run()
        return RunState(state.decode())

    def want_actors(self, host: str, count: int) -> None:
        """Have the supervisor on `host` keep up so many actors from now on."""
        self._notices.put(self._wanted_key(host), str(count))

    def wanted_actors(self, host: str) -> int | None:
        """What was last asked of `host`; None where nothing was since its supervisor started."""
        wanted = self._notices.read(self._wanted_key(host))
        return None if wanted is None else int(wanted)

    def forget_wanted_actors(self, host: str) -> None:
        """A supervisor that starts begins with its own number: what was asked of one before it is over."""
        self._client.delete(self._wanted_key(host))

    def _wanted_key(self, host: str) -> str:
        return key(self._run_id, "fleet", "wanted", host)

    def _unknown_run(self) -> UnknownRun:
        names: set[Any] = self._client.smembers(RUNS_KEY)
        runs = sorted(name.decode() for name in names)
        known = f"the runs it knows are {', '.join(runs)}" if runs else "it knows no run"
        return UnknownRun(
            f"`run.name` {self._run_id} is not on this Redis server; {known}; start its learner, or choose one of them"
        )
