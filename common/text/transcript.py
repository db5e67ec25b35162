"""Recovers the messages of an episode from the tokens of its trajectory, and verifies them by rendering them again.

A trajectory contains tokens, not messages. So the chat template is inverted. Rendering a few probes shows what the
template writes around a message of each role; the prompts are split at these marks; and the messages are rendered again
by `Chat`. They are accepted only if that gives every recorded prompt, token for token.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from itertools import groupby
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from slipstream.common.config.model_config import ModelConfig
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.text.chat import Chat, Extension
from slipstream.common.text.chat_template import rendered
from slipstream.common.text.codec import SPLIT, encoder, ending_tokens, marks_of, split_marks, whole_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT_TOKENS = 4
UNFINISHED = "\ufffd"  # what a tokenizer decodes half a character to
MAX_TOKENS_A_CHARACTER = 8  # more than four bytes in tokens of one byte
A, B, PROBE = "first words", "second words", "probe words"  # texts that no template changes


class Fidelity(enum.Enum):
    """How exactly the messages of a transcript reproduce the recorded tokens."""

    TOKENS = "tokens"
    """They give all recorded tokens, from the first to the last."""
    PROMPTS = "prompts"
    """They give every prompt; but a sampled text is encoded differently, or the template rewrote earlier text."""
    NONE = "none"
    """The messages could not be recovered: there are only the texts of the turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnText:
    """One turn as the tokenizer decodes it, including special tokens."""

    prompt: str  # the part of the prompt that was new; with `new_branch`, the whole prompt
    action: str
    new_branch: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """The messages and texts of one episode. `messages` is empty if `fidelity` is NONE."""

    messages: list[Message]
    fidelity: Fidelity
    turns: list[TurnText]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompt:
    """The new tokens before one generation, and the generated tokens."""

    tokens: list[int]
    sampled: list[int]
    new_branch: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """The text that a template writes before and after a message of a role."""

    role: str
    opening: str
    closing: str


