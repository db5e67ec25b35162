"""Decides which recorded conversations `slipstream data` keeps."""

import math

import xxhash

from slipstream.common.rows.row_source import Row
from slipstream.common.text.action_format import action_format
from slipstream.tools.data.conversation_rows import Conversation, label_of
from slipstream.tools.data.data_options import DataOptions
from slipstream.tools.data.fit_rows import return_of
from slipstream.tools.data.near_duplicates import NearDuplicates


class Sieve:
    """Remembers a hash of each conversation, and what finds near-duplicates."""

    def __init__(self, options: DataOptions) -> None:
        self._options = options
        self._format = action_format(options.action_format) if options.action_format else None
        self._seen = set[int]()
        self._near = NearDuplicates(similarity=options.near_duplicates) if options.near_duplicates else None

    def reason_to_drop(self, conversation: Conversation, row: Row) -> str:
        """Why it is dropped; empty if it is kept. Raises BadRow for a return that is no number."""
        options, messages = self._options, conversation.messages
        replies = [each.content for index, each in enumerate(messages) if conversation.is_learnt(index)]
        if not replies:
            return "no assistant message to learn from"
        if messages[0].role == "assistant":
            return "the first message is the assistant's"
        if options.successes and row.get("success") is not True:
            return "no success"
        if options.min_return > -math.inf and return_of(row, needed=True) < options.min_return:
            return "return below --min-return"
        if self._format and not all(self._format.parse(reply).valid for reply in replies):
            return f"a reply is not in the format {options.action_format}"
        parts = [f"{each.role}\0{each.content}\0{conversation.is_learnt(index)}" for index, each in enumerate(messages)]
        labels = repr((conversation.labels, label_of(row)))
        digest = xxhash.xxh3_64_intdigest("\0".join(parts).encode(errors="replace") + labels.encode())
        if digest in self._seen:
            return "identical to another row"
        self._seen.add(digest)
        if self._near and not self._near.add(messages):
            return "nearly identical to another row"
        return ""
