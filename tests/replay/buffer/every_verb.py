"""Every verb of the buffers, Fleet and Bulletin once, as a learner, an actor and a viewer use them in a run."""

import msgspec
import redis

from slipstream.common.records.trajectory import Outcome
from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.weights import Offer, sealed
from slipstream.replay.buffer.audit import audit
from slipstream.replay.buffer.listing import find_group, list_groups
from slipstream.replay.fleet.bulletin import Acknowledgement, BroadcastGroup, Bulletin, RelayNotice
from slipstream.replay.fleet.fleet import Fleet, Member, MemberState, RunFacts, RunState
from slipstream.replay.fleet.rendezvous import Rendezvous
from slipstream.replay.records.failures import read_failures, read_quarantined
from slipstream.replay.records.keys import key
from slipstream.replay.records.ledger import read_ledger
from slipstream.replay.records.ticket import InsertResult
from tests.replay.records.attempts import leased, make_buffer, partial_of, ticket, verdict_on

FACTS = RunFacts(
    config_yaml="", model_path="/models/tiny", model_files=[], own_modules={}, vocab_size=100, tokenizer_root="root"
)
ACTOR = {"host": "host", "instance_kind": "spot", "price_per_hour": 0.5, "engine": "scripted", "transport": "pull"}
PLAYED = {"num_episodes": 8, "max_episodes": 16, "used_slots": 8.0, "generated_tokens": 0, "kept_tokens": 0}
MEASURED = {"tokens_per_s": 12.5, "kv_use": 0.25, "started_at_s": 1.7e9, "served_s": 60.0, "last_pause_s": 0.01}
SERVING = {"policy_version": 3, "num_refreshes": 2, "state": MemberState.SERVING, "refusal": None}
MEMBER = Member(name="a", **ACTOR, **PLAYED, **MEASURED, **SERVING)
GLOO = {"backend": "gloo", "host": "127.0.0.1", "chunk_bytes": 1024, "deadline_s": 1.0, "stall_s": 1.0}
GROUP = BroadcastGroup(number=1, actors=["a"], blob=Blob(root="root", num_bytes=1), **GLOO)
SERVED = {"num_children": 0, "fan_out": 8, "fetched_bytes": 0, "served_bytes": 0, "num_corrupt": 0}
RELAY = RelayNotice(name="r", host="host", endpoint="tcp://127.0.0.1:3", roots=["root"], policy_version=1, **SERVED)


