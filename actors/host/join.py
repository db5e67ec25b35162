"""Joins a run that its learner described in Redis, for actors, judges and relays."""

import contextlib
import logging
import os
import secrets
import socket
import tempfile
import time

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect, connect_or_explain
from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.transfer.encryption import KEY_VARIABLE, CurveKey, key_from_environment
from slipstream.replay.fleet.fleet import Fleet, RunFacts, RunState, UnknownRun

JOIN_POLL_S, MAX_JOIN_POLL_S = 0.2, 5.0
LATENESS = 0.05  # of the time waited: thousands of hosts may wait for hours, and would keep Redis busy

log = logging.getLogger(__name__)


def fleet_of(config: Config, shutdown: Shutdown) -> Fleet:
    """The processes of the run that `config` names. Raises ConfigError, RedisUnreachable."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; set it to the run's Redis server, as in redis.url=redis://host:6379")
    connect_or_explain(config.redis.url).close()
    return Fleet(connect(config.redis.url, ending=shutdown.requested), config.run.name)


def process_name() -> str:
    """A name for this process, with a random part: containers may have the same host name and the same process ids."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def wait_for_run(fleet: Fleet, timeout_s: float) -> RunFacts:
    """Wait until the run exists; return its facts. Raises UnknownRun after `timeout_s`.

    Actors may be started before the learner, and a failed learner may be started again. The wait is logged once. The
    longer it is, the more rarely it asks.
    """
    started, logged = time.monotonic(), False
    while True:
        try:
            if fleet.run_state() is not RunState.FAILED:
                return fleet.run_facts()
            missing = UnknownRun("the learner of this run ended with an error; see its log, and start it again")
        except UnknownRun as error:
            missing = error
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            raise missing
        if not logged:
            log.info("waiting up to %.0f s for the learner: %s", timeout_s, missing)
            logged = True
        time.sleep(min(MAX_JOIN_POLL_S, max(JOIN_POLL_S, LATENESS * waited_s)))


def is_over(fleet: Fleet) -> bool:
    """Whether the run is finished; False if that is unknown, because Redis is away or the state is damaged."""
    with contextlib.suppress(RedisAway, UnknownRun):
        return fleet.run_state() is RunState.FINISHED
    return False


def run_config(facts: RunFacts) -> Config:
    """The run's configuration, as its learner published it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(facts.config_yaml)
        file.flush()
        return load_config(file.name, [])


def checked_key(run: Config) -> CurveKey | None:
    """The key of this process; None if the run has no key. Raises ConfigError if the run has one and it is missing."""
    key = key_from_environment()
    if run.weights.key_file and key is None:
        raise ConfigError(
            "the run encrypts its weights, and this process has no key: copy the file that `slipstream access key` "
            f"wrote, and set weights.key_file to its path, or set {KEY_VARIABLE}"
        )
    return key
