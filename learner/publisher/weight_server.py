"""The publisher process: hashes, announces and sends the weights that the learner copied into shared memory.

It is a separate process, so that a hanging collective or a slow receiver never affects training. One thread answers the
learner, one serves pulls, and one takes each version through hashing, delta, announcement and broadcast.
"""

import contextlib
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import redis
import torch

from slipstream.common.process.connection import connect
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.shutdown import die_with_parent
from slipstream.common.transfer.chunk_server import ChunkServer, ServerLimits
from slipstream.common.transfer.chunks import ChunkRequest
from slipstream.common.transfer.delta import encode_delta
from slipstream.common.transfer.encryption import key_from_environment
from slipstream.common.transfer.model_folder import OfferedFolder
from slipstream.common.transfer.weights import Manifest, Offer, buffer_bytes, sealed
from slipstream.learner.publisher import messages
from slipstream.learner.publisher.broadcast_sender import Broadcaster, Payload
from slipstream.learner.publisher.lineage import continued
from slipstream.learner.publisher.shelf import Shelf
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.records.keys import FencedOut

log = logging.getLogger(__name__)

REDIS_PAUSE_S = 1.0
REDIS_PATIENCE_S = 5.0  # then it checks for a newer version
POLL_S = 0.1
RENEW_S = 5.0  # between two looks at whether Redis still has the newest offer


class WeightServer:
    """The publisher process's threads and what they share."""

    def __init__(self, settings: messages.PublisherSettings, connection: Connection, slot_fds: list[int]) -> None:
        self._settings = settings
        self._connection = connection
        self._reporting = threading.Lock()
        self._shelf = Shelf()
        self._model = OfferedFolder(Path(settings.model_folder), settings.model_files)
        slots = [mmap.mmap(fd, buffer_bytes(settings.entries)) for fd in slot_fds]
        self._views = [memoryview(slot) for slot in slots]
        self._buffers = [torch.frombuffer(slot, dtype=torch.uint8) for slot in slots]
        client, key = connect(settings.redis_url, patience_s=REDIS_PATIENCE_S), key_from_environment()
        self._bulletin = Bulletin(client, settings.run_id)
        self._broadcaster = Broadcaster(client, settings, secret=key.secret if key else b"")
        self._server = ChunkServer(settings.host, self._read, limits=ServerLimits(), key=key)
        self._publishing = threading.Thread(target=self._publish_versions, name="publish-versions", daemon=True)

    def run(self) -> None:
        """Serve until the learner asks to stop or has exited."""
        self._publishing.start()
        while self._publishing.is_alive() and self._server.alive:
            if self._connection.poll(POLL_S) and not self._take_message():
                break
        self._server.close()

    def _read(self, request: ChunkRequest) -> bytes | None:
        """The requested bytes of a version or of a file of the model; None if there is no such blob."""
        try:
            return self._shelf.read(request, self._views) or self._model.read(request)
        except OSError as error:
            log.error("cannot read a file of the model for those that pull it: %s", error)
            return None

    def _take_message(self) -> bool:
        try:
            message = msgspec.msgpack.decode(self._connection.recv_bytes(), type=messages.ToProcess)
        except (EOFError, ConnectionResetError):
            return False  # the learner has exited
        match message:
            case messages.Submitted():
                self._report(self._shelf.submit(message))
            case messages.Withdraw():
                self._report(self._shelf.withdraw())
            case messages.Stop():
                self._shelf.stop()
        return True

    def _report(self, outgoing: Sequence[messages.ToLearner]) -> None:
        with self._reporting, contextlib.suppress(ConnectionError):  # the learner is gone: `run` sees it, and ends
            for message in outgoing:
                self._connection.send_bytes(msgspec.msgpack.encode(message))

    def _publish_versions(self) -> None:
        while not self._shelf.is_over:
            submitted = self._shelf.take(RENEW_S)
            try:
                if submitted is not None:
                    self._publish(submitted)
                else:
                    self._renew()
            except FencedOut as error:
                log.error("fenced out: %s", error)
                self._report([messages.Refused(reason=str(error))])

    def _publish(self, submitted: messages.Submitted) -> None:
        manifest = sealed(
            self._settings.entries,
            self._views[submitted.slot],
            policy_version=submitted.policy_version,
            learner_epoch=self._settings.learner_epoch,
            adapted=self._settings.adapted,
            probe=submitted.probe,
        )
        newest, delta = self._shelf.newest, None
        if newest is not None and self._settings.anchor_every > 1:
            delta = encode_delta(self._views[newest.slot], self._views[submitted.slot], self._settings.entries)
            if delta is not None:  # else too much has changed
                manifest = continued(manifest, newest.manifest, delta, anchor_every=self._settings.anchor_every)
        self._report(self._shelf.serve(manifest, delta, slot=submitted.slot))
        self._offer(manifest, Payload(whole=self._buffers[submitted.slot], delta=delta))

    def _renew(self) -> None:
        """Offer the newest version again if Redis has lost it with its newest writes: groups may be waiting for it."""
        newest = self._shelf.newest
        with contextlib.suppress(redis.RedisError):
            if newest is not None and self._bulletin.highest_version() < newest.manifest.policy_version:
                log.warning("Redis has lost the offer of version %d; offering it again", newest.manifest.policy_version)
                self._offer(newest.manifest, Payload(whole=self._buffers[newest.slot], delta=None))

    def _offer(self, manifest: Manifest, payload: Payload) -> None:
        """Announce and broadcast a version; while Redis is unreachable, retry until a newer version replaces it."""
        while True:
            try:
                invitation = self._broadcaster.invite()
                self._bulletin.announce(
                    Offer(manifest=manifest, pull_endpoint=self._server.endpoint, invitation=invitation)
                )
                announced = messages.Announced(
                    policy_version=manifest.policy_version,
                    num_bytes=manifest.num_bytes if payload.delta is None else len(payload.delta),
                    served_bytes=self._server.load.served_bytes,
                )
                self._report([announced])
                if invitation and (done := self._broadcaster.broadcast(invitation, manifest, payload)):
                    self._report([done])
                return
            except redis.RedisError as error:
                log.warning(
                    "could not announce version %d; retrying in %g s: %s", manifest.policy_version, REDIS_PAUSE_S, error
                )
                if self._shelf.overtaken():
                    return
                time.sleep(REDIS_PAUSE_S)


def let_failed_broadcasts_end_alone() -> None:
    """Make NCCL end the group of a failed broadcast. With 1, which torchrun exports, it would end this process."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"


def main(arguments: list[str]) -> None:
    """Run `python -m slipstream.learner.publisher.weight_server CONNECTION_FD SLOT_FD...`. Settings are a message."""
    log_to_stderr()
    let_failed_broadcasts_end_alone()
    # Ctrl-C goes to every process of the terminal, but the learner stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(os.getppid())  # a learner that has already exited has closed the connection
    connection_fd, *slot_fds = map(int, arguments)
    connection = Connection(connection_fd)
    settings = msgspec.msgpack.decode(connection.recv_bytes(), type=messages.PublisherSettings)
    try:
        WeightServer(settings, connection, slot_fds).run()
    except Exception:
        log.exception("the publisher process failed")
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