class Transcriber:
    """Reads trajectories with their tokenizer. Its template is probed once a day, as it may write the date."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, model: ModelConfig | None = None) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._readers: dict[date, _Reader] = {}
        self._reader(time.time())

    def turns(self, trajectory: Trajectory) -> list[TurnText]:
        """Every turn as decoded text. This does not depend on the template."""
        return [
            TurnText(
                prompt=str(self._tokenizer.decode(prompt.tokens)),
                action=str(self._tokenizer.decode(prompt.sampled)),
                new_branch=prompt.new_branch,
            )
            for prompt in _prompts(trajectory)
        ]

    def pieces(self, trajectory: Trajectory, start: int, stop: int) -> list[str]:
        """The text that each of the tokens [start, stop) adds; "" if it only begins a character that needs more tokens.

        A token is decoded after those before it, as many tokenizers write it differently at the start of a text.
        """
        tokens, found = trajectory.token_array().tolist(), list[str]()
        known, waiting = max(0, start - CONTEXT_TOKENS), start  # decoded before, and the first token not written yet
        for end in range(start + 1, stop + 1):
            text = str(self._tokenizer.decode(tokens[known:end]))
            if text.endswith(UNFINISHED) and end < stop and end - waiting < MAX_TOKENS_A_CHARACTER:
                found.append("")
                continue
            found.append(text[len(str(self._tokenizer.decode(tokens[known:waiting]))) :])
            known, waiting = waiting, end
        return found

    def read(self, trajectory: Trajectory) -> Transcript:
        """The transcript of a trajectory: its messages, their fidelity, and the text of every turn."""
        reader = self._reader(trajectory.started_at_s)
        messages = reader.messages(_prompts(trajectory))
        return Transcript(
            messages=messages or [],
            fidelity=Fidelity.NONE if messages is None else reader.fidelity(trajectory, messages),
            turns=self.turns(trajectory),
        )

    def _reader(self, at_s: float) -> _Reader:
        now = datetime.fromtimestamp(at_s, UTC)
        if now.date() not in self._readers:
            self._readers[now.date()] = _Reader(self._tokenizer, model=self._model, today=now)
        return self._readers[now.date()]


class _Reader:
    """Reads the messages of trajectories of one day."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, model: ModelConfig | None, today: datetime) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._today = today
        self._ending, self._marks = ending_tokens(tokenizer), marks_of(tokenizer)
        self._encode = encoder(tokenizer)
        marks = _marks(tokenizer, today)
        self._assistant_closings = [mark.closing for mark in marks if mark.role == "assistant"]
        first = _rendered(tokenizer, [Message("user", A)], today)
        user = next((mark for mark in marks if mark.role == "user"), None)
        piece = f"{user.opening}{A}{user.closing}" if user else ""
        self._prologue = self._as_decoded(first.removesuffix(piece))  # the text before the first message
        prompting = _rendered(tokenizer, [Message("user", A)], today, to_reply=True)
        self._generation = self._as_decoded(prompting.removeprefix(first))
        probe = f"{first} {B}"
        self._gap = "" if self._as_decoded(probe) == probe else " ?"  # a word-level tokenizer does not keep spaces
        self._patterns = self._patterns_of(marks)

    def messages(self, prompts: list[_Prompt]) -> list[Message] | None:
        """The whole conversation; None unless `Chat` renders it to the recorded prompts."""
        chat = Chat(self._tokenizer, model=self._model, started_at_s=self._today.timestamp())
        messages, ended_with = list[Message](), None
        for prompt in prompts:
            observed = self._observed(prompt, ended_with=ended_with)
            if observed is None or not _renders_to(chat, observed, prompt, opening=not messages):
                return None
            messages += [*observed, Message("assistant", chat.reply(prompt.sampled))]
            ended = prompt.sampled[-1] in self._ending
            ended_with = self._decoded(prompt.sampled[-1:]) if ended else ""
        return messages

    def _observed(self, prompt: _Prompt, *, ended_with: str | None) -> tuple[Message, ...] | None:
        """The environment's messages in `prompt`, which follows a reply that `ended_with` a special token or "".

        None if the prompt cannot be split into messages.
        """
        text = self._decoded(prompt.tokens)
        if ended_with is None or prompt.new_branch:
            starts = [self._prologue, ""]
        else:
            starts = [self._as_decoded(closing.removeprefix(ended_with)) for closing in self._assistant_closings]
        readings = [self._cut(text[len(start) :]) for start in dict.fromkeys(starts) if text.startswith(start)]
        messages = next((reading for reading in readings if reading is not None), None)
        if messages is None:
            return None
        return tuple(messages if ended_with is None else _after_last_reply(messages))

    def _cut(self, text: str) -> list[Message] | None:
        """The messages in `text`; None if it contains anything else."""
        messages, position = list[Message](), 0
        while text[position:].strip(" ") != self._generation.strip(" "):
            for role, pattern in self._patterns:
                found = pattern.match(text, position)
                if found:
                    messages.append(Message(role, found[1].replace(SPLIT, "")))
                    position = found.end()
                    break
            else:
                return None
        return messages

    def _patterns_of(self, marks: list[_Mark]) -> list[tuple[str, re.Pattern[str]]]:
        """A pattern for each mark, longest opening first: a message of its role, before another message or the end."""
        gap = self._gap
        openings = {re.escape(self._as_decoded(mark.opening)) for mark in marks}
        ends = [*sorted(openings), re.escape(self._generation) + r"\Z"]
        followed = f"(?={gap}(?:{'|'.join(ends)}))"
        return [
            (
                mark.role,
                re.compile(
                    f"{gap}{re.escape(self._as_decoded(mark.opening))}{gap}(.*?)"
                    f"{gap}{re.escape(self._as_decoded(mark.closing))}{followed}",
                    re.DOTALL,
                ),
            )
            for mark in sorted(marks, key=lambda mark: -len(mark.opening))
        ]

    def fidelity(self, trajectory: Trajectory, messages: list[Message]) -> Fidelity:
        """How exactly `messages`, rendered as a whole, give the recorded tokens."""
        whole = self._encode(_rendered(self._tokenizer, messages, self._today))
        recorded = trajectory.token_array().tolist()
        return Fidelity.TOKENS if whole[: len(recorded)] == recorded else Fidelity.PROMPTS

    def _as_decoded(self, text: str) -> str:
        return self._decoded(self._encode(text))

    def _decoded(self, tokens: list[int]) -> str:
        """The text of `tokens`, with the marks split that are text and no token."""
        text, real = str(self._tokenizer.decode(tokens)), frozenset(self._marks.values())
        if len(whole_marks(text, self._marks)) == sum(token in real for token in tokens):
            return text
        runs = ((is_mark, list(run)) for is_mark, run in groupby(tokens, key=real.__contains__))
        return "".join(
            decoded if is_mark else split_marks(decoded, self._marks)
            for is_mark, run in runs
            for decoded in [str(self._tokenizer.decode(run))]
        )


