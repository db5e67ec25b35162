"""`slipstream serve relay`: pull a run's newest weights once, and serve them to its actors."""

from slipstream.actors.host.relay import relay
from slipstream.common.config.config import Config
from slipstream.tools.run.check_input import check_host


def run_relay(config: Config) -> int:
    """Check the relay's address, then serve until the run is over; return the exit code. Raises ConfigError."""
    check_host(config)
    return relay(config)
