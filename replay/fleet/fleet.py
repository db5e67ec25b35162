"""The processes of a run that are alive, and the facts that a new actor needs to join the run.

A member that sends no heartbeat for MEMBER_TTL_S of the server's time is gone. The facts and the state of the run never
expire.
"""

import enum
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec
import redis
import yaml
from redis.exceptions import NoPermissionError

from slipstream.common.process.wire import MALFORMED, WireError, decode, encode
from slipstream.common.transfer.model_folder import MAX_FILES, ModelFile
from slipstream.replay.records import scripts
from slipstream.replay.records.failures import MAX_REASON_CHARS
from slipstream.replay.records.keys import FencedOut, epoch_key, key
from slipstream.replay.records.records import Notices, leave_set, log_skipped, read_or_nothing, read_records, write_over

MEMBER_TTL_S = 15.0
RUNS_KEY = "slipstream:runs"  # the names of the runs that this server knows
MAX_WANTED = 4096  # actors of one host
MAX_COUNT = 1 << 53
NO_EPOCH = 1 << 53  # of a process that is no learner: above every epoch
BATCH_MEMBERS = 1000  # records that one request reads
PLAYED_SECTIONS = ("model", "env", "sampling", "replay")  # of the configuration: what actors go by

log = logging.getLogger(__name__)

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=float(MAX_COUNT))]


class UnknownRun(ValueError):
    """No learner has described a run of that name on this server."""


class RunState(enum.Enum):
    """How far a run has come."""

    STARTING = "starting"
    """Its learner makes the model and runs the warm start; no weights are published yet."""
    TRAINING = "training"
    """Tickets are being opened and weights published."""
    FINISHED = "finished"
    """The last step is done; actors leave."""
    FAILED = "failed"
    """The learner ended with an error. Actors wait until it is started again."""


class MemberState(enum.Enum):
    """What an actor is doing."""

    SERVING = "serving"
    """It plays episodes."""
    DRAINING = "draining"
    """It was asked to leave, and takes no new work."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published version that an actor does not serve, and why."""

    policy_version: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
    unfit: bool  # the version does not fit, or failed its probe; otherwise it did not arrive


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last heartbeat of one actor."""

    name: str
    host: str
    role: Literal["actor"] = "actor"  # no other process sends heartbeats
    instance_kind: str  # "reserved" or "spot"
    price_per_hour: Amount  # dollars; 0 if not configured
    engine: str  # the engine's name, version and kind of device
    transport: str  # `actors.transport`
    policy_version: Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)]
    num_episodes: Count  # running now
    max_episodes: Count  # its slots
    used_slots: Amount  # in the mean since the heartbeat before, or since the start; at most `max_episodes`
    generated_tokens: Count  # since its start
    kept_tokens: Count  # those of them in stored trajectories, in partials, and in answers of a judge
    tokens_per_s: Amount  # generated since the heartbeat before
    kv_use: Amount  # fraction of KV blocks in use, in [0, 1]
    state: MemberState
    started_at_s: Amount  # unix time, by its own clock
    served_s: Amount  # from its first heartbeat to this one
    last_pause_s: Amount  # how long the last refresh paused generation
    num_refreshes: Count
    refusal: Refusal | None  # of the version that it tried last; None if it serves


class RunFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an actor needs beyond the Redis URL and the run's name."""

    config_yaml: str
    model_path: str  # the Hugging Face folder on the learner's host
    # The files of that folder, which a host without it pulls; the weights are among them only if adapters are trained.
    model_files: Annotated[list[ModelFile], msgspec.Meta(max_length=MAX_FILES)]
    vocab_size: int
    # The hash of tokenizer and template, see `slipstream.common.text.tokenizer`: an actor that loads another one may
    # not join.
    tokenizer_root: str
    # By name, the digest of each of the user's modules that environments and action format have imported; and of the
    # rooms of Slipstream that learner and actors share.
    own_modules: dict[str, str]

    def play_root(self) -> str:
        """A digest of all by which actors play: it changes if a learner is started again with other such settings."""
        sections = yaml.safe_load(self.config_yaml) or {}
        played = {name: sections.get(name) for name in PLAYED_SECTIONS} | {"seed": sections.get("run", {}).get("seed")}
        rest = msgspec.structs.replace(self, config_yaml="", model_path="")
        return hashlib.sha256(msgspec.json.encode([played, rest], order="deterministic")).hexdigest()[:16]


