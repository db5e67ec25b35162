"""All the scripts that the processes of a run call, loaded by the learner: actors and viewers may not send any."""

import logging
import threading

import redis

from common.patience import RedisAway
from replay import scripts
from replay.buffer import VERBS

CHECK_EVERY_S = 1.0  # a server that was started again has forgotten its scripts, and actors wait for them
FILES = (
    *(("prelude", "begin", verb) for verb in VERBS),
    ("prelude", "audit"), ("prelude", "unnamed"),
    ("announce",), ("beat",), ("broadcast_members",), ("enlist",), ("join_broadcast",), ("members",), ("put",),
)  # fmt: skip

log = logging.getLogger(__name__)


class Repertoire:
    """Keeps the scripts loaded on one server, by a thread of its own, until it is closed."""

    def __init__(self, client: redis.Redis) -> None:
        """Load them. Raises RedisAway, and NoPermissionError for a user who is no learner."""
        self._client = client
        self._scripts = [scripts.load(client, *files) for files in FILES]
        self._closing = threading.Event()
        self._load()
        self._keeping = threading.Thread(target=self._keep, name="keep-scripts", daemon=True)
        self._keeping.start()

    def close(self) -> None:
        """Idempotent."""
        self._closing.set()

    def _load(self) -> None:
        for script in self._scripts:
            self._client.script_load(script.text)

    def _keep(self) -> None:
        while not self._closing.wait(CHECK_EVERY_S):
            try:
                if not all(self._client.script_exists(*(script.sha for script in self._scripts))):
                    self._load()
                    log.info("the server had forgotten the run's scripts: loaded again")
            except RedisAway as error:
                log.warning("the run's scripts may be gone: %s", error)
