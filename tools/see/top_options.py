"""The options of `slipstream top`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TopOptions:
    once: bool = False  # print the run as it is now, and exit
