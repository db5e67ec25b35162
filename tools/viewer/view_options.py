"""The options of `slipstream view`."""

import re
from dataclasses import dataclass

from slipstream.common.process.config_error import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewOptions:
    port: int = 0  # of the page, on 127.0.0.1; 0: any free one
    file: str = ""  # write a self-contained HTML file instead of serving a page
    steps: str = ""  # with --file, the steps in it, as 1:3; empty: the newest

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "--port", "0 to 65535", self.port, "leave it out for any free port")
        require(
            not self.steps or re.fullmatch(r"\d{1,9}:\d{1,9}", self.steps) is not None,
            "--steps",
            "FIRST:LAST, as in 1:3",
            self.steps,
            "leave it out for the newest step",
        )
        require(not self.steps or bool(self.file), "--steps", "together with --file", self.steps, "add --file FILE")
