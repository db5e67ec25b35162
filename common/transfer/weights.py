"""The manifest of one published set of weights, and the offer that announces it.

A set of weights is one flat byte buffer: the tensors one after another, each at its offset. It is sent as a full
snapshot, or as an anchor (the full snapshot of an earlier version) and the deltas since. The manifest's hashes are of
the final bytes, so a receiver verifies the result in the same way for both.
"""

import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import msgspec
import xxhash

from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.probe import Probe

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGN_BYTES = 64
NUM_THREADS = max(1, min(16, (os.cpu_count() or 1) // 2))  # for hashes and deltas; others compute on the other cores
DOWN, UP = ".lora_A", ".lora_B"  # suffixes of a weight's name for its adapter's A, [rank, in], and B, [out, rank]


class WeightsError(ValueError):
    """Bytes that differ from the weights in their manifest."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor inside the flat buffer."""

    name: str
    dtype: str  # a key of DTYPE_BYTES
    shape: list[int]
    offset: int  # bytes from the start of the buffer
    num_bytes: int
    xxh3: int  # 64 bits, of the tensor's bytes


class Anchor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An earlier version that is offered as a full snapshot: the same tensors at the same offsets."""

    root: str
    xxh3: list[int]  # one hash for each tensor


class Delta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The changes from one set of weights to the next; `slipstream.common.transfer.delta` has its blob's format."""

    base: str  # root hash of the weights to which it applies
    blob: Blob


class Adapted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of published adapters: each adapted weight W becomes W + scaling B A."""

    root: str  # of the model's folder, see `slipstream.common.transfer.model_folder`
    scaling: float  # alpha / rank


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a published version, and the blobs from which it can be built."""

    policy_version: int
    learner_epoch: int  # a learner of an older epoch cannot publish
    tensors: list[TensorEntry]
    num_bytes: int
    root: str  # xxh3-128 over the entries, in hex: names this version's bytes
    adapted: Adapted | None  # None if the tensors are the weights; otherwise they are adapters
    probe: Probe | None  # what the learner computes with them; None for tensors that are no model's
    anchor: Anchor | None  # the snapshot that a new receiver pulls first; None: a full snapshot of this version
    # Each delta gives the base of the next one, and the last one gives this version; the anchor is one of the bases.
    deltas: list[Delta]


class Invitation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attempt at a broadcast: the actors that are asked to acknowledge it."""

    number: int  # rises in Redis, so that a late acknowledgement of an earlier attempt is ignored
    actors: list[str]


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published version and how to get it; `latest` in Redis is the newest offer."""

    manifest: Manifest
    pull_endpoint: str  # ZeroMQ address of the publisher
    invitation: Invitation | None = None  # None if no actor is registered for broadcasts


def layout(shapes: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[TensorEntry]:
    """Place the tensors (name, dtype, shape) one after another, aligned. Their hashes stay 0 until `sealed`."""
    entries, offset = [], 0
    for name, dtype, shape in shapes:
        num_bytes = DTYPE_BYTES[dtype] * math.prod(shape)
        entries.append(
            TensorEntry(name=name, dtype=dtype, shape=list(shape), offset=offset, num_bytes=num_bytes, xxh3=0)
        )
        offset += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return entries


def buffer_bytes(entries: list[TensorEntry]) -> int:
    """The size of the flat buffer for `entries`."""
    if not entries:
        return 0
    return entries[-1].offset + -(-entries[-1].num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def sealed(
    entries: list[TensorEntry],
    buffer: memoryview,
    *,
    policy_version: int,
    learner_epoch: int,
    adapted: Adapted | None = None,
    probe: Probe | None = None,
) -> Manifest:
    """Hash the bytes in `buffer` and return their manifest."""
    with closing(Hashing(entries, buffer)) as hashing:
        hashed = [
            msgspec.structs.replace(entry, xxh3=xxh3) for entry, xxh3 in zip(entries, hashing.digests(), strict=True)
        ]
    return Manifest(
        policy_version=policy_version,
        learner_epoch=learner_epoch,
        tensors=hashed,
        num_bytes=buffer_bytes(entries),
        root=_root(hashed),
        adapted=adapted,
        probe=probe,
        anchor=None,
        deltas=[],
    )


class Hashing:
    """Hashes the tensors of a flat buffer in threads, each as soon as its bytes have arrived."""

    def __init__(self, entries: Sequence[TensorEntry], buffer: memoryview) -> None:
        self._entries = entries
        self._buffer = buffer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hash-weights")
        self._digests: list[Future[int]] = []

    def close(self) -> None:
        """Wait until no thread reads the buffer any more."""
        self._threads.shutdown(cancel_futures=True)

    def arrived(self, num_bytes: int) -> None:
        """Begin to hash the tensors that lie within the first `num_bytes` of the buffer."""
        for entry in self._entries[len(self._digests) :]:
            end = entry.offset + entry.num_bytes
            if end > num_bytes:
                return
            self._digests.append(self._threads.submit(xxhash.xxh3_64_intdigest, self._buffer[entry.offset : end]))

    def digests(self) -> list[int]:
        """Wait for the hashes of all tensors, whose bytes must all be there now."""
        self.arrived(self._buffer.nbytes)
        return [digest.result() for digest in self._digests]


def verify(manifest: Manifest, buffer: memoryview, hashing: Hashing | None = None) -> None:
    """Raise WeightsError unless `buffer` holds exactly what `manifest` describes.

    `hashing` has begun with the same tensors and buffer; if it is None, everything is hashed here.
    """
    if buffer.nbytes != manifest.num_bytes:
        raise WeightsError(f"version {manifest.policy_version}: {buffer.nbytes} bytes, expected {manifest.num_bytes}")
    if _root(manifest.tensors) != manifest.root:
        raise WeightsError(f"version {manifest.policy_version}: the manifest does not match its own root hash")
    with closing(hashing or Hashing(manifest.tensors, buffer)) as hashed:
        for entry, digest in zip(manifest.tensors, hashed.digests(), strict=True):
            if digest != entry.xxh3:
                raise WeightsError(f"version {manifest.policy_version}: {entry.name} does not match its hash")


def deltas_from(manifest: Manifest, root: str) -> list[Delta] | None:
    """The deltas that turn the weights `root` into this version; [] if they are this version, None if unknown."""
    if root == manifest.root:
        return []
    for index in reversed(range(len(manifest.deltas))):
        if manifest.deltas[index].base == root:
            return manifest.deltas[index:]
    return None


def anchor_blob(manifest: Manifest) -> Blob:
    """The full snapshot that a new receiver pulls first."""
    root = manifest.anchor.root if manifest.anchor else manifest.root
    return Blob(root=root, num_bytes=manifest.num_bytes)


def blobs(manifest: Manifest) -> list[Blob]:
    """All blobs of this version: the anchor, then the deltas, oldest first."""
    return [anchor_blob(manifest), *(delta.blob for delta in manifest.deltas)]


def check_blob(manifest: Manifest, blob: Blob, data: memoryview) -> None:
    """Raise WeightsError unless the bytes `data` of `blob` match the hashes in `manifest`."""
    if blob != anchor_blob(manifest):
        if xxhash.xxh3_128_hexdigest(data) != blob.root:
            raise WeightsError(f"version {manifest.policy_version}: delta {blob.root} does not match its hash")
    elif manifest.anchor is None:
        verify(manifest, data)
    else:
        if len(manifest.anchor.xxh3) != len(manifest.tensors):
            raise WeightsError(
                f"version {manifest.policy_version}: {len(manifest.anchor.xxh3)} hashes of its anchor for "
                f"{len(manifest.tensors)} tensors"
            )
        hashes = zip(manifest.tensors, manifest.anchor.xxh3, strict=True)
        tensors = [msgspec.structs.replace(entry, xxh3=xxh3) for entry, xxh3 in hashes]
        verify(msgspec.structs.replace(manifest, tensors=tensors, root=blob.root), data)


def _root(entries: list[TensorEntry]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(entries))
