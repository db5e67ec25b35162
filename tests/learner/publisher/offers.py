"""Offers of weights without a tensor, for tests that read the number of a version only; and settings of publishers."""

from collections.abc import Sequence
from typing import Any

from slipstream.common.transfer.weights import Manifest, Offer, TensorEntry
from slipstream.learner.publisher.messages import PublisherSettings


def empty_offer(policy_version: int, *, learner_epoch: int = 1 << 43, root: str = "", pull_endpoint: str = "") -> Offer:
    nothing = {"tensors": [], "num_bytes": 0, "adapted": None, "probe": None, "anchor": None, "deltas": []}
    manifest = Manifest(policy_version=policy_version, learner_epoch=learner_epoch, root=root, **nothing)
    return Offer(manifest=manifest, pull_endpoint=pull_endpoint)


def publisher_settings(redis_url: str, run_id: str, entries: Sequence[TensorEntry], **others: Any) -> PublisherSettings:
    """Those of a publisher on this machine; without `others` each version is an anchor."""
    usual = {"learner_epoch": 0, "anchor_every": 1, "broadcast_timeout_s": 20.0}
    place = {"redis_url": redis_url, "run_id": run_id, "host": "127.0.0.1"}
    return PublisherSettings(entries=list(entries), **place, **(usual | others))
