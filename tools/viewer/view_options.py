"""The options of `slipstream view`."""

import re
from dataclasses import dataclass

from slipstream.common.config.setting_bounds import Port
from slipstream.tools.terminal.options import check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewOptions:
    port: Port = 0  # of the page, on 127.0.0.1; 0: any free one
    file: str = ""  # write the report there, of one run or of several, instead of showing it
    steps: str = ""  # whose episodes the file has too, as 1:3; empty: none

    def __post_init__(self) -> None:
        is_range = not self.steps or re.fullmatch(r"\d{1,9}:\d{1,9}", self.steps) is not None
        shown = "a page in the browser shows all steps"
        check_options(
            self,
            ("steps", not self.steps or self.file != "", "left out without --file", shown),
            ("port", self.port == 0 or not self.file, "left out with --file", "only a page in the browser has one"),
            ("steps", is_range, "FIRST:LAST, as in 1:3", "leave it out for a report without episodes"),
        )
