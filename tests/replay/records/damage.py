"""A small run in Redis, every kind of damage to each of its keys, and everyone who has to live with that."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import redis

from slipstream.common.config.config import Config, RunConfig
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.process.wire import encode
from slipstream.common.records.trajectory import Outcome
from slipstream.common.transfer.weights import Offer, sealed
from slipstream.learner.supply.supply import Supply
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.buffer.audit import audit
from slipstream.replay.buffer.judge_buffer import JudgeBuffer
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.buffer.listing import find_group, list_groups
from slipstream.replay.buffer.people_buffer import PeopleBuffer
from slipstream.replay.fleet.bulletin import Acknowledgement, Bulletin
from slipstream.replay.fleet.fleet import Fleet, RunState, UnknownRun
from slipstream.replay.fleet.judge_account import JudgeAccount
from slipstream.replay.records.failures import Failure, read_failures, read_quarantined
from slipstream.replay.records.keys import FencedOut, RunForgotten, key
from slipstream.replay.records.ledger import read_ledger
from slipstream.replay.records.ticket import Marks, Verdict
from slipstream.tools.see.view import View
from tests.common.process.test_headline import REST
from tests.common.process.test_headline import step as made_step
from tests.learner.supply.test_supply import ahead_of, config
from tests.replay.buffer.every_verb import FACTS, GROUP, MEMBER, RELAY
from tests.replay.records.attempts import attempt_at, earning, make_buffer, partial_of, ticket, verdict_on

NUM_GROUPS = 8
GARBAGE = {
    "empty": b"",
    "50 random bytes": random.Random(50).randbytes(50),
    "invalid utf-8": b"\xff\xfe\xc3(" * 10,
    "a record of another kind": encode(Failure(group_id=1, member=0, attempt=2, outcome="x", reason="why")),
    "no record": b"\x93\x01\x02\x03",
    "a huge number": b"9" * 23,
    "a large number": b"9" * 14,
    "a negative number": b"-7",
    "nan": b"nan",
}
STEP_CONFIG = config("learner.claim_timeout_s=10", "sampling.max_turn_tokens=8")  # once: it takes as long as a step
SCORES = [float("inf"), float("-inf"), 1e300, -7.0]
Command = tuple[str | bytes | float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A run of every state: trained, claimed, ready (judged), judging, leased with a partial, queued, quarantined."""

    client: redis.Redis
    impatient: redis.Redis  # whose calls do not wait
    run_id: str
    dumps: dict[bytes, bytes]
    folder: Path

    def restore(self) -> None:
        """Begin again with everything as it was."""
        names = list(self.client.scan_iter(match=f"{key(self.run_id)}:*", count=10_000))
        with self.client.pipeline(transaction=False) as everything:
            everything.delete(*names)
            for name, dump in self.dumps.items():
                everything.restore(name, 0, dump)
            everything.execute()


def make_scene(client: redis.Redis, impatient: redis.Redis, run_id: str, folder: Path) -> Scene:
    fleet, bulletin, buffer = Fleet(client, run_id), Bulletin(client, run_id), make_buffer(client, run_id).start()
    fleet.describe_run(FACTS)
    fleet.set_run_state(RunState.TRAINING)
    fleet.report_step(made_step(3, episodes=100, success=0.5) | REST)
    fleet.want_actors("host", 3)
    fleet.beat(MEMBER)
    bulletin.announce(offer(1))
    bulletin.join_broadcast("a", ttl_s=600)
    bulletin.acknowledge(bulletin.next_invitation(), "a", Acknowledgement(held_group=0, device="cpu", root=""))
    bulletin.seal(1, GROUP)
    bulletin.announce_relay(RELAY, ttl_s=600)
    bulletin.blame(RELAY.endpoint)
    buffer.learner.open([ticket(group_id, is_judged=group_id in (2, 3)) for group_id in range(NUM_GROUPS)])
    for _ in range(4):
        play(buffer.actor, run_id)
    buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    buffer.learner.settle(1)
    buffer.learner.claim(2, 1, policy_version=0, max_lag=0)
    judge(buffer.judge)
    JudgeAccount(client, run_id).add("env.rewards.clear", 1, 7, 0.5)
    assert buffer.judge.lease("j") is not None
    lease = buffer.actor.lease("b")
    assert buffer.actor.fail(lease, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="it broke") == 1
    buffer.actor.hand_in(lease, partial_of(lease, 1, run_id=run_id))
    buffer.people.quarantine(NUM_GROUPS - 1, "to be looked at")
    assert buffer.audit() == []
    names = list(client.scan_iter(match=f"{key(run_id)}:*", count=10_000))
    dumps: dict[bytes, Any] = {name: client.dump(name) for name in names}
    return Scene(client=client, impatient=impatient, run_id=run_id, dumps=dumps, folder=folder)