class Census(NamedTuple):
    """The actors of a run at one instant, by name."""

    alive: list[Member]
    everyone: list[Member]  # that ever took part


class Fleet:
    """The processes of one run."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._records, self._deadlines = key(run_id, "fleet"), key(run_id, "fleet", "deadlines")
        self._beat = scripts.load(client, "beat")
        self._members = scripts.load(client, "members")
        self._enlist = scripts.load(client, "enlist")
        self._put_as_learner = scripts.load(client, "put_as_learner")
        self._notices = Notices(client)
        self._epoch = NO_EPOCH
        self._described: RunFacts | None = None  # what this process has described, for `renew`
        self._state: RunState | None = None
        self._known: dict[str, Member] = {}  # everyone, as of the last census
        self._were_alive = set[bytes]()  # at the last census
        self.num_unreadable = 0  # member records that the last read skipped

    def adopt_epoch(self, epoch: int) -> None:
        """Write facts and state as the learner of `epoch`, so only until a newer learner acquires one."""
        self._epoch = epoch

    def beat(self, member: Member) -> int:
        """Send the heartbeat of `member`, which is valid for MEMBER_TTL_S; return how many members are alive now."""
        arguments = [member.name, round(1000 * MEMBER_TTL_S), encode(member)]
        return cast(int, self._beat(keys=[self._deadlines, self._records], args=arguments))

    def members(self) -> list[Member]:
        """The members that are alive now, by name."""
        return self._of(self._alive())

    def _of(self, names: Sequence[bytes]) -> list[Member]:
        """The last heartbeats of these processes, by name."""
        frames = list[Any]()
        for start in range(0, len(names), BATCH_MEMBERS):  # a script that reads thousands would block other clients
            batch = names[start : start + BATCH_MEMBERS]
            found = read_or_nothing(lambda: self._client.hmget(self._records, batch), self._records)  # noqa: B023
            frames += found or [None] * len(batch)
        return self._read(list(zip(names, frames, strict=True)))

    def everyone(self) -> list[Member]:
        """The last heartbeat of every process that ever took part, by name: for the cost and the output of the run."""
        frames: Any = read_or_nothing(lambda: self._client.hgetall(self._records), self._records)
        return self._read(list(frames.items()) if frames else [])

    def census(self) -> Census:
        """The members that are alive, and everyone that ever took part.

        It reads those that live, and once more those that have left since the last census: of others nothing changes.
        """
        names = self._alive()
        left = sorted(self._were_alive - set(names))
        self._known |= {member.name: member for member in self._of([*names, *left])}
        self._were_alive = set(names)
        num_records = read_or_nothing(lambda: self._client.hlen(self._records), self._records)
        if num_records != len(self._known):  # others came, and left
            self._known = {member.name: member for member in self.everyone()}
        alive = {name.decode(errors="replace") for name in names}
        everyone = sorted(self._known.values(), key=lambda member: member.name)
        return Census([member for member in everyone if member.name in alive], everyone)

    def _alive(self) -> list[bytes]:
        """The names of the members that are alive now."""
        names: Any = read_or_nothing(lambda: self._members(keys=[self._deadlines]), self._deadlines)
        return names or []

    def _read(self, rows: list[Any]) -> list[Member]:
        """The readable members, by name. A record under the name of another member is a forgery, and is skipped."""
        frames = [(f"{self._records}: {name.decode(errors='replace')}", frame) for name, frame in rows]
        sound = []
        for sender, member in read_records(Member, frames):
            if sender == f"{self._records}: {member.name}":
                sound.append(member)
            else:
                log_skipped(sender, f"its record names another member, {member.name!r}")
        self.num_unreadable = sum(frame is not None for _, frame in frames) - len(sound)
        return sorted(sound, key=lambda member: member.name)

    def leave(self, name: str) -> None:
        """Remove the member `name` at once, instead of letting its heartbeat expire."""
        leave_set(self._client, self._deadlines, name)

    def describe_run(self, facts: RunFacts) -> None:
        """Publish the facts of the run, so that actors can join it. Raises FencedOut."""
        self._described = facts
        self._put("facts", encode(facts))
        write_over(self._client, lambda: self._enlist(keys=[RUNS_KEY], args=[self._run_id]), name=RUNS_KEY, kind="set")

    def run_facts(self) -> RunFacts:
        """The facts that the learner published. Raises UnknownRun."""
        frame = self._notices.read(key(self._run_id, "facts"))
        if frame is None:
            raise self._unknown_run()
        try:
            return decode(RunFacts, frame)
        except WireError as error:
            raise self._unreadable("facts", str(error)) from None

    def forget_run(self) -> None:
        """Delete the facts and the state of a run that has ended: actors wait until its learner describes it again."""
        self._client.delete(*(key(self._run_id, what) for what in ("facts", "state", "newest")))

    def set_run_state(self, state: RunState) -> None:
        """Publish how far the run has come. Raises FencedOut."""
        self._state = state
        self._put("state", f"{state.value} {self._described.play_root()}" if self._described else state.value)

    def report_step(self, record: Mapping[str, float]) -> None:
        """Publish the record of the newest step, for viewers that have no directory of the run. Raises FencedOut."""
        self._put("newest", msgspec.json.encode(record))

    def newest_step(self) -> dict[str, float] | None:
        """The record of the newest step; None before the first, or where it is damaged."""
        written = self._notices.read(key(self._run_id, "newest"))
        try:
            record = msgspec.json.decode(written or b"", type=dict[str, float | None])
        except (*MALFORMED, OverflowError):
            return None
        return {name: value for name, value in record.items() if value is not None} if record.get("step") else None

    def renew(self) -> None:
        """Publish the facts and the state again if they are missing or damaged. Raises FencedOut."""
        try:
            self.run_facts()
            self.run_state()
        except UnknownRun as error:
            log.error("publishing the facts and the state of the run again: %s", error)
            if self._described:
                self.describe_run(self._described)
            if self._state:
                self.set_run_state(self._state)

    def run_state(self) -> RunState:
        """How far the run has come. Raises UnknownRun."""
        return self.state_and_root()[0]

    def state_and_root(self) -> tuple[RunState, str]:
        """How far the run has come, and the `play_root` of its facts; "" without facts. Raises UnknownRun."""
        written = self._notices.read(key(self._run_id, "state"))
        if written is None:
            raise self._unknown_run()
        state, _, root = written.decode(errors="replace").partition(" ")
        try:
            return RunState(state), root
        except ValueError as error:
            raise self._unreadable("state", str(error)) from None

    def _put(self, what: str, value: str | bytes) -> None:
        keys = [epoch_key(self._run_id), key(self._run_id, what)]
        if newest := self._put_as_learner(keys=keys, args=[self._epoch, value]):
            raise FencedOut(f"the learner of epoch {newest} has taken over: this one does not write the run's {what}")

    def _unreadable(self, what: str, why: str) -> UnknownRun:
        return UnknownRun(
            f"{key(self._run_id, what)} is damaged: {why}; the learner writes it again at its next step or start"
        )

    def want_actors(self, host: str, count: int) -> None:
        """Ask the supervisor on `host` to keep `count` actors running from now on."""
        if not 0 <= count <= MAX_WANTED:
            raise ValueError(
                f"the number of actors on a host must be in [0, {MAX_WANTED}], got {count}; use more hosts"
            )
        self._notices.put(self._wanted_key(host), str(count))

    def wanted_actors(self, host: str) -> int | None:
        """The last number that `want_actors` set for `host`; None if there was none since its supervisor started."""
        wanted = self._notices.read(self._wanted_key(host))
        if wanted is None:
            return None
        if not wanted.isdigit() or len(wanted) > 5 or int(wanted) > MAX_WANTED:
            log_skipped(self._wanted_key(host), f"{wanted[:40]!r} is not a number from 0 to {MAX_WANTED}")
            return None
        return int(wanted)

    def forget_wanted_actors(self, host: str) -> None:
        """Remove the number that `want_actors` set: a new supervisor starts with its configured number."""
        self._client.delete(self._wanted_key(host))

    def _wanted_key(self, host: str) -> str:
        return key(self._run_id, "fleet", "wanted", host)

    def _unknown_run(self) -> UnknownRun:
        try:
            names: Any = read_or_nothing(lambda: self._client.smembers(RUNS_KEY), RUNS_KEY) or set()
        except NoPermissionError:  # of the user of an actor, which is one of this run alone
            names = {self._run_id.encode()}
        runs = sorted(name.decode(errors="replace") for name in names)
        if self._run_id in runs:
            return UnknownRun(f"the learner of {self._run_id} has not described the run; start it, if it does not run")
        known = f"it has the runs {', '.join(runs)}" if runs else "it has no runs"
        return UnknownRun(
            f"`run.name` {self._run_id} is not on this Redis server; {known}; start the learner of this run, or choose "
            "another name or server"
        )
