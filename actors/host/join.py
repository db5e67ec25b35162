"""Joins a run that its learner described in Redis, for actors and relays."""

import logging
import tempfile
import time

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.transfer.encryption import KEY_VARIABLE, CurveKey, key_from_environment
from slipstream.replay.fleet.fleet import Fleet, RunFacts, RunState, UnknownRun

JOIN_POLL_S, MAX_JOIN_POLL_S = 0.2, 5.0
LATENESS = 0.05  # of the time waited: thousands of hosts may wait for hours, and would keep Redis busy

log = logging.getLogger(__name__)


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