def play(actor: ActorBuffer, run_id: str) -> None:
    """What an actor does with one lease, if it gets one: its members earn 0 and 1."""
    lease = actor.lease("a")
    if lease is None:
        return
    for member in lease.missing:
        actor.insert(lease, earning(attempt_at(lease, member, run_id=run_id, policy_version=9), float(member)))


def judge(buffer: JudgeBuffer) -> None:
    """What a judge does with one group, if one waits."""
    judging = buffer.lease("j")
    if judging is not None:
        buffer.store(judging, verdict_on(judging))


def offer(version: int, *, epoch: int = 1 << 43) -> Offer:
    manifest = sealed([], memoryview(b""), policy_version=version, learner_epoch=epoch)
    return Offer(manifest=manifest, pull_endpoint="tcp://127.0.0.1:1")


def damages(client: redis.Redis, name: bytes) -> Iterator[tuple[str, list[Command]]]:
    """Every kind of damage to a key, with its description."""
    found: Any = client.type(name)
    kind = found.decode()
    yield "deleted", [("DEL", name)]
    yield "of another type", [("DEL", name), ("RPUSH" if kind != "list" else "SADD", name, b"x")]
    yield "a string", [("SET", name, b"x")]
    add = {"string": ("SET", name), "set": ("SADD", name), "list": ("RPUSH", name)}.get(kind)
    for label, value in GARBAGE.items():
        if add:
            yield label, [("DEL", name), (*add, value)]
        if kind == "list":
            yield f"{label} at its head", [("LPUSH", name, value)]
        if kind == "zset":
            yield f"{label} as a member", [("ZADD", name, 1, value)]
        if kind == "hash":
            yield f"{label} as a field", [("HSET", name, value, value)]
    if kind == "zset":
        first: Any = client.zrange(name, 0, 0)
        yield "without its first", [("ZREM", name, first[0])]
        for score in SCORES:
            yield f"its first at {score}", [("ZADD", name, score, first[0])]
    fields: Any = client.hkeys(name) if kind == "hash" else []
    for field in fields:
        yield f"without {field!r}", [("HDEL", name, field)]
        for label, value in GARBAGE.items():
            yield f"{label} in {field!r}", [("HSET", name, field, value)]


def everyone_goes_on(scene: Scene, learner: LearnerBuffer, shutdown: Shutdown) -> None:
    """What every process of the run does next; whatever they raise that they may not raise, ends the test."""
    viewers_go_on(scene)
    time_passes(scene)
    an_actor_and_a_judge_look_in(scene)
    learner = a_learner_steps(scene, learner, shutdown)
    an_actor_works(scene)
    assert read_ledger(scene.client, scene.run_id).balanced
    if audit(scene.client, scene.run_id):  # damage that stopped no process stays, until a person has it repaired
        assert PeopleBuffer(scene.client, scene.run_id).repair("the audit found something")
    assert audit(scene.client, scene.run_id) == []


