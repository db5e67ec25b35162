"""Finds the files of a run's model on this host, or pulls them into a cache.

The cache is the folder `slipstream/models` in XDG_CACHE_HOME, or in ~/.cache. Each set of files has a folder there,
named by its hash, which later actors and runs use again. Nothing removes it. An actor checks the hash of every file
before it starts; an interrupted pull continues with the files that are missing or damaged.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import xxhash

from slipstream.actors.weights.fetch import Bytes
from slipstream.actors.weights.pull import Puller, PullFailed
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import whole_file
from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.model_folder import SHAPES, ModelFile, has_file, has_weights
from slipstream.common.transfer.weights import Offer, WeightsError
from slipstream.replay.fleet.fleet import RunFacts

POLL_S = 0.2
ONE_PULL_S = 60.0  # then the newest offer is read again; the chunks that have arrived are kept

log = logging.getLogger(__name__)


class ModelUnavailable(RuntimeError):
    """No publisher and no relay has sent anything for too long. A later attempt may succeed."""


def learners_folder(facts: RunFacts) -> Path | None:
    """The learner's own folder, if this host has it at the same path with the same files."""
    folder = Path(facts.model_path)
    wanted = [file for file in facts.model_files if file.name != SHAPES]
    is_here = has_weights(folder) and all(has_file(folder, file) for file in wanted)
    return folder if is_here else None


def cached_folder(
    files: list[ModelFile], *, make_puller: Callable[[], Puller], newest: Callable[[], Offer | None], timeout_s: float
) -> Path:
    """The folder with `files` in this host's cache; missing ones are pulled from a relay or the publisher.

    `newest` reads the newest offer. Actors of one host that start together wait for the one that pulls. Raises
    ModelUnavailable if nothing has arrived for `timeout_s`, ConfigError if the cache cannot be written.
    """
    root = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(files))
    folder = _cache() / root
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            for left in folder.glob("*.tmp"):  # of an actor that was killed
                left.unlink()
            missing = [file for file in files if not has_file(folder, file)]
            if missing:
                _check_room(folder, missing)
                puller = make_puller()
                with contextlib.closing(puller):
                    for file in missing:
                        pulled = _pulled(file.blob, puller, newest, timeout_s)
                        with whole_file(folder / file.name) as target:
                            target.write(pulled.data)
                num_bytes = puller.counts.fetched_bytes
                log.info("pulled %d files of the model, %.1f MB, into %s", len(missing), num_bytes / 1e6, folder)
    except OSError as error:
        raise ConfigError(
            f"the model's files cannot be cached in {folder}: {error}; set XDG_CACHE_HOME to a folder with room for "
            f"{sum(file.blob.num_bytes for file in files) / 1e9:.1f} GB"
        ) from error
    return folder


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "slipstream" / "models"
    except RuntimeError:
        raise ConfigError(
            "this user has no home folder for the model's files; set XDG_CACHE_HOME to a folder for them"
        ) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Be the only process that writes to a folder of the cache; the kernel frees the lock of a process that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another actor of this host pulls the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_room(folder: Path, missing: list[ModelFile]) -> None:
    needed, free = sum(file.blob.num_bytes for file in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"{needed / 1e9:.1f} GB are missing, and {free / 1e9:.1f} GB are free")


def _pulled(blob: Blob, puller: Puller, newest: Callable[[], Offer | None], timeout_s: float) -> Bytes:
    """The bytes of `blob`, verified. It waits for the first offer, which names the publisher's address."""

    def check(data: memoryview) -> None:
        if xxhash.xxh3_128_hexdigest(data) != blob.root:
            raise WeightsError(f"file {blob.root} of the model does not match its hash")

    counts, progress_at, why = replace(puller.counts), time.monotonic(), "the learner has offered no weights yet"
    while True:
        now = puller.counts
        if now.fetched_bytes > counts.fetched_bytes and now.num_corrupt == counts.num_corrupt:
            progress_at = time.monotonic()
        counts = replace(now)
        if time.monotonic() - progress_at > timeout_s:
            raise ModelUnavailable(
                f"no file of the model has arrived for {timeout_s:.0f} s: {why}; is the publisher's `weights.host` an "
                "address that this host can connect to?"
            )
        offer = newest()
        if offer is None:
            time.sleep(POLL_S)
            continue
        try:
            return puller.pull(blob, publisher=offer.pull_endpoint, check=check, timeout_s=ONE_PULL_S)
        except PullFailed as error:
            why = str(error)
            log.warning("could not pull a file of the model; trying again: %s", why)
            time.sleep(POLL_S)
