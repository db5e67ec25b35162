"""`slipstream relay`: keeps the newest weights of a run, verified, for others to pull.

It needs Redis to hear of new versions and to be found. To go on serving what it has it needs nobody: not the learner,
not the publisher and, for those who know it already, not Redis.
"""

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from actors.fetch import Bytes
from actors.holdings import Holdings
from actors.join import checked_key, run_config, wait_for_run
from actors.pull import Puller, PullFailed
from actors.sources import Sources
from common.chunk_server import ChunkServer, ServerLimits
from common.chunks import Blob
from common.config import Config
from common.config_error import ConfigError
from common.connection import connect, connect_or_explain
from common.curve import CurveKey
from common.patience import RedisAway
from common.shutdown import Shutdown
from common.weights import Offer, WeightsError, blobs, check_blob
from replay.bulletin import Bulletin, RelayNotice
from replay.fleet import Fleet, RunState

POLL_S = 0.1
RENEW_S = 1.0  # what a relay says of itself is at most so old
TTL_S = 5.0  # one that is silent for this long is not asked any more
SUSPECT_S = 30.0  # it looks at its blobs again, when somebody blames it, at most so often
RETRY_S = 1.0
REDIS_PATIENCE_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayInfo:
    """What a relay must know."""

    redis_url: str
    run_id: str
    name: str
    host: str  # the machine's name, as the actors there call it
    address: str  # to bind to
    limits: ServerLimits
    timeout_s: float  # for pulling one blob; what has come then stays


class Relay:
    """One thread serves, one fetches, one tells what there is. Its owner waits for the end of the run."""

    def __init__(self, info: RelayInfo, *, key: CurveKey | None) -> None:
        self._info = info
        self._bulletin = Bulletin(connect(info.redis_url, patience_s=REDIS_PATIENCE_S), info.run_id)
        self._holdings = Holdings()
        sources = Sources(self._bulletin.relays, name=info.name, host=info.host, patience_s=0.0)
        self._puller = Puller(sources, blame=self._bulletin.blame, chunk_bytes=info.limits.chunk_bytes, key=key)
        self._server = ChunkServer(info.address, self._holdings.read, limits=info.limits, key=key)
        self._told: RelayNotice | None = None
        self._told_at = 0.0
        self._num_blamed = 0
        self._suspect_at = 0.0
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep, args=[work], name=name, daemon=True)
            for name, work in (("fetch-weights", self._fetch), ("tell-weights", self._tell))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def endpoint(self) -> str:
        """Where it serves."""
        return self._server.endpoint

    @property
    def alive(self) -> bool:
        """False once a part of it has failed; the log says why."""
        return self._server.alive and all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Say that it serves no more, and let go of the port. A pull under way ends within seconds."""
        self._closing.set()
        self._puller.abandon()
        for thread in self._threads:
            thread.join()
        with contextlib.suppress(RedisAway):  # then it is missed
            self._bulletin.withdraw_relay(self._info.name)
        self._server.close()
        self._puller.close()

    def _keep(self, work: Callable[[], None]) -> None:
        while not self._closing.wait(POLL_S):
            try:
                work()
            except RedisAway:  # its client has said so
                pass
            except redis.RedisError as error:  # its memory is full; what is here is served
                log.warning("Redis refuses a relay, which goes on: %s", error)
                self._closing.wait(RETRY_S)

    def _fetch(self) -> None:
        """Bring what the newest version is made of and is not here; where it does not come, the next look does."""
        self._look_again()
        offer = self._bulletin.latest()
        if offer is None or offer.manifest == self._holdings.manifest:
            return
        manifest = offer.manifest
        self._holdings.make_room(manifest)
        try:
            # The small ones first: who has the version before needs only the last delta.
            for blob in sorted(blobs(manifest), key=lambda blob: blob.num_bytes):
                if self._holdings.get(blob.root) is None:
                    self._holdings.add(blob.root, self._pull(offer, blob))
        except PullFailed as error:
            log.warning("version %d: %s", manifest.policy_version, error)
            self._closing.wait(RETRY_S)
            return
        self._holdings.complete(manifest)
        log.info("version %d is here", manifest.policy_version)

    def _pull(self, offer: Offer, blob: Blob) -> Bytes:
        return self._puller.pull(
            blob,
            publisher=offer.pull_endpoint,
            check=lambda data: check_blob(offer.manifest, blob, data),
            timeout_s=self._info.timeout_s,
        )

    def _look_again(self) -> None:
        """Whoever is blamed looks whether it was to blame: memory fails, and nothing else would ever tell."""
        manifest, now = self._holdings.manifest, time.monotonic()
        if manifest is None or now < self._suspect_at:
            return
        num_blamed = self._bulletin.blamed().get(self.endpoint, 0)
        self._suspect_at = now + (RENEW_S if num_blamed == self._num_blamed else SUSPECT_S)
        if num_blamed == self._num_blamed:
            return
        self._num_blamed = num_blamed
        for blob in blobs(manifest):
            held = self._holdings.get(blob.root)
            try:
                if held is not None:
                    check_blob(manifest, blob, held.data)
            except WeightsError as error:
                log.error("what was right when it came has changed in memory, and is fetched again: %s", error)
                self._holdings.drop(blob.root)

    def _tell(self) -> None:
        """Renew the notice; at once where it is new what is here, or who is served."""
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
        told, now = self._told, time.monotonic()
        is_news = told is None or (told.roots, told.num_children) != (notice.roots, notice.num_children)
        if not is_news and now < self._told_at + RENEW_S:
            return
        self._bulletin.announce_relay(notice, ttl_s=TTL_S)
        self._told, self._told_at = notice, now


def relay(config: Config) -> int:
    """Be a relay of the run until it is over, or until told to leave; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; say which Redis the run is on, as in redis.url=redis://host:6379")
    connect_or_explain(config.redis.url).close()
    shutdown = Shutdown()
    fleet = Fleet(connect(config.redis.url, ending=shutdown.requested), config.run.name)
    with shutdown.nothing_to_lose():
        run = run_config(wait_for_run(fleet, config.actors.join_timeout_s))
    host = socket.gethostname()
    kept = Relay(
        RelayInfo(
            redis_url=config.redis.url,
            run_id=run.run.name,
            # Containers may have one name, and the same process ids.
            name=f"{host}-{os.getpid()}-{secrets.token_hex(4)}",
            host=host,
            address=config.weights.host,
            limits=ServerLimits(
                fan_out=config.weights.fan_out,
                bytes_per_s=config.weights.pull_bytes_per_s,
                chunk_bytes=run.weights.chunk_bytes,
            ),
            timeout_s=2 * run.weights.broadcast_timeout_s,
        ),
        key=checked_key(run),
    )
    print(f"relay at {kept.endpoint}", flush=True)
    while kept.alive and not is_over(fleet) and not shutdown.requested.wait(RENEW_S):
        pass
    failed = not kept.alive
    kept.close()
    return 1 if failed else shutdown.exit_code


def is_over(fleet: Fleet) -> bool:
    """Whether the run is finished; while Redis is away, nobody knows."""
    with contextlib.suppress(RedisAway):
        return fleet.run_state() is RunState.FINISHED
    return False
