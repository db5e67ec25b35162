"""The options of `slipstream export`."""

import re
from dataclasses import dataclass

from slipstream.common.process.config_error import require

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    to_hub: str = ""  # MAKER/NAME on the Hugging Face Hub to upload to, with the token in HF_TOKEN; empty: nowhere
    public: bool = False  # a repository that is created is public; without it, private
    critic: bool = False  # write the critic of the newest checkpoint instead, for the searches of `slipstream collect`

    def __post_init__(self) -> None:
        require(
            not self.to_hub or NAME.fullmatch(self.to_hub) is not None,
            "--to-hub",
            "like maker/name",
            self.to_hub,
            "leave it out to write the card only",
        )
        alone = not (self.critic and (self.to_hub or self.public))
        require(alone, "--critic", "without --to-hub and --public", self.critic, "a critic is not uploaded")
