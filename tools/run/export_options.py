"""The options of `slipstream export`."""

import re
from dataclasses import dataclass

from slipstream.tools.terminal.options import check_options

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    to_hub: str = ""  # MAKER/NAME on the Hugging Face Hub to upload to, with the token in HF_TOKEN; empty: nowhere
    public: bool = False  # a repository that is created is public; without it, private
    critic: bool = False  # write the critic of the newest checkpoint instead, for the searches of `slipstream collect`

    def __post_init__(self) -> None:
        is_name = not self.to_hub or NAME.fullmatch(self.to_hub) is not None
        alone = not (self.critic and (self.to_hub or self.public))
        check_options(
            self,
            ("to_hub", is_name, "like maker/name", "leave it out to write the card only"),
            ("critic", alone, "without --to-hub and --public", "a critic is not uploaded"),
            ("public", self.to_hub != "" or not self.public, "off without --to-hub", "nothing is uploaded without it"),
        )
