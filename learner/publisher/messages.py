"""The messages between the learner and its publisher process, in MessagePack."""

import msgspec

from slipstream.common.transfer.model_folder import ModelFile
from slipstream.common.transfer.probe import Probe
from slipstream.common.transfer.weights import Adapted, TensorEntry

ANCHOR_EVERY = 10  # versions after which one can be pulled whole; those between are deltas
NUM_SLOTS = 4  # for the newest version, the anchor, one that is being hashed, and one for the learner to write


class PublisherSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the learner, as the first message; fields that are not explained here are those of `weights`."""

    entries: list[TensorEntry]  # the tensors of every version, in this order, and their places in a slot
    adapted: Adapted | None = None  # the model that the tensors are adapters of; None for full weights
    model_folder: str = ""  # the folder of `model_files`
    model_files: list[ModelFile] = []  # that hosts without the folder pull
    redis_url: str
    run_id: str
    learner_epoch: int
    host: str
    anchor_every: int = ANCHOR_EVERY  # 1: no deltas
    broadcast_timeout_s: float
    device: str = "cpu"  # of the weights, for the broadcast's backend


class Submitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the learner: this slot contains this version."""

    slot: int
    policy_version: int
    probe: Probe | None = None  # for the version's manifest


class Withdraw(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the learner: it has a newer version and needs a free slot for it."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the learner: finish the submitted version, then exit."""


class Freed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the learner: this slot may be written again."""

    slot: int


class Announced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the learner: this version is announced; -1 before the first."""

    policy_version: int = -1
    num_bytes: int = 0  # that a receiver of the version before needs: its delta, or all weights
    served_bytes: int = 0  # pulled from this process so far


class Broadcasted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the learner: a broadcast is complete."""

    broadcast_s: float  # of sending, without waiting for acknowledgements and without joining


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the learner: it is fenced out of the run."""

    reason: str


ToProcess = PublisherSettings | Submitted | Withdraw | Stop
ToLearner = Freed | Announced | Broadcasted | Refused
