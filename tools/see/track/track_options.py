"""The options of `slipstream track`."""

from dataclasses import dataclass

from slipstream.common.process.config_error import require

TRACKERS = ("wandb", "mlflow", "prometheus")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackOptions:
    to: str = "wandb"  # wandb, mlflow or prometheus
    project: str = "slipstream"  # wandb: the project; mlflow: the experiment
    once: bool = False  # wandb, mlflow: send what there is, and exit
    host: str = "127.0.0.1"  # prometheus: the address to serve on; other hosts need one that they can reach
    port: int = 9464  # prometheus: the port to serve on; 0 takes a free one

    def __post_init__(self) -> None:
        require(self.to in TRACKERS, "--to", " or ".join(TRACKERS), self.to, "wandb is the default")
        require(self.project != "", "--project", "a name", self.project, "leave it out for slipstream")
        require(0 <= self.port < 65536, "--port", "0 to 65535", self.port, "9464 is the default")
        require(
            not (self.once and self.to == "prometheus"),
            "--once",
            "left out with --to prometheus",
            self.once,
            "Prometheus fetches the numbers for as long as this process runs",
        )
