"""Loads all scripts of a run into a server; only the learner may: actors and viewers cannot send scripts."""

import logging
import threading

import redis

from slipstream.common.process.redis_retry import RedisAway
from slipstream.replay.buffer.verbs import ACTORS, JUDGES, LEARNERS, PEOPLES
from slipstream.replay.records import scripts

CHECK_EVERY_S = 1.0  # a restarted server has forgotten its scripts, and actors wait for them
FILES = (
    *(("prelude", "leases", "begin", verb) for verb in sorted({*LEARNERS, *ACTORS, *JUDGES, *PEOPLES})),
    ("prelude", "audit"),
    ("prelude", "unnamed"),
    *((file,) for file in ("announce", "beat", "enlist", "members", "put", "put_as_learner", "spend")),
)

log = logging.getLogger(__name__)


class Repertoire:
    """Keeps the scripts loaded on one server, with a thread, until it is closed."""

    def __init__(self, client: redis.Redis) -> None:
        """Load the scripts and keep them loaded. Raises RedisAway, and NoPermissionError without the learner's role."""
        self._client = client
        self._scripts = [scripts.load(client, *files) for files in FILES]
        self._closing = threading.Event()
        self._load()
        threading.Thread(target=self._keep, name="keep-scripts", daemon=True).start()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._closing.set()

    def _load(self) -> None:
        for script in self._scripts:
            self._client.script_load(script.text)

    def _keep(self) -> None:
        while not self._closing.wait(CHECK_EVERY_S):
            try:
                if not all(self._client.script_exists(*(script.sha for script in self._scripts))):
                    self._load()
                    log.info("the server had lost the run's scripts: loaded again")
            except RedisAway as error:
                log.warning(
                    "could not check that the run's scripts are loaded; trying again in %.0f s: %s",
                    CHECK_EVERY_S,
                    error,
                )
