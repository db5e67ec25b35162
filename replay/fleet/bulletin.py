"""The bulletin: the newest weights on offer, the members of broadcasts, and the relays.

`latest` moves by compare-and-set: an older learner, or a version that is not newer, cannot overwrite it. The offer is
first written whole under a staging key; the script that moves `latest` only renames that key. It also adds the version
to a stream, at which actors wait: the offer, which names each expert of a mixture, is read once.

The members of a broadcast are agreed in steps. Actors call `join_broadcast`, and renew it while they live. The
publisher invites them in its offer. Each invited actor calls `acknowledge` with the number of the group that it is
still in. The publisher seals a `BroadcastGroup` of those that answered in time. All other actors pull.

A relay keeps weights for others to pull. It announces itself with a `RelayNotice`, and renews the notice while it
lives. Any actor of the run can forge a notice, so receivers check every pulled byte against the offer, which only a
learner can make.
"""

import logging
import time
from typing import Any

import msgspec
import redis

from slipstream.common.process import wire
from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.weights import Offer
from slipstream.replay.records import keys, scripts
from slipstream.replay.records.keys import FencedOut
from slipstream.replay.records.records import Notices, leave_set, read_or_nothing, read_records, write_over
from slipstream.replay.records.scripts import is_damage

TTL_S = 120  # time to live of every key of one invitation
BROADCAST_TIMEOUT_S = 20.0  # a member of a broadcast that takes longer, or 4 s a GB if that is more, pulls
MAX_DIGITS = 14  # of a counter
MAX_SEQUENCE = 2**64 - 1  # of an entry's id in a stream, after its version
CPU = "cpu"

log = logging.getLogger(__name__)


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An invited actor's answer: it is ready to receive."""

    held_group: int  # the number of the group that it is still in; 0 for none
    device: str  # where it can receive: cpu, or the UUID of a GPU
    root: str  # of the weights that it holds, for a delta; empty for none


class BroadcastGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The members of one broadcast: the publisher is rank 0, and `actors[i]` is rank i + 1."""

    number: int  # of the invitation that made this group; it stays the same while the group is used again
    backend: str  # gloo or nccl
    host: str  # the publisher's address
    actors: list[str]
    blob: Blob  # what is sent: a full snapshot of the version, or its last delta
    chunk_bytes: int
    deadline_s: float  # for joining and receiving, counted by each side from its own start
    stall_s: float  # for one chunk


class RelayNotice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last report of one relay."""

    name: str
    host: str  # its machine's name: actors on the same machine ask this relay first
    endpoint: str  # ZeroMQ address
    roots: list[str]  # of the blobs that it holds, verified
    policy_version: int  # of the newest offer whose blobs it holds completely; -1 for none
    num_children: int  # receivers that it serves now
    fan_out: int  # receivers that it serves at a time
    fetched_bytes: int  # since its start, like the next field: while it grows, the relay is worth waiting for
    served_bytes: int
    num_corrupt: int  # fetched chunks that did not match their hash