def viewers_go_on(scene: Scene) -> None:
    client, run_id = scene.client, scene.run_id
    fleet, bulletin = Fleet(client, run_id), Bulletin(client, run_id)
    audit(client, run_id)
    read_ledger(client, run_id).to_dict()
    read_failures(client, key(run_id, "train")), read_quarantined(client, key(run_id, "train"))
    list(list_groups(client, run_id)), [find_group(client, run_id, group_id) for group_id in range(NUM_GROUPS)]
    fleet.newest_step()
    View(client, RunDir(scene.folder, run_id), Config(run=RunConfig(name=run_id))).render()
    fleet.members(), fleet.everyone(), fleet.wanted_actors("host")
    asks: list[Callable[[], object]] = [fleet.run_facts, fleet.run_state]
    for ask in asks:
        try:
            ask()
        except UnknownRun as error:
            assert run_id in str(error)
    bulletin.latest(), bulletin.highest_version(), bulletin.relays(), bulletin.blamed()
    bulletin.acknowledgements(1), bulletin.sealed_group(1)


def time_passes(scene: Scene) -> None:
    """Every lease has expired."""
    for leased in (key(scene.run_id, "train", state) for state in ("leased", "judging")):
        if scene.client.type(leased) != b"zset":
            continue
        found: Any = scene.client.zrange(leased, 0, -1, withscores=True)
        for group_id, score in found:
            if score < 1e15:
                scene.client.zadd(leased, {group_id: 1})


def an_actor_and_a_judge_look_in(scene: Scene) -> None:
    """Each works, or it waits for the learner and says so."""
    buffer = make_buffer(scene.impatient, scene.run_id)
    works: list[Callable[[], None]] = [lambda: play(buffer.actor, scene.run_id), lambda: judge(buffer.judge)]
    account = JudgeAccount(scene.client, scene.run_id)
    before = account.add("env.rewards.clear", 1, 7, 0.5)
    assert account.add("env.rewards.clear", 1, 7, 0.5) == (before[0] + 1, before[1] + 7, before[2] + 0.5)
    for work in works:
        try:
            work()
        except redis.ConnectionError as error:
            assert "waiting for the learner to repair them" in str(error)


def a_learner_steps(scene: Scene, learner: LearnerBuffer, shutdown: Shutdown) -> LearnerBuffer:
    """One step, from the claim to the offer; once it may be started again."""
    try:
        step(scene, learner, shutdown)
    except (FencedOut, RunForgotten):
        learner = make_buffer(scene.client, scene.run_id).start().learner
        step(scene, learner, shutdown)
    return learner


def step(scene: Scene, learner: LearnerBuffer, shutdown: Shutdown) -> None:
    buffer = make_buffer(scene.client, scene.run_id)
    learner.settle(2)
    learner.reopen(2)

    def others_work(_: float) -> None:
        play(buffer.actor, scene.run_id)
        judge(buffer.judge)

    supply = Supply(learner, STEP_CONFIG, first_group_id=NUM_GROUPS, sleep=others_work)
    batch = supply.next_batch(ahead_of(3, 9), shutdown)
    assert batch is not None and len(batch.groups) == 2
    learner.settle(3)
    fleet, bulletin = Fleet(scene.client, scene.run_id), Bulletin(scene.client, scene.run_id)
    fleet.describe_run(FACTS)
    fleet.set_run_state(RunState.TRAINING)
    version = bulletin.highest_version() + 1
    bulletin.announce(offer(version))
    latest = bulletin.latest()
    assert latest is not None and latest.manifest.policy_version == version
    number = bulletin.next_invitation()
    bulletin.seal(number, GROUP)
    assert bulletin.sealed_group(number) == GROUP


