"""One message between an environment and a policy."""

import msgspec


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation, with a role that chat templates know."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
