"""What the learner and its publisher process say to each other, one MessagePack message at a time."""

import msgspec

from common.weights import Adapted, TensorEntry


class Settings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the learner, first of all."""

    redis_url: str
    run_id: str
    learner_epoch: int
    host: str
    chunk_bytes: int
    anchor_every: int
    fan_out: int
    pull_bytes_per_s: int
    broadcast_timeout_s: float
    disk: str  # `weights.disk`
    device: str
    entries: list[TensorEntry]  # where each tensor lies in a slot
    adapted: Adapted | None


class Submitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the learner: this version is whole in this slot."""

    slot: int
    policy_version: int


class Withdraw(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the learner: it holds a newer version and has no slot to write it to."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the learner: finish what is submitted, then exit."""


class Freed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the learner: this slot may be written again."""

    slot: int
    skipped: bool  # its version was overtaken before it was announced


class Announced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the learner: `latest` says this version."""

    policy_version: int
    num_bytes: int  # that a receiver of the version before it takes


class Broadcasted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the learner: a broadcast was whole."""

    policy_version: int
    broadcast_s: float
    num_receivers: int


class Served(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the learner: so much had been pulled from this process when the next version was announced."""

    total_bytes: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the learner: it is fenced out."""

    reason: str


ToProcess = Settings | Submitted | Withdraw | Stop
ToLearner = Freed | Announced | Broadcasted | Served | Refused
