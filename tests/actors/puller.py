"""Receivers without an engine, each a thread: `python -m tests.actors.puller REDIS_URL RUN CHUNK_BYTES NAME...`.

Each pulls all that the newest version is made of, whenever there is a newer one, and says a line of JSON for each,
after one that says that it is up.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import xxhash

from slipstream.actors.weights.fetch import Bytes
from slipstream.actors.weights.pull import Puller, PullFailed
from slipstream.actors.weights.sources import Sources
from slipstream.common.process.connection import connect
from slipstream.common.transfer.encryption import key_from_environment
from slipstream.common.transfer.weights import blobs, check_blob
from slipstream.replay.fleet.bulletin import Bulletin

POLL_S = 0.05
RELAY_PATIENCE_S = 5.0


def main(redis_url: str, run_id: str, chunk_bytes: str, *names: str) -> None:
    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(partial(receive, redis_url, run_id, chunk_bytes), names))


def receive(redis_url: str, run_id: str, chunk_bytes: str, name: str) -> None:
    bulletin = Bulletin(connect(redis_url), run_id)
    sources = Sources(bulletin.relays, name=name, host="a-host-of-its-own", patience_s=RELAY_PATIENCE_S)
    puller = Puller(sources, blame=bulletin.blame, chunk_bytes=int(chunk_bytes), key=key_from_environment())
    held: dict[str, Bytes] = {}
    say(name, up=True)
    version = -1
    while True:
        time.sleep(POLL_S)
        offer = bulletin.latest()
        if offer is None or offer.manifest.policy_version <= version:
            continue
        manifest = offer.manifest
        try:
            for blob in blobs(manifest):
                if blob.root not in held:
                    check = partial(check_blob, manifest, blob)
                    held[blob.root] = puller.pull(blob, publisher=offer.pull_endpoint, check=check, timeout_s=40.0)
        except PullFailed as error:
            say(name, refused=manifest.policy_version, why=str(error))
            continue
        version = manifest.policy_version
        digests = {blob.root: xxhash.xxh3_128_hexdigest(held[blob.root]) for blob in blobs(manifest)}
        counts = puller.counts
        say(name, version=version, digests=digests, fetched_bytes=counts.fetched_bytes, num_corrupt=counts.num_corrupt)


def say(name: str, **what: object) -> None:
    print(json.dumps({"name": name, **what}) + "\n", end="", flush=True)  # in one piece


if __name__ == "__main__":
    main(*sys.argv[1:])
