"""The options of `slipstream serve-rewards`."""

from dataclasses import dataclass

from slipstream.common.config.setting_bounds import Port, check_bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardsOptions:
    host: str = "127.0.0.1"  # address that the server binds to; other hosts must be able to connect to it
    port: Port = 7366  # 0 takes a free port and prints it
    key_file: str = ""  # file with the key that clients must send; empty: SLIPSTREAM_REWARDS_KEY, or no authentication

    def __post_init__(self) -> None:
        check_bounds(self, "--")
