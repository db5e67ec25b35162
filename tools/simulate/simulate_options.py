"""The options of `slipstream simulate`."""

import math
from dataclasses import dataclass

from slipstream.common.process.config_error import require


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    actors: tuple[str, ...] = ()  # numbers of actors, such as 4,16,64; empty: those of the run
    preemptions_per_hour: float = 0.0  # of each actor; it leaves in order, and its episodes continue elsewhere
    kills_per_hour: float = 0.0  # of each actor; its episodes begin again once their leases have expired
    restart_s: float = 120.0  # until a lost actor is replaced
    learner_speed: float = 1.0  # of what was measured: 8 for eight times the ranks, if they scale
    steps: int = 100  # optimizer steps that are measured
    seed: int = 0  # of everything that is drawn: episodes, times and losses of actors
    json: bool = False  # print one JSON object

    def __post_init__(self) -> None:
        require(
            all(number.isdecimal() and int(number) >= 1 for number in self.actors),
            "--actors",
            "numbers >= 1, with commas between them",
            ",".join(self.actors),
            "4,16,64 simulates three fleets",
        )
        for name in ("preemptions_per_hour", "kills_per_hour", "restart_s"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"--{name.replace('_', '-')}", ">= 0", value, "0 turns it off")
        require(
            0 < self.learner_speed < math.inf,
            "--learner-speed",
            "> 0",
            self.learner_speed,
            "1 is the speed as measured",
        )
        require(self.steps >= 1, "--steps", ">= 1", self.steps, "100 is the default")
