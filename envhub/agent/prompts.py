"""The prompts of one episode as tokens. An agent sends its conversation as text; what was sampled keeps its tokens.

A tokenizer rarely gives back the tokens that a policy sampled. So each answer is remembered with the text that it
stands for. A text that begins with a remembered one begins with its tokens, and only the rest is encoded. If an agent
or the chat template rewrites an answer, the text differs from there on, and it is encoded as any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from slipstream.common.records.message import bare
from slipstream.common.text.chat import MARK, reply_form
from slipstream.common.text.chat_template import REFUSALS, rendered, turn_marks
from slipstream.common.text.codec import encoder, end_tokens, ending_tokens, following
from slipstream.envhub.agent.request import with_objects

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL = "a-tool-4b825dc6"  # begins what stands for the name of a tool in a rendering


class Prompts:
    """Encodes the prompts of an episode, and decodes the answers to them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, started_at_s: float) -> None:
        """`started_at_s` is the unix time whose date a template may write into the system message."""
        self._tokenizer = tokenizer
        self._today = datetime.fromtimestamp(started_at_s, UTC)
        self._encode = encoder(tokenizer)
        self._ending = ending_tokens(tokenizer)
        self._ends = [str(tokenizer.convert_ids_to_tokens(token)) for token in end_tokens(tokenizer)]
        self._takes_json, self._takes_none = _taken(tokenizer, str(tokenizer.chat_template))
        self._known: dict[str, list[int]] = {}  # the tokens of each text that ends with an answer
        try:
            self._end_of_turn = reply_form(tokenizer).ends["user"]
        except ValueError:  # a template that rewrites every answer; what it does not rewrite usually ends like this
            self._end_of_turn = str(tokenizer.eos_token)

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, to_reply: bool = True
    ) -> str:
        """Return the conversation as the chat template renders it; with `to_reply`, ready for an answer.

        Raises ValueError if the template refuses it.
        """
        if not self._takes_json:
            messages = with_objects(messages)
        if not self._takes_none:
            messages = [{**message, "content": message.get("content") or ""} for message in messages]
        try:
            return rendered(self._tokenizer, messages, today=self._today, to_reply=to_reply, tools=tools)
        except (*REFUSALS, RecursionError) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a prompt: those of the longest known text that it begins with, and the rest encoded."""
        begun = max((known for known in list(self._known) if text.startswith(known)), key=len, default="")
        return self._known.get(begun, []) + following(self._encode, text[len(begun) :], after=begun)

    def answer(self, tokens: Sequence[int]) -> str:
        """Return the text of a sampled answer, without its end-of-turn token."""
        return self.text(tokens[:-1] if self._is_ended(tokens) else tokens)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def remember(self, text: str, prompt: list[int], tokens: list[int], *, written: str, shown: str) -> None:
        """Remember that `tokens`, the text `written`, answered the prompt `text`, and that the agent gets `shown`."""
        is_ended, split = self._is_ended(tokens), turn_marks(self._tokenizer).split_reply
        written, shown = split(written), split(shown)
        self._known[text + written] = prompt + (tokens[:-1] if is_ended else tokens)
        end = str(self._tokenizer.convert_ids_to_tokens(tokens[-1])) if is_ended else ""
        is_closed = is_ended and self._end_of_turn.endswith(end)
        closing = [] if is_closed else following(self._encode, self._end_of_turn, after=text + shown)
        self._known[text + shown + self._end_of_turn] = prompt + tokens + closing

    def remember_message(
        self,
        earlier: Sequence[dict[str, Any]],
        message: dict[str, Any],
        tools: Sequence[Mapping[str, Any]],
        *,
        text: str,
        prompt: list[int],
        tokens: list[int],
        written: str,
    ) -> None:
        """Remember how the template shows `message`, the parts of the answer `tokens`, when the agent sends it back.

        White space apart, it must show what was `written`; of the calls only up to the first name, as templates write
        arguments in their own way. If it shows anything else, nothing is remembered, and the next prompt begins a
        branch.
        """
        calls = message.get("tool_calls", [])
        asked = [{"role": "user", "content": MARK}]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": MARK} for call in calls]
        marks = [f"{TOOL}-{place}." for place in range(len(calls))]
        if calls:
            named = zip(calls, marks, strict=True)
            message = message | {
                "tool_calls": [call | {"function": call["function"] | {"name": mark}} for call, mark in named]
            }
        try:
            by_mark = self.rendered([*earlier, message, *(results or asked)], tools, to_reply=False)
        except ValueError:  # the template refuses the call, also in the next request
            return
        whole = by_mark  # a template that writes a name in another way than this gives no prompt that begins so
        for call, mark in zip(calls, marks, strict=True):
            whole = whole.replace(mark, call["function"]["name"])
        begun, written = text.rstrip(), turn_marks(self._tokenizer).split_reply(written)
        shown, is_followed, _ = whole.removeprefix(begun).partition(MARK)
        ends = [(shown.rindex(end) + len(end), end) for end in self._ends if end in shown]
        if not (whole.startswith(begun) and is_followed and ends):
            return
        stop, end = max(ends)
        if calls:
            before = by_mark.removeprefix(begun).partition(marks[0])[0]
            is_same = all(mark in by_mark for mark in marks) and bare(written).startswith(bare(before))
        else:
            is_same = bare(written) == bare(shown[:stop].removesuffix(end))
        if is_same:
            is_closed = bool(tokens) and str(self._tokenizer.convert_ids_to_tokens(tokens[-1])) == end
            self._known[begun + shown[:stop]] = prompt + tokens + ([] if is_closed else self._encode(end))

    def _is_ended(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and tokens[-1] in self._ending


@lru_cache(maxsize=8)
def _taken(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[bool, bool]:
    """Whether a template shows the arguments of a call as JSON that it gets as a string, and no content not as None."""
    arguments, asked = {"a": MARK}, {"role": "user", "content": "a"}
    for shown, content in product((json.dumps(arguments), None), (None, "")):
        function = {"name": "a", "arguments": shown or arguments}
        call = {"id": "4b825dc64", "type": "function", "function": function}
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        with suppress(*REFUSALS):
            text = rendered(tokenizer, [asked, answer], today=datetime.now(UTC))
            if (shown or "") in text:
                return shown is not None, content is None and "None" not in text
    return False, False