class Bulletin:
    """The keys of one run in Redis that are about weights."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._notices = Notices(client)
        self._announce = scripts.load(client, "announce")
        self._beat = scripts.load(client, "beat")
        self._members = scripts.load(client, "members")

    def announce(self, offer: Offer) -> None:
        """Make `offer` the newest. Raises FencedOut."""
        manifest = offer.manifest
        staged = self._key("staged", manifest.learner_epoch, manifest.policy_version)
        self._notices.put(staged, wire.encode(offer, compress=True), ttl_s=TTL_S)
        epoch, version, latest = keys.epoch_key(self._run_id), self._key("version"), self._key("latest")
        refusal = self._announce(
            keys=[epoch, version, latest, staged, self._key("latest", "versions")],
            args=[manifest.learner_epoch, manifest.policy_version, manifest.root],
        )
        if refusal:
            raise FencedOut(refusal.decode())

    def latest(self) -> Offer | None:
        """The newest offer; None before the first."""
        name = self._key("latest")
        return next((offer for _, offer in read_records(Offer, [(name, self._notices.read(name))])), None)

    def later(self, policy_version: int, *, wait_s: float) -> Offer | None:
        """The newest offer, as soon as its version is above `policy_version`; None if `wait_s` passes first."""
        name, block_ms = self._key("latest", "versions"), int(wait_s * 1000) or None  # Redis waits for ever at 0
        after: Any = {name: f"{policy_version}-{MAX_SEQUENCE}" if policy_version >= 0 else "0-0"}
        announced = read_or_nothing(lambda: self._client.xread(after, block=block_ms), name)
        if announced is not None and not announced:
            return None
        offer = self.latest()
        if offer is not None and offer.manifest.policy_version > policy_version:
            return offer
        time.sleep(wait_s)  # the stream or the offer is damaged: the next announcement replaces both
        return None

    def highest_version(self) -> int:
        """The highest version ever offered, as far as Redis knows; -1 for none. Its offer may be missing or damaged."""
        name, latest = self._key("version"), self.latest()
        kept: Any = read_or_nothing(lambda: self._client.hget(name, "policy_version"), name)
        announced = int(kept) if kept and _is_count(kept) else -1
        return max(announced, latest.manifest.policy_version if latest else -1)

    def join_broadcast(self, actor: str, *, ttl_s: float) -> None:
        """Register `actor` for broadcasts, for `ttl_s` seconds of Redis time. Call it again to renew."""
        self._beat(keys=[self._key("members")], args=[actor, int(ttl_s * 1000)])

    def leave_broadcast(self, actor: str) -> None:
        """Remove `actor` from the members of broadcasts: it pulls from now on."""
        leave_set(self._client, self._key("members"), actor)

    def broadcast_members(self) -> list[str]:
        """The actors that are registered for broadcasts now, sorted."""
        name = self._key("members")
        found: Any = read_or_nothing(lambda: self._members(keys=[name]), name) or []
        return sorted(member.decode(errors="replace") for member in found)

    def next_invitation(self) -> int:
        """A number that no earlier invitation of this run has used."""
        name = self._key("invitation")
        try:
            return self._client.incr(name)
        except redis.ResponseError as error:
            if not is_damage(error):
                raise
            log.error("%s was not a number; it continues from the clock, above every earlier number: %s", name, error)
            self._client.set(name, time.time_ns() // 1_000_000)
            return self._client.incr(name)

    def acknowledge(self, number: int, actor: str, acknowledgement: Acknowledgement) -> None:
        """Answer invitation `number`."""
        name = self._key("acknowledged", number)

        def answer() -> None:
            # A transaction: a process killed between the two commands would leave a key that never expires.
            with self._client.pipeline(transaction=True) as transaction:
                transaction.hset(name, actor, wire.encode(acknowledgement))
                transaction.expire(name, TTL_S)
                transaction.execute()

        write_over(self._client, answer, name=name, kind="hash")

    def acknowledgements(self, number: int) -> dict[str, Acknowledgement]:
        """The answers to invitation `number` so far, by actor."""
        name = self._key("acknowledged", number)
        answers: Any = read_or_nothing(lambda: self._client.hgetall(name), name) or {}
        named = [(actor.decode(errors="replace"), answer) for actor, answer in answers.items()]
        return dict(read_records(Acknowledgement, named))

    def seal(self, number: int, group: BroadcastGroup) -> None:
        """Store the group that receives the broadcast of invitation `number`."""
        self._notices.put(self._key("group", number), wire.encode(group), ttl_s=TTL_S)

    def sealed_group(self, number: int) -> BroadcastGroup | None:
        """The group of invitation `number`; None while the publisher waits for acknowledgements."""
        name = self._key("group", number)
        return next((group for _, group in read_records(BroadcastGroup, [(name, self._notices.read(name))])), None)

    def rendezvous_key(self, number: int) -> str:
        """Where the members of group `number` exchange their addresses: see `slipstream.replay.fleet.rendezvous`."""
        return self._key("rendezvous", number)

    def announce_relay(self, notice: RelayNotice, *, ttl_s: float) -> None:
        """Publish a relay's notice for `ttl_s` seconds of Redis time. Call it again to renew."""
        self._client.set(self._key("relay", notice.name), wire.encode(notice), px=int(ttl_s * 1000))
        self._beat(keys=[self._key("relays")], args=[notice.name, int(ttl_s * 1000)])

    def withdraw_relay(self, name: str) -> None:
        """Remove the relay of this name: it serves no receiver from now on."""
        leave_set(self._client, self._key("relays"), name)
        self._client.delete(self._key("relay", name))

    def relays(self) -> list[RelayNotice]:
        """The relays that are alive now, by name. It only reads, so a viewer may call it."""
        key = self._key("relays")
        found: Any = read_or_nothing(lambda: self._client.zrange(key, 0, -1), key) or []
        names = [self._key("relay", name.decode(errors="replace")) for name in sorted(found)]
        frames: Any = self._client.mget(names) if names else []
        return [notice for _, notice in read_records(RelayNotice, zip(names, frames, strict=True))]

    def blame(self, endpoint: str) -> None:
        """Count one corrupt chunk from the server at `endpoint`."""
        name = self._key("corrupt")
        try:
            write_over(self._client, lambda: self._client.hincrby(name, endpoint, 1), name=name, kind="hash")
        except redis.ResponseError as error:
            if not is_damage(error):
                raise
            log.warning("%s: the count of %s was not a number; it is set to 1: %s", name, endpoint, error)
            self._client.hset(name, endpoint, 1)

    def blamed(self) -> dict[str, int]:
        """The number of corrupt chunks from each server, by endpoint."""
        name = self._key("corrupt")
        counts: Any = read_or_nothing(lambda: self._client.hgetall(name), name) or {}
        return {endpoint.decode(errors="replace"): int(count) for endpoint, count in counts.items() if _is_count(count)}

    def _key(self, *parts: str | int) -> str:
        return keys.key(self._run_id, "weights", *parts)


def _is_count(text: bytes) -> bool:
    return text.isdigit() and len(text) <= MAX_DIGITS