def _prompts(trajectory: Trajectory) -> list[_Prompt]:
    tokens, prompts, stop = trajectory.token_array().tolist(), [], 0
    for turn in trajectory.turns:
        new_branch = stop > 0 and any(stop <= start < turn.start for start in trajectory.branch_starts)
        prompts.append(
            _Prompt(tokens=tokens[stop : turn.start], sampled=tokens[turn.start : turn.stop], new_branch=new_branch)
        )
        stop = turn.stop
    return prompts


def _renders_to(chat: Chat, messages: tuple[Message, ...], prompt: _Prompt, *, opening: bool) -> bool:
    """Whether `chat`, extended by `messages`, renders exactly `prompt`."""
    try:
        if opening:
            return chat.open(messages) == prompt.tokens
        return chat.extend(messages) == Extension(tokens=prompt.tokens, new_branch=prompt.new_branch)
    except TemplateError:
        return False


def _after_last_reply(messages: list[Message]) -> list[Message]:
    last = max((place for place, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return messages[last + 1 :]


def _marks(tokenizer: PreTrainedTokenizerBase, today: datetime) -> list[_Mark]:
    """The marks of each role that the template accepts."""
    asked, answered = Message("user", A), Message("assistant", B)
    marks: list[_Mark] = []
    for before, role, after in (
        ([asked, answered], "user", []),
        ([asked], "assistant", []),
        ([asked], "assistant", [asked]),  # some templates render an answer differently when a question follows it
        ([asked, answered], "tool", []),
        ([], "system", [asked]),
    ):
        try:
            mark = _mark(tokenizer, today, before, role, after, marks)
        except (TemplateError, TypeError):  # it rejects this role with the first, or crashes on it with the second
            continue
        if mark is not None and mark not in marks:
            marks.append(mark)
    return marks


def _mark(
    tokenizer: PreTrainedTokenizerBase,
    today: datetime,
    before: list[Message],
    role: str,
    after: list[Message],
    known: list[_Mark],
) -> _Mark | None:
    whole = _rendered(tokenizer, [*before, Message(role, PROBE), *after], today)
    earlier = _rendered(tokenizer, before, today) if before else ""
    rest = ""
    if after:
        user = next(mark for mark in known if mark.role == "user")
        rest = f"{user.opening}{after[0].content}{user.closing}"
    if not whole.startswith(earlier) or not whole.endswith(rest) or whole.count(PROBE) != 1:
        return None
    opening, closing = whole[len(earlier) : len(whole) - len(rest)].split(PROBE)
    return _Mark(role=role, opening=opening, closing=closing) if opening or closing else None


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Iterable[Message], today: datetime, *, to_reply: bool = False
) -> str:
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    return rendered(tokenizer, conversation, today=today, to_reply=to_reply)
