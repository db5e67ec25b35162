"""Failed attempts, and groups that were set aside: their records, and how people and the learner read them."""

from typing import Any

import msgspec
import redis

from slipstream.common.process.wire import encode
from slipstream.replay.records.records import read_or_nothing, read_records

MAX_REASON_CHARS = 2000  # an environment's error may quote a whole file
DIED_TWICE = "an engine died during this attempt, for the second time"  # begins the reason


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attempt that ended for any reason other than the policy."""

    group_id: int
    member: int
    attempt: int
    outcome: str  # a value of slipstream.common.records.trajectory.Outcome
    reason: str  # at most MAX_REASON_CHARS


class Quarantined(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group that was set aside: for an invalid payload, or at a person's request."""

    group_id: int
    member: int | None  # whose payload is invalid; None at a person's request
    actor: str | None  # that sent the payload; None at a person's request
    reason: str  # at most MAX_REASON_CHARS


def cut_reason(reason: str) -> str:
    """The reason cut to MAX_REASON_CHARS, with `?` for each character that UTF-8 cannot encode."""
    return reason[:MAX_REASON_CHARS].encode(errors="replace").decode()


def failed_attempt(group_id: int, member: int, *, attempt: int, outcome: str, reason: str) -> bytes:
    """The encoded record of a failure, with its reason cut."""
    return encode(
        Failure(group_id=group_id, member=member, attempt=attempt, outcome=outcome, reason=cut_reason(reason))
    )


def read_failures(client: redis.Redis, base: str) -> list[Failure]:
    """The last hundred failed attempts of the stream whose keys begin with `base`, newest first."""
    name = f"{base}:failures"
    frames: list[Any] = read_or_nothing(lambda: client.lrange(name, 0, -1), name) or []
    return [failure for _, failure in read_records(Failure, [(name, frame) for frame in frames])]


def read_quarantined(client: redis.Redis, base: str) -> list[Quarantined]:
    """The quarantined groups of the stream whose keys begin with `base`, newest first."""
    name = f"{base}:quarantined"
    ids: list[Any] = read_or_nothing(lambda: client.zrevrange(name, 0, -1), name) or []
    names = [f"{base}:group:{group_id.decode(errors='replace')}" for group_id in ids]
    pipeline = client.pipeline(transaction=False)
    for group in names:
        pipeline.hget(group, "why")
    reasons = pipeline.execute(raise_on_error=False)
    # A group without a reason was requeued or dropped between the two reads.
    return [why for _, why in read_records(Quarantined, zip(names, reasons, strict=True))]
