"""The options of `slipstream envs serve`."""

from dataclasses import dataclass

from slipstream.common.process.config_error import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    host: str = "127.0.0.1"  # address that the server binds to; other hosts must be able to connect to it
    port: int = 7365  # 0 takes a free port and prints it
    names: tuple[str, ...] = ()  # keys of the catalogue or module:Class; empty: all built-in ones
    processes: int = 2  # worker processes that play the episodes; a worker that crashes or hangs loses its episodes
    max_episodes: int = 256  # at a time; more episodes wait, or are refused if a protocol cannot wait
    lease_s: float = 60.0  # an episode is closed if its client sends nothing for this long
    key_file: str = ""  # file with the key that clients must send; empty: SLIPSTREAM_ENVS_KEY, or no authentication

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "--port", "in [0, 65535]", self.port, "0 takes a free one")
        for name in ("processes", "max_episodes"):
            value = getattr(self, name)
            require(value >= 1, f"--{name.replace('_', '-')}", ">= 1", value, "leave it out for the default")
        require(self.lease_s >= 1, "--lease-s", ">= 1", self.lease_s, "60 is the default")
