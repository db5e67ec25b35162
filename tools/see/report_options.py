"""The options of `slipstream report`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    to: str = ""  # folder to write to; empty: report/ in the run's directory, or in run.root for several runs
