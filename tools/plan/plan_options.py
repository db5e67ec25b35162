"""The options of `slipstream plan`."""

from dataclasses import dataclass

from slipstream.common.config.setting_bounds import Count, Whole, check_bounds
from slipstream.common.process.config_error import require

GPUS = {  # GiB of memory, by data sheet
    "A100-40": 40,
    "A100": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
    "L40S": 48,
    "A10": 24,
    "L4": 24,
    "RTX4090": 24,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    gpus: Count = 8  # of the learner's host
    gpu: str = "H100"  # their kind: A100-40, A100, H100, H200, B200, L40S, A10, L4 or RTX4090
    actor_gpus: Whole = 0  # of each host of actors; 0: the actors are on the learner's host

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        require(self.gpu in GPUS, "--gpu", f"one of {', '.join(GPUS)}", self.gpu, "the nearest one gives an estimate")
