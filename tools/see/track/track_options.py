"""The options of `slipstream track`."""

from dataclasses import dataclass
from typing import Literal

from slipstream.common.config.setting_bounds import Port, check_bounds
from slipstream.common.process.config_error import require


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackOptions:
    to: Literal["wandb", "mlflow", "prometheus"] = "wandb"  # where the metrics go
    once: bool = False  # wandb, mlflow: send what there is, and exit
    host: str = "127.0.0.1"  # prometheus: the address to serve on; other hosts need one that they can reach
    port: Port = 9464  # prometheus: the port to serve on; 0 takes a free one

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        require(
            not (self.once and self.to == "prometheus"),
            "--once",
            "left out with --to prometheus",
            self.once,
            "Prometheus fetches the numbers for as long as this process runs",
        )
