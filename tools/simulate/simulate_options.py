"""The options of `slipstream simulate`."""

from dataclasses import dataclass

from slipstream.common.config.setting_bounds import NonNegative, Positive
from slipstream.tools.terminal.options import check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    actors: tuple[str, ...] = ()  # numbers of actors, such as 4,16,64; empty: those of the run
    preemptions_per_hour: NonNegative = 0.0  # of each actor; it leaves in order, and its episodes continue elsewhere
    learner_speed: Positive = 1.0  # of what was measured: 8 for eight times the ranks, if they scale

    def __post_init__(self) -> None:
        are_counts = all(number.isdecimal() and int(number) >= 1 for number in self.actors)
        rule = ("actors", are_counts, "numbers >= 1, with commas between them", "4,16,64 simulates three fleets")
        check_options(self, rule)
