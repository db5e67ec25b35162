"""Turns a conversation into tokens: sampled tokens are kept as they were sampled, and only new messages are rendered.

A prompt is never built by decoding and re-encoding the past, because a tokenizer rarely gives back the tokens that a
policy sampled. Each extension renders the conversation as text, finds the text after what was rendered before, and
encodes only that. Where a chat template changes only the white space of a reply, the reply stays as it was sampled. If
it rewrites earlier text, for example by dropping earlier thoughts, a new branch begins, unless `model.history` keeps
all replies as they were sampled. So does one if `model.context` shortens a conversation that fills its context.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.imported import imported, is_own
from slipstream.common.records.message import Message, bare
from slipstream.common.text.chat_template import REFUSALS, TurnMarks, prompt, rendered, turn_marks
from slipstream.common.text.codec import decoder, encoder, end_tokens, ending_tokens, following, kept_by_template
from slipstream.common.text.thought import THOUGHT_MARKS, own_marks, thought_marks, without_thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUMMARISE = (
    "Summarise what you have done and seen, and what remains to be done. You will keep the task and your summary; all "
    "else will be dropped."
)
SUMMARY = "Your summary of what you have done and seen:"
MARK = "the-words-of-a-reply-4b825dc6"  # stands for a reply in a rendering, to find what a template writes after it
_THOUGHT = "the-words-of-a-thought-4b825dc6"
_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of a thought, in which templates look for it
_ASK, _RESULT = {"role": "user", "content": "a"}, {"role": "tool", "content": "a"}
_UNLIKE_ITS_PROMPT = (
    "the chat template does not render an assistant's message right after its generation prompt; use another"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """The tokens after the conversation so far; or, with `new_branch`, the whole prompt of a new sequence."""

    tokens: list[int]
    new_branch: bool


class Chat:
    """One conversation between an environment and a policy."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, model: ModelConfig | None = None, started_at_s: float | None = None
    ) -> None:
        """`started_at_s` is the unix time whose date a template may write into the system message; default: now."""
        self._tokenizer = tokenizer
        self._model = model or ModelConfig()
        self._today = datetime.fromtimestamp(time.time() if started_at_s is None else started_at_s, UTC)
        self._encode = encoder(tokenizer)
        self._decode = decoder(tokenizer)
        self._ending = ending_tokens(tokenizer)
        self._thoughts, self._turns = thought_marks(tokenizer), turn_marks(tokenizer)
        self._messages: list[Message] = []
        self.text = ""  # the conversation up to the last prompt, as the template renders it
        self._reply = ""  # the text of the reply to that prompt
        self._ended_with = ""  # the end-of-turn token that the policy sampled itself
        self._opening: list[Message] = []  # the messages before the first reply, which a shorter one keeps
        self._tools: list[dict[str, Any]] = []
        self._waiting: tuple[Message, ...] = ()  # the environment's answer, while the policy summarises
        self.is_summarising = False  # the next reply is a summary; `extend(())` then continues
        self._num_tokens = 0  # of the current branch
        context = self._model.context
        self._shorten = imported("model.context", context, Callable) if is_own(context) else None

    def open(self, messages: tuple[Message, ...], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Begin with `messages` and return the first prompt. The chat template shows `tools` in every prompt."""
        self._tools = [dict(tool) for tool in tools]
        prompt = self._anew(self._in_roles(messages))
        self._opening = list(self._messages)
        return prompt.tokens

    def written(self, text: str) -> list[int]:
        """The tokens of a reply that is written as text, and not sampled."""
        return following(self._encode, text, after=self.text)

    def reply(self, tokens: list[int]) -> str:
        """Record what the policy sampled and return it as text, without its end-of-turn token."""
        self._ended_with = self._ending.get(tokens[-1], "") if tokens else ""
        self._reply = self._decode(tokens[:-1] if self._ended_with else tokens)
        self._messages.append(Message("assistant", self._reply))
        self._num_tokens += len(tokens)
        return self._reply

    @property
    def answer(self) -> str:
        """The last reply without the thought that it begins with; empty if that thought never ended."""
        return without_thought(self._reply, prompt=self.text, marks=self._thoughts)

    def extend(self, messages: tuple[Message, ...]) -> Extension:
        """Add the environment's answer; return the tokens that the next prompt adds.

        If the prompt takes more than three quarters of the context, `model.context` may shorten the conversation.
        Half of the context is the aim, because each new branch costs a whole prompt. With a context of "summary", the
        policy is asked for one instead, and the answer waits until it is written.
        """
        if self.is_summarising:
            return self._resumed()
        replied, text, num_tokens = list(self._messages), self.text, self._num_tokens
        extension = self._extended(messages)
        if self._model.context == "stop" or 4 * self._num_tokens <= 3 * self._model.max_tokens:
            return extension
        if self._model.context == "summary":
            self._messages, self.text, self._num_tokens = replied, text, num_tokens
            self._waiting, self.is_summarising = messages, True
            return self._extended((Message("user", SUMMARISE),))
        shorter = self._windowed() if self._shorten is None else self._shortened(self._shorten)
        return extension if shorter is None else self._anew(shorter)

    def _resumed(self) -> Extension:
        """The prompt after a summary: the first messages, the summary, and the answer that has waited, as a branch."""
        kept = list(self._opening)
        began = [kept.pop().content] if kept[-1].role == "user" else []
        texts = [*began, f"{SUMMARY}\n{self.answer.strip()}", *(message.content for message in self._waiting)]
        self.is_summarising, self._waiting = False, ()
        return self._anew([*kept, Message("user", "\n\n".join(texts))])

    def _anew(self, messages: list[Message]) -> Extension:
        """Continue from `messages` alone, in a sequence of its own."""
        self._messages = messages
        self.text = self._rendered(messages)
        return self._branch()

    def _branch(self) -> Extension:
        """The whole prompt as a sequence of its own."""
        tokens = self._encode(self.text)
        self._num_tokens = len(tokens)
        return Extension(tokens=tokens, new_branch=True)

    def _windowed(self) -> list[Message] | None:
        """The first messages and the newest turns that fit into half of the context, at least the last turn.

        None if there are no older turns.
        """
        opening = self._opening
        later = range(len(opening), len(self._messages))
        turns = [place for place in later if self._messages[place].role == "assistant"]

        def fits(place: int) -> bool:
            tokens = self._encode(self._rendered(opening + self._messages[place:]))
            return 2 * len(tokens) <= self._model.max_tokens

        if len(turns) < 2:
            return None
        first = bisect_left(turns, True, lo=1, hi=len(turns) - 1, key=fits)
        return opening + self._messages[turns[first] :]

    def _shortened(self, shorten: Callable[..., Any]) -> list[Message]:
        """The messages of the user's function. Raises ValueError if they are none that a policy can answer."""
        made = shorten(tuple(self._messages))
        messages = list(made) if isinstance(made, list | tuple) else []
        if not messages or not all(isinstance(message, Message) for message in messages):
            raise ValueError(f"`model.context` {self._model.context} must return a list of Message, got {made!r:.200}")
        if messages[-1].role == "assistant":
            raise ValueError(
                f"`model.context` {self._model.context} returned messages that end with the assistant's; the policy "
                "answers the last message, so keep the environment's"
            )
        return self._in_roles(tuple(messages))

    def _extended(self, messages: tuple[Message, ...]) -> Extension:
        self._messages += self._in_roles(messages)
        whole = self._rendered(self._messages)
        new_text, replied = self._after_reply(whole), self.text + self._reply + self._ended_with
        self.text = whole
        if new_text is None:
            return self._branch()
        if self._ended_with and new_text.lstrip().startswith(self._ended_with):  # white space before it is the reply's
            new_text = new_text.lstrip().removeprefix(self._ended_with)
        tokens = following(self._encode, new_text, after=replied)
        self._num_tokens += len(tokens)
        return Extension(tokens=tokens, new_branch=False)

    def _after_reply(self, whole: str) -> str | None:
        """The text of `whole` after the last reply; None if the template changed what comes before it."""
        earlier = self.text + self._turns.split_reply(self._reply)
        if whole.startswith(earlier):
            return whole[len(earlier) :]
        place = max(index for index, message in enumerate(self._messages) if message.role == "assistant")
        marked = list(self._messages)
        marked[place] = Message("assistant", MARK)
        tail = _after_mark(self._rendered(marked))
        if tail is None or not whole.endswith(tail):
            return None
        is_kept = self._model.history == "sampled" or bare(whole.removesuffix(tail)) == bare(earlier)
        return tail if is_kept else None

    def _in_roles(self, messages: tuple[Message, ...]) -> list[Message]:
        return list(alternating(messages) if self._model.roles == "alternate" else messages)

    def _rendered(self, messages: Sequence[Message]) -> str:
        return prompt(self._tokenizer, messages, today=self._today, tools=self._tools)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyForm:
    """How a policy writes a reply right after the generation prompt of a chat template."""

    given: str  # the marks of a thought that the generation prompt itself ends with; often none
    opening: str  # written before the content of a reply without a thought
    ends: dict[str, str]  # the end-of-turn token, by the role of the next message: "user" or "tool"
    thoughts: Sequence[tuple[str, str]]  # the marks of one
    around: tuple[str, str] | None  # the texts around a thought in place of <think> and </think>; None: these
    turns: TurnMarks

    def write(self, content: str, *, before: str = "user") -> str:
        """The text of a reply. `content` may begin with a thought between the marks of its family, or <think> tags.

        Raises ValueError for a thought where the generation prompt has already closed one.
        """
        content = _with_marks(content, self.around)
        end, content = self.ends.get(before, self.ends["user"]), self.turns.split_reply(content)
        for opening, closing in self.thoughts:
            if content.lstrip().startswith(opening):
                if closing in self.given:
                    raise ValueError("a message has a thought, but the template arguments turn thinking off")
                if self.given:
                    return content.lstrip().removeprefix(opening).lstrip("\n") + end
                lead = self.opening.partition(opening)[0] if opening in self.opening else ""
                return lead + content.lstrip() + end
        return self.opening + content + end


@kept_by_template
def reply_form(tokenizer: PreTrainedTokenizerBase) -> ReplyForm:
    """The form of a reply, found by rendering one. Raises ValueError if the template changes what a policy writes."""
    today, marks_of_thoughts = datetime.now(UTC), thought_marks(tokenizer)
    prompt = rendered(tokenizer, [_ASK], today=today, to_reply=True)
    reply = {"role": "assistant", "content": MARK}
    before, mark, _ = rendered(tokenizer, [_ASK, reply], today=today).partition(MARK)
    given = prompt.removeprefix(_shared(prompt, rendered(tokenizer, [_ASK], today=today)))
    thoughts = [
        (opening if closing not in given else closing, f"{closing}\n\n" if closing not in given else "")
        for opening, closing in marks_of_thoughts
        if given.rstrip().endswith((opening, closing))
    ]
    marks, closed = thoughts[0] if thoughts else ("", "")
    if not mark or not (before.startswith(prompt) or thoughts or bare(before) == bare(prompt)):
        raise ValueError(_UNLIKE_ITS_PROMPT)
    return ReplyForm(
        given=marks,
        opening=before[len(prompt) :] if before.startswith(prompt) else closed,
        ends=_ends_of_reply(tokenizer, reply, today),
        thoughts=marks_of_thoughts,
        around=_around_thought(tokenizer, prompt, today),
        turns=turn_marks(tokenizer),
    )


def _around_thought(tokenizer: PreTrainedTokenizerBase, prompt: str, today: datetime) -> tuple[str, str] | None:
    """What the template writes before and after a thought in a field of its own, else its marks; None for <think>."""
    own = own_marks(tokenizer)
    if own is None or own == THOUGHT_MARKS[0]:
        return None
    for name in _FIELDS:
        with contextlib.suppress(*REFUSALS):
            reply = {"role": "assistant", "content": MARK, name: _THOUGHT}
            before, thought, after = rendered(tokenizer, [_ASK, reply], today=today).partition(_THOUGHT)
            if thought and before.startswith(prompt) and before[len(prompt) :].strip() == own[0] and MARK in after:
                return before[len(prompt) :], after.partition(MARK)[0]
    gap = "" if own[0][-1] in ">]▷" else "\n"
    return own[0] + gap, gap + own[1] + gap


def _with_marks(content: str, around: tuple[str, str] | None) -> str:
    """`content` with the <think> tags of its thought replaced by the texts `around` one."""
    opening, closing = THOUGHT_MARKS[0]
    thought, closed, rest = content.lstrip().removeprefix(opening).partition(closing)
    if around is None or not closed or not content.lstrip().startswith(opening):
        return content
    return around[0] + thought.strip() + around[1] + rest.lstrip()


def alternating(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages of an environment as one user message, for templates without system messages and tool results."""
    return tuple(
        Message(role, "\n\n".join(message.content for message in group))
        for role, group in groupby(
            messages, key=lambda message: "user" if message.role in ("system", "tool") else message.role
        )
    )


def _ends_of_reply(tokenizer: PreTrainedTokenizerBase, reply: dict[str, str], today: datetime) -> dict[str, str]:
    """The end-of-turn token after a reply by the role of the next message.

    GLM's template writes none: there, the token that begins the next message ends the turn.
    """
    texts, ends = [str(tokenizer.convert_ids_to_tokens(token)) for token in end_tokens(tokenizer)], dict[str, str]()
    for role, answer in (("user", [_ASK]), ("tool", [_RESULT])):
        for conversation in ([_ASK, reply], [_ASK, reply, *answer]):
            try:
                tail = _after_mark(rendered(tokenizer, conversation, today=today)) or ""
            except REFUSALS:  # it has no tool results, or only after a call
                continue
            if stops := sorted((tail.index(end), end) for end in texts if end in tail):
                at, end = stops[0]
                ends[role] = tail[: at + len(end)]
                break
    return {"user": str(tokenizer.eos_token)} | ends


def _after_mark(text: str) -> str | None:
    """The text after the only MARK in `text`; None if there is another number of them."""
    return text.split(MARK)[1] if text.count(MARK) == 1 else None


def _shared(one: str, other: str) -> str:
    """The longest prefix of both."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(first for first, _ in same)