def an_actor_works(scene: Scene) -> None:
    client, run_id = scene.client, scene.run_id
    fleet, bulletin = Fleet(client, run_id), Bulletin(client, run_id)
    me = msgspec.structs.replace(MEMBER, name="me")
    fleet.beat(me)
    assert me in fleet.members() and me in fleet.everyone()
    assert fleet.run_facts() == FACTS and fleet.run_state() is RunState.TRAINING
    bulletin.join_broadcast("me", ttl_s=60)
    assert "me" in bulletin.broadcast_members()
    bulletin.acknowledge(1, "me", Acknowledgement(held_group=0, device="cpu", root=""))
    assert "me" in bulletin.acknowledgements(1)
    bulletin.announce_relay(msgspec.structs.replace(RELAY, name="mine"), ttl_s=60)
    assert "mine" in {relay.name for relay in bulletin.relays()}
    bulletin.blame("tcp://127.0.0.1:9")
    assert bulletin.blamed()["tcp://127.0.0.1:9"] >= 1
    bulletin.withdraw_relay("mine")
    bulletin.leave_broadcast("me")
    fleet.leave("me")
    play(make_buffer(client, run_id).actor, run_id)


Argument = bytes | str | int


def honest_calls(scene: Scene) -> dict[str, tuple[list[str], list[Argument]]]:
    """(keys, arguments) of a call of each verb of an actor or a judge, by who leases a group of the scene."""
    base, group_id = key(scene.run_id, "train"), 4
    fence: Any = scene.client.hget(f"{base}:group:{group_id}", "fence")
    at, record = f"{group_id}:0:1:{int(fence)}", f"1:{int(fence)}:0:7:5:1:100:b"
    failure = encode(Failure(group_id=group_id, member=0, attempt=1, outcome="env_failure", reason="why"))
    others = [base, f"{base}:counters"]
    judged_id, judge_fence = 3, int(cast(Any, scene.client.hget(f"{base}:group:3", "judge_fence")))
    verdict = encode(Verdict(judge="j", members=[Marks(values={"liked": 0.5}, rewards={"liked": 0.5})] * 2))
    return {
        "lease": (others, ["b", "request", 60_000]),
        "heartbeat": (others, ["b", 60_000, group_id, int(fence)]),
        "insert": ([base, f"{base}:blob:{at}"], [group_id, 0, record, "shop", "1.0", "1", "77", "2"]),
        "hand_in": ([base, f"{base}:partial:{at}"], [group_id, 0, record]),
        "discard": (others, [group_id, 1, f"0:{int(fence)}:0:7:5:1:100:b", "poison"]),
        "condemn": (others, [group_id, int(fence)]),
        "fail": (others, [group_id, 0, 1, int(fence), "env_failure", failure]),
        "release": (others, [group_id, int(fence)]),
        "lease_judging": (others, ["j", "request", 60_000]),
        "renew_judging": (others, ["j", 60_000, judged_id, judge_fence]),
        "judged": (others, [judged_id, judge_fence, verdict]),
        "fail_judging": (others, [judged_id, judge_fence, 0, failure]),
        "release_judging": (others, [judged_id, judge_fence]),
    }


def lies(scene: Scene) -> Iterator[tuple[str, str, list[str], list[Argument]]]:
    """(what, verb, keys, arguments) of calls in each of which one argument, or a field of the record, is a lie."""
    for verb, (keys, arguments) in honest_calls(scene).items():
        for place, honest in enumerate(arguments):
            told: list[Argument] = [*GARBAGE.values(), "inf", "1e400", 1 << 40, "0.5", "x" * 100_000]
            fields = honest.split(":") if isinstance(honest, str) else []
            for at in range(len(fields) if len(fields) == 8 else 0):
                told += [
                    ":".join([*fields[:at], lie, *fields[at + 1 :]]) for lie in ("", "-1", "9" * 23, "9" * 14, "nan")
                ]
            for lie in told:
                yield f"{verb}[{place}] = {lie!r:.60}", verb, keys, [*arguments[:place], lie, *arguments[place + 1 :]]
