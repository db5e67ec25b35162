"""How a process joins a run that its learner described in Redis: an actor, or a relay."""

import logging
import tempfile
import time

from common.config import Config, load_config
from common.config_error import ConfigError
from common.curve import KEY_VARIABLE, CurveKey, key_from_environment
from replay.fleet import Fleet, RunFacts, RunState, UnknownRun

JOIN_POLL_S = 0.2

log = logging.getLogger(__name__)


def wait_for_run(fleet: Fleet, timeout_s: float) -> RunFacts:
    """What the run's learner says about it. Raises UnknownRun after `timeout_s`.

    Actors may be started first, so a run that is not there yet, or whose learner failed and may come back, is waited
    for, aloud.
    """
    deadline, said = time.monotonic() + timeout_s, False
    while True:
        try:
            if fleet.run_state() is not RunState.FAILED:
                return fleet.run_facts()
            missing = UnknownRun("the run's learner ended with an error; see its log, and start it again")
        except UnknownRun as error:
            missing = error
        if time.monotonic() > deadline:
            raise missing
        if not said:
            log.info("waiting up to %.0f s for the learner: %s", timeout_s, missing)
            said = True
        time.sleep(JOIN_POLL_S)


def run_config(facts: RunFacts) -> Config:
    """The run's configuration, as its learner has it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(facts.config_yaml)
        file.flush()
        return load_config(file.name, [])


def checked_key(run: Config) -> CurveKey | None:
    """This process's key, if it has one. Raises ConfigError where the run has one, and this process does not."""
    key = key_from_environment()
    if run.weights.key_file and key is None:
        raise ConfigError(
            "the run's weights travel under a key, and this host has none: copy the file that `slipstream key` wrote, "
            f"and say where it is by weights.key_file, or set {KEY_VARIABLE}"
        )
    return key
