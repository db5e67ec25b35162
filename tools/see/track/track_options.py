"""The options of `slipstream track`."""

from dataclasses import dataclass
from typing import Literal

from slipstream.common.config.setting_bounds import Port
from slipstream.tools.terminal.options import check_options

HOST, PORT = "127.0.0.1", 9464


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackOptions:
    to: Literal["wandb", "mlflow", "prometheus"] = "wandb"  # where the metrics go
    once: bool = False  # wandb, mlflow: send what there is, and exit
    host: str = HOST  # prometheus: the address to serve on; other hosts need one that they can reach
    port: Port = PORT  # prometheus: the port to serve on; 0 takes a free one

    def __post_init__(self) -> None:
        serves = self.to == "prometheus"
        fetched = "Prometheus fetches the numbers for as long as this process runs"
        check_options(
            self,
            ("once", not (self.once and serves), "left out with --to prometheus", fetched),
            ("host", serves or self.host == HOST, "left out without --to prometheus", "nothing else is served"),
            ("port", serves or self.port == PORT, "left out without --to prometheus", "nothing else is served"),
        )
