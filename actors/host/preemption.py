"""Asks the cloud's metadata service whether this host will be taken away.

    aws    interruption, two minutes ahead
           https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    gcp    preemption, 30 s ahead, and maintenance that ends the host, 60 s ahead or, with GPUs, an hour
           https://cloud.google.com/compute/docs/instances/create-use-spot
    azure  preemption, 30 s ahead, and deletion, 5 minutes ahead
           https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events

Kubernetes and Slurm send SIGTERM instead.
"""

import asyncio
import logging
import math
import re
import threading
import time
from collections.abc import Mapping
from typing import TypeVar

import aiohttp
import msgspec

from slipstream.common.process.http_answer import Passing, requested
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.process.wire import MALFORMED

POLL_S = 2.0
TIMEOUT_S = 2.0  # the service is on the host's own network, and answers in milliseconds
WAIT_S = 5  # GCP answers a request when the value changes, or after this long
TOKEN_TTL_S = 21_600  # the longest that AWS allows
TOKEN = rb"[!-~]{1,4096}"
MAX_ANSWER_BYTES = 64 << 10
FAILURE_EVERY_S = 600.0  # how often a failure of the service is logged: it may fail in turns with other words

log = logging.getLogger(__name__)

T = TypeVar("T")


class MetadataError(RuntimeError):
    """The metadata service did not answer, or its answer is malformed; it is asked again."""


class _Denied(MetadataError):
    """Status 401: the token is missing or has expired."""


class Aws:
    """AWS: its IMDSv2 wants a token with each request; status 404 means that there is no notice."""

    def __init__(self, url: str) -> None:
        self._url = (url or "http://169.254.169.254") + "/latest"
        self._token = ""

    def look(self) -> str:
        """What the cloud announces for this host, in a sentence; empty if nothing.

        Like `look` of the other clouds it blocks for seconds at most. Raises MetadataError.
        """
        action = self._ask("/meta-data/spot/instance-action")
        if action is None:
            return ""
        announced = _decoded(action, _InstanceAction)
        return f"AWS will {announced.action} this host at {announced.time}"

    def _ask(self, path: str) -> bytes | None:
        if not self._token:
            self._refresh_token()
        try:
            return self._get(path)
        except _Denied:
            self._refresh_token()
            return self._get(path)

    def _get(self, path: str) -> bytes | None:
        return _asked(self._url + path, headers={"X-aws-ec2-metadata-token": self._token})

    def _refresh_token(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        answer = _asked(self._url + "/api/token", headers=headers, method="PUT") or b""
        if not re.fullmatch(TOKEN, token := answer.strip()):  # a request could not carry it
            raise MetadataError(f"{self._url}/api/token answered without a token: {answer[:200]!r}")
        self._token = token.decode()


class Gcp:
    """GCP: its service answers when the value changes, so that a preemption is known at once."""

    def __init__(self, url: str) -> None:
        self._url = (url or "http://metadata.google.internal") + "/computeMetadata/v1/instance/"

    def look(self) -> str:
        # Always asked first: GCP warns only hosts that have asked for it recently.
        if self._ask("maintenance-event") == b"TERMINATE_ON_HOST_MAINTENANCE":
            return "GCP will end this host for maintenance"
        if self._ask(f"preempted?wait_for_change=true&timeout_sec={WAIT_S}", wait_s=WAIT_S) == b"TRUE":
            return "GCP preempts this host"
        return ""

    def _ask(self, path: str, *, wait_s: float = 0.0) -> bytes:
        return _existing(self._url + path, headers={"Metadata-Flavor": "Google"}, wait_s=wait_s).strip()


class Azure:
    """Azure: its service lists the events of all hosts of a set; only those of this host count."""

    def __init__(self, url: str) -> None:
        self._url = (url or "http://169.254.169.254") + "/metadata"
        self._name = ""

    def look(self) -> str:
        if not self._name:
            name = self._ask("/instance/compute/name?api-version=2021-02-01&format=text")
            self._name = name.decode(errors="replace").strip()
        document = _decoded(self._ask("/scheduledevents?api-version=2020-07-01"), _ScheduledEvents)
        for event in document.Events:
            if event.EventType in ("Preempt", "Terminate") and self._name in event.Resources:
                when = event.NotBefore or "now"
                return f"Azure: {event.EventType} of this host, not before {when}"
        return ""

    def _ask(self, path: str) -> bytes:
        return _existing(self._url + path, headers={"Metadata": "true"})


CLOUDS: dict[str, type[Aws | Gcp | Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def watch_notices(service: str, shutdown: Shutdown) -> None:
    """Start a thread that sets `shutdown` when the cloud announces that this host will be taken away.

    `service` is the name of the cloud, or CLOUD@URL with the address of its metadata service. The thread asks until
    `shutdown` is set. A failure of the service is logged every FAILURE_EVERY_S at most.
    """
    cloud, _, url = service.partition("@")
    metadata = CLOUDS[cloud](url.rstrip("/"))
    threading.Thread(target=_watch, args=[metadata, shutdown], name="notices", daemon=True).start()


def _watch(metadata: Aws | Gcp | Azure, shutdown: Shutdown) -> None:
    failed_at = -math.inf
    while not shutdown.requested.is_set():
        try:
            if notice := metadata.look():
                log.warning("%s", notice)
                shutdown.notice()
        except MetadataError as error:
            if time.monotonic() - failed_at >= FAILURE_EVERY_S:
                log.warning("notices of the cloud do not arrive: %s", error)
                failed_at = time.monotonic()
        shutdown.requested.wait(POLL_S)


class _InstanceAction(msgspec.Struct, frozen=True, kw_only=True):
    action: str  # terminate, stop or hibernate
    time: str


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    EventType: str
    Resources: list[str]
    NotBefore: str


class _ScheduledEvents(msgspec.Struct, frozen=True, kw_only=True):
    Events: list[_Event]


def _decoded(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except MALFORMED as error:
        raise MetadataError(f"malformed answer {answer[:200]!r} of the metadata service: {error}") from error


def _existing(url: str, *, headers: Mapping[str, str], wait_s: float = 0.0) -> bytes:
    answer = _asked(url, headers=headers, wait_s=wait_s)
    if answer is None:
        raise MetadataError(f"{url} does not exist")
    return answer


def _asked(url: str, *, headers: Mapping[str, str], method: str = "GET", wait_s: float = 0.0) -> bytes | None:
    """The body of the answer; None for status 404. Raises MetadataError."""
    asking = requested(url, None, headers, method=method, timeout_s=TIMEOUT_S + wait_s, max_bytes=MAX_ANSWER_BYTES)
    try:
        reply = asyncio.run(asking)
    except (aiohttp.ClientError, OSError, Passing, RuntimeError) as error:  # RuntimeError: the interpreter ends
        raise MetadataError(f"{url} does not answer as documented: {error!r}") from error
    if reply.status == 404:
        return None
    if not 200 <= reply.status < 300:
        failure = _Denied if reply.status == 401 else MetadataError
        raise failure(f"{url} answered with status {reply.status}: {reply.body[:200]!r}")
    return reply.body
