"""The bulletin: which weights are offered now, and who takes part in broadcasts.

`latest` moves by compare-and-set: an older learner, or a version that is not newer, cannot overwrite it. The offer is
written whole under a key of its own first; the script that moves `latest` only renames it.

A broadcast is agreed upon in three verbs. Actors `join_broadcast` and renew it while they live; the publisher invites
those who did, in the offer; the invited `acknowledge`, each with the group it still holds; the publisher seals the
`BroadcastGroup` of those who did in time, and the others pull.

Who keeps weights for others to pull says so in a `RelayNotice`, again and again while it lives. A notice may be forged
by any actor of the run; what is pulled is checked against the offer, which only a learner can make.
"""

import logging
from typing import Any, cast

import msgspec
import redis

from common import wire
from common.chunks import Blob
from common.weights import Offer
from replay import keys, scripts
from replay.keys import FencedOut
from replay.notice import Notices

TTL_S = 120  # of what belongs to one invitation

log = logging.getLogger(__name__)


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An invited actor is ready to receive."""

    held_group: int  # the number of the group that it is still in; 0 for none
    device: str  # cpu or cuda: where it can receive
    root: str  # of the weights that it holds, for a delta; empty for none


class BroadcastGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who receives one broadcast; the publisher is rank 0, and `actors[i]` rank i + 1."""

    number: int  # of the invitation at which this group was made; the same while it is used again
    backend: str  # gloo or nccl
    store_host: str
    store_port: int
    actors: list[str]
    blob: Blob  # what is sent: the version whole, or its last delta
    chunk_bytes: int
    deadline_s: float  # for joining and receiving, counted by each side from its own start


