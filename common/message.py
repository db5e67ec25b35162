"""What people, environments and policies say to each other."""

import msgspec


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation, in the roles that chat templates know."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
