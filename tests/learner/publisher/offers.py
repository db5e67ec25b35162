"""Offers of weights without a tensor, by the newest learner, for tests that read the number of a version only."""

from slipstream.common.transfer.weights import Manifest, Offer


def empty_offer(policy_version: int, *, learner_epoch: int = 1 << 43, root: str = "", pull_endpoint: str = "") -> Offer:
    manifest = Manifest(
        policy_version=policy_version,
        learner_epoch=learner_epoch,
        tensors=[],
        num_bytes=0,
        root=root,
        adapted=None,
        probe=None,
        anchor=None,
        deltas=[],
    )
    return Offer(manifest=manifest, pull_endpoint=pull_endpoint)
