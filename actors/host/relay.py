"""`slipstream serve relay`: fetches and verifies a run's newest weights and its model's files, and serves them.

It needs Redis to learn of new versions, and actors need Redis to find it. It serves the weights that it has even if the
learner, the publisher and Redis are away.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from slipstream.actors.host.join import checked_key, fleet_of, is_over, process_name, run_config, wait_for_run
from slipstream.actors.weights.holdings import Holdings
from slipstream.actors.weights.pull import Puller, PullFailed
from slipstream.actors.weights.sources import Sources
from slipstream.common.config.config import Config
from slipstream.common.process.connection import checked_address, connect
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.transfer.chunk_server import ChunkServer, ServerLimits
from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.encryption import CurveKey
from slipstream.common.transfer.weights import Offer, WeightsError, blobs, check_blob
from slipstream.replay.fleet.bulletin import BROADCAST_TIMEOUT_S, Bulletin, RelayNotice
from slipstream.replay.fleet.fleet import Fleet, UnknownRun

POLL_S = 0.1
RENEW_S = 1.0  # interval at which a relay renews its notice
TTL_S = 5.0  # a relay that has not renewed its notice for this long is not asked any more
SUSPECT_S = 30.0  # a relay that is blamed for corrupt bytes checks its blobs again at most this often
RETRY_S = 1.0
REDIS_PATIENCE_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayInfo:
    """The settings of a relay."""

    redis_url: str
    run_id: str
    name: str
    host: str  # the machine's name, which actors on it compare with their own
    address: str  # to bind to
    limits: ServerLimits
    timeout_s: float  # for pulling one blob; chunks that have arrived by then are kept


class Relay:
    """One thread serves, one fetches, and one renews the notice. The owner waits for the end of the run."""

    def __init__(self, info: RelayInfo, *, key: CurveKey | None) -> None:
        self._info = info
        client = connect(info.redis_url, patience_s=REDIS_PATIENCE_S)
        self._bulletin, self._fleet = Bulletin(client, info.run_id), Fleet(client, info.run_id)
        self._holdings = Holdings()
        self._files: list[Blob] = []  # of the model
        sources = Sources(self._bulletin.relays, name=info.name, host=info.host, patience_s=0.0)
        self._puller = Puller(sources, blame=self._bulletin.blame, chunk_bytes=info.limits.chunk_bytes, key=key)
        self._server = ChunkServer(info.address, self._holdings.read, limits=info.limits, key=key)
        self._announced: RelayNotice | None = None
        self._announced_at = 0.0
        self._num_blamed = 0
        self._suspect_at = 0.0
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep, args=[work], name=name, daemon=True)
            for name, work in (("fetch-weights", self._fetch), ("announce-weights", self._announce))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def endpoint(self) -> str:
        """The address at which it serves."""
        return self._server.endpoint

    @property
    def alive(self) -> bool:
        """False after any of its threads has failed; the log has the reason."""
        return self._server.alive and all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Withdraw the notice, stop serving and release the port. A pull in progress ends within seconds."""
        self._closing.set()
        self._puller.abandon()
        for thread in self._threads:
            thread.join()
        with contextlib.suppress(RedisAway):  # then the notice expires
            self._bulletin.withdraw_relay(self._info.name)
        self._server.close()
        self._puller.close()

    def _keep(self, work: Callable[[], None]) -> None:
        while not self._closing.wait(POLL_S):
            try:
                work()
            except RedisAway:  # its client has logged it
                pass
            except redis.RedisError as error:  # for example, its memory is full
                log.warning("Redis refused a call of this relay; still serving, retrying in %.0f s: %s", RETRY_S, error)
                self._closing.wait(RETRY_S)

    def _fetch(self) -> None:
        """Fetch the missing blobs of the newest version; after a failure, the next call tries again."""
        self._look_again()
        offer = self._bulletin.latest()
        if offer is None or offer.manifest == self._holdings.manifest:
            return
        manifest = offer.manifest
        self._files = self._model_files()
        self._holdings.make_room(manifest, self._files)
        try:
            # The smallest first: receivers with the version before need only the last delta.
            for blob in sorted(blobs(manifest), key=lambda blob: blob.num_bytes):
                self._obtain(offer, blob)
        except PullFailed as error:
            log.warning("could not fetch version %d; retrying in %.0f s: %s", manifest.policy_version, RETRY_S, error)
            self._closing.wait(RETRY_S)
            return
        self._holdings.manifest = manifest
        log.info("holding version %d", manifest.policy_version)
        self._fetch_files(offer)

    def _fetch_files(self, offer: Offer) -> None:
        """Fetch the missing files of the model, after the weights, which they must not delay."""
        try:
            for blob in self._files:
                self._obtain(offer, blob)
        except PullFailed as error:
            log.warning("could not fetch a file of the model; retrying with the next version: %s", error)

    def _model_files(self) -> list[Blob]:
        try:
            return [file.blob for file in self._fleet.run_facts().model_files]
        except UnknownRun as error:  # its learner writes the facts again
            log.warning("keeping the known files of the model: %s", error)
            return self._files

    def _obtain(self, offer: Offer, blob: Blob) -> None:
        if self._holdings.get(blob.root) is not None:
            return
        pulled = self._puller.pull(
            blob,
            publisher=offer.pull_endpoint,
            check=lambda data: check_blob(offer.manifest, blob, data),
            timeout_s=self._info.timeout_s,
        )
        self._holdings.add(blob.root, pulled)

    def _look_again(self) -> None:
        """Check the blobs again if a receiver has blamed this relay: nothing else detects errors in its memory."""
        manifest, now = self._holdings.manifest, time.monotonic()
        if manifest is None or now < self._suspect_at:
            return
        num_blamed = self._bulletin.blamed().get(self.endpoint, 0)
        self._suspect_at = now + (RENEW_S if num_blamed == self._num_blamed else SUSPECT_S)
        if num_blamed == self._num_blamed:
            return
        self._num_blamed = num_blamed
        for blob in [*blobs(manifest), *self._files]:
            cached = self._holdings.get(blob.root)
            try:
                if cached is not None:
                    check_blob(manifest, blob, cached.data)
            except WeightsError as error:
                log.error("the cached weights are corrupt; downloading them again: %s", error)
                self._holdings.drop(blob.root)

    def _announce(self) -> None:
        """Renew the notice every RENEW_S, and at once after a change of the blobs or of the number of receivers."""
        manifest, load, counts = self._holdings.manifest, self._server.load, self._puller.counts
        notice = RelayNotice(
            name=self._info.name,
            host=self._info.host,
            endpoint=self.endpoint,
            roots=self._holdings.roots(),
            policy_version=-1 if manifest is None else manifest.policy_version,
            num_children=load.num_children,
            fan_out=self._info.limits.fan_out,
            fetched_bytes=counts.fetched_bytes,
            served_bytes=load.served_bytes,
            num_corrupt=counts.num_corrupt,
        )
        last, now = self._announced, time.monotonic()
        has_changed = last is None or (last.roots, last.num_children) != (notice.roots, notice.num_children)
        if not has_changed and now < self._announced_at + RENEW_S:
            return
        self._bulletin.announce_relay(notice, ttl_s=TTL_S)
        self._announced, self._announced_at = notice, now


def relay(config: Config) -> int:
    """Run a relay until the run is over or a signal asks it to leave; return the exit code. Raises ConfigError."""
    log_to_stderr()
    address, shutdown = checked_address(config.weights.host, config.redis.url), Shutdown()
    with shutdown.nothing_to_lose():
        fleet = fleet_of(config, shutdown)
        run = run_config(wait_for_run(fleet, config.actors.join_timeout_s))
    kept = Relay(
        RelayInfo(
            redis_url=config.redis.url,
            run_id=run.run.name,
            name=process_name(),
            host=socket.gethostname(),
            address=address,
            limits=ServerLimits(),
            timeout_s=2 * BROADCAST_TIMEOUT_S,
        ),
        key=checked_key(run),
    )
    print(f"relay at {kept.endpoint}", flush=True)
    while kept.alive and not is_over(fleet) and not shutdown.requested.wait(RENEW_S):
        pass
    failed = not kept.alive
    kept.close()
    return 1 if failed else shutdown.exit_code
