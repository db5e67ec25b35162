"""One message between an environment and a policy."""

import msgspec

from slipstream.common.records.valid_text import valid_text


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation, with a role that chat templates know."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str

    def __post_init__(self) -> None:
        """Make the text valid Unicode; what is no text is refused where an observation is checked."""
        if isinstance(self.content, str):
            msgspec.structs.force_setattr(self, "content", valid_text(self.content))
