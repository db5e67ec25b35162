"""Decides which recorded conversations `slipstream data` keeps."""

import math

import numpy as np
import xxhash

from slipstream.common.rows.row_source import Row
from slipstream.common.text.action_format import action_format
from slipstream.tools.data.conversation_rows import Conversation, label_of
from slipstream.tools.data.data_files import DataFiles
from slipstream.tools.data.data_options import DataOptions
from slipstream.tools.data.fit_rows import return_of
from slipstream.tools.data.near_duplicates import NUM_HASHES, NearDuplicates

RESTORED = 1 << 12  # texts at a time


class Sieve:
    """Remembers a hash of each conversation, and what finds near-duplicates; both in files too, for another call."""

    def __init__(self, options: DataOptions, files: DataFiles) -> None:
        self._options = options
        self._format = action_format(options.action_format) if options.action_format else None
        self._seen_file = files.opened(files.seen)
        self._seen = set[int]()
        for chunk in self._seen_file.chunks(8 * RESTORED):
            self._seen.update(np.frombuffer(chunk, dtype="<u8").tolist())
        self._near = NearDuplicates(similarity=options.near_duplicates) if options.near_duplicates else None
        if self._near:
            self._minima_file = files.opened(files.minima)
            for chunk in self._minima_file.chunks(4 * NUM_HASHES * RESTORED):
                for minima in np.frombuffer(chunk, dtype="<u4").astype(np.uint32).reshape(-1, NUM_HASHES):
                    self._near.remember(minima)

    def reason_to_drop(self, conversation: Conversation, row: Row) -> str:
        """Why it is dropped; empty if it is kept. Raises BadRow for a return that is no number."""
        options = self._options
        if not any(map(conversation.is_learnt, range(len(conversation.messages)))):
            return "no assistant message to learn from"
        if conversation.messages[0].role == "assistant":
            return "the first message is the assistant's"
        if options.successes and row.get("success") is not True:
            return "no success"
        if options.min_return > -math.inf and return_of(row, needed=True) < options.min_return:
            return "return below --min-return"
        return self._reason_in_text(conversation, row)

    def _reason_in_text(self, conversation: Conversation, row: Row) -> str:
        replies = [
            message.content for index, message in enumerate(conversation.messages) if conversation.is_learnt(index)
        ]
        if self._format and not all(self._format.parse(reply).valid for reply in replies):
            return f"a reply is not in the format {self._options.action_format}"
        digest = xxhash.xxh3_64_intdigest(
            "\0".join(
                f"{message.role}\0{message.content}\0{conversation.is_learnt(index)}"
                for index, message in enumerate(conversation.messages)
            ).encode(errors="replace")
            + repr((conversation.labels, label_of(row))).encode()
        )
        if digest in self._seen:
            return "identical to another row"
        self._seen.add(digest)
        self._seen_file.write(digest.to_bytes(8, "little"))
        if self._near:
            minima = self._near.add(conversation.messages)
            if minima is None:
                return "nearly identical to another row"
            self._minima_file.write(minima.astype("<u4").tobytes())
        return ""
