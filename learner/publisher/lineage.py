"""How a published version hangs together with those before it: which one is its anchor, and which deltas lead on."""

import msgspec
import xxhash

from common.chunks import Blob
from common.weights import Anchor, Delta, Manifest, deltas_from


def continued(manifest: Manifest, previous: Manifest, delta: bytes, *, anchor_every: int) -> Manifest:
    """`manifest`, which is whole, as what `delta` makes of `previous`.

    It is an anchor itself where the last one lies `anchor_every` versions back, or where a newcomer would pull more in
    deltas than in whole weights. Whoever holds the last anchor, or what came after it, still gets on by deltas alone.
    """
    newest = Delta(base=previous.root, blob=Blob(root=xxhash.xxh3_128_hexdigest(delta), num_bytes=len(delta)))
    last = previous.anchor or Anchor(root=previous.root, xxh3=[entry.xxh3 for entry in previous.tensors])
    # Weights that stay as they are for many versions have one delta, of nothing, from themselves to themselves.
    deltas = previous.deltas if previous.deltas[-1:] == [newest] else [*previous.deltas, newest]
    continuing = msgspec.structs.replace(manifest, anchor=last, deltas=deltas)
    since = deltas_from(continuing, last.root)
    assert since is not None, "the last anchor is the base of a delta, or this version"
    if len(since) < anchor_every and sum(each.blob.num_bytes for each in since) <= manifest.num_bytes:
        return continuing
    return msgspec.structs.replace(manifest, deltas=since)
