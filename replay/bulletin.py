"""The bulletin: which weights are offered now, and who takes part in broadcasts.

`latest` moves by compare-and-set: an older learner, or a version that is not newer, cannot overwrite it. The offer is
written whole under a key of its own first; the script that moves `latest` only renames it.

A broadcast is agreed upon in three verbs. Actors `join_broadcast` and renew it while they live; the publisher invites
those who did, in the offer; the invited `acknowledge`, each with the group it still holds; the publisher seals the
`BroadcastGroup` of those who did in time, and the others pull.
"""

from typing import cast

import msgspec
import redis

from common import wire
from common.weights import Offer
from replay import keys
from replay.keys import FencedOut

TTL_S = 120  # of what belongs to one invitation

# KEYS: epoch, latest's version, latest, staged offer.  ARGV: learner epoch, policy version, root.
# A learner that comes back may offer the version it left off with again, from a new address; other bytes under that
# number are refused. This also makes a retried call harmless.
_ANNOUNCE = """
local newest_epoch = tonumber(redis.call('GET', KEYS[1]) or '0')
if tonumber(ARGV[1]) < newest_epoch then
  redis.call('DEL', KEYS[4])
  return 'the learner of epoch ' .. newest_epoch .. ' has taken over from epoch ' .. ARGV[1]
end
local latest = redis.call('HMGET', KEYS[2], 'policy_version', 'root')
local version = tonumber(latest[1] or '-1')
if tonumber(ARGV[2]) < version or (tonumber(ARGV[2]) == version and ARGV[3] ~= latest[2]) then
  redis.call('DEL', KEYS[4])
  return 'version ' .. version .. ' is offered already; ' .. ARGV[2] .. ' is not newer'
end
if redis.call('EXISTS', KEYS[4]) == 1 then
  redis.call('RENAME', KEYS[4], KEYS[3])
  redis.call('PERSIST', KEYS[3])
  redis.call('HSET', KEYS[2], 'policy_version', ARGV[2], 'root', ARGV[3])
end
return ''
"""

# KEYS: members, scored by the Redis time in ms at which they expire.  ARGV: actor, time to live in ms.
_JOIN = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZADD', KEYS[1], now_ms + ARGV[2], ARGV[1])
"""

# KEYS: members.
_MEMBERS = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An invited actor is ready to receive."""

    held_group: int  # the number of the group that it is still in; 0 for none
    device: str  # cpu or cuda: where it can receive


class BroadcastGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who receives one broadcast; the publisher is rank 0, and `actors[i]` rank i + 1."""

    number: int  # of the invitation at which this group was made; the same while it is used again
    backend: str  # gloo or nccl
    store_host: str
    store_port: int
    actors: list[str]
    chunk_bytes: int
    deadline_s: float  # for joining and receiving, counted by each side from its own start


class Bulletin:
    """The weights' side of a run in Redis."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._announce = client.register_script(_ANNOUNCE)
        self._join = client.register_script(_JOIN)
        self._members = client.register_script(_MEMBERS)

    def announce(self, offer: Offer) -> None:
        """Make `offer` the latest. Raises FencedOut."""
        manifest = offer.manifest
        staged = self._key("staged", manifest.learner_epoch, manifest.policy_version)
        self._client.set(staged, wire.encode(offer), ex=TTL_S)
        refusal = cast(
            bytes,
            self._announce(
                keys=[keys.epoch_key(self._run_id), self._key("version"), self._key("latest"), staged],
                args=[manifest.learner_epoch, manifest.policy_version, manifest.root],
            ),
        )
        if refusal:
            raise FencedOut(refusal.decode())

    def latest(self) -> Offer | None:
        """The newest offer; None before the first."""
        frame = cast("bytes | None", self._client.get(self._key("latest")))
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
        self._client.hset(name, actor, wire.encode(acknowledgement))
        self._client.expire(name, TTL_S)

    def acknowledgements(self, number: int) -> dict[str, Acknowledgement]:
        """Who has answered invitation `number` so far."""
        answers = cast("dict[bytes, bytes]", self._client.hgetall(self._key("acknowledged", number)))
        return {actor.decode(): wire.decode(Acknowledgement, answer) for actor, answer in answers.items()}

    def seal(self, number: int, group: BroadcastGroup) -> None:
        """Say who takes part after invitation `number`."""
        self._client.set(self._key("group", number), wire.encode(group), ex=TTL_S)

    def sealed_group(self, number: int) -> BroadcastGroup | None:
        """Who takes part after invitation `number`; None while acknowledgements are awaited."""
        frame = cast("bytes | None", self._client.get(self._key("group", number)))
        return None if frame is None else wire.decode(BroadcastGroup, frame)

    def _key(self, *parts: str | int) -> str:
        return keys.key(self._run_id, "weights", *parts)
