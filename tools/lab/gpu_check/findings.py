"""What an item of the GPU check found: rows of numbers, some with a bound that they must keep.

It imports no package, so that an item can report what a machine lacks.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import IO


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number or fact."""

    name: str
    value: float | str
    unit: str = ""
    bound: str = ""  # such as "<= 0.001"; empty if it is only reported
    holds: bool | None = None  # None without a bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Takes rows one at a time; each is written at once, so that a crash or a timeout loses no earlier row."""

    file: IO[str]

    def note(self, name: str, value: float | str, unit: str = "") -> None:
        """Report without a bound."""
        self._write(Row(name=name, value=value, unit=unit))

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Report, and require `value` <= `limit`; a NaN does not keep it."""
        self._write(Row(name=name, value=value, unit=unit, bound=f"<= {limit:g}", holds=value <= limit))

    def require(self, name: str, holds: bool, value: float | str = "") -> None:
        """Report whether something is so, and require it."""
        self._write(Row(name=name, value=value or ("yes" if holds else "no"), bound="yes", holds=holds))

    def _write(self, row: Row) -> None:
        plain = asdict(row)
        if isinstance(row.value, float) and not math.isfinite(row.value):
            plain["value"] = str(row.value)  # JSON has no number for it
        self.file.write(json.dumps(plain) + "\n")
        self.file.flush()


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The end of one item."""

    name: str
    state: str  # passed, failed, or not run
    reason: str = ""  # of a failure, or what is lacking, in one line
    log: str = ""  # the end of what a failed item printed
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @property
    def broken(self) -> list[Row]:
        """The rows whose bound does not hold."""
        return [row for row in self.rows if row.holds is False]


def read_rows(text: str) -> list[Row]:
    """The rows that an item wrote; a last line that a kill cut short is left out."""
    return [Row(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]
