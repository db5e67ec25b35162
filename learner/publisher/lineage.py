"""Links a published version to earlier ones: its anchor, and the deltas since the anchor."""

import msgspec
import xxhash

from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.weights import Anchor, Delta, Manifest, deltas_from


def continued(manifest: Manifest, previous: Manifest, delta: bytes, *, anchor_every: int) -> Manifest:
    """`manifest` with the deltas that lead to it; `delta` is the one from `previous`.

    The version becomes a new anchor if the last one is `anchor_every` versions old, or if a new actor would pull more
    in deltas than in full weights. An actor that has the last anchor or a later version can still use deltas alone.
    """
    newest = Delta(base=previous.root, blob=Blob(root=xxhash.xxh3_128_hexdigest(delta), num_bytes=len(delta)))
    last = previous.anchor or Anchor(root=previous.root, xxh3=[entry.xxh3 for entry in previous.tensors])
    # Weights that do not change for many versions have only one delta, an empty one from themselves to themselves.
    deltas = previous.deltas if previous.deltas[-1:] == [newest] else [*previous.deltas, newest]
    continuing = msgspec.structs.replace(manifest, anchor=last, deltas=deltas)
    since = deltas_from(continuing, last.root)
    assert since is not None, "the last anchor is the base of a delta, or this version"
    if len(since) < anchor_every and sum(each.blob.num_bytes for each in since) <= manifest.num_bytes:
        return continuing
    return msgspec.structs.replace(manifest, deltas=since)