class RelayNotice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One relay, as it last said of itself."""

    name: str
    host: str  # its machine's name: who runs there as well asks it first
    endpoint: str  # ZeroMQ address
    roots: list[str]  # of the blobs that it holds, verified
    policy_version: int  # of the newest offer that it holds whole; -1 for none
    num_children: int  # receivers that it serves now
    fan_out: int  # receivers that it serves at a time
    fetched_bytes: int  # since its start, like the next: while they grow, it is worth waiting for
    served_bytes: int
    num_corrupt: int  # times that what it fetched was not what it should be


class Bulletin:
    """The weights' side of a run in Redis."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._notices = Notices(client)
        self._announce = scripts.load(client, "announce")
        self._join = scripts.load(client, "join_broadcast")
        self._members = scripts.load(client, "broadcast_members")

    def announce(self, offer: Offer) -> None:
        """Make `offer` the latest. Raises FencedOut."""
        self._move("latest", "version", offer)

    def announce_stored(self, offer: Offer) -> None:
        """Make `offer` the latest of those that can be read on `weights.disk`. Raises FencedOut."""
        self._move("stored", "stored_version", offer)

    def _move(self, board: str, version: str, offer: Offer) -> None:
        manifest = offer.manifest
        staged = self._key("staged", board, manifest.learner_epoch, manifest.policy_version)
        self._notices.put(staged, wire.encode(offer), ttl_s=TTL_S)
        refusal = cast(
            bytes,
            self._announce(
                keys=[keys.epoch_key(self._run_id), self._key(version), self._key(board), staged],
                args=[manifest.learner_epoch, manifest.policy_version, manifest.root],
            ),
        )
        if refusal:
            raise FencedOut(refusal.decode())

    def latest(self) -> Offer | None:
        """The newest offer; None before the first."""
        return self._read("latest")

    def stored(self) -> Offer | None:
        """The newest offer whose blobs are on `weights.disk`; None before the first."""
        return self._read("stored")

    def _read(self, board: str) -> Offer | None:
        frame = self._notices.read(self._key(board))
        return None if frame is None else wire.decode(Offer, frame)

    def join_broadcast(self, actor: str, *, ttl_s: float) -> None:
        """Say that `actor` wants broadcasts, for `ttl_s` seconds of Redis time; call again to renew."""
        self._join(keys=[self._key("members")], args=[actor, int(ttl_s * 1000)])

    def leave_broadcast(self, actor: str) -> None:
        """Say that `actor` pulls from now on."""
        self._client.zrem(self._key("members"), actor)

    def broadcast_members(self) -> list[str]:
        """The actors that want broadcasts now, sorted."""
        members = cast("list[bytes]", self._members(keys=[self._key("members")]))
        return sorted(member.decode() for member in members)

    def next_invitation(self) -> int:
        """A number that no invitation of this run has had."""
        return self._client.incr(self._key("invitation"))

    def acknowledge(self, number: int, actor: str, acknowledgement: Acknowledgement) -> None:
        """Answer invitation `number`."""
        name = self._key("acknowledged", number)
        with self._client.pipeline(transaction=True) as transaction:  # killed in between, it would leave it for good
            transaction.hset(name, actor, wire.encode(acknowledgement))
            transaction.expire(name, TTL_S)
            transaction.execute()

    def acknowledgements(self, number: int) -> dict[str, Acknowledgement]:
        """Who has answered invitation `number` so far."""
        answers = cast("dict[bytes, bytes]", self._client.hgetall(self._key("acknowledged", number)))
        return {actor.decode(): wire.decode(Acknowledgement, answer) for actor, answer in answers.items()}

    def seal(self, number: int, group: BroadcastGroup) -> None:
        """Say who takes part after invitation `number`."""
        self._notices.put(self._key("group", number), wire.encode(group), ttl_s=TTL_S)

    def sealed_group(self, number: int) -> BroadcastGroup | None:
        """Who takes part after invitation `number`; None while acknowledgements are awaited."""
        frame = self._notices.read(self._key("group", number))
        return None if frame is None else wire.decode(BroadcastGroup, frame)

    def announce_relay(self, notice: RelayNotice, *, ttl_s: float) -> None:
        """Say that a relay lives, and what it holds, for `ttl_s` seconds of Redis time; call again to renew."""
        self._client.set(self._key("relay", notice.name), wire.encode(notice), px=int(ttl_s * 1000))
        self._join(keys=[self._key("relays")], args=[notice.name, int(ttl_s * 1000)])
        self._members(keys=[self._key("relays")])  # forgets the names of those that are silent

    def withdraw_relay(self, name: str) -> None:
        """Say that the relay of this name serves nobody from now on."""
        self._client.zrem(self._key("relays"), name)
        self._client.delete(self._key("relay", name))

    def relays(self) -> list[RelayNotice]:
        """The relays that live now, by name. Reads only, so that a viewer may ask."""
        names = sorted(cast("list[bytes]", self._client.zrange(self._key("relays"), 0, -1)))
        frames: Any = self._client.mget([self._key("relay", name.decode()) for name in names]) if names else []
        return [notice for name, frame in zip(names, frames, strict=True) if (notice := _notice(name, frame))]

    def blame(self, endpoint: str) -> None:
        """Count that the bytes of the server at `endpoint` were not what they should be."""
        self._client.hincrby(self._key("corrupt"), endpoint, 1)

    def blamed(self) -> dict[str, int]:
        """How often each server's bytes were refused, by endpoint."""
        counts = cast("dict[bytes, bytes]", self._client.hgetall(self._key("corrupt")))
        return {endpoint.decode(): int(count) for endpoint, count in counts.items()}

    def _key(self, *parts: str | int) -> str:
        return keys.key(self._run_id, "weights", *parts)


def _notice(name: bytes, frame: bytes | None) -> RelayNotice | None:
    """None where it has just expired, or is none: one relay's fault must not hide the others."""
    try:
        return None if frame is None else wire.decode(RelayNotice, frame)
    except wire.WireError as error:
        log.warning("relay %s is passed over: %s", name.decode(errors="replace"), error)
        return None
