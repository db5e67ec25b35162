"""One message between an environment and a policy, and valid Unicode of any text that a policy wrote.

JSON can escape half a surrogate pair, as in "\\ud83d". Python reads it as a character that no encoding, wire or
tokenizer takes. So the types that carry such text make it valid: Message, ToolCall, ParsedAnswer and ParsedAction.
"""

import json
import re

import msgspec

_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # the beginning of an escaped half, which may belong to a pair


def valid_text(text: str) -> str:
    """`text` with U+FFFD for each half surrogate pair; two halves side by side become their character."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def valid_json(text: str) -> str:
    """`text`, of which a reader gets valid text only: JSON is written again if it has half a pair, escaped or not.

    What is no JSON is treated as text.
    """
    if not _HALF.search(text):
        return valid_text(text)
    try:
        written = json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return valid_text(text)
    valid = valid_text(written)
    return text if valid == written else valid


def bare(text: str) -> str:
    """`text` without white space, of which a tokenizer or a template may lose some."""
    return "".join(text.split())


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation, with a role that chat templates know."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str

    def __post_init__(self) -> None:
        """Make the text valid Unicode; what is no text is refused where an observation is checked."""
        if isinstance(self.content, str):
            msgspec.structs.force_setattr(self, "content", valid_text(self.content))
