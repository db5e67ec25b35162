"""The options of `slipstream serve envs` and `slipstream serve rewards`."""

from dataclasses import dataclass

from slipstream.common.config.setting_bounds import AtLeast1, Count, Port, check_bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardsOptions:
    host: str = "127.0.0.1"  # address that the server binds to; other hosts must be able to connect to it
    port: Port = 7366  # 0 takes a free port and prints it
    key_file: str = ""  # file with the key that clients must send; empty: SLIPSTREAM_REWARDS_KEY, or no authentication

    def __post_init__(self) -> None:
        check_bounds(self, "--")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvsOptions(RewardsOptions):
    port: Port = 7365  # 0 takes a free port and prints it
    names: tuple[str, ...] = ()  # keys of the catalogue or module:Class; empty: all built-in ones
    processes: Count = 2  # worker processes that play the episodes; a worker that crashes or hangs loses its episodes
    max_episodes: Count = 256  # at a time; more episodes wait, or are refused if a protocol cannot wait
    lease_s: AtLeast1 = 60.0  # an episode is closed if its client sends nothing for this long
    key_file: str = ""  # file with the key that clients must send; empty: SLIPSTREAM_ENVS_KEY, or no authentication