def play_every_verb(run_id: str, *, learner: redis.Redis, actor: redis.Redis, viewer: redis.Redis) -> None:
    """Play four groups: one is trained, one dropped, one fails and is handed in, one is quarantined and requeued."""
    fleet, mine = Fleet(learner, run_id), Fleet(actor, run_id)
    books, buffer = make_buffer(learner, run_id).learner, make_buffer(actor, run_id)
    played, judge = buffer.actor, buffer.judge
    person, base = make_buffer(learner, run_id).people, key(run_id, "train")
    epoch = books.acquire_epoch()
    fleet.describe_run(FACTS)
    fleet.set_run_state(RunState.TRAINING)
    assert mine.run_facts() == FACTS and mine.run_state() is RunState.TRAINING
    fleet.want_actors("host", 3)
    assert mine.wanted_actors("host") == 3
    mine.forget_wanted_actors("host")
    assert fleet.wanted_actors("host") is None
    mine.beat(MEMBER)
    assert fleet.members() == fleet.everyone() == Fleet(viewer, run_id).members() == [MEMBER]
    offer_and_take(Bulletin(learner, run_id), Bulletin(actor, run_id), epoch)
    meet(learner, actor, Bulletin(actor, run_id).rendezvous_key(1))
    relay_and_find(Bulletin(actor, run_id), Bulletin(viewer, run_id))

    assert books.open([ticket(group_id, is_judged=group_id == 0) for group_id in range(4)]) == 4
    for _ in range(2):
        buffer.insert(leased(buffer))
    for _ in range(2):
        judging = judge.lease("j")
        assert judging is not None and judge.renew("j", [judging]) == {0}
        judge.release(judging)
    judging = judge.lease("j")
    assert judging is not None and judge.fail(judging, wait_s=0, reason="no answer")
    judging = judge.lease("j")
    assert judging is not None and judge.store(judging, verdict_on(judging)) is InsertResult.STORED
    trained, dropped = books.claim(1, 2, policy_version=0, max_lag=0)
    books.drop([dropped.ticket.group_id], "zero_variance")
    assert books.reopen(0) == 1
    assert [group.ticket for group in books.claim(1, 1, policy_version=0, max_lag=0)] == [trained.ticket]
    assert books.settle(1) == 1

    lease = leased(buffer)
    assert played.heartbeat("a", [lease]) == {lease.ticket.group_id}
    assert played.fail(lease, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="it broke") == 1
    assert played.hand_in(lease, partial_of(lease, 1, run_id=run_id)) is InsertResult.STORED
    played.release(lease, death="exit code -6")
    lease = leased(buffer)
    played.release(lease, death="exit code -6")
    lease = leased(buffer)
    assert played.hand_in(lease, partial_of(lease, 1, run_id=run_id)) is InsertResult.STORED
    played.release(lease)
    resumed = leased(buffer)
    assert list(resumed.partials) == [1]
    assert person.quarantine(resumed.ticket.group_id, "to be looked at")
    assert len(read_quarantined(viewer, base)) == 1
    assert person.requeue([resumed.ticket.group_id]) == 1
    assert len(books.failures()) == len(read_failures(viewer, base)) == 3
    assert [group.group_id for group in list_groups(viewer, run_id)] == [2, 3]
    queued = find_group(viewer, run_id, 3)
    assert queued is not None and queued.state == "queued"
    mine.leave("a")
    assert fleet.members() == []

    ledger = read_ledger(viewer, run_id)
    assert ledger.balanced and audit(viewer, run_id) == []
    assert (ledger.opened, ledger.trained, ledger.queued, ledger.dropped) == (4, 1, 2, {"zero_variance": 1})


def offer_and_take(learner: Bulletin, actor: Bulletin, epoch: int) -> None:
    actor.join_broadcast("a", ttl_s=60)
    assert learner.broadcast_members() == ["a"]
    manifest = sealed([], memoryview(b""), policy_version=1, learner_epoch=epoch)
    offer = Offer(manifest=manifest, pull_endpoint="tcp://127.0.0.1:1")
    learner.announce(offer)
    learner.announce(msgspec.structs.replace(offer, pull_endpoint="tcp://127.0.0.1:2"))
    latest = actor.latest()
    assert latest is not None and latest.pull_endpoint == "tcp://127.0.0.1:2"
    assert actor.later(0, wait_s=0.1) == latest and actor.later(1, wait_s=0.1) is None
    number = learner.next_invitation()
    actor.acknowledge(number, "a", Acknowledgement(held_group=0, device="cpu", root=""))
    assert list(learner.acknowledgements(number)) == ["a"]
    learner.seal(number, GROUP)
    assert actor.sealed_group(number) == GROUP
    actor.leave_broadcast("a")
    assert learner.broadcast_members() == []


def meet(learner: redis.Redis, actor: redis.Redis, name: str) -> None:
    first, second = (Rendezvous(client, name, secret=b"", timeout_s=1.0) for client in (learner, actor))
    first.set("0/0", b"where the learner is")
    second.set("0/1", b"where the actor is")
    assert (first.get("0/1"), second.get("0/0")) == (b"where the actor is", b"where the learner is")
    assert (second.add("n", 1), first.add("n", 1)) == (1, 2)
    assert second.delete_key("0/1") and first.delete_key("0/0")


def relay_and_find(actor: Bulletin, viewer: Bulletin) -> None:
    actor.announce_relay(RELAY, ttl_s=60)
    assert viewer.relays() == actor.relays() == [RELAY]
    actor.blame(RELAY.endpoint)
    assert viewer.blamed() == {RELAY.endpoint: 1}
    actor.withdraw_relay(RELAY.name)
    assert viewer.relays() == []
